"""Megatron's torch_dist checkpoints as a source: (pieces, stores) of the parameters, for `launch.convert import`.

    DIR/.metadata          pickle: key -> global shape and chunks, chunk -> file, offset and length
    DIR/__R_T.distcp       the chunks, each as torch.save wrote it

Keys are those of GPTModel.sharded_state_dict: with TransformerEngine's names of fused norms or with plain ones, layers
and experts stacked into leading axes ("decoder.layers.mlp...") or numbered ("decoder.layers.3.mlp..."), gate and up in
one tensor or apart (_w, _v). The .metadata names classes; they are read as inert records, and a pickle that names
anything else is refused. Optimizer, RNG and other objects of the checkpoint are passed over.
"""

from __future__ import annotations

import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from parallel.family import ModelShape, kinds
from parallel.layout import Piece
from parallel.tensor_file import short

METADATA, TRACKER = ".metadata", "latest_checkpointed_iteration.txt"
RECORDS = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
DTYPES = ("bfloat16", "float16", "float32")
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.experts\.(\d+)\.")
MODEL_KEYS = ("embedding.", "decoder.", "output_layer.")

Part = tuple[str, int, int, int]
"""(kind, unit, first row in Megatron's tensor, rows)."""


class Record:
    """What a pickle calls an object of an expected class: attributes without behaviour."""

    def __init__(self, *state: Any):
        self.state = state

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


PLAIN = {("torch", "Size"): tuple, ("torch.serialization", "_get_layout"): str, ("pathlib", "PosixPath"): Record}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(RECORDS):
            return Record
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        if (module, name) in PLAIN:
            return PLAIN[module, name]
        raise pickle.UnpicklingError(f"it asks for {short(f'{module}.{name}')}, which no torch_dist checkpoint needs")


@dataclass(frozen=True)
class Chunk:
    key: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """First byte in the file."""
    length: int

    @property
    def store(self) -> str:
        return f"{self.key}@{'.'.join(map(str, self.offsets))}"


@dataclass(frozen=True)
class TorchDist:
    path: Path
    dtype: str
    """The dtype that holds every parameter exactly."""
    chunks: dict[str, list[tuple[Chunk, tuple[Piece, ...]]]]
    """File -> its chunks of parameters."""

    def stores(self, file: str) -> dict[str, torch.Tensor]:
        """Flat tensors of one file by store name, mapped where the file's dtype is the checkpoint's."""
        dtype = getattr(torch, self.dtype)
        return {chunk.store: _mapped(self.path, chunk).to(dtype) for chunk, _ in self.chunks[file]}


def find_torch_dist(path: Path) -> Path | None:
    """The directory with .metadata: `path`, or the iteration that a tracker file in it names; else None."""
    tracker = path / TRACKER
    if not (path / METADATA).exists() and tracker.is_file():
        latest = tracker.read_text(errors="replace").strip()
        path = path / (f"iter_{int(latest):07d}" if latest.isdecimal() else "release")
    return path if (path / METADATA).is_file() else None


def read_torch_dist(path: Path, shape: ModelShape) -> TorchDist:
    """Chunks and pieces of the parameters, from .metadata alone. ValueError names the first key that does not fit."""
    rules = _Rules(shape)
    chunks: dict[str, list[tuple[Chunk, tuple[Piece, ...]]]] = {}
    found: set[str] = set()
    for size, chunk in _tensors(path / METADATA, _read_metadata(path / METADATA)):
        if chunk.dtype not in DTYPES:
            raise ValueError(f"{path / METADATA}: {short(chunk.key)}: dtype {chunk.dtype} is not a weight type")
        if pieces := tuple(rules.pieces(path / METADATA, size, chunk)):
            chunks.setdefault(chunk.file, []).append((chunk, pieces))
            found.add(chunk.dtype)
    for file in chunks:
        if Path(file).name != file or not (path / file).is_file():
            raise ValueError(f"{path}: {METADATA} names {short(file)}, which does not exist there")
    return TorchDist(path, found.pop() if len(found) == 1 else "float32", chunks)


def _read_metadata(file: Path) -> Any:
    try:
        table = _Unpickler(BytesIO(file.read_bytes())).load()
        return table.state_dict_metadata, table.storage_data
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"{file}: not the metadata of a torch_dist checkpoint: {short(str(error))}") from None


