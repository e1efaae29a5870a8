"""What the routers did in an update, as metrics: how evenly tokens fell on experts, and Megatron's auxiliary losses.

Measured in the trainer, on every device and whatever engine sampled: with routing replay the choices are the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from torch import Tensor

from parallel.megatron_model import TrainModel

RANKS_WITH_WHOLE = {
    "load_balancing_loss": ("dp",),
    "seq_load_balancing_loss": ("dp",),
    "global_load_balancing_loss": (),
    "z_loss": ("tp", "cp", "dp"),
}
"""Megatron's name of an auxiliary loss -> axes whose ranks each have all of it; on other axes they have shares."""


class RouterWatch:
    """Counts one update's choices; `during` is a context around it. A dense model has no routers and no metrics."""

    def __init__(self, model: TrainModel):
        self.model = model
        shape = model.shape
        self.load = torch.zeros(shape.num_layers, shape.experts, dtype=torch.int64, device=model.device.torch)
        """Tokens that chose each expert, [layers, experts]; padding included."""

    @contextmanager
    def during(self) -> Iterator[None]:
        get_moe_layer_wise_logging_tracker().clear()
        hooks = [
            layer.mlp.router.register_forward_hook(self._count)
            for chunk in self.model.chunks
            for layer in chunk.module.decoder.layers
            if self.model.shape.is_moe
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _count(self, router: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        if not (is_checkpointing() and torch.is_grad_enabled()):  # that is a recomputation
            self.load[router.layer_number - 1] += output[1].sum(0)

    def stats(self, num_micro_batches: int) -> dict[str, tuple[float, float]]:
        """(value, 1) by metric, the same on all ranks; collective over the world.

        experts/load_max_over_mean: tokens of the busiest expert over the mean, mean over layers; _worst: of the worst
        layer. moe/NAME: an auxiliary loss without its coefficient, mean over layers and micro-batches.
        """
        shape, grid = self.model.shape, self.model.grid
        if not shape.is_moe:
            return {}
        tracked = get_moe_layer_wise_logging_tracker()
        names = [name for name in RANKS_WITH_WHOLE if name in tracked]
        sums = torch.zeros(len(names), device=self.load.device)
        for i, name in enumerate(names):
            sums[i] = tracked[name]["values"].sum()
        dist.all_reduce(self.load)
        dist.all_reduce(sums)
        found = load_metrics(self.load.cpu())
        for name, total in zip(names, sums.tolist(), strict=True):
            copies = math.prod(getattr(grid, axis) for axis in RANKS_WITH_WHOLE[name])
            found[f"moe/{name}"] = total / (copies * shape.num_layers * num_micro_batches)
        return {name: (value, 1.0) for name, value in found.items()}


def load_metrics(load: Tensor) -> dict[str, float]:
    """Max / mean of the expert load [layers, experts] per layer: averaged over layers, and the worst layer."""
    ratio = load.amax(1) / load.double().mean(1).clamp(min=1e-9)
    return {"experts/load_max_over_mean": float(ratio.mean()), "experts/load_max_over_mean_worst": float(ratio.max())}
