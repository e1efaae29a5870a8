"""Which experts a redundant engine starts with, and where: as many as can be lie on the ranks that train them. Pure.

vLLM itself puts expert e in slot e and the copies at the end, which shifts nearly every expert to a rank that does not
train it. Placing them by the training layout saves that part of each weight sync until vLLM moves an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from parallel.family import ModelShape
from parallel.grid import RolloutGrid
from parallel.layout import Layout
from rollout.vllm_layout import ExpertMap, initial_expert_map

Owned = tuple[frozenset[int], ...]
"""Experts of one layer that each rank of a replica trains."""


def aligned_expert_maps(training: Layout, shape: ModelShape, grid: RolloutGrid, redundant: int) -> list[ExpertMap]:
    """Per replica [layer][slot] -> expert: every expert at least once, all slots filled.

    vLLM's own map where the slots do not spread over the ranks; vllm_layout says so then.
    """
    slots, left = divmod(shape.experts + redundant, grid.ep_size)
    if left:
        return [initial_expert_map(shape, redundant)] * grid.replicas
    row, owned = functools.cache(place), [owners(training, rank) for rank in range(grid.world)]
    maps = []
    for first in range(0, grid.world, grid.replica_size):
        by_layer = zip(*owned[first : first + grid.replica_size], strict=True)
        maps.append(tuple(row(held, shape.experts, slots) for held in by_layer))
    return maps


def owners(training: Layout, rank: int) -> list[frozenset[int]]:
    """Per layer the experts of which a rank trains at least a part."""
    kind = training.kinds["expert_gate"]
    held: list[set[int]] = [set() for _ in range(kind.shape[0])]
    for piece in training.pieces(rank):
        if piece.kind == kind.name:
            (first, stop), units = piece.box[0], piece.box[1]
            for layer in range(first, stop):
                held[layer].update(range(*units))
    return [frozenset(experts) for experts in held]


def place(owned: Owned, experts: int, slots: int) -> tuple[int, ...]:
    """One layer: `slots` experts of each rank in turn.

    Every expert goes to a rank that owns it if one has room, else to the emptiest; the slots that are left get copies,
    again of owned experts first, the rarest before.
    """
    rows: list[list[int]] = [[] for _ in owned]
    copies = [0] * experts

    def put(rank: int, expert: int) -> None:
        rows[rank].append(expert)
        copies[expert] += 1

    def emptiest(ranks: Iterable[int]) -> int | None:
        free = [rank for rank in ranks if len(rows[rank]) < slots]
        return min(free, key=lambda rank: len(rows[rank])) if free else None

    for at_home in (True, False):
        for expert in (e for e in range(experts) if not copies[e]):
            homes = (rank for rank, held in enumerate(owned) if expert in held) if at_home else range(len(owned))
            if (rank := emptiest(homes)) is not None:
                put(rank, expert)
    for rank, row in enumerate(rows):
        while len(row) < slots:
            new = [e for e in range(experts) if e not in row] or list(range(experts))
            put(rank, min(new, key=lambda e: (e not in owned[rank], copies[e], e)))
    return tuple(expert for row in rows for expert in sorted(row))
