"""What vLLM is started with: EngineArgs by platform, environment variables, end-of-text ids."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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
    if kind == "npu":
        ours |= _ascend_arguments(config, shape)
    return defaults | rollout.vllm | ours


def _ascend_arguments(config: Config, shape: ModelShape) -> dict[str, Any]:
    """What vLLM-Ascend takes beside EngineArgs. ValueError for what would move or re-tile weights behind our back."""
    rollout = config.rollout
    extra = dict(rollout.vllm.get("additional_config") or {})
    for name in ("weight_nz_mode", "enable_fused_mc2"):
        if extra.get(name):
            raise ValueError(
                f"rollout.vllm.additional_config.{name} = {extra[name]} stores weights in tiles (FRACTAL_NZ), which no "
                "weight sync can write; leave it out"
            )
    if rollout.redundant_experts or extra.get("eplb_config"):
        raise ValueError("rollout.redundant_experts = 0 on npu: vLLM-Ascend has an expert balancer of its own kind")
    if shape.is_moe and rollout.sync_plan == "golden":
        raise ValueError("rollout.sync_plan = golden cannot load npu's transposed experts; use sync_plan = planned")
    # Its own binding would move this whole process, trainer included, off the cpus that launch.nodes chose.
    defaults = {"enable_cpu_binding": False}
    return dict(additional_config=defaults | extra | {"weight_nz_mode": 0, "enable_fused_mc2": 0})


def check_allocator(arguments: dict[str, Any], environment: Mapping[str, str], kind: str) -> None:
    """ValueError when torch_npu's allocator is set to what vLLM-Ascend's sleep mode asserts against."""
    setting = environment.get("PYTORCH_NPU_ALLOC_CONF", "")
    if kind == "npu" and arguments["enable_sleep_mode"] and "expandable_segments:True" in setting:
        raise ValueError(
            f"PYTORCH_NPU_ALLOC_CONF = {setting}: vLLM-Ascend cannot sleep with expandable segments; unset the variable"
        )


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
        fixed |= dict(VLLM_ASCEND_ENABLE_NZ="0", VLLM_ASCEND_ENABLE_FUSED_MC2="0")  # weights stay as they are loaded
    if grid.dp > 1 or kind == "npu":  # data parallelism with the new runner is unproved; vLLM-Ascend falls back
        fixed |= dict(VLLM_USE_V2_MODEL_RUNNER="0")
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
