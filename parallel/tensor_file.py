"""One safetensors file: a checked header, one sequential read, one sequential write, and its hash on the way.

The safetensors package maps files into memory, wants all tensors at once to write, and does not name the file in its
errors; the format itself is 8 bytes of length, a JSON header and the data, so this is all there is to it.
No reader below trusts a length: every header is checked before a byte of data is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
}
CODES = {name: code for code, name in DTYPES.items()}
HEADER_LIMIT = 100_000_000
"""Bytes; the limit of the safetensors package."""
CHUNK = 8 << 20
HASH_THREADS = 2


class Unreadable(ValueError):
    """The system did not read a file, which may be whole: too many open files, a filesystem that was away."""


@dataclass(frozen=True)
class Entry:
    dtype: str
    """torch's name, for example "bfloat16"."""
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the end of the header."""
    stop: int


@dataclass(frozen=True)
class Header:
    entries: dict[str, Entry]
    """In file order."""
    metadata: dict[str, str]
    size: int
    """Bytes before the data."""
    digest: str
    """sha256 of those bytes."""


def short(text: object, limit: int = 120) -> str:
    """`text` on one line of an error message, whatever a damaged file holds."""
    line = ascii(text) if not (isinstance(text, str) and text.isascii() and text.isprintable()) else text
    return line if len(line) <= limit else line[: limit - 3] + "..."


def parse_json(text: bytes, where: str | Path) -> dict[str, Any]:
    """A JSON object without duplicate keys. ValueError names `where`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{short(next(n for n in names if names.count(n) > 1))} appears twice")
        return table

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {short(str(error))}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def read_header(file: Path) -> Header:
    """Header of a safetensors file, checked against the file's size. ValueError names the file and the tensor."""
    try:
        with open(file, "rb") as stream:
            total = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if total < 8 or length > min(HEADER_LIMIT, total - 8):
                raise ValueError(f"{file}: header of {length} bytes, file of {total}: not safetensors, or truncated")
            text = stream.read(length)
    except FileNotFoundError:
        raise ValueError(f"{file}: does not exist") from None
    except OSError as error:
        raise Unreadable(f"{file}: cannot be read: {error.strerror}") from None
    table = parse_json(text, file)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{file}: __metadata__ must map names to strings")
    entries = {name: _entry(file, name, row) for name, row in table.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_extents(file, ordered, total - 8 - length)
    return Header(ordered, metadata, 8 + length, hashlib.sha256(length.to_bytes(8, "little") + text).hexdigest())


def _entry(file: Path, name: str, row: Any) -> Entry:
    where = f"{file}: tensor {short(name)}"
    if not isinstance(row, dict) or not {"dtype", "shape", "data_offsets"} <= set(row):
        raise ValueError(f"{where}: needs dtype, shape and data_offsets")
    code, shape, extent = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"{where}: dtype {short(code)} is not supported; one of {' '.join(DTYPES)}")
    for what, numbers in (("shape", shape), ("data_offsets", extent)):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise ValueError(f"{where}: {what} must be a list of non-negative integers, got {short(numbers)}")
    size = math.prod(shape) * item_size(DTYPES[code])
    if len(extent) != 2 or extent[1] - extent[0] != size:
        raise ValueError(f"{where}: {code} {short(shape)} takes {short(size)} bytes, data_offsets are {short(extent)}")
    return Entry(DTYPES[code], tuple(shape), *extent)


def _check_extents(file: Path, entries: dict[str, Entry], size: int) -> None:
    """Tensors in file order must tile the `size` bytes of data."""
    at = 0
    for name, entry in entries.items():
        if entry.start != at:
            what = "overlaps the tensor before it" if entry.start < at else "leaves a hole before it"
            raise ValueError(f"{file}: tensor {short(name)}: begins at byte {entry.start} and {what} (ends at {at})")
        at = entry.stop
    if at != size:
        state = "truncated" if at > size else "too long"
        raise ValueError(f"{file}: {state}: the header describes {at} bytes of data, the file has {size}")


def item_size(dtype: str) -> int:
    """Bytes of one element."""
    return getattr(torch, dtype).itemsize


