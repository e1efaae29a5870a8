"""Hugging Face directories as layouts: read each file once, in sequence, by one rank; write each file by one rank.

    rank      0          1          2
    round 0   file a     file b     file c      each round is one Layout whose stores are the tensors of its files;
    round 1   file d     file e                 the resharder moves the pieces, so a rank holds one file at most

Stores are named by tensor. Experts are one tensor each on disk (as transformers writes them); q, k and v hold their
units one below the other. Deliberately absent: fused 3-D experts, quantised weights, .bin files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from parallel.agree import each, on_first
from parallel.device import Device
from parallel.family import ModelShape, kinds, model_shape, read_config
from parallel.layout import Kind, Layout, Piece, elements
from parallel.reshard import Resharder
from parallel.reshard_plan import plan
from parallel.tensor_file import (
    Entry,
    Header,
    allocate,
    item_size,
    parse_json,
    read,
    read_header,
    short,
    sync_directory,
    write,
    write_bytes,
)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
    "*.model",
    "LICENSE*",
)
NO_FILE = ""
"""Coordinate of a rank without a file in a round."""


@dataclass(frozen=True)
class Place:
    """What a tensor is: one layer of a kind and, when each unit is a tensor, one unit."""

    kind: Kind
    layer: int
    unit: int


@dataclass(frozen=True)
class Index:
    """The tensors of one model directory, from headers only, checked complete."""

    path: Path
    shape: ModelShape
    headers: dict[str, Header]
    """File name -> header."""
    skipped: frozenset[str]
    """Tensors that the model does not need: a tied lm_head, rotary buffers."""

    @cached_property
    def tensors(self) -> dict[str, tuple[str, Entry]]:
        """Tensor name -> (file name, entry)."""
        found = {n: (f, e) for f, header in self.headers.items() for n, e in header.entries.items()}
        return {name: at for name, at in found.items() if name not in self.skipped}

    @property
    def dtype(self) -> str:
        """The dtype that holds every tensor exactly."""
        found = {entry.dtype for _, entry in self.tensors.values()}
        return found.pop() if len(found) == 1 else "float32"


def tensor_table(shape: ModelShape) -> dict[str, Place]:
    """Tensor name -> what it is, in the order of a forward pass."""
    rows = []
    for order, kind in enumerate(kinds(shape).values()):
        layered = "{layer}" in kind.template
        section = 1 if layered else (0 if kind.name == "embed" else 2)
        for layer in range(kind.shape[0]):
            for unit in range(kind.shape[1] if kind.unit_is_tensor else 1):
                at = layer if layered else -order  # the norm precedes the head
                rows.append(((section, at, order, unit), kind.tensor_name(layer, unit), Place(kind, layer, unit)))
    return {name: place for _, name, place in sorted(rows, key=lambda row: row[0])}


def read_index(path: str | Path, shape: ModelShape | None = None) -> Index:
    """Index of a model directory. ValueError, at most 5 lines, names the file and the tensors of the first problem."""
    path = Path(path)
    shape = shape or model_shape(read_config(path), str(path / "config.json"))
    listed = _files(path)
    headers = {}
    for file, names in sorted(listed.items()):
        headers[file] = read_header(path / file)
        if names is not None:
            held = set(headers[file].entries)
            _refuse(path / file, f"lacks tensors that {INDEX} places there", names - held)
            _refuse(path / file, f"holds tensors that {INDEX} does not place there", held - names)
    where = path / (SINGLE if list(listed) == [SINGLE] else INDEX)
    return Index(path, shape, headers, _check(path, where, headers, shape))


def _files(path: Path) -> dict[str, set[str] | None]:
    """File name -> the tensors that the index places in it; None without an index."""
    index, single = path / INDEX, path / SINGLE
    if not index.exists():
        if single.exists():
            return {SINGLE: None}
        shards = sorted(file.name for file in path.glob("*.safetensors"))
        _refuse(path, f"has safetensors files, but neither {INDEX} nor {SINGLE}", shards)
        raise ValueError(f"{path}: has no {SINGLE} and no {INDEX}; only safetensors checkpoints are read")
    try:
        weight_map = parse_json(index.read_bytes(), index).get("weight_map")
    except OSError as error:
        raise ValueError(f"{index}: cannot be read: {error.strerror}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: needs a table weight_map of tensor -> file")
    files: dict[str, set[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\0" in file:
            raise ValueError(f"{index}: tensor {short(name)}: {short(file)} is not the name of a safetensors file")
        files.setdefault(file, set()).add(name)  # type: ignore[union-attr]
    _refuse(index, "names files that do not exist", [file for file in files if not (path / file).is_file()])
    if single.exists() and SINGLE not in files:
        raise ValueError(f"{index}: does not name {SINGLE}, which exists too; remove the one that is stale")
    return files


def _check(path: Path, where: Path, headers: dict[str, Header], shape: ModelShape) -> frozenset[str]:
    """Compare the tensors with the model's kinds; returns those that are not needed."""
    table = tensor_table(shape)
    homes: dict[str, str] = {}
    for file, header in headers.items():
        _refuse(path / file, "repeats tensors of another file", [n for n in header.entries if n in homes])
        homes.update(dict.fromkeys(header.entries, file))
    skipped = {name for name in homes if name.endswith(".rotary_emb.inv_freq")}
    if shape.tied and "lm_head.weight" in homes:
        skipped.add("lm_head.weight")
    fused = [name for name in homes if ".mlp.experts.gate_up_proj" in name]
    _refuse(where, "holds experts fused into 3-D tensors; save it with transformers 5 (one tensor per expert)", fused)
    _refuse(where, "lacks tensors that config.json asks for", [name for name in table if name not in homes])
    _refuse(where, "holds tensors that the model does not have", set(homes) - set(table) - skipped)
    for name, file in homes.items():
        place = table.get("model.embed_tokens.weight" if name == "lm_head.weight" and shape.tied else name)
        entry = headers[file].entries[name]
        if place and entry.shape != place.kind.tensor_shape:
            raise ValueError(
                f"{path / file}: tensor {short(name)}: shape is {short(list(entry.shape))}, "
                f"config.json makes it {list(place.kind.tensor_shape)}"
            )
        if place and entry.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"{path / file}: tensor {short(name)}: dtype {entry.dtype} is not a weight type")
    return frozenset(skipped)


