"""The weight sync as the trainer uses it: planned once, run after every update, verified on the first few runs.

When the target's layout changes (experts were rearranged), the plan is made anew; nothing else is kept between runs.
"""

from __future__ import annotations

from typing import Any

from launch.config import RolloutConfig
from parallel.device import Device
from parallel.layout import Layout
from parallel.reshard import Resharder, Stores
from parallel.reshard_check import prepare, verify
from parallel.reshard_plan import plan

FIRST_RUNS = 3
"""Runs that are always verified."""


class WeightSync:
    def __init__(
        self, source: Layout, target: Layout | None, options: RolloutConfig, rank: int, group: Any, device: Device
    ):
        """`target` None: there is no engine, and nothing runs."""
        self.source, self.options, self.rank, self.group, self.device = source, options, rank, group, device
        self.runs = 0
        if target is not None:
            self.aim(target)

    def aim(self, target: Layout) -> None:
        """Plan for a target layout, check that all ranks planned alike and that the exchange works. Collective."""
        self.target = target
        planned = plan(self.source, target, cap_bytes=self.options.sync_staging_mib << 20)
        self.resharder = Resharder(planned, self.rank, self.group, self.source, target, self.device)
        prepare(self.resharder, self.device)

    def run(self, source: Stores, target: Stores) -> None:
        """Write every element of the target. RuntimeError names tensors, boxes and ranks that differ afterwards."""
        self.resharder.run(source, target)
        self.runs += 1
        every = self.options.verify_every_steps
        if self.runs <= FIRST_RUNS or (every and self.runs % every == 0):
            verify(self.source, self.target, source, target, self.rank, self.group, self.device)
