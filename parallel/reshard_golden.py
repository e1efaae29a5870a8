"""The golden path of the weight sync: every whole tensor on every rank, for vLLM's own loader.

Slow, and simple enough to be believed: no plan, one broadcast per bucket and owner. An oracle for the planned path.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from parallel.device import Device
from parallel.layout import Box, Kind, Layout, elements, intersect
from parallel.reshard import Stores, views

Tensor = tuple[Kind, int, int]
"""Kind, layer, unit (0 where units are no tensors)."""


@torch.no_grad()
def gather_full(
    layout: Layout,
    stores: Stores,
    rank: int,
    group: dist.ProcessGroup | None,
    device: Device,
    bucket_bytes: int = 256 << 20,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole tensor) of every tensor, in the same order on all ranks, which iterate together."""
    dtype = getattr(torch, layout.dtype)
    for bucket in _buckets(layout, bucket_bytes // dtype.itemsize):
        full = {key: torch.empty(key[0].tensor_shape, dtype=dtype, device=device.torch) for key in bucket}
        for owner, parts in _parts(layout, bucket).items():
            flat = torch.empty(sum(elements(box) for _, box, _ in parts), dtype=dtype, device=device.torch)
            if owner == rank:
                _fill(flat, layout, stores, rank, parts)
            if group is not None:
                dist.broadcast(flat, group=group, group_src=owner)
            start = 0
            for key, box, _ in parts:
                place = _region(full[key], key, box)
                place.copy_(flat[start : start + place.numel()].view(place.shape))
                start += place.numel()
        yield from ((kind.tensor_name(layer, unit), tensor) for (kind, layer, unit), tensor in full.items())


def num_broadcasts(layout: Layout, bucket_bytes: int = 256 << 20) -> int:
    """Collectives of one gather_full."""
    limit = bucket_bytes // getattr(torch, layout.dtype).itemsize
    return sum(len(_parts(layout, bucket)) for bucket in _buckets(layout, limit))


def _buckets(layout: Layout, limit: int) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for kind in layout.kinds.values():
        for layer in range(kind.shape[0]):
            for unit in range(kind.shape[1] if kind.unit_is_tensor else 1):
                count = elements(_tensor_box((kind, layer, unit)))
                if bucket and size + count > limit:
                    yield bucket
                    bucket, size = [], 0
                bucket.append((kind, layer, unit))
                size += count
    yield bucket


def _tensor_box(key: Tensor) -> Box:
    kind, layer, unit = key
    _, units, rows, cols = kind.shape
    return ((layer, layer + 1), (unit, unit + 1) if kind.unit_is_tensor else (0, units), (0, rows), (0, cols))


def _parts(layout: Layout, bucket: list[Tensor]) -> dict[int, list[tuple[Tensor, Box, Box]]]:
    """First holder -> (tensor, part of it, the holder's box that the part lies in)."""
    parts: dict[int, list[tuple[Tensor, Box, Box]]] = {}
    for key in bucket:
        for held, ranks in layout.table[key[0].name].items():
            part = intersect(_tensor_box(key), held)
            if part:
                parts.setdefault(ranks[0], []).append((key, part, held))
    return parts


def _fill(flat: torch.Tensor, layout: Layout, stores: Stores, rank: int, parts: list[tuple[Tensor, Box, Box]]) -> None:
    pieces = {(piece.kind, piece.box): piece for piece in layout.pieces(rank)}
    start = 0
    for key, box, held in parts:
        for view in views(pieces[key[0].name, held], box):
            values = view.of(stores)
            flat[start : start + values.numel()].view(values.shape).copy_(values)
            start += values.numel()


def _region(tensor: torch.Tensor, key: Tensor, box: Box) -> torch.Tensor:
    kind, _, unit = key
    _, units, rows, cols = kind.shape
    first = unit if kind.unit_is_tensor else 0
    spans = (slice(box[1][0] - first, box[1][1] - first), slice(*box[2]), slice(*box[3]))
    return tensor.view(1 if kind.unit_is_tensor else units, rows, cols)[spans]
