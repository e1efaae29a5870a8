"""Rank arithmetic of both uses of the ranks: Megatron's training axes and vLLM's rollout axes. Pure.

Training ranks decompose along Megatron's order string, fastest axis first: tp, cp, dp, pp for dense parameters and
etp, ep, edp, pp for experts, over the same ranks. Rollout ranks are vLLM's reshape (replica, dp, tp), tp fastest.
A *group* of an axis is the ranks that agree on every other axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class TrainCoord(NamedTuple):
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


class RolloutCoord(NamedTuple):
    replica: int
    dp: int
    tp: int


@dataclass(frozen=True)
class TrainGrid:
    world: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    order: str = "tp-cp-ep-dp-pp"

    def __post_init__(self) -> None:
        dense, expert = self.tp * self.cp * self.pp, self.etp * self.ep * self.pp
        for names, product in (("tp*cp*pp", dense), ("etp*ep*pp", expert)):
            values = "*".join(str(getattr(self, name)) for name in names.split("*"))
            if self.world % product:
                near = ", ".join(
                    str(n) for n in (self.world // product * product, -(-self.world // product) * product) if n
                )
                raise ValueError(
                    f"train.{names} = {values} = {product} does not divide {self.world} ranks; "
                    f"use {near} ranks, or change one of the degrees"
                )
        if self.order.endswith("dp") and self.pp > 1 and self.tp * self.cp != self.etp * self.ep:
            raise ValueError(
                f"train.order {self.order} with pp > 1 needs tp*cp = etp*ep, got "
                f"{self.tp}*{self.cp} and {self.etp}*{self.ep}; use tp-cp-ep-dp-pp"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"train.vpp = {self.vpp} needs train.pp of at least 2")

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        return self.world // (self.etp * self.ep * self.pp)

    @cached_property
    def coords(self) -> tuple[TrainCoord, ...]:
        slow = ("pp", "dp") if self.order.endswith("dp") else ("dp", "pp")
        dense = ("tp", "cp", *slow)
        expert = ("etp", "ep", *(("edp" if axis == "dp" else axis) for axis in slow))
        return tuple(TrainCoord(**self._split(rank, expert), **self._split(rank, dense)) for rank in range(self.world))

    def _split(self, rank: int, axes: Sequence[str]) -> dict[str, int]:
        place = {}
        for axis in axes:
            size = getattr(self, axis)
            place[axis], rank = rank % size, rank // size
        if "etp" in place:
            del place["pp"]  # both decompositions agree on it
        return place

    def coord(self, rank: int) -> TrainCoord:
        return self.coords[rank]

    def groups(self, axes: str) -> list[list[int]]:
        """Groups of one axis or of several joined by "-", for example "tp" or "dp-cp"; ranks ascend in each.

        Dense axes (tp, cp, dp, pp) and expert axes (etp, ep, edp, pp) are not mixed.
        """
        chosen = axes.split("-")
        family = ("etp", "ep", "edp", "pp") if {"etp", "ep", "edp"} & set(chosen) else ("tp", "cp", "dp", "pp")
        if not set(chosen) <= set(family):
            raise ValueError(f"axes {axes!r} mix dense and expert axes, or are unknown")
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, coord in enumerate(self.coords):
            members.setdefault(tuple(getattr(coord, a) for a in family if a not in chosen), []).append(rank)
        return list(members.values())


def stage_layers(num_layers: int, pp: int, vpp: int = 1, first: int = 0, last: int = 0) -> list[list[range]]:
    """[stage][chunk] -> global layers. `first` and `last` fix the layers of the outer stages; 0 spreads evenly.

    Chunk v of all stages precedes chunk v + 1 of any (Megatron's interleaved order). ValueError shows the arithmetic.
    """
    fixed = [n for n in (first, last) if n]
    middle = pp - len(fixed)
    left = num_layers - sum(fixed)
    if pp == 1 and fixed:
        raise ValueError("train.first_stage_layers and last_stage_layers need train.pp of at least 2")
    if left < 0 or (middle and (left % middle or not left)) or (not middle and left):
        near = f"; the middle stages need a multiple of {middle} layers" if middle else ""
        raise ValueError(
            f"{num_layers} layers do not spread over {pp} stages: first {first or 'even'}, last {last or 'even'} leave "
            f"{left} layers for {middle} stages{near}; set train.first_stage_layers or train.last_stage_layers"
        )
    sizes = [left // middle if middle else 0] * pp
    sizes[0], sizes[-1] = first or sizes[0], last or sizes[-1]
    if any(size % vpp for size in sizes):
        raise ValueError(f"stages of {sizes} layers are not all multiples of train.vpp = {vpp}")
    stages: list[list[range]] = [[] for _ in range(pp)]
    start = 0
    for _ in range(vpp):
        for stage, size in enumerate(sizes):
            stages[stage].append(range(start, start + size // vpp))
            start += size // vpp
    return stages


@dataclass(frozen=True)
class RolloutGrid:
    world: int
    tp: int = 1
    dp: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        size = self.tp * self.dp
        if self.world % size:
            raise ValueError(
                f"rollout.tp*dp = {self.tp}*{self.dp} = {size} does not divide {self.world} ranks; "
                f"use {self.world // size * size or size} or {-(-self.world // size) * size} ranks, or change tp"
            )

    @property
    def replica_size(self) -> int:
        return self.tp * self.dp

    @property
    def replicas(self) -> int:
        return self.world // self.replica_size

    @property
    def ep_size(self) -> int:
        """Ranks over which vLLM spreads the experts by expert; 1 when every expert is split instead."""
        return self.replica_size if self.expert_parallel else 1

    @property
    def expert_tp(self) -> int:
        """Ranks over which vLLM splits every expert; 1 with expert parallelism."""
        return 1 if self.expert_parallel else self.replica_size

    def coord(self, rank: int) -> RolloutCoord:
        inside = rank % self.replica_size
        return RolloutCoord(rank // self.replica_size, inside // self.tp, inside % self.tp)

    def replica_ranks(self, rank: int) -> list[int]:
        start = rank // self.replica_size * self.replica_size
        return list(range(start, start + self.replica_size))

    def groups(self, axis: str) -> list[list[int]]:
        """Groups of "tp", "dp" or "replica" (all ranks of one replica, which is also vLLM's expert group)."""
        if axis == "replica":
            return [self.replica_ranks(r) for r in range(0, self.world, self.replica_size)]
        members: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.world):
            replica, dp, tp = self.coord(rank)
            members.setdefault((replica, dp if axis == "tp" else tp), []).append(rank)
        return list(members.values())
