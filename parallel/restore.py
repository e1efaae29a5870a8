"""Restore a checkpoint onto the layout of today, whatever layout and number of ranks wrote it.

On the same layout a rank reads its own file straight into its stores. Else the files are dealt to the ranks, one at a
time, and the planner moves their pieces, as it does for Hugging Face files and for the weight sync.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from parallel.agree import each, gather, on_first
from parallel.boxes import cover_gap, disjoint
from parallel.checkpoint import (
    MARKER,
    TORN,
    Marker,
    State,
    Torn,
    common_dtype,
    find,
    load_own,
    load_small,
    read_marker,
)
from parallel.device import Device
from parallel.layout import Kind, Layout, Piece
from parallel.reshard import Resharder
from parallel.reshard_plan import plan
from parallel.tensor_file import Header, Unreadable, allocate, read, read_header

log = logging.getLogger(__name__)
T = TypeVar("T")
NO_FILE = ""


def restore(
    directory: str | Path,
    kinds: dict[str, Kind],
    states: dict[str, State],
    rank: int,
    group: Any,
    device: Device,
) -> None:
    """Fill the stores of every state on all ranks of `group`, whatever layout and number of ranks wrote them.

    Each file is read once, by one rank, and hashed on the way. Raises on every rank alike: Torn for a damaged file
    (the stores hold garbage then), ValueError for a checkpoint of another model or without one of the states.
    """
    directory = Path(directory)
    marker = on_first(lambda: read_marker(directory), rank, group)
    check_kinds(directory, marker, kinds)
    agreed(lambda: (load_small(directory), load_own(directory, rank)), group)  # the caller reads them, after this
    for state, (pieces, stores) in states.items():
        _Restore(directory, marker, state, kinds, rank, group, device).run(pieces, stores)


def agreed(function: Callable[[], T], group: Any) -> T:
    """`function` on all ranks; a damaged file of any rank is Torn on all. One that the system did not read is OSError:
    it may be whole, and nothing is condemned for it.
    """

    def attempt() -> T:
        try:
            return function()
        except Unreadable as error:
            raise OSError(str(error)) from error

    try:
        return each(attempt, group)
    except ValueError as error:
        raise Torn(str(error)) from error


def check_kinds(directory: Path, marker: Marker, kinds: dict[str, Kind]) -> None:
    """ValueError unless the checkpoint is of a model with these kinds."""
    saved = {(name, tuple(shape)) for name, shape in marker.kinds.items()}
    differ = sorted(saved ^ {(name, kind.shape) for name, kind in kinds.items()})
    if differ:
        raise ValueError(f"{directory}: is of another model; these kinds differ: {differ[:4]}")


def state_files(directory: Path, marker: Marker, state: str) -> list[str]:
    """Files of one state, in the order of the ranks that wrote them."""
    if state not in marker.states:
        raise ValueError(f"{directory}: has no state {state!r}, only {', '.join(marker.states)}")
    return [name for name in sorted(marker.files) if name.rpartition("-")[0] == state]


def verified_pieces(directory: Path, marker: Marker, name: str) -> tuple[Piece, ...]:
    """Pieces of a file whose every byte was hashed. Torn when a hash differs."""
    header = read_header(directory / name)
    if read(directory / name, header, {}, hashed=True) != marker.files[name][1]:
        raise Torn(f"{directory / name}: damaged, its hash does not match")
    return _pieces(header)


def restore_newest(
    run_dir: str | Path,
    resume: str,
    kinds: dict[str, Kind],
    states: dict[str, State],
    rank: int,
    group: Any,
    device: Device,
) -> Path | None:
    """find, then restore; on a damaged file the checkpoint is marked as torn and the next older one is taken.

    None when there is nothing to resume from and the stores are untouched.
    """
    damaged = ""
    while directory := find(run_dir, resume, rank, group):
        try:
            restore(directory, kinds, states, rank, group, device)
            return directory
        except Torn as error:
            if resume != "auto":
                raise
            damaged = str(error)
            log.warning("resume: skipped %s: %s", directory, error)
            on_first(lambda torn=directory: (torn / MARKER).rename(torn / TORN), rank, group)
    if damaged:
        raise ValueError(f'{damaged}\nno older checkpoint is complete; checkpoint.resume = "none" starts anew')
    return None


@dataclass(frozen=True)
class _Restore:
    """One state of one checkpoint. Rank r reads file r of each round of `world` files."""

    directory: Path
    marker: Marker
    state: str
    kinds: dict[str, Kind]
    rank: int
    group: Any
    device: Device

    def run(self, pieces: Sequence[Piece], stores: dict[str, torch.Tensor]) -> None:
        names = state_files(self.directory, self.marker, self.state)
        targets = gather((tuple(pieces), common_dtype(stores)), self.group)
        world, dtype = len(targets), self.marker.states[self.state]
        other = {found for _, found in targets} - {dtype, ""}
        if other:
            raise ValueError(f"{self.directory}: state {self.state} was saved as {dtype}, the model has {other.pop()}")
        names += [NO_FILE] * (-len(names) % world)
        rounds = [names[i : i + world] for i in range(0, len(names), world)]
        headers = agreed(lambda: [self._header(row[self.rank]) for row in rounds], self.group)
        held = list(zip(*gather([_pieces(header) for header in headers], self.group), strict=True))
        if len(rounds) == 1 and all(gather(_same(headers[0], pieces, stores), self.group)):
            self._read(rounds[0][self.rank], headers[0], stores)
            return
        for store in stores.values():
            store.zero_()  # padding, which no box covers
        flat = disjoint([found for row in held for found in row], self.kinds)
        gap = cover_gap([piece for found in flat for piece in found], self.kinds)
        if gap:
            raise ValueError(f"{self.directory}: state {self.state} is incomplete: {gap}")
        ranks = tuple(range(world))
        target = Layout(self.state, self.kinds, ranks, lambda rank: targets[rank][0], dtype)
        for i, row in enumerate(rounds):
            parts = [tuple(found) for found in flat[i * world : (i + 1) * world]]
            source = Layout(f"{self.state}, files {i}", self.kinds, ranks, parts.__getitem__, dtype)
            loaded = allocate(headers[i])
            self._read(row[self.rank], headers[i], loaded)
            moved = plan(source, target, partial=True)
            Resharder(moved, self.rank, self.group, source, target, self._buffers).run(loaded, stores)

    @property
    def _buffers(self) -> Device:
        """Where the group can exchange: gloo alone knows the host only."""
        return Device("cpu") if dist.is_initialized() and dist.get_backend(self.group) == "gloo" else self.device

    def _header(self, name: str) -> Header:
        if name == NO_FILE:
            return Header({}, {}, 0, "")
        header = read_header(self.directory / name)
        if header.digest != self.marker.files[name][2]:
            raise ValueError(f"{self.directory / name}: damaged, the hash of its header does not match")
        return header

    def _read(self, name: str, header: Header, stores: dict[str, torch.Tensor]) -> None:
        def checked() -> None:
            if name and read(self.directory / name, header, stores, hashed=True) != self.marker.files[name][1]:
                raise ValueError(f"{self.directory / name}: damaged, its hash does not match")

        agreed(checked, self.group)


def _pieces(header: Header) -> tuple[Piece, ...]:
    """Pieces of a shard, from its metadata."""
    rows = json.loads(header.metadata.get("pieces", "[]"))
    return tuple(
        Piece(kind, tuple(map(tuple, box)), store, first, offset, tuple(strides))  # type: ignore[arg-type]
        for kind, box, store, first, offset, strides in rows
    )


def _same(header: Header, pieces: Sequence[Piece], stores: dict[str, torch.Tensor]) -> bool:
    """Whether a file is, tensor for tensor and piece for piece, what this rank wants."""
    shapes = {name: entry.shape for name, entry in header.entries.items()}
    return _pieces(header) == tuple(pieces) and shapes == {name: tuple(store.shape) for name, store in stores.items()}
