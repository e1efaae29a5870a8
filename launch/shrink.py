"""A recipe reduced to a laptop: same algorithm and options, degrees of at most 2, at most 4 ranks, a tiny model.

`shrink = true` (launch/recipes/shrink.toml) applies it after files and overrides are merged; data and engine sizes are
plain options in that file. Applying it twice changes nothing, so the config.toml of such a run loads as it is.
"""

from __future__ import annotations

import math
from dataclasses import replace

from launch.options import Config, RolloutConfig, TrainConfig

LARGEST_DEGREE = 2
MOST_RANKS = 4
NUM_LAYERS, NUM_EXPERTS = 6, 8
"""Of the tiny models: uneven stages (4 and 2 layers) stay uneven, also in two chunks each."""
DEVICE_ONLY = ("gpu_memory_utilization", "cudagraph_capture_sizes")


def shrunk(config: Config) -> Config:
    """The reduced config. Of etp, ep and pp above 1 ep gives way: all three need 8 ranks."""
    train, rollout = _train(config.train), _rollout(config.rollout)
    layouts = (train.tp * train.cp * train.pp, train.ep * (train.etp or train.tp) * train.pp, rollout.tp * rollout.dp)
    needed = math.lcm(*layouts)
    world = MOST_RANKS if config.world > needed and not MOST_RANKS % needed else needed
    family = "qwen3-moe" if is_moe(config) else "qwen3-tied"
    path = config.model.path if config.model.path.endswith(family) else f"{config.model.path}/{family}"
    algorithm, most = config.algorithm, config.data.max_response_tokens // 2
    return replace(
        config,
        world=world,
        model=replace(config.model, path=path),
        train=train,
        rollout=replace(rollout, samples_per_prompt=min(rollout.samples_per_prompt, 4)),
        algorithm=replace(algorithm, overlong_buffer_tokens=min(algorithm.overlong_buffer_tokens, most)),
        eval=replace(config.eval, samples_per_prompt=min(config.eval.samples_per_prompt, 2)),
    )


def is_moe(config: Config) -> bool:
    return config.train.ep > 1 or config.train.etp > 0 or config.rollout.expert_parallel


def _train(train: TrainConfig) -> TrainConfig:
    axes = ("tp", "pp", "vpp", "cp", "ep", "etp")
    tp, pp, vpp, cp, ep, etp = (min(getattr(train, axis), LARGEST_DEGREE) for axis in axes)
    ends = bool(train.first_stage_layers), bool(train.last_stage_layers)
    first, last = {(True, True): (4, 2), (True, False): (4, 0), (False, True): (0, 2)}.get(ends, (0, 2 * (vpp > 1)))
    if etp > 1 and pp > 1:
        ep = 1
    elif ep > 1 and not etp:
        etp = 1
    return replace(
        train,
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=etp,
        first_stage_layers=first if pp > 1 else 0,
        last_stage_layers=last if pp > 1 else 0,
        spec="torch",
        megatron={} if train.spec == "te" else train.megatron,
    )


def _rollout(rollout: RolloutConfig) -> RolloutConfig:
    tp, dp = min(rollout.tp, LARGEST_DEGREE), min(rollout.dp, LARGEST_DEGREE)
    return replace(
        rollout,
        tp=tp,
        dp=dp,
        redundant_experts=_copies(tp * dp) if rollout.redundant_experts else 0,
        vllm={name: value for name, value in rollout.vllm.items() if name not in DEVICE_ONLY},
    )


def _copies(ranks: int) -> int:
    """The fewest expert copies, at least one, with which all slots spread over the engine's ranks."""
    return -NUM_EXPERTS % ranks or ranks
