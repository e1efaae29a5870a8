"""Seconds of one step, term by term, from a configuration and the hardware table. Pure, good to a factor of two.

generate   decoding steps x (weights and cache read from memory + layers x a constant), a wave of sequences at a time;
           a batch is as long as its longest sequence
passes     2 FLOPs a parameter and token forward, 6 for an update, 8 with full recomputation; attention beside them;
           divided by what the pipeline bubble leaves
transfers  weight sync by the resharding plan; host copies at the pinned rate
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.config import Config
from launch.hardware import Hardware
from parallel.family import ModelShape
from parallel.memory import ITEM, RankMemory, cache_token_bytes, grids

DEFAULT_SLOTS = 256
"""vLLM's max_num_seqs when a recipe says nothing."""
HOST_ADAM = 10e9
"""Bytes/s a device of host Adam, assumed: eight share a node's memory."""


NODE = 8
LINK_SHARE = 0.6
"""Of a node's links that collectives reach, assumed."""


@dataclass(frozen=True)
class Work:
    """What a step is about."""

    prompt_tokens: float
    """Mean."""
    response_tokens: float
    """Mean."""
    longest_tokens: float
    """Response that the batch waits for."""
    samples: int

    @property
    def tokens(self) -> float:
        return self.samples * (self.prompt_tokens + self.response_tokens)


def expected_work(config: Config, prompt: float = 0, response: float = 0) -> Work:
    """Means as given, or guesses: a quarter of the longest prompt, a third of the longest response."""
    data = config.data
    samples = data.prompts_per_step * config.rollout.samples_per_prompt
    response = response or data.max_response_tokens / 3
    return Work(prompt or data.max_prompt_tokens / 4, response, min(data.max_response_tokens, 4 * response), samples)


