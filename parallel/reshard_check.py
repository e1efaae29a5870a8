"""Distrust of the weight sync: before the first exchange, and after any of them.

    prepare        all ranks have the same plan; the exchange delivers a known pattern, else pairs of ranks take over
    verify         64-bit sums over what target ranks hold against sums over what source ranks hold, tensor by tensor

A sum is over elements of raw bits x odd weight of the place within the tensor, modulo 2**64. It does not depend on who
holds what, so sources sum what each owns first; swapped rows, swapped experts and missing writes change it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from parallel.device import Device
from parallel.layout import Box, Kind, Layout, Piece
from parallel.reshard import Resharder, Stores, as_box, views
from parallel.reshard_plan import Plan, match

RAW = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
CHUNK = 1 << 22
"""Elements hashed at a time: the weights of places take 8 bytes each."""
PATTERN = 61
"""Elements of a message in the test of the exchange; prime, so that no split is aligned."""


# Before


def prepare(resharder: Resharder, device: Device) -> None:
    """Once, before the first run. RuntimeError on every rank when the plans differ or no exchange works."""
    agree(resharder.plan, resharder.group, device)
    if resharder.group is None or not resharder.rounds:
        return
    for resharder.pairwise in (False, True):
        if _delivers(resharder, device):
            return
    raise RuntimeError(
        f"reshard: neither all_to_all_single nor pairs of isend and irecv deliver a test pattern on {device.kind} "
        f"({dist.get_backend(resharder.group)}); rollout.sync_plan = golden needs broadcasts only"
    )


def agree(plan: Plan, group: dist.ProcessGroup | None, device: Device) -> None:
    """RuntimeError on every rank unless all of them have the same plan. One all-reduce."""
    if group is None:
        return
    value = int(plan.digest[:15], 16)
    ends = torch.tensor([value, -value], dtype=torch.int64, device=device.torch)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    if ends[0] != -ends[1]:
        raise RuntimeError(
            f"reshard: ranks have different plans (rank {dist.get_rank(group)}: {plan.digest}); configuration, "
            "library versions or expert maps differ between them"
        )


def _delivers(resharder: Resharder, device: Device) -> bool:
    """Whether short messages between the pairs of every round arrive as sent, on all ranks."""
    good = True
    for number, step in enumerate(resharder.rounds):
        sent = [min(n, PATTERN) for n in step.send_splits]
        come = [min(n, PATTERN) for n in step.receive_splits]
        mine = [_pattern(number, resharder.rank, dst, n) for dst, n in enumerate(sent)]
        want = [_pattern(number, src, resharder.rank, n) for src, n in enumerate(come)]
        send = torch.cat(mine).to(device.torch, resharder.dtype)
        receive = torch.full((sum(come),), -1, dtype=resharder.dtype, device=device.torch)
        work = resharder.exchange(receive, send, come, sent)
        if work is not None:
            work.wait()
        good &= torch.equal(receive.cpu(), torch.cat(want).to(resharder.dtype))
    flag = torch.tensor([int(good)], device=device.torch)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=resharder.group)
    return bool(flag)


def _pattern(number: int, src: int, dst: int, count: int) -> torch.Tensor:
    """Integers below 251, which every element type holds exactly."""
    return (torch.arange(count) * 7 + src * 31 + dst * 17 + number) % 251


# After


@dataclass(frozen=True)
class _Slots:
    """Where the sums of a target box of a kind lie: one for each layer and, where units are tensors, each unit."""

    start: dict[tuple[str, Box], int]
    total: int

    @staticmethod
    def of(target: Layout) -> _Slots:
        start, total = {}, 0
        for name, kind in target.kinds.items():
            for box in target.table[name]:
                start[name, box] = total
                total += math.prod(_tensors(kind, box))
        return _Slots(start, total)


def _tensors(kind: Kind, box: Box) -> tuple[int, int]:
    return box[0][1] - box[0][0], box[1][1] - box[1][0] if kind.unit_is_tensor else 1


@torch.no_grad()
def verify(
    source: Layout,
    target: Layout,
    source_stores: Stores,
    target_stores: Stores,
    rank: int,
    group: dist.ProcessGroup | None,
    device: Device,
) -> None:
    """RuntimeError on every rank that names tensor, box and ranks unless all of `target` equals `source`."""
    slots = _Slots.of(target)
    sums = _source_sums(source, target, source_stores, rank, slots)
    if group is not None:
        sums = sums.to(device.torch)
        dist.all_reduce(sums, group=group)
    wrong = _wrong(target, target_stores, rank, slots, sums.cpu())
    if group is not None:
        count = torch.tensor([len(wrong)], device=device.torch)
        dist.all_reduce(count, group=group)
        if not int(count):
            return
        everywhere: list[list[str]] = [[] for _ in range(target.world)]
        dist.all_gather_object(everywhere, wrong[:8], group=group)
        wrong = [line for lines in everywhere for line in lines]
    if wrong:
        raise RuntimeError("reshard: weights differ after the sync:\n  " + "\n  ".join(wrong[:16]))


def _source_sums(source: Layout, target: Layout, stores: Stores, rank: int, slots: _Slots) -> torch.Tensor:
    """Sums over the parts of target boxes whose first holder is this rank."""
    sums = torch.zeros(slots.total, dtype=torch.int64)
    pieces = {(piece.kind, piece.box): piece for piece in source.pieces(rank)}
    for name, kind in target.kinds.items():
        held, needed = list(source.table[name].items()), list(target.table[name])
        common = match([box for box, _ in held], needed)
        mine = np.array([ranks[0] == rank for _, ranks in held])
        for i in np.flatnonzero(mine[common.source]):
            piece = pieces[name, held[common.source[i]][0]]
            whole, box = needed[common.target[i]], as_box(common.box[i].tolist())
            found = box_sums(kind, piece, box, stores, getattr(torch, target.dtype))
            layers, units = _tensors(kind, whole)
            area = sums[slots.start[name, whole] :][: layers * units].view(layers, units)
            area[_span(box, whole, 0), _span(box, whole, 1) if kind.unit_is_tensor else slice(0, 1)] += found
    return sums


def _span(box: Box, whole: Box, axis: int) -> slice:
    return slice(box[axis][0] - whole[axis][0], box[axis][1] - whole[axis][0])


def _wrong(target: Layout, stores: Stores, rank: int, slots: _Slots, sums: torch.Tensor) -> list[str]:
    found = []
    for piece in target.pieces(rank):
        kind = target.kinds[piece.kind]
        mine = box_sums(kind, piece, piece.box, stores, getattr(torch, target.dtype)).flatten()
        start = slots.start[piece.kind, piece.box]
        units = _tensors(kind, piece.box)[1]
        for at in (mine != sums[start : start + len(mine)]).nonzero().flatten().tolist():
            layer, unit = piece.box[0][0] + at // units, piece.box[1][0] + at % units
            found.append(
                f"{kind.tensor_name(layer, unit)}: box {piece.box} (layer, {'expert' if units > 1 else 'unit'}, row, "
                f"col) in {piece.store_name(layer)} of rank {rank}"
            )
    return found


def box_sums(kind: Kind, piece: Piece, box: Box, stores: Stores, dtype: torch.dtype) -> torch.Tensor:
    """[layers, units or 1] int64 sums of the tensors in `box`, which lies within the piece."""
    _, _, rows, cols = kind.shape
    units, inner, columns = (torch.arange(*span) for span in box[1:])
    base = units * (0 if kind.unit_is_tensor else rows)
    sums = torch.zeros(_tensors(kind, box), dtype=torch.int64)
    for unit, row in _chunks(len(units), len(inner), len(columns)):
        place = (base[unit, None, None] + inner[row, None]) * cols + columns
        weights = _mix(place.to(stores[piece.store_name(box[0][0])].device))
        for layer, view in enumerate(views(piece, box)):
            raw = view.of(stores)[unit, row].to(dtype).contiguous().view(RAW[dtype]).to(torch.int64)
            total = (raw * weights).sum(dim=(1, 2)).cpu()
            if kind.unit_is_tensor:
                sums[layer, unit] += total
            else:
                sums[layer, 0] += total.sum()
    return sums


def _chunks(units: int, rows: int, cols: int) -> Iterator[tuple[slice, slice]]:
    """(units, rows) of at most CHUNK elements: several whole units, or some rows of one."""
    row_step = max(1, min(rows, CHUNK // cols))
    unit_step = max(1, CHUNK // (rows * cols)) if row_step == rows else 1
    for unit in range(0, units, unit_step):
        for row in range(0, rows, row_step):
            yield slice(unit, unit + unit_step), slice(row, row + row_step)


def _mix(place: torch.Tensor) -> torch.Tensor:
    """Odd 64-bit weights of places (the finaliser of splitmix64 with signed shifts; products wrap)."""
    x = place * -7046029254386353131 + 1442695040888963407
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return (x ^ (x >> 31)) | 1
