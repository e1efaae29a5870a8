"""The weight sync as the trainer uses it: planned once, run after every update, checked after every run.

Most parameters of the engine are plain storage and are written in place, all by one plan. A parameter that the engine
keeps packed for a kernel is written layer by layer, each by a plan of its own: the layer in the form that a checkpoint
has, then the engine's own packing into the old storage. When the target's layout changes (experts were rearranged), the
plans are made anew.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from launch.config import RolloutConfig
from parallel.device import Device
from parallel.layout import Layout
from parallel.reshard import Resharder, Stores
from parallel.reshard_check import addresses, faults, prepare, require, verify
from parallel.reshard_golden import gather_full
from parallel.reshard_plan import plan

logger = logging.getLogger(__name__)

FIRST_RUNS = 3
"""Runs that are always verified."""


class Packed(Protocol):
    """A module of the engine whose parameters are not stored as a checkpoint has them."""

    names: tuple[str, ...]
    """Its stores, by the names of the layout."""

    def open(self) -> Stores:
        """The stores in checkpoint form, zeros; they must be written before `close`."""

    def close(self) -> None:
        """Pack what was written into the engine's own storage."""


@dataclass(frozen=True)
class _Part:
    """What one plan writes: everything that is plain, or one packed module."""

    resharder: Resharder
    packed: Packed | None = None


class WeightSync:
    def __init__(
        self,
        source: Layout,
        target: Layout | None,
        options: RolloutConfig,
        rank: int,
        group: Any,
        device: Device,
        packed: Sequence[Packed] = (),
    ):
        """`target` None: there is no engine, and nothing runs."""
        self.source, self.options, self.rank, self.group, self.device = source, options, rank, group, device
        self.packed, self.runs, self.is_resumed = packed, 0, False
        self.before: dict[str, int] = {}
        if target is not None and options.sync_plan == "planned":
            self.aim(target)

    def aim(self, target: Layout) -> None:
        """Plan for a target layout, check that all ranks planned alike and that the exchange works. Collective."""
        self.target = target
        names = {name for packed in self.packed for name in packed.names}
        self.parts = [_Part(self._resharder(target.only(lambda name: name not in names) if names else target))]
        for packed in self.packed:
            if packed.names:
                self.parts.append(_Part(self._resharder(target.only(set(packed.names).__contains__)), packed))

    def _resharder(self, target: Layout) -> Resharder:
        planned = plan(self.source, target, cap_bytes=self.options.sync_staging_mib << 20)
        shared = self.parts[-1].resharder.slots if getattr(self, "parts", None) else None
        resharder = Resharder(planned, self.rank, self.group, self.source, target, self.device, shared)
        prepare(resharder, self.device)
        return resharder

    def update(self, source: Stores, engine: Any) -> None:
        """Write `source` into the engine by the configured path. RuntimeError as in `run`."""
        if self.options.sync_plan == "golden":
            engine.load(gather_full(self.source, source, self.rank, self.group, self.device))
            self.runs += 1
            return
        if self.target is not engine.layout:  # vLLM has moved experts
            self.aim(engine.layout)
        if self.options.compare_at_start and not self.runs and not self.is_resumed:
            self.compare(source, engine.stores)
        self.run(source, engine.stores)

    def compare(self, source: Stores, target: Stores) -> None:
        """RuntimeError on every rank, with tensors, boxes and ranks, unless `target` holds already what a run writes.

        For an engine that loaded its weights itself. Packed modules cannot be compared and are left out.
        """
        wrong = self.parts[0].resharder.compare(source, target)
        what = "the planned sync would write other weights than vLLM has loaded itself from model.path"
        require(wrong, what, self.target.world, self.group, self.device)
        if self.rank == 0:
            rest = f"; {len(self.parts) - 1} packed modules are left out" if len(self.parts) > 1 else ""
            logger.info("every element equals what vLLM loaded itself%s", rest)

    def run(self, source: Stores, target: Stores) -> None:
        """Write every element of the target. RuntimeError on every rank names tensors, boxes and ranks of a fault."""
        self.before = self.before or addresses(target)
        self.runs += 1
        every = self.options.verify_every_steps
        is_verified = self.runs <= FIRST_RUNS or bool(every and self.runs % every == 0)
        layer = (self.runs - 1) % max(kind.shape[0] for kind in self.target.kinds.values())
        for part in self.parts:
            resharder, stores = part.resharder, part.packed.open() if part.packed else target
            resharder.run(source, stores)
            wrong = faults(resharder, stores, {} if part.packed else self.before, layer)
            require(wrong, "a check after the sync failed", self.target.world, self.group, self.device)
            if is_verified:
                verify(self.source, resharder.target, source, stores, self.rank, self.group, self.device)
            if part.packed:
                part.packed.close()
        for packed in self.packed:
            if not packed.names:  # derived from plain parameters
                packed.close()
