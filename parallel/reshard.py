"""Run a plan: pack boxes of the source stores into a flat buffer, exchange one round, unpack into the target stores.

    round 0   pack 0 | exchange 0
    round 1            pack 1     | exchange 1          two slots: a slot's buffers are packed again only after
    ...                unpack 0                         its exchange has ended and its boxes are unpacked

A box of one store is one strided copy, however many experts it spans. Casts happen while packing, so that both ends
agree on byte counts. Buffers hold the fullest round and are allocated once. Views are made anew in every run: stores
may be freed and restored in between, and this file keeps none of them alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parallel.device import Device
from parallel.layout import Box, Layout, Piece, elements
from parallel.reshard_plan import Plan

Stores = dict[str, torch.Tensor]
Slots = list[list[torch.Tensor]]
"""Two pairs of a send and a receive buffer."""


@dataclass(frozen=True)
class View:
    """One layer of a box within one store."""

    kind: str
    box: Box
    store: str
    offset: int
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]

    def of(self, stores: Stores) -> torch.Tensor:
        store = stores[self.store]
        return store.as_strided(self.shape, self.strides, store.storage_offset() + self.offset)

    @property
    def end(self) -> int:
        """Elements that the store must have."""
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


def views(piece: Piece, box: Box) -> Iterator[View]:
    """Views of the layers of `box`, which lies within the piece."""
    offset = piece.offset_of(box[1][0], box[2][0], box[3][0])
    shape = (box[1][1] - box[1][0], box[2][1] - box[2][0], box[3][1] - box[3][0])
    for layer in range(*box[0]):
        part = ((layer, layer + 1), *box[1:])
        yield View(piece.kind, part, piece.store_name(layer), offset, shape, piece.strides)


@dataclass
class _Round:
    send: list[tuple[int, View]]
    """(first element in the buffer, where it comes from); receive likewise, where it goes."""
    receive: list[tuple[int, View]]
    send_splits: list[int]
    receive_splits: list[int]


class Resharder:
    """Moves weights by one plan, any number of times. All ranks of `group` run it together; rank i of the group is
    rank i of the plan. `group` may be None for one rank."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        group: dist.ProcessGroup | None,
        source: Layout,
        target: Layout,
        device: Device,
        shared: Slots | None = None,
    ):
        """`shared`: buffers of resharders that never run at the same time; they grow here to what this one needs."""
        self.plan, self.rank, self.group = plan, rank, group
        self.source, self.target = source, target
        self.dtype = getattr(torch, target.dtype)
        assert plan.world == source.world == target.world
        if group is not None and dist.get_world_size(group) != plan.world:
            raise ValueError(f"plan for {plan.world} ranks, group of {dist.get_world_size(group)}")
        finder = _Finder(plan, rank, source, target)
        self.local = list(_local_copies(plan, rank, finder))
        self.rounds = list(_rounds(plan, rank, finder)) if plan.world > 1 and len(plan.moves) else []
        sizes = [max((sum(r.send_splits) for r in self.rounds), default=0)]
        sizes.append(max((sum(r.receive_splits) for r in self.rounds), default=0))
        count = min(2, len(self.rounds))
        self.pairwise = False
        """Set when all_to_all_single fails its test on this group (see reshard_check.prepare)."""
        self.slots: Slots = [] if shared is None else shared
        self.slots += [[torch.empty(0, dtype=self.dtype, device=device.torch) for _ in sizes] for _ in range(count)]
        del self.slots[2:]
        for slot in self.slots:
            for side, size in enumerate(sizes):
                if len(slot[side]) < size:
                    slot[side] = torch.empty(size, dtype=self.dtype, device=device.torch)
        self.sent, self.got = ([0] * plan.world for _ in range(2))
        """Elements that the last run sent to, and got from, each rank."""

    def run(self, source: Stores, target: Stores) -> None:
        """Write every planned element of `target` from `source`. ValueError when a store is missing or too small."""

        def write(view: View, value: torch.Tensor) -> None:
            view.of(target).copy_(value)

        self._move(source, target, write)

    def compare(self, source: Stores, target: Stores) -> list[str]:
        """Move as in `run`, but compare with what `target` holds and leave it: one line for each view that differs.

        For a target that its own loader filled from the same checkpoint: proves layouts, plan and exchange at once.
        The coarser of both element types counts.
        """
        found, types = [], [getattr(torch, layout.dtype) for layout in (self.source, self.target)]
        coarse = min(types, key=lambda dtype: dtype.itemsize)

        def check(view: View, value: torch.Tensor) -> None:
            held = view.of(target)
            wrong = held.to(coarse) != value.to(coarse)
            if count := int(wrong.sum()):
                found.append(f"{self.describe(view, wrong)}: {count} of {held.numel()} elements differ")

        self._move(source, target, check)
        return found

    def describe(self, view: View, wrong: torch.Tensor) -> str:
        """Tensor, box, store and ranks of a view, for messages; the tensor is that of the first True in `wrong`."""
        unit = view.box[1][0] + int(wrong.flatten(1).any(1).nonzero()[0])
        kind = self.target.kinds[view.kind]
        senders = self.senders(view.kind, view.box)
        return (
            f"{kind.tensor_name(view.box[0][0], unit)}: box {view.box} (layer, unit, row, col) in {view.store}, from "
            f"rank {', '.join(map(str, senders))} to rank {self.rank}"
        )

    def senders(self, kind: str, box: Box) -> list[int]:
        """Ranks that this rank gets parts of `box` from, itself perhaps among them."""
        number = [k.name for k in self.plan.kinds].index(kind)
        lo, hi = np.array(box).T
        found: set[int] = set()
        for table in (self.plan.local, self.plan.moves):
            common = ((table.box[:, :, 0] < hi) & (table.box[:, :, 1] > lo)).all(axis=1)
            found.update(table.src[common & (table.dst == self.rank) & (table.kind == number)].tolist())
        return sorted(found)

    @torch.no_grad()
    def _move(self, source: Stores, target: Stores, sink: Callable[[View, torch.Tensor], None]) -> None:
        _require((view for view, _ in self.local), source, self.source)
        _require((view for step in self.rounds for _, view in step.send), source, self.source)
        _require((view for _, views in self.local for view in views), target, self.target)
        _require((view for step in self.rounds for _, view in step.receive), target, self.target)
        for view, into in self.local:
            for place in into:
                sink(place, view.of(source).to(self.dtype))
        self.sent, self.got = ([0] * self.plan.world for _ in range(2))
        running: tuple[int, Any] | None = None
        for number in range(len(self.rounds)):
            send, step = self.pack(number, source), self.rounds[number]
            work = self.exchange(self.received(number), send, step.receive_splits, step.send_splits)
            self.sent = [a + b for a, b in zip(self.sent, step.send_splits, strict=True)]
            if running:
                self._finish(*running, sink)
            running = number, work
        if running:
            self._finish(*running, sink)

    def pack(self, number: int, source: Stores) -> torch.Tensor:
        """The send buffer of a round, filled: messages by receiving rank."""
        step, buffer = self.rounds[number], self.slots[number % 2][0]
        for start, view in step.send:
            _slot(buffer, start, view).copy_(view.of(source))
        return buffer[: sum(step.send_splits)]

    def received(self, number: int) -> torch.Tensor:
        """The receive buffer of a round: messages by sending rank."""
        return self.slots[number % 2][1][: sum(self.rounds[number].receive_splits)]

    def unpack(self, number: int, sink: Callable[[View, torch.Tensor], None]) -> None:
        buffer = self.slots[number % 2][1]
        for start, view in self.rounds[number].receive:
            sink(view, _slot(buffer, start, view))

    def exchange(
        self, receive: torch.Tensor, send: torch.Tensor, receive_splits: list[int], send_splits: list[int]
    ) -> Any:
        """Start one round; the result has wait(), or is None when the round has ended."""
        if self.pairwise:
            return pairwise_exchange(receive, send, receive_splits, send_splits, self.group)
        return dist.all_to_all_single(receive, send, receive_splits, send_splits, group=self.group, async_op=True)

    def _finish(self, number: int, work: Any, sink: Callable[[View, torch.Tensor], None]) -> None:
        if work is not None:
            work.wait()
        self.got = [a + b for a, b in zip(self.got, self.rounds[number].receive_splits, strict=True)]
        self.unpack(number, sink)


