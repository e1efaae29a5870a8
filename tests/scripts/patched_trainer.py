"""trainer.py with one function of the shipped modules replaced, as PATCH names it. Under torchrun.

Faults are what the first-step self-check is there to catch; `permuted_producers` must change nothing at all.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from parallel import device, megatron_step, weight_sync
from parallel.reshard import Resharder
from reward.experience import Experience
from rollout.batch import gather
from rollout.engine import Engine


def wrong_temperature() -> None:
    """The trainer divides its logits by another temperature than the engine."""
    for name in ("score", "update"):
        right = getattr(megatron_step, name)
        at = 2 if name == "score" else 3

        def wrong(*args, right=right, at=at, **kwargs):
            return right(*args[:at], 1.25 * args[at], *args[at + 1 :], **kwargs)

        setattr(megatron_step, name, wrong)


def after_sync(damage) -> None:
    """`damage(parameters)` after each sync, behind the back of the sync's own verification."""
    right = weight_sync.WeightSync.run

    def run(self, source, target):
        before = {name: tensor.clone() for name, tensor in target.items()}
        right(self, source, target)
        damage(before, target)

    weight_sync.WeightSync.run = run


def permuted_experts() -> None:
    def damage(_, stores):
        for name, tensor in stores.items():
            if "experts" in name and name.endswith(("w13_weight", "w2_weight")):
                tensor.copy_(tensor.flip(0).clone())

    after_sync(damage)


def stale_weight() -> None:
    """One tensor keeps what it held before the sync."""

    def damage(before, stores):
        name = next(n for n in sorted(stores) if n.endswith("o_proj.weight"))
        stores[name].copy_(before[name])

    after_sync(damage)


def unsynced_weight() -> None:
    """As stale_weight, but inside the sync: its verification must see it."""
    right = Resharder.run

    def run(self, source, target):
        name = next(n for n in sorted(target) if n.endswith("o_proj.weight"))
        before = target[name].clone()
        right(self, source, target)
        target[name].copy_(before)

    Resharder.run = run


def shifted_mask() -> None:
    """Responses are taken to begin one token too early; the lists of log-probs stay as the engine gave them."""
    right = Experience.of.__func__

    def of(cls, samples):
        batch = right(cls, samples)
        batch.prompt_tokens = batch.prompt_tokens - 1
        batch.sequences = [sequence[:-1] for sequence in batch.sequences]
        return batch

    Experience.of = classmethod(of)


def changed_weights() -> None:
    """The weights change after each pass that scores the batch: between the old or reference pass and the update."""
    right = megatron_step.score

    def score(model, *args, **kwargs):
        results = right(model, *args, **kwargs)
        with torch.no_grad():
            for name, tensor in model.stores().items():
                if "norm" in name:
                    tensor.mul_(1.1)
        return results

    megatron_step.score = score


def full_host() -> None:
    """Nearly all of the host's memory is in use."""
    device.host_memory = lambda: (97 << 30, 100 << 30)


def permuted_producers() -> None:
    """Samples come from random ranks, in random order."""
    right = Engine.generate

    def generate(self, requests, label="generate"):
        every = gather(right(self, requests, label))
        rng = np.random.default_rng(len(every))
        owners, order = rng.integers(0, dist.get_world_size(), len(every)), rng.permutation(len(every))
        return [every[i] for i in order if owners[i] == dist.get_rank()]

    Engine.generate = generate


def nothing() -> None:
    """The job itself."""


if __name__ == "__main__":
    torch.manual_seed(0), np.random.seed(0)
    globals()[os.environ["PATCH"]]()
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "trainer.py"), run_name="__main__")
