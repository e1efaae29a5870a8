"""Weights whose every element says where it belongs, and whole worlds of ranks in one process."""

from __future__ import annotations

import torch

from parallel.device import Device
from parallel.layout import Layout
from parallel.reshard import Resharder, Stores, View, views
from parallel.reshard_plan import Plan

CPU = Device("cpu")


def expected(layout: Layout, rank: int) -> Stores:
    """Stores of a rank in which every element is a hash of its kind and global place; padding is 0."""
    size: dict[str, int] = {}
    for piece in layout.pieces(rank):
        for view in views(piece, piece.box):
            size[view.store] = max(size.get(view.store, 0), view.end)
    stores = {name: torch.zeros(count, dtype=getattr(torch, layout.dtype)) for name, count in size.items()}
    for piece in layout.pieces(rank):
        number = list(layout.kinds).index(piece.kind)
        _, units, rows, cols = layout.kinds[piece.kind].shape
        u, r, c = (torch.arange(*span) for span in piece.box[1:])
        inner = (u[:, None, None] * rows + r[:, None]) * cols + c
        for layer, view in zip(range(*piece.box[0]), views(piece, piece.box), strict=True):
            place = inner + layer * units * rows * cols
            view.of(stores).copy_((place * 2654435761 + number * 40503) % 4294967291 % 251)
    return stores


def fresh(layout: Layout, rank: int) -> Stores:
    return {name: torch.zeros_like(store) for name, store in expected(layout, rank).items()}


def differing(got: Stores, want: Stores) -> list[str]:
    return [name for name in want if not torch.equal(got[name], want[name])]


def writer(stores: Stores):
    def write(view: View, value: torch.Tensor) -> None:
        view.of(stores).copy_(value)

    return write


def check_virtual_world(source: Layout, target: Layout, moves: Plan) -> None:
    """Pack, exchange (slices of Python lists) and unpack of all ranks, round after round, compared bit for bit."""
    world = range(source.world)
    held = {c: expected(source, source.coordinates.index(c)) for c in dict.fromkeys(source.coordinates)}
    ranks = [Resharder(moves, rank, None, source, target, CPU) for rank in world]
    sent: list[list[tuple[torch.Tensor, ...]]] = []  # [rank][round][receiver]
    for rank in ranks:
        stores = held[source.coordinates[rank.rank]]
        packed = (rank.pack(number, stores).clone() for number in range(len(rank.rounds)))
        sent.append([p.split(step.send_splits) for p, step in zip(packed, rank.rounds, strict=True)])
    want = {}
    for rank in ranks:
        coordinate = target.coordinates[rank.rank]
        if coordinate not in want:
            want[coordinate] = expected(target, rank.rank)
        stores = {name: torch.zeros_like(store) for name, store in want[coordinate].items()}
        for view, into in rank.local:
            for place in into:
                place.of(stores).copy_(view.of(held[source.coordinates[rank.rank]]))
        for number, step in enumerate(rank.rounds):
            messages = [sent[src][number][rank.rank] for src in world]
            assert [len(m) for m in messages] == step.receive_splits
            rank.received(number).copy_(torch.cat(messages))
            rank.unpack(number, writer(stores))
        assert differing(stores, want[coordinate]) == [], rank.rank