def pairwise_exchange(
    receive: torch.Tensor,
    send: torch.Tensor,
    receive_splits: Sequence[int],
    send_splits: Sequence[int],
    group: dist.ProcessGroup | None,
) -> None:
    """What all_to_all_single does, by messages between two ranks at a time: rank +1 and -1, rank +2 and -2, ..."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    incoming, outgoing = receive.split(list(receive_splits)), send.split(list(send_splits))
    incoming[rank].copy_(outgoing[rank])
    for shift in range(1, world):
        to, come = (rank + shift) % world, (rank - shift) % world
        operations = []
        if send_splits[to]:
            operations.append(dist.P2POp(dist.isend, outgoing[to], group=group, group_peer=to))
        if receive_splits[come]:
            operations.append(dist.P2POp(dist.irecv, incoming[come], group=group, group_peer=come))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


class _Finder:
    """Pieces of one rank by kind and box number."""

    def __init__(self, plan: Plan, rank: int, source: Layout, target: Layout):
        self.plan = plan
        self.target: dict[tuple[str, Box], list[Piece]] = {}
        for piece in target.pieces(rank):
            self.target.setdefault((piece.kind, piece.box), []).append(piece)
        self.source: dict[tuple[str, Box], Piece] = {}
        self.by_kind: dict[str, list[Piece]] = {}
        for piece in source.pieces(rank):
            self.source.setdefault((piece.kind, piece.box), piece)
            self.by_kind.setdefault(piece.kind, []).append(piece)

    def reads(self, kind: int, number: int) -> Piece:
        """A piece that holds source box `number`; the box itself may be an atom of overlapping boxes."""
        name, box = self.plan.kinds[kind].name, self.plan.source_boxes[kind][number]
        if (name, box) not in self.source:
            self.source[name, box] = next(p for p in self.by_kind[name] if _within(box, p.box))
        return self.source[name, box]

    def writes(self, kind: int, number: int) -> list[Piece]:
        """All pieces that are target box `number`: a tied head and the embedding, or two slots of one expert."""
        return self.target[self.plan.kinds[kind].name, self.plan.target_boxes[kind][number]]


def _within(inner: Box, outer: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def as_box(rows: Sequence[Sequence[int]]) -> Box:
    return tuple((lo, hi) for lo, hi in rows)  # type: ignore[return-value]


def _local_copies(plan: Plan, rank: int, finder: _Finder) -> Iterator[tuple[View, list[View]]]:
    table = plan.local.take((plan.local.dst == rank).nonzero()[0])
    for kind, rows, source, number in _rows(table):
        box = as_box(rows)
        sinks = zip(*(views(piece, box) for piece in finder.writes(kind, number)), strict=True)
        for view, into in zip(views(finder.reads(kind, source), box), sinks, strict=True):
            yield view, list(into)


def _rows(table: Any) -> Iterator[tuple[int, list[list[int]], int, int]]:
    return zip(table.kind.tolist(), table.box.tolist(), table.source.tolist(), table.target.tolist(), strict=True)


def _rounds(plan: Plan, rank: int, finder: _Finder) -> Iterator[_Round]:
    number, table = plan.fragments(rank)
    steps = [_Round([], [], [0] * plan.world, [0] * plan.world) for _ in range(plan.rounds)]
    filled = [[0, 0] for _ in steps]
    ends = zip(number.tolist(), table.src.tolist(), table.dst.tolist(), strict=True)
    for (at, src, dst), (kind, rows, source, target) in zip(ends, _rows(table), strict=True):
        step, box = steps[at], as_box(rows)
        if src == rank:
            _fill(step.send, filled[at][0], [finder.reads(kind, source)], box)
            filled[at][0] += elements(box)
            step.send_splits[dst] += elements(box)
        else:
            _fill(step.receive, filled[at][1], finder.writes(kind, target), box)
            filled[at][1] += elements(box)
            step.receive_splits[src] += elements(box)
    return iter(steps)


def _fill(entries: list[tuple[int, View]], start: int, pieces: list[Piece], box: Box) -> None:
    layer = elements(box) // (box[0][1] - box[0][0])
    for piece in pieces:
        entries += [(start + i * layer, view) for i, view in enumerate(views(piece, box))]


def _slot(buffer: torch.Tensor, start: int, view: View) -> torch.Tensor:
    units, rows, cols = view.shape
    return buffer[start : start + units * rows * cols].view(view.shape)


def _require(wanted: Iterator[View], stores: Stores, layout: Layout) -> None:
    need: dict[str, int] = {}
    for view in wanted:
        need[view.store] = max(need.get(view.store, 0), view.end)
    for name, count in need.items():
        if name not in stores:
            raise ValueError(f"reshard: {layout.name} has no store {name!r}; it has {list(stores)[:4]} ...")
        store = stores[name]
        if store.numel() < count or not store.is_contiguous():
            raise ValueError(
                f"reshard: store {name!r} of {layout.name} must be contiguous and hold {count} elements, "
                f"got shape {tuple(store.shape)}, strides {store.stride()}"
            )