class Hasher:
    """Hash of the bytes given to it, in order, by threads: it hides behind the disk.

    It is the sha256 of the CRC-32 of every 8 MiB: what a disk or a copy damages is found, and a fast disk does not wait
    for a core, as it does for sha256 of all bytes. It is no defence against forgery.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(HASH_THREADS)
        self.block: list[memoryview] = []
        self.digests: list[Future[bytes]] = []
        self.room, self.size = CHUNK, 0

    def add(self, data: bytes | memoryview) -> None:
        """`data` must not change until `finish`."""
        view = memoryview(data)
        self.size += len(view)
        while len(view):
            part, view = view[: self.room], view[self.room :]
            self.block.append(part)
            self.room -= len(part)
            if not self.room:
                self._submit()

    def _submit(self) -> None:
        self.digests.append(self.pool.submit(_digest, self.block))
        self.block, self.room = [], CHUNK

    def finish(self) -> str:
        if self.block:
            self._submit()
        self.pool.shutdown()
        return hashlib.sha256(b"".join(digest.result() for digest in self.digests)).hexdigest()


def _digest(block: list[memoryview]) -> bytes:
    found = 0
    for part in block:
        found = zlib.crc32(part, found)
    return found.to_bytes(4, "little")


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def allocate(header: Header) -> dict[str, torch.Tensor]:
    """Uninitialised host tensors for everything in a file."""
    return {n: torch.empty(e.shape, dtype=getattr(torch, e.dtype)) for n, e in header.entries.items()}


def mapped(file: Path, header: Header) -> dict[str, torch.Tensor]:
    """Tensors that are read from the file when they are used; for offline tools."""
    if not header.entries:
        return {}
    data = torch.from_numpy(np.memmap(file, np.uint8, "c", offset=header.size))
    tensors = {}
    for name, entry in header.entries.items():
        part = data[entry.start : entry.stop]
        part = part.clone() if entry.start % item_size(entry.dtype) else part
        tensors[name] = part.view(getattr(torch, entry.dtype)).view(entry.shape)
    return tensors


def read(file: Path, header: Header, stores: dict[str, torch.Tensor], hashed: bool = False) -> str:
    """Fill contiguous `stores` (by tensor name, any device, equal dtype and size) in one sequential pass.

    Tensors without a store are passed over. Returns the file's hash (see Hasher) when `hashed`, else "".
    """
    hasher = Hasher() if hashed else None
    with open(file, "rb", buffering=1 << 20) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        if hasher:
            hasher.add(stream.read(header.size))
        for name, entry in header.entries.items():
            store = stores.get(name)
            if store is None and not hasher:
                continue
            on_host = store is not None and store.device.type == "cpu"
            host = store if on_host else torch.empty(entry.stop - entry.start, dtype=torch.uint8)
            stream.seek(header.size + entry.start)
            for chunk in _fill(stream, host_bytes(host), file, name):
                if hasher:
                    hasher.add(chunk)
            if store is not None and not on_host:
                store.detach().reshape(-1).copy_(host.view(store.dtype))
    return hasher.finish() if hasher else ""


def _fill(stream: BinaryIO, view: memoryview, file: Path, name: str) -> Iterator[memoryview]:
    for start in range(0, len(view), CHUNK):
        part = view[start : start + CHUNK]
        done = 0
        while done < len(part):
            count = stream.readinto(part[done:])  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"{file}: tensor {short(name)}: the file became shorter while it was read")
            done += count
        yield part


def write(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Write and fsync one safetensors file tensor by tensor (any device). Returns (bytes, hash, header's sha256).

    Larger elements come first, so that every tensor is aligned to its element when the file is mapped.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        code = CODES[str(tensor.dtype).removeprefix("torch.")]
        table[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise ValueError(f"{file}: a header of {len(text)} bytes is more than the {HEADER_LIMIT} that readers accept")
    head = len(text).to_bytes(8, "little") + text
    hasher = Hasher()
    try:
        with open(file, "wb", buffering=1 << 20) as stream:
            for data in chain([memoryview(head)], (host_bytes(tensors[name].contiguous().cpu()) for name in order)):
                for start in range(0, len(data), CHUNK):
                    stream.write(data[start : start + CHUNK])
                    hasher.add(data[start : start + CHUNK])
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:  # a failed write does not name its file
        raise OSError(error.errno, error.strerror, str(file)) from error
    return hasher.size, hasher.finish(), hashlib.sha256(head).hexdigest()


def write_bytes(file: Path, data: bytes) -> None:
    """Replace a small file so that a reader, or a crash, sees the old or the new one."""
    part = file.with_name(f".{file.name}.part")
    with open(part, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, file)
    sync_directory(file.parent)


def sync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
