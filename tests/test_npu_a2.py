"""The A2 recipe whole: resolved, checked and planned for its 128 ranks, and what every rank would start with on npu."""

from __future__ import annotations

import dataclasses
import json

import pytest

from launch.checks import check
from launch.config import load
from launch.layout_checks import check_model, check_world
from launch.plan import main, read_shape
from parallel.device import Device
from parallel.grid import RolloutGrid, TrainGrid
from rollout.engine_options import check_allocator, engine_arguments, environment
from rollout.vllm_layout import vllm_layout
from tests.jobs import ROOT

RECIPE = str(ROOT / "launch/recipes/qwen3-235b-a22b-a2.toml")
WORLD = 128


@pytest.fixture(scope="module")
def job():
    config = load([RECIPE])
    t, r = config.train, config.rollout
    train = TrainGrid(WORLD, t.tp, t.pp, t.vpp, t.cp, t.ep, t.etp or t.tp, t.order)
    return config, read_shape(config.model.path), train, RolloutGrid(WORLD, r.tp, r.dp, r.expert_parallel)


def test_options_hold_for_128_ranks(job):
    config, shape, train, rollout = job
    check(config), check_world(config, WORLD), check_model(config, shape)
    assert config.runtime.device == "npu" and config.train.npu_adaptor == "torch_npu"
    assert (train.dp, train.edp, rollout.replicas, rollout.ep_size) == (4, 1, 2, 64)
    with pytest.raises(ValueError, match="64"):
        check_world(config, 64)


def test_mindspeed_is_for_npu_only(job):
    check(load([RECIPE, "train.npu_adaptor=mindspeed"]))
    with pytest.raises(ValueError, match="npu_adaptor"):
        check(load([RECIPE, "train.npu_adaptor=mindspeed", "runtime.device=cuda"]))


def test_plan_says_that_it_fits(job, capsys):
    assert main(["job", RECIPE, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["world"] == WORLD and not plan["problems"]


def test_engine_of_every_rank(job):
    config, shape, _, rollout = job
    arguments, variables = engine_arguments(config, shape, rollout, "npu"), environment("npu", rollout)
    check_allocator(arguments, {}, "npu")
    expected = {
        "tensor_parallel_size": 8,
        "data_parallel_size": 8,
        "enable_expert_parallel": True,
        "enable_sleep_mode": True,
        "enforce_eager": True,
        "load_format": "dummy",
        "distributed_executor_backend": "external_launcher",
        "gpu_memory_utilization": 0.5,
        "additional_config": {"enable_cpu_binding": False, "weight_nz_mode": 0, "enable_fused_mc2": 0},
        "max_model_len": 12288,
    }
    assert {name: arguments[name] for name in expected} == expected and "moe_backend" not in arguments
    pinned = ("VLLM_ASCEND_ENABLE_NZ", "VLLM_ASCEND_ENABLE_FUSED_MC2", "VLLM_USE_V2_MODEL_RUNNER")
    assert {variables[name] for name in pinned} == {"0"}


@pytest.mark.slow
def test_engine_options_are_fields_of_vllm(job):
    from vllm import EngineArgs

    config, shape, _, rollout = job
    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    assert set(engine_arguments(config, shape, rollout, "npu")) <= fields


def test_experts_of_every_rank_are_stored_transposed(job):
    """Rank r of a replica holds experts 2 (r % 64) and the next: w13 [2, hidden, 2 ffn], w2 [2, ffn, hidden]."""
    config, shape, _, rollout = job
    layout = vllm_layout(shape, rollout, "bfloat16", transposed_experts=True)
    hidden, ffn = shape.hidden, shape.expert_ffn
    strides = {
        "expert_gate": (hidden * 2 * ffn, 1, 2 * ffn),
        "expert_up": (hidden * 2 * ffn, 1, 2 * ffn),
        "expert_down": (ffn * hidden, 1, hidden),
    }
    for rank in range(WORLD):
        found = {piece.kind: piece for piece in layout.pieces(rank) if piece.kind in strides}
        assert {kind: piece.strides for kind, piece in found.items()} == strides
        first = 2 * (rank % 64)
        assert {piece.box[1] for piece in found.values()} == {(first, first + 2)}
        assert (found["expert_gate"].offset, found["expert_up"].offset) == (0, ffn)


def test_megatron_takes_the_configuration(job):
    """TransformerConfig's own checks, with what `build` passes on npu."""
    from megatron.core.transformer import TransformerConfig

    from parallel.megatron_options import check as check_layout
    from parallel.megatron_options import optimizer_fields, split_passthrough, transformer_fields

    config, shape, train, _ = job
    device = Device("npu")
    check_layout(config, shape, train, device)
    transformer, optimizer, _ = split_passthrough(config.train.megatron, config.train.spec)
    made = TransformerConfig(**{**transformer_fields(config, shape, train, device), **transformer})
    assert made.bias_activation_fusion and not made.bias_dropout_fusion and not made.use_cpu_initialization
    assert made.deallocate_pipeline_outputs and made.moe_token_dispatcher_type == "alltoall"
    assert optimizer_fields(config, device)["bf16"] and (made.expert_tensor_parallel_size, made.num_moe_experts) == (
        4,
        128,
    )


def test_weight_sync_to_transposed_experts(job):
    """The plan is that of plain storage: only strides differ, and each rank's buffers stay within their cap."""
    from parallel.megatron_layout import megatron_layout
    from parallel.reshard_plan import plan

    config, shape, train, rollout = job
    stages = (config.train.first_stage_layers, config.train.last_stage_layers)
    source = megatron_layout(shape, train, *stages, dtype="bfloat16")
    plans = [plan(source, vllm_layout(shape, rollout, "bfloat16", transposed_experts=t)) for t in (False, True)]
    assert plans[0].digest == plans[1].digest and plans[1].world == WORLD
    assert max(max(plans[1].peak_bytes(rank)) for rank in range(WORLD)) <= 256 << 20
