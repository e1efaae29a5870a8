"""Checkpoints: every rank writes its own shards, addressed by kind and box; a marker, written last, makes it count.

    checkpoints/step_000120/
        parameters-00003.safetensors      one file per state and rank; its metadata holds the pieces, in global boxes
        exp_avg-00003.safetensors  ...
        own-00003.safetensors             what only rank 3 knows (RNG)
        small.safetensors                 what all ranks know alike (step, scheduler, data position); rank 0 writes it
        complete.json                     the marker: sizes and hashes of all files, and its own hash
    checkpoints/latest                    name of the newest, for people and scripts; resume looks for markers

A save goes to a hidden directory, is synced, renamed, then marked: a crash at any point leaves the older checkpoints.
A state is any set of (pieces, stores), so parameters, fp32 masters and Adam's moments restore onto any layout.
Deliberately absent: a gather of tensors, pickle, Megatron's own checkpoint (quadratic checks, a helper process).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from parallel.agree import each, gather, on_first
from parallel.layout import Kind, Piece
from parallel.plain_values import frozen, read_value, write_value
from parallel.tensor_file import parse_json, sync_directory, write, write_bytes

log = logging.getLogger(__name__)
MARKER, TORN, FORMAT = "complete.json", "torn.json", 3
COMPLETE = re.compile(r"step_\d{6,}(\.old)?")
OURS = re.compile(r"\.?step_\d{6,}(\.(old|part|trash))*")
"""Names that saves and pruning may touch; everything else below checkpoints/ is somebody's own."""

State = tuple[Sequence[Piece], dict[str, torch.Tensor]]
"""The pieces of this rank and the stores they are in (contiguous, all of one dtype)."""


class Torn(ValueError):
    """A checkpoint that its marker calls complete and that is not."""


@dataclass(frozen=True)
class Marker:
    step: int
    serial: int
    """Counts the saves of a run directory: the newest is the one saved last, not the one with the largest step."""
    world: int
    kinds: dict[str, list[int]]
    states: dict[str, str]
    """State -> dtype."""
    files: dict[str, tuple[int, str, str]]
    """Name -> (bytes, hash of the bytes by tensor_file.Hasher, sha256 of the header)."""
    versions: dict[str, str]
    format: int = FORMAT


def directory_of(root: str | Path, step: int) -> Path:
    return Path(root) / f"step_{step:06d}"


def save(
    root: str | Path,
    step: int,
    kinds: dict[str, Kind],
    states: dict[str, State],
    small: dict[str, Any],
    rank: int,
    group: Any = None,
    own: dict[str, Any] | None = None,
) -> Path:
    """Write root/step_NNNNNN on all ranks of `group` (gloo). Returns it once it is complete and durable.

    `small` is alike on all ranks, `own` is each rank's; both are JSON values, tuples, arrays and tensors.
    An OSError of one rank (a full disk) is everybody's; nothing of the attempt is left then.
    """
    final = directory_of(root, step)
    part = final.with_name(f".{final.name}.part")
    on_first(lambda: _clear(part), rank, group)
    try:
        written = gather(each(lambda: _write_rank(part, states, small, own or {}, rank), group), group)
    except (ValueError, OSError):
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise
    files = {name: entry for files in written for name, entry in files.items()}
    dtypes = gather({name: common_dtype(stores) for name, (_, stores) in states.items()}, group)
    marker = Marker(
        step=step,
        serial=0,
        world=len(written),
        kinds={name: list(kind.shape) for name, kind in kinds.items()},
        states={name: dtype for found in dtypes for name, dtype in found.items() if dtype},
        files=files,
        versions={name: _version(name) for name in ("torch", "megatron-core", "numpy")},
    )
    on_first(lambda: _commit(part, final, marker), rank, group)
    return final


def _clear(part: Path) -> None:
    _remove(part)
    part.mkdir(parents=True)