def _tensors(file: Path, tables: Any) -> Iterator[tuple[tuple[int, ...], Chunk]]:
    """(global shape, chunk) of every tensor that belongs to the model."""
    try:
        tensors, storage = tables
        places = {(index.fqn, tuple(getattr(index, "offset", None) or ())): info for index, info in storage.items()}
        for key, tensor in tensors.items():
            if not key.startswith(MODEL_KEYS) or not hasattr(tensor, "chunks"):
                continue
            dtype = tensor.properties.state[0]
            for part in tensor.chunks:
                info = places[key, tuple(part.offsets)]
                place = (tuple(part.offsets), tuple(part.sizes), info.relative_path, info.offset, info.length)
                yield tuple(tensor.size), Chunk(key, dtype, *place)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: not the metadata of a torch_dist checkpoint: {short(repr(error))}") from None


class _Rules:
    """Which rows of which kinds a key holds, for one model."""

    def __init__(self, shape: ModelShape):
        s, self.shape, self.kinds = shape, shape, kinds(shape)
        layer, experts = "decoder.layers.", "decoder.layers.mlp.experts.experts."
        table: dict[str, list[Part]] = {
            "embedding.word_embeddings.weight": [("embed", 0, 0, s.vocab)],
            "output_layer.weight": [("embed" if s.tied else "head", 0, 0, s.vocab)],
            "decoder.final_layernorm.weight": [("final_norm", 0, 0, 1)],
            layer + "input_layernorm.weight": [("input_norm", 0, 0, 1)],
            layer + "self_attention.linear_qkv.layer_norm_weight": [("input_norm", 0, 0, 1)],
            layer + "pre_mlp_layernorm.weight": [("post_norm", 0, 0, 1)],
            layer + "mlp.linear_fc1.layer_norm_weight": [("post_norm", 0, 0, 1)],
            layer + "self_attention.linear_qkv.weight": self._qkv(""),
            layer + "self_attention.linear_qkv.bias": self._qkv("_bias"),
            layer + "self_attention.linear_proj.weight": [("o", 0, 0, s.hidden)],
            layer + "self_attention.q_layernorm.weight": [("q_norm", 0, 0, 1)],
            layer + "self_attention.k_layernorm.weight": [("k_norm", 0, 0, 1)],
            layer + "mlp.router.weight": [("router", 0, 0, s.experts)],
            **self._mlp(layer + "mlp.", "", s.ffn),
            **self._mlp(experts, "expert_", s.expert_ffn),
        }
        self.parts = {name: parts for name, parts in table.items() if parts[0][0] in self.kinds}

    def _qkv(self, suffix: str) -> list[Part]:
        s, found = self.shape, []
        for group in range(s.kv_heads):
            at = group * (s.heads_per_group + 2) * s.head_dim
            for name, rows in (("q", s.heads_per_group * s.head_dim), ("k", s.head_dim), ("v", s.head_dim)):
                found.append((name + suffix, group, at, rows))
                at += rows
        return found

    def _mlp(self, prefix: str, kind: str, width: int) -> dict[str, list[Part]]:
        gate, up = kind + "gate", kind + "up"
        return {
            prefix + "linear_fc1.weight": [(gate, 0, 0, width), (up, 0, width, width)],
            prefix + "linear_fc1.weight_w": [(gate, 0, 0, width)],
            prefix + "linear_fc1.weight_v": [(up, 0, 0, width)],
            prefix + "linear_fc2.weight": [(kind + "down", 0, 0, self.shape.hidden)],
        }

    def pieces(self, where: Path, size: tuple[int, ...], chunk: Chunk) -> Iterator[Piece]:
        """Pieces of one chunk of a tensor of shape `size`. ValueError when the model has no such tensor."""
        name = EXPERT.sub(".experts.experts.", LAYER.sub("decoder.layers.", chunk.key))
        if name not in self.parts:
            raise ValueError(f"{where}: {short(chunk.key)}: the model of config.json has no such parameter")
        counts = (
            (LAYER, self.shape.num_layers if name.startswith("decoder.layers.") else 0),
            (EXPERT, self.shape.experts if ".experts.experts." in name else 0),
        )
        lead: list[int] = []
        held: list[range] = []  # layers, experts
        for pattern, count in counts:
            number = pattern.search(chunk.key)
            stacked, at = count > 0 and not number, len(lead)
            lead += [count] if stacked else []
            low = chunk.offsets[at] if stacked else int(number[1]) if number else 0
            held.append(range(low, low + (chunk.sizes[at] if stacked else 1)))
            if low >= max(count, 1):
                raise ValueError(f"{where}: {short(chunk.key)}: config.json has only {count} of them")
        parts = self.parts[name]
        self._check_shape(where, chunk.key, size, lead, parts)
        is_column = self.kinds[parts[0][0]].shape[3] == 1
        corner, sizes = (_matrix(n[len(lead) :], i, is_column) for i, n in enumerate((chunk.offsets, chunk.sizes)))
        yield from _cut(chunk.store, parts, held, ".experts.experts." in name, corner, sizes)

    def _check_shape(self, where: Path, key: str, size: tuple[int, ...], lead: list[int], parts: list[Part]) -> None:
        kind, rows = self.kinds[parts[0][0]], max(at + count for _, _, at, count in parts)
        want = (*lead, rows, kind.shape[3]) if kind.ndim == 2 else (*lead, rows * kind.shape[3])
        spare = [n - w for n, w in zip(size, want, strict=False)]
        if kind.name in ("embed", "head") and spare[0] > 0:
            spare[0] = 0  # rows that pad the vocabulary
        if len(size) != len(want) or any(spare):
            raise ValueError(f"{where}: {short(key)}: shape {list(size)}, config.json makes it {list(want)}")