def _refuse(where: Path, what: str, names: Iterable[str]) -> None:
    found = sorted(names)
    if found:
        more = [f"  and {len(found) - 3} more"] if len(found) > 3 else []
        raise ValueError("\n".join([f"{where}: {what}:", *(f"  {short(name)}" for name in found[:3]), *more]))


def hf_piece(name: str, place: Place) -> Piece:
    """The whole tensor as one piece."""
    _, units, rows, cols = place.kind.shape
    held = (place.unit, place.unit + 1) if place.kind.unit_is_tensor else (0, units)
    box = ((place.layer, place.layer + 1), held, (0, rows), (0, cols))
    return Piece(place.kind.name, box, name, 0, 0, (rows * cols, cols, 1))


def deal(sizes: dict[str, int], world: int, node_size: int = 8) -> list[tuple[str, ...]]:
    """Rounds of one file a rank (NO_FILE for none), balanced by bytes; the first files go to different nodes."""
    held: list[list[str]] = [[] for _ in range(world)]
    load = [0] * world
    order = sorted(range(world), key=lambda rank: (rank % node_size, rank))
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        rank = min(order, key=lambda rank: (load[rank], len(held[rank])))
        held[rank].append(file)
        load[rank] += sizes[file]
    return [tuple(files[i] if i < len(files) else NO_FILE for files in held) for i in range(max(len(f) for f in held))]


def file_layouts(
    files: dict[str, list[str]], sizes: dict[str, int], shape: ModelShape, dtype: str, world: int
) -> list[Layout]:
    """One Layout a round; coordinate of a rank is its file, `files` says which tensors that file holds."""
    table = tensor_table(shape)
    held = {file: tuple(hf_piece(name, table[name]) for name in names) for file, names in files.items()}
    held[NO_FILE] = ()
    return [
        Layout(f"hf files, round {i}", kinds(shape), coordinates, lambda file: held[file], dtype)
        for i, coordinates in enumerate(deal(sizes, world))
    ]


def hf_layouts(index: Index, shape: ModelShape, world: int) -> list[Layout]:
    """Rounds in which `world` ranks read the directory; Layout.coordinates[rank] is the file that the rank reads."""
    files = {f: [n for n in header.entries if n not in index.skipped] for f, header in index.headers.items()}
    sizes = {file: max((e.stop for e in header.entries.values()), default=0) for file, header in index.headers.items()}
    return file_layouts(files, sizes, shape, index.dtype, world)


def read_stores(index: Index, file: str, dtype: str) -> dict[str, torch.Tensor]:
    """Tensors of one file as host stores, cast where a file mixes dtypes; NO_FILE has none."""
    if file == NO_FILE:
        return {}
    header = index.headers[file]
    stores = {name: tensor for name, tensor in allocate(header).items() if name not in index.skipped}
    read(index.path / file, header, stores)
    return {name: stores.pop(name).to(getattr(torch, dtype)) for name in list(stores)}