def _remove(path: Path) -> None:
    """A directory, or a file that lies in its place; what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True)
    if path.is_file() or path.is_symlink():
        path.unlink()


def _write_rank(
    part: Path, states: dict[str, State], small: dict[str, Any], own: dict[str, Any], rank: int
) -> dict[str, tuple[int, str, str]]:
    files = {}
    for state, (pieces, stores) in states.items():
        if stores:
            name = f"{state}-{rank:05d}.safetensors"
            common_dtype(stores)
            files[name] = write(part / name, stores, {"pieces": json.dumps([_row(piece) for piece in pieces])})
    for name, value in ((f"own-{rank:05d}.safetensors", own), *([("small.safetensors", small)] if rank == 0 else [])):
        files[name] = write_value(part / name, value)
    return files


def _row(piece: Piece) -> list[Any]:
    return [piece.kind, piece.box, piece.store, piece.first_layer, piece.offset, piece.strides]


def common_dtype(stores: dict[str, torch.Tensor]) -> str:
    found = {str(store.dtype).removeprefix("torch.") for store in stores.values()}
    assert len(found) <= 1, f"one dtype a state, got {sorted(found)}"
    return found.pop() if found else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit(part: Path, final: Path, marker: Marker) -> None:
    """Rename, mark, point `latest` at it. A complete checkpoint of the same step stays beside it until then."""
    root = final.parent
    serial = 1 + max((found.serial for _, found in complete(root)), default=0)
    sync_directory(part)
    old = final.with_name(f"{final.name}.old")
    if final.exists() or final.is_symlink():
        if (final / MARKER).exists():
            _remove(old)
            final.rename(old)
        else:  # a save that did not end; `old` may be the complete one of before it
            _remove(final)
    part.rename(final)
    sync_directory(root)
    body = json.dumps(vars(replace(marker, serial=serial))).encode()
    write_bytes(final / MARKER, body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n")
    write_bytes(root / "latest", f"{final.name}\n".encode())
    _remove(old)


def prune(root: str | Path, keep: int, keep_every: int = 0) -> list[str]:
    """Remove all but the last `keep` complete checkpoints and those of every `keep_every`-th step; returns their names.

    To be called on one rank, after a save. Torn ones and leftovers go too, since a newer complete one exists.
    """
    found = complete(root)
    kept = {path for path, _ in found[: max(keep, 1)]}
    kept |= {path for path, marker in found if keep_every and marker.step % keep_every == 0}
    removed = []
    for path in sorted(Path(root).glob("*step_*")) if found else []:
        if path not in kept and OURS.fullmatch(path.name) and not path.is_symlink():
            trash = path
            if not path.name.endswith(".trash"):
                trash = path.with_name(f".{path.name.lstrip('.')}.trash")
                _remove(trash)
                path.rename(trash)  # so that a half-removed directory has no name that counts
            _remove(trash)
            removed.append(path.name)
    return removed


class Saver:
    """Saves, keeps the last ones, and can write behind the training's back from a host snapshot.

    With `background` its `group` must be a gloo group that nothing else uses. A failed save is raised by the next
    call of save() or wait().
    """

    def __init__(self, root: str | Path, kinds: dict[str, Kind], rank: int, group: Any, background: bool = False):
        self.root, self.kinds, self.rank, self.group = Path(root), kinds, rank, group
        self.pool = ThreadPoolExecutor(1, "checkpoint") if background else None
        self.job: Future | None = None

    def save(
        self,
        step: int,
        states: dict[str, State],
        small: dict[str, Any],
        own: dict[str, Any],
        keep: int = 2,
        keep_every: int = 0,
    ) -> None:
        self.wait()
        if self.pool is None:
            self._run(step, states, small, own, keep, keep_every)
            return
        held = {
            state: (pieces, {name: _snapshot(store) for name, store in stores.items()})
            for state, (pieces, stores) in states.items()
        }
        self.job = self.pool.submit(self._run, step, held, frozen(small), frozen(own), keep, keep_every)

    def _run(self, step: int, states: dict[str, State], small: Any, own: Any, keep: int, keep_every: int) -> None:
        began = time.monotonic()
        path = save(self.root, step, self.kinds, states, small, self.rank, self.group, own)
        removed = on_first(lambda: prune(self.root, keep, keep_every), self.rank, self.group)
        seconds = time.monotonic() - began
        log.info("saved %s in %.1f s%s", path, seconds, f", removed {', '.join(removed)}" if removed else "")

    def wait(self) -> None:
        """Until the running save, if any, is complete; raises what it raised."""
        job, self.job = self.job, None
        if job:
            job.result()


def _snapshot(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


def read_marker(path: Path) -> Marker:
    """Marker of a checkpoint directory. ValueError says why it is not complete, as far as file sizes tell."""
    file = path / MARKER
    if not path.is_dir():
        raise ValueError(f"{path}: no such checkpoint directory")
    if not file.exists():
        why = "a file was found damaged earlier" if (path / TORN).exists() else "the save did not end"
        raise ValueError(f"{path}: not a complete checkpoint, no {MARKER}: {why}")
    body, _, digest = file.read_bytes().rstrip(b"\n").rpartition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError(f"{file}: damaged, its hash does not match")
    table = parse_json(body, file)
    if table.get("format") != FORMAT:
        raise ValueError(f"{file}: format {table.get('format')!r}, this version reads {FORMAT}")
    try:
        marker = Marker(**table)
        sizes = {name: size for name, (size, *_) in marker.files.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file}: not a marker of this format: {error}") from None
    for name, size in sizes.items():
        member = path / name
        actual = member.stat().st_size if member.exists() else -1
        if actual != size:
            raise ValueError(f"{member}: {'missing' if actual < 0 else f'{actual} bytes'}, {MARKER} says {size} bytes")
    return marker


def complete(root: str | Path, why_not: Callable[[str], None] = log.debug) -> list[tuple[Path, Marker]]:
    """Complete checkpoints below `root`, newest first; the others are passed to `why_not`. OSError when the filesystem
    does not answer: a checkpoint is not passed over for that.
    """
    found = []
    for path in sorted(Path(root).glob("step_*"), reverse=True):
        if not COMPLETE.fullmatch(path.name) or path.is_symlink():
            continue  # somebody's own
        try:
            found.append((path, read_marker(path)))
        except ValueError as error:
            why_not(str(error))
    return sorted(found, key=lambda item: -item[1].serial)


def find(run_dir: str | Path, resume: str = "auto", rank: int = 0, group: Any = None) -> Path | None:
    """Checkpoint to resume from, decided by rank 0: "none", "auto" (the newest complete one), or a directory.

    Torn ones are logged with the reason. ValueError when a directory was named and is not complete.
    """
    return on_first(lambda: _find(Path(run_dir) / "checkpoints", resume), rank, group)


def _find(root: Path, resume: str) -> Path | None:
    resume = _after_requeue(root, resume)
    if resume == "none":
        return None
    if resume != "auto":
        read_marker(Path(resume))
        return Path(resume)
    found = complete(root, lambda reason: log.warning("resume: skipped %s", reason))
    if not found:
        if torn := [path for path in sorted(root.glob("step_*")) if (path / TORN).exists()]:
            raise ValueError(
                f"{torn[-1]}: a file was found damaged earlier, and no other checkpoint is complete; "
                'checkpoint.resume = "none" starts anew'
            )
        return None
    path = found[0][0]
    latest = root / "latest"
    named = latest.read_text(errors="replace").strip() if latest.exists() else ""
    if named != path.name:
        log.warning("resume: %s says %r, the newest complete checkpoint is %s", latest, named, path.name)
    return path


def _after_requeue(root: Path, resume: str) -> str:
    """A Slurm job that is queued again goes on from what it saved itself, whatever its first attempt began from."""
    if resume == "auto" or not int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        return resume
    mine = f'"job": "{os.environ.get("SLURM_JOB_ID")}"'
    records = [file for file in root.parent.glob("logs/attempt_*/rank_000.json") if mine in file.read_text()]
    began = min((file.stat().st_mtime for file in records), default=float("inf"))
    if not any((path / MARKER).stat().st_mtime > began for path, _ in complete(root)):
        return resume
    log.warning("resume: queued again, so from the newest checkpoint; checkpoint.resume = %s was for the start", resume)
    return "auto"


def load_small(directory: str | Path) -> dict[str, Any]:
    """What was passed to save as `small`."""
    return _load_value(Path(directory), "small.safetensors")


def load_own(directory: str | Path, rank: int) -> dict[str, Any]:
    """What this rank passed as `own`; with another number of ranks, that of rank modulo the saved number."""
    directory = Path(directory)
    return _load_value(directory, f"own-{rank % read_marker(directory).world:05d}.safetensors")


def _load_value(directory: Path, name: str) -> dict[str, Any]:
    value, digest = read_value(directory / name)
    if digest != read_marker(directory).files[name][1]:
        raise Torn(f"{directory / name}: damaged, its hash does not match")
    return value