def _matrix(numbers: tuple[int, ...], fill: int, is_column: bool) -> tuple[int, int]:
    """(rows, cols) of a shape (`fill` 1) or an offset (0): a bias is a column, a norm is a row."""
    if len(numbers) == 1:
        return (numbers[0], fill) if is_column else (fill, numbers[0])
    return numbers[0], numbers[1]


def _cut(
    store: str, parts: list[Part], held: list[range], is_expert: bool, corner: tuple[int, int], sizes: tuple[int, int]
) -> Iterator[Piece]:
    """Pieces of a chunk that begins at `corner` of the matrix and has `sizes`, for each held layer and expert."""
    (row0, col0), (rows, cols) = corner, sizes
    for i, (layer, expert) in enumerate(product(*held)):
        for kind, group, at, length in parts:
            low, high = max(row0, at), min(row0 + rows, at + length)
            if low < high:
                unit = expert if is_expert else group
                box = ((layer, layer + 1), (unit, unit + 1), (low - at, high - at), (col0, col0 + cols))
                yield Piece(kind, box, store, 0, (i * rows + low - row0) * cols, (rows * cols, cols, 1))


class _Window:
    """Bytes [start, start + length) of a file, as a file."""

    def __init__(self, stream: BinaryIO, start: int, length: int):
        self.stream, self.start, self.length = stream, start, length
        self.seek(0)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self.length}[whence]
        return self.stream.seek(self.start + base + offset) - self.start

    def tell(self) -> int:
        return self.stream.tell() - self.start

    def read(self, size: int = -1) -> bytes:
        left = max(0, self.length - self.tell())
        return self.stream.read(left if size < 0 else min(size, left))

    def seekable(self) -> bool:
        return True


def _mapped(path: Path, chunk: Chunk) -> torch.Tensor:
    """One chunk, flat, read from the file when it is used. ValueError when it is not the tensor that .metadata says."""
    file = path / chunk.file
    try:
        with open(file, "rb") as stream:
            window: Any = _Window(stream, chunk.start, chunk.length)
            shell = torch.load(window, map_location="meta", weights_only=True)
            with zipfile.ZipFile(window) as archive:
                (info,) = (i for i in archive.infolist() if i.filename.endswith("/data/0"))
            window.seek(info.header_offset)
            name, extra = struct.unpack("<26xHH", window.read(30))
    except Exception as error:  # a damaged file raises anything
        raise ValueError(f"{file}: tensor {short(chunk.key)}: cannot be read: {short(str(error))}") from None
    kept = isinstance(shell, torch.Tensor) and info.compress_type == zipfile.ZIP_STORED and shell.is_contiguous()
    if not kept or (str(shell.dtype), tuple(shell.shape)) != (f"torch.{chunk.dtype}", chunk.sizes):
        raise ValueError(
            f"{file}: tensor {short(chunk.key)}: is not {chunk.dtype} {list(chunk.sizes)} as {METADATA} says"
        )
    begin = chunk.start + info.header_offset + 30 + name + extra + shell.storage_offset() * shell.element_size()
    data = np.memmap(file, np.uint8, "c", begin, (shell.numel() * shell.element_size(),))
    return torch.from_numpy(data).view(shell.dtype)