def load(
    path: str | Path,
    target: Layout,
    target_stores: dict[str, torch.Tensor],
    rank: int,
    group: Any,
    device: Device,
    shape: ModelShape | None = None,
) -> Index:
    """Fill the stores of `target` on all ranks of `group` from a model directory. ValueError on every rank alike."""
    index = on_first(lambda: read_index(path, shape), rank, group)
    written = 0
    for layout in hf_layouts(index, index.shape, target.world):
        stores = each(partial(read_stores, index, layout.coordinates[rank], layout.dtype), group)
        moved = plan(layout, target, partial=True)
        Resharder(moved, rank, group, layout, target, device).run(stores, target_stores)
        del stores  # before the next file is read: at most one is in host memory
        written += int(moved.moves.size.sum() + moved.local.size.sum())
    wanted = sum(elements(box) * len(ranks) for boxes in target.table.values() for box, ranks in boxes.items())
    assert written == wanted, f"{path}: {written} elements written, {target.name} has {wanted}"
    return index


def shards(shape: ModelShape, dtype: str, max_bytes: int) -> tuple[dict[str, list[str]], dict[str, int]]:
    """(file -> tensors, file -> bytes) of an export, by the names that transformers uses."""
    groups: list[list[str]] = [[]]
    sizes = [0]
    for name, place in tensor_table(shape).items():
        size = item_size(dtype)
        for n in place.kind.tensor_shape:
            size *= n
        if groups[-1] and sizes[-1] + size > max_bytes:
            groups.append([])
            sizes.append(0)
        groups[-1].append(name)
        sizes[-1] += size
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return dict(zip(names, groups, strict=True)), dict(zip(names, sizes, strict=True))


def export(
    path: str | Path,
    source: Layout,
    stores: dict[str, torch.Tensor],
    shape: ModelShape,
    model_dir: str | Path,
    rank: int,
    group: Any,
    device: Device,
    max_shard_bytes: int = 5 << 30,
    dtype: str = "",
    overwrite: bool = False,
) -> None:
    """Write `source` as a Hugging Face directory at `path`, in `dtype` (the source's unless given).

    Config, generation config and tokenizer come from `model_dir`. The directory appears complete or not at all.
    ValueError when `path` exists (unless `overwrite`); OSError, on every rank, when a rank cannot write.
    """
    path, model_dir, dtype = Path(path), Path(model_dir), dtype or source.dtype
    part = path.with_name(f".{path.name}.part")
    on_first(lambda: _prepare(path, part, model_dir, overwrite), rank, group)
    files, sizes = shards(shape, dtype, max_shard_bytes)
    table = tensor_table(shape)
    for layout in file_layouts(files, sizes, shape, dtype, source.world):
        file = layout.coordinates[rank]
        own = {
            name: torch.empty(table[name].kind.tensor_shape, dtype=getattr(torch, dtype))
            for name in files.get(file, [])
        }
        Resharder(plan(source, layout), rank, group, source, layout, device).run(stores, own)
        each(partial(write, part / file, own, {"format": "pt"}) if file else lambda: None, group)
    on_first(lambda: _finish(path, part, model_dir, files, sizes, dtype, shape), rank, group)


def _prepare(path: Path, part: Path, model_dir: Path, overwrite: bool) -> None:
    read_config(model_dir)
    if model_dir.resolve().is_relative_to(path.resolve()):
        raise ValueError(f"{path}: the export would replace {model_dir}, which it is made from")
    if path.exists() and not overwrite and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path}: exists; give a new directory for the export, or allow overwriting")
    if path.is_dir() and any(path.iterdir()) and not (path / "config.json").exists():
        raise ValueError(f"{path}: holds no model that could be overwritten; give another directory for the export")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def _finish(
    path: Path,
    part: Path,
    model_dir: Path,
    files: dict[str, list[str]],
    sizes: dict[str, int],
    dtype: str,
    shape: ModelShape,
) -> None:
    """Index, config and tokenizer; then reopen, check, and give the directory its name."""
    if list(files) != [SINGLE]:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_bytes(part / INDEX, json.dumps(index, indent=2).encode())
    config = read_config(model_dir)
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    config.update(dict.fromkeys(keys, dtype))
    write_bytes(part / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    for pattern in COPIED:
        for file in sorted(model_dir.glob(pattern)):
            copy = shutil.copytree if file.is_dir() else shutil.copyfile
            copy(file, part / file.name)
    read_index(part, shape)
    if model_shape(config) != shape:
        raise ValueError(f"{model_dir}/config.json describes another model than the one that was exported")
    sync_directory(part)
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        path.rename(old)
    part.rename(path)
    shutil.rmtree(old, ignore_errors=True)
    sync_directory(path.parent)
