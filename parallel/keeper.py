"""Saves and restores of a running training side: what a checkpoint holds beyond tensors, when it is due, what is next.

Tensors: train_state.py. Files: checkpoint.py, restore.py. The caller adds what only it knows (data position, surplus
samples); it comes back from `restore` as it was saved.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from launch.config import Config, changed_options, to_toml
from parallel.checkpoint import Saver, load_own, load_small
from parallel.layout import Layout
from parallel.restore import restore_newest
from parallel.train_state import after_restore, optimizer_steps, set_optimizer_steps, training_state

if TYPE_CHECKING:
    from parallel.groups import Groups
    from parallel.megatron_model import TrainModel

log = logging.getLogger(__name__)


class Keeper:
    def __init__(self, config: Config, model: TrainModel, layout: Layout, groups: Groups, total_steps: int):
        self.config, self.model, self.layout, self.groups = config, model, layout, groups
        self.total_steps, self.saved_step = total_steps, -1
        background = config.checkpoint.background
        own_group = dist.new_group(backend="gloo") if background else groups.host
        root = Path(config.run_dir) / "checkpoints"
        self.saver = Saver(root, layout.kinds, groups.rank, own_group, background)

    def is_due(self, step: int) -> bool:
        """After this step, by checkpoint.every_steps and checkpoint.at_end."""
        options = self.config.checkpoint
        due = options.every_steps > 0 and step % options.every_steps == 0
        return due or (step == self.total_steps and options.at_end)

    def save(self, step: int, small: dict[str, Any]) -> float:
        """Save the state after `step` with `small`, alike on all ranks; seconds that training waited. Collective.

        A step that is saved already is not saved again.
        """
        if step == self.saved_step:
            return 0.0
        began, options = time.monotonic(), self.config.checkpoint
        small = small | {
            "step": step,
            "optimizer_steps": optimizer_steps(self.model),
            "skipped_steps": self.model.skipped_steps,
            "scheduler": self.model.scheduler.state_dict(),
            "config": to_toml(self.config),
        }
        states = training_state(self.model, self.layout, self.groups.rank)
        own = {"torch_rng": torch.get_rng_state()}
        self.saver.save(step, states, small, own, options.keep, options.keep_every)
        self.saved_step = step
        return time.monotonic() - began

    def restore(self) -> dict[str, Any] | None:
        """Make the newest complete checkpoint live, by checkpoint.resume; what was saved as `small`, or None."""
        groups, options, model = self.groups, self.config.checkpoint, self.model
        states = training_state(model, self.layout, groups.rank)
        run_dir, kinds = self.config.run_dir, self.layout.kinds
        found = restore_newest(run_dir, options.resume, kinds, states, groups.rank, groups.host, model.device)
        if found is None:
            return None
        after_restore(model)
        small = load_small(found)
        set_optimizer_steps(model, small["optimizer_steps"])
        model.skipped_steps = small["skipped_steps"]
        model.scheduler.load_state_dict(small["scheduler"])
        torch.set_rng_state(load_own(found, groups.rank)["torch_rng"])
        self.saved_step = small["step"]
        if changes := changed_options(small["config"], self.config):
            log.warning("options that the checkpoint was made with have changed since: %s", "; ".join(changes))
        return small

    def wait(self) -> None:
        """Until a save in the background is complete; raises what it raised."""
        self.saver.wait()
