"""Distrust of the weight sync: before the first exchange, and after any of them.

    prepare        all ranks have the same plan; the exchange delivers a known pattern, else pairs of ranks take over
    faults         after every run: bytes as planned, storage where it was, a sample of one layer finite
    verify         64-bit sums over what target ranks hold against sums over what source ranks hold, tensor by tensor

A sum is over elements of raw bits x odd weight of the place within the tensor, modulo 2**64. It does not depend on who
holds what, so sources sum what each owns first; swapped rows, swapped experts and missing writes change it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from parallel.device import Device
from parallel.layout import Box, Kind, Layout, Piece, intersect
from parallel.reshard import Resharder, Stores, as_box, views
from parallel.reshard_plan import Plan, match

log = logging.getLogger(__name__)
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
        try:
            work = resharder.exchange(receive, send, come, sent)
            if work is not None:
                work.wait()
        except RuntimeError as error:  # this backend has no such exchange
            log.warning("the exchange of the weight sync fails its test: %s", error)
            good = False
            break
        good &= torch.equal(receive.cpu(), torch.cat(want).to(resharder.dtype))
    flag = torch.tensor([int(good)], device=device.torch)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=resharder.group)
    return bool(flag)


def _pattern(number: int, src: int, dst: int, count: int) -> torch.Tensor:
    """Integers below 251, which every element type holds exactly."""
    return (torch.arange(count) * 7 + src * 31 + dst * 17 + number) % 251


# After every run


def addresses(stores: Stores) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in stores.items()}


def faults(resharder: Resharder, stores: Stores, before: Mapping[str, int], layer: int) -> list[str]:
    """What is wrong on this rank after a run into `stores`: one line each, with tensor, box and ranks.

    before    addresses of the stores as they were; stores that are not in it may lie anywhere
    layer     the layer whose values are looked at
    """
    return [*_miscounted(resharder), *_moved(resharder, stores, before), *_not_finite(resharder, stores, layer)]


def _miscounted(resharder: Resharder) -> Iterator[str]:
    """Pairs of ranks whose bytes are not those of the plan, and the first box of the pair."""
    plan, me = resharder.plan, resharder.rank
    for verb, mine, other, done in (("sent", "src", "dst", resharder.sent), ("received", "dst", "src", resharder.got)):
        table = plan.moves.take(np.flatnonzero(getattr(plan.moves, mine) == me))
        peers = getattr(table, other)
        planned = np.bincount(peers, table.size, minlength=plan.world).astype(np.int64)
        for peer in np.flatnonzero(planned != np.array(done)).tolist():
            row = np.flatnonzero(peers == peer)[:1]
            what = [_tensor_and_box(plan.kinds[table.kind[i]], as_box(table.box[i].tolist())) for i in row.tolist()]
            yield (
                f"rank {me} {verb} {done[peer] * plan.item_bytes} bytes, not {planned[peer] * plan.item_bytes}, "
                f"{'to' if mine == 'src' else 'from'} rank {peer}; their boxes begin with {', '.join(what) or 'none'}"
            )


def _tensor_and_box(kind: Kind, box: Box) -> str:
    return f"{kind.tensor_name(box[0][0], box[1][0])}: box {box} (layer, unit, row, col)"


def _moved(resharder: Resharder, stores: Stores, before: Mapping[str, int]) -> Iterator[str]:
    moved = {name for name, at in addresses(stores).items() if at != before.get(name, at)}
    for piece in resharder.target.pieces(resharder.rank) if moved else ():
        for layer in range(*piece.box[0]):
            if (name := piece.store_name(layer)) in moved:
                moved.remove(name)
                box = ((layer, layer + 1), *piece.box[1:])
                what = _tensor_and_box(resharder.target.kinds[piece.kind], box)
                yield f"{what}: {name} of rank {resharder.rank} is at {stores[name].data_ptr()}, not at {before[name]}"


def _not_finite(resharder: Resharder, stores: Stores, layer: int) -> Iterator[str]:
    target = resharder.target
    sample = [piece for piece in target.pieces(resharder.rank) if piece.box[0][0] <= layer < piece.box[0][1]]
    seen = [next(views(piece, ((layer, layer + 1), *piece.box[1:]))) for piece in sample]
    if not seen:
        return
    # The extremes of a tensor with a NaN are NaN; this needs no mask of the tensor's size.
    extremes = torch.stack([torch.stack(view.of(stores).aminmax()) for view in seen])
    for view, good in zip(seen, extremes.isfinite().all(1).tolist(), strict=True):
        if not good:
            wrong = ~view.of(stores).isfinite()
            yield f"{resharder.describe(view, wrong)}: {int(wrong.sum())} of {wrong.numel()} elements are not finite"


def require(wrong: Sequence[str], what: str, world: int, group: dist.ProcessGroup | None, device: Device) -> None:
    """RuntimeError on every rank with the lines of all ranks, unless there are none. One all-reduce if all is well."""
    lines = list(wrong)
    if group is not None:
        count = torch.tensor([len(lines)], device=device.torch)
        dist.all_reduce(count, group=group)
        if not int(count):
            return
        everywhere: list[list[str]] = [[] for _ in range(world)]
        dist.all_gather_object(everywhere, lines[:8], group=group)
        lines = [line for found in everywhere for line in found]
    if lines:
        raise RuntimeError(f"reshard: {what}:\n  " + "\n  ".join(lines[:16]))


# On the first runs, and now and then


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
    wrong = _wrong(source, target, target_stores, rank, slots, sums.cpu())
    require(wrong, "weights differ after the sync", target.world, group, device)


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


def _wrong(source: Layout, target: Layout, stores: Stores, rank: int, slots: _Slots, sums: torch.Tensor) -> list[str]:
    found = []
    for piece in target.pieces(rank):
        kind = target.kinds[piece.kind]
        mine = box_sums(kind, piece, piece.box, stores, getattr(torch, target.dtype)).flatten()
        start = slots.start[piece.kind, piece.box]
        units = _tensors(kind, piece.box)[1]
        for at in (mine != sums[start : start + len(mine)]).nonzero().flatten().tolist():
            layer, unit = piece.box[0][0] + at // units, piece.box[1][0] + at % units
            part: Box = ((layer, layer + 1), (unit, unit + 1) if kind.unit_is_tensor else piece.box[1], *piece.box[2:])
            held = source.table[piece.kind].items()
            holders = sorted({r for box, ranks in held if intersect(box, part) for r in ranks})
            found.append(
                f"{kind.tensor_name(layer, unit)}: box {piece.box} (layer, {'expert' if units > 1 else 'unit'}, row, "
                f"col) in {piece.store_name(layer)} of rank {rank}; trained by ranks {str(holders[:16])[1:-1]}"
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
