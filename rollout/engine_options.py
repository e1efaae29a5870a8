"""What vLLM is started with: EngineArgs by platform, environment variables, end-of-text ids."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from launch.config import Config
from parallel.family import ModelShape
from parallel.grid import RolloutGrid

OWNED = {
    "model": "model.path",
    "tokenizer": "model.path",
    "skip_tokenizer_init": "rollout.stop",
    "load_format": "model.path",
    "quantization": "rollout.dtype",
    "distributed_executor_backend": "rollout.tp and rollout.dp",
    "tensor_parallel_size": "rollout.tp",
    "data_parallel_size": "rollout.dp",
    "pipeline_parallel_size": "rollout.tp",
    "enable_expert_parallel": "rollout.expert_parallel",
    "enable_eplb": "rollout.redundant_experts",
    "enable_return_routed_experts": "rollout.routing_replay",
    "dtype": "rollout.dtype",
    "seed": "seed",
    "max_model_len": "data.max_prompt_tokens and data.max_response_tokens",
    "logprobs_mode": "rollout.temperature, top_p, top_k and min_p",
}
"""EngineArgs fields that we set ourselves, and the option to use instead."""

CPU_CACHE_LIMIT = 2 << 30
CPU_BLOCK_TOKENS = 128


def engine_arguments(config: Config, shape: ModelShape, grid: RolloutGrid, kind: str) -> dict[str, Any]:
    """EngineArgs of a platform ("cpu", "cuda", "npu"): defaults, the user's [rollout.vllm], then what is ours. Pure."""
    rollout, data = config.rollout, config.data
    max_model_len = data.max_prompt_tokens + data.max_response_tokens
    defaults: dict[str, Any] = dict(disable_log_stats=True, enable_prefix_caching=True)
    if kind == "cpu":
        slots = rollout.vllm.get("max_num_seqs", 256)
        cache = cpu_cache_bytes(shape, grid.tp, max_model_len, slots, 4 if rollout.dtype == "float32" else 2)
        defaults |= dict(enforce_eager=True, max_num_seqs=slots, kv_cache_memory_bytes=cache)
    else:
        defaults |= dict(enable_sleep_mode=True)
    if kind == "cuda":
        defaults |= dict(moe_backend="triton")  # the only one that keeps experts in load layout
    if kind == "npu":
        defaults |= dict(additional_config={"weight_nz_mode": 0})  # else weights are re-tiled after loading
    ours = dict(
        model=config.model.path,
        skip_tokenizer_init=not rollout.stop,
        load_format="auto" if rollout.compare_at_start else "dummy",
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=grid.tp,
        data_parallel_size=grid.dp,
        enable_expert_parallel=grid.expert_parallel,
        dtype=rollout.dtype,
        seed=config.seed,
        max_model_len=max_model_len,
        logprobs_mode="processed_logprobs",
    )
    if rollout.redundant_experts:  # asynchronous rearrangement would race with our writes
        experts = dict(num_redundant_experts=rollout.redundant_experts, use_async=False)
        if kind == "cpu":
            experts |= dict(communicator="torch_gloo")
        ours |= dict(enable_eplb=True, eplb_config=experts | rollout.vllm.get("eplb_config", {}))
    if rollout.routing_replay == "R3":
        ours |= _routes_arguments(rollout.vllm, kind)
    return defaults | rollout.vllm | ours


def _routes_arguments(passed: dict[str, Any], kind: str) -> dict[str, Any]:
    if kind != "cpu":
        return dict(enable_return_routed_experts=True)
    if passed.get("enable_prefix_caching"):
        raise ValueError("rollout.routing_replay = R3 on cpu needs rollout.vllm.enable_prefix_caching = false")
    return dict(enable_prefix_caching=False)  # cached prompt tokens pass no router, so that nothing could be captured


def cpu_cache_bytes(shape: ModelShape, tp: int, max_model_len: int, slots: int, item: int) -> int:
    """KV cache for `slots` longest sequences, at most 2 GiB but never less than two of them."""
    block = 2 * shape.num_layers * max(1, shape.kv_heads // tp) * shape.head_dim * item * CPU_BLOCK_TOKENS
    sequence = -(-max_model_len // CPU_BLOCK_TOKENS) * block
    return max(2 * sequence, min(slots * sequence, CPU_CACHE_LIMIT)) + block


def environment(kind: str, grid: RolloutGrid) -> dict[str, str]:
    """Variables that vLLM reads when it is imported. Values that the user has set win, apart from the first two."""
    fixed = dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_DISABLE_REQUEST_ID_RANDOMIZATION="1")
    optional = dict(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR" if kind == "cpu" else "WARNING")
    if kind == "cpu":
        optional |= dict(TORCHDYNAMO_DISABLE="1")
    if kind == "cuda":
        optional |= dict(VLLM_USE_FLASHINFER_SAMPLER="0")  # cannot return processed log-probs
    if kind == "npu":
        fixed |= dict(VLLM_ASCEND_ENABLE_NZ="0")
    if grid.dp > 1:
        fixed |= dict(VLLM_USE_V2_MODEL_RUNNER="0")  # data parallelism with the new runner is unproved
    return {name: value for name, value in optional.items() if name not in os.environ} | fixed


def model_stop_ids(path: str | Path) -> set[int]:
    """End-of-text ids of a model directory's generation_config.json; empty without the file."""
    file = Path(path) / "generation_config.json"
    if not file.exists():
        return set()
    try:
        ids = json.loads(file.read_text()).get("eos_token_id")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise ValueError(f"{file}: not a JSON table: {error}") from None
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{file}: eos_token_id must be an id or a list of ids, got {ids!r}")
    return set(ids)
