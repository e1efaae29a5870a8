"""The metrics of a step that follow from the whole batch, by the formulas of launch/metrics.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launch import metrics as formulas
from launch.config import Config


def step_metrics(
    config: Config,
    shape: Any,
    batch: Any,
    partitions: Sequence[Sequence[int]],
    seconds: Mapping[str, float],
    world: int,
    device_name: str,
) -> dict[str, float]:
    """`batch`: an Experience; `partitions`: sequence numbers per data-parallel rank; `seconds` by phase."""
    table = formulas.StepBatch(
        prompt_ids=batch.prompt_ids,
        prompt_tokens=batch.prompt_tokens,
        response_tokens=batch.response_tokens,
        truncated=batch.truncated,
        scores=batch.scores,
        rewards=batch.rewards,
        advantages=np.concatenate(batch.fields["advantage"]),
    )
    result = formulas.seqlen_metrics(batch.lengths, partitions)
    result |= formulas.critic_metrics(table)
    result |= formulas.length_metrics(table, config.data.max_prompt_tokens, config.data.max_response_tokens)
    result |= formulas.speed_metrics(table, seconds, world)
    flops = formulas.train_flops(shape, batch.lengths) * config.train.epochs
    peak = formulas.peak_flops(device_name)
    result["perf/mfu/actor"] = formulas.mfu(flops, seconds.get("update_actor", 0.0), world, peak)
    return result