def matrix_parameters(shape: ModelShape) -> int:
    """Parameters that multiply one token, embedding left out."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    ffn = shape.hidden * (3 * shape.expert_ffn * shape.experts_per_token + shape.experts)
    ffn = ffn if shape.is_moe else 3 * shape.hidden * shape.ffn
    return shape.num_layers * (attention + ffn) + shape.vocab * shape.hidden


def micro_batches(config: Config, work: Work, dp: int) -> int:
    """Of one update on one data parallel rank; sequences are packed whole, some of each budget stays empty."""
    budget = config.train.micro_batch_tokens * config.train.cp
    return max(1, math.ceil(1.05 * work.tokens / dp / config.train.mini_batches / budget))


def bubble(config: Config, count: int) -> float:
    """Share of a pass in which a stage idles: (pp - 1) / (count x vpp + pp - 1)."""
    pp = config.train.pp
    return (pp - 1) / (count * config.train.vpp + pp - 1)


def seconds(
    config: Config, shape: ModelShape, world: int, hardware: Hardware, work: Work, memory: RankMemory, sync_s: float
) -> dict[str, float]:
    """Term -> seconds, in the order of a step. `memory`: the rank with most; `sync_s`: of the resharding plan."""
    train, _ = grids(config, world)
    count = micro_batches(config, work, train.dp)
    length = work.prompt_tokens + work.response_tokens
    attention = 4 * length * shape.heads * shape.head_dim * shape.num_layers / 2
    forward = work.tokens * (2 * matrix_parameters(shape) + attention)
    filled = 1 - bubble(config, count)
    rate = world * hardware.flops * hardware.train_share * filled
    links = exchange_s(config, shape, world, hardware, work) / filled
    times = 4 if config.train.recompute == "full" else 3
    one_pass, update = forward / rate + links, (times * forward / rate + (times - 1) * links) * config.train.epochs
    algorithm, updates = config.algorithm, config.train.mini_batches * config.train.epochs
    recompute = algorithm.kl_reward or algorithm.correction != "none" or updates > 1
    old = algorithm.old_log_probs == "recompute" or (algorithm.old_log_probs == "auto" and recompute)
    reference = bool(algorithm.kl_loss or algorithm.kl_reward)
    away = memory.params * ("params" in config.train.offload) + memory.optimizer * ("optimizer" in config.train.offload)
    return {
        "generate": generate_s(config, shape, world, hardware, work, memory),
        "old log-probs": one_pass if old else 0.0,
        "reference log-probs": (one_pass + 2 * memory.params / hardware.host) if reference else 0.0,
        "update": update,
        "host Adam": updates * memory.optimizer_host * 2 / HOST_ADAM,
        "offload and restore": 2 * away / hardware.host,
        "weight sync": sync_s,
    }


def exchange_s(config: Config, shape: ModelShape, world: int, hardware: Hardware, work: Work) -> float:
    """What a forward pass exchanges between ranks, nothing hidden behind compute: two gathers and two scatters a layer
    over tp, routed tokens to their experts and back over ep (and to all columns over etp), keys and values over cp.
    """
    train, _ = grids(config, world)
    item, h = ITEM[config.train.dtype], shape.hidden
    tokens = work.tokens / (train.dp * train.cp) * shape.num_layers / train.pp
    dense = 4 * h * (train.tp - 1) / train.tp
    kv = 2 * shape.kv_heads * shape.head_dim * (train.cp - 1) / max(train.tp, 1)
    routed = 2 * shape.experts_per_token * h / train.tp
    routed *= (train.ep - 1) / train.ep + (train.etp - 1)
    near = hardware.link * LINK_SHARE
    dense_rate = near if train.tp * train.cp <= NODE else hardware.nic
    return (
        tokens * item * ((dense + kv) / dense_rate + routed / (near if train.ep * train.etp <= NODE else hardware.nic))
    )


def generate_s(
    config: Config, shape: ModelShape, world: int, hardware: Hardware, work: Work, memory: RankMemory
) -> float:
    """Prefill and decoding of all samples."""
    rollout = config.rollout
    _, grid = grids(config, world)
    workers = grid.replicas * grid.dp
    mine = math.ceil(work.samples / workers)
    length = work.prompt_tokens + work.response_tokens
    slots = rollout.vllm.get("max_num_seqs", DEFAULT_SLOTS)
    running = max(1, min(mine, slots, int(memory.cache_tokens / length)))
    steps = max(work.longest_tokens, mine * work.response_tokens / running)
    mean_running = mine * work.response_tokens / steps
    touched = 1.0
    if shape.is_moe:  # experts that at least one token of this replica chooses
        tokens = mean_running * grid.dp
        touched = 1 - (1 - shape.experts_per_token / shape.experts) ** tokens
    cache = mean_running * (work.prompt_tokens + work.response_tokens / 2) * cache_token_bytes(config, shape)
    read = (memory.engine * touched + cache) / (hardware.hbm * hardware.hbm_share)
    layer_s = hardware.eager_layer_s if rollout.vllm.get("enforce_eager") else hardware.graph_layer_s
    tokens = mean_running * matrix_parameters(shape) / grid.tp
    compute = 2 * tokens / (hardware.flops * hardware.train_share)
    links = _tensor_parallel_s(shape, grid.tp, mean_running, hardware, ITEM[rollout.dtype])
    unique_prompts = work.samples / rollout.samples_per_prompt * work.prompt_tokens
    prefill = unique_prompts * 2 * matrix_parameters(shape) / (world * hardware.flops * hardware.train_share)
    return steps * (max(read, compute) + links + shape.num_layers * layer_s) + prefill


def _tensor_parallel_s(shape: ModelShape, tp: int, running: float, hardware: Hardware, item: int) -> float:
    """Two all-reduces a layer, by bytes; their latency is part of the seconds a layer."""
    rate = hardware.link if tp <= 8 else hardware.nic
    return 2 * shape.num_layers * 2 * running * shape.hidden * item * (tp - 1) / tp / rate
