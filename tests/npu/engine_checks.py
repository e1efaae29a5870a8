"""The engine's side of the npu: vLLM-Ascend's worker played by a double that moves weights as its source does.

What the double does is stated in signatures.json with the lines it was read from; tests/test_npu_packages.py runs the
worker's own code where the package is present.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.npu.checks import raised

HIDDEN, WIDTH, NUM = 12, 8, 3


class Experts(nn.Module):
    """As process_weights_after_loading leaves them: (expert, in, out). The map is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.randn(NUM, HIDDEN, 2 * WIDTH), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.randn(NUM, WIDTH, HIDDEN), requires_grad=False)
        self._expert_map = torch.arange(NUM, dtype=torch.int32)


class Worker:
    """NPUWorker: sleep(2) drops everything but buffers, wake_up shows experts as transposed views."""

    def __init__(self) -> None:
        self.model = nn.Module()
        self.model.experts = Experts()
        self.model.norm = nn.Parameter(torch.ones(HIDDEN))
        self.model.register_buffer("scale", torch.tensor(3.0))
        self.model_runner = SimpleNamespace(get_model=lambda: self.model, model=self.model)
        self._sleep_saved_buffers: dict[str, torch.Tensor] = {}
        self.calls: list[Any] = []

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))
        self._sleep_saved_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        if level == 2:
            lost = [*self.model.parameters(), *self.model.buffers(), self.model.experts._expert_map]
            for tensor in lost:
                tensor.data.fill_(77)

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", tags))
        if "weights" not in tags:
            return
        for name in ("w13_weight", "w2_weight"):
            view = getattr(self.model.experts, name).transpose(1, 2)
            setattr(self.model.experts, name, nn.Parameter(view, requires_grad=False))
        for name, buffer in self.model.named_buffers():
            buffer.data.copy_(self._sleep_saved_buffers[name])

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return True


def engine_of(worker: Any, sync: bool = True) -> Any:
    """An Engine around the double, as its constructor leaves it."""
    from launch.config import Config, RolloutConfig
    from parallel.device import Device
    from rollout import vllm_params
    from rollout.engine import Engine

    engine = Engine.__new__(Engine)
    engine.device, engine.config = Device("npu"), Config(rollout=RolloutConfig(sync_weights=sync))
    engine._engine, engine._runner, engine.model = worker, worker.model_runner, worker.model
    engine._sleep_level = vllm_params.sleep_level(worker) if sync else 1
    engine._sleeps, engine._must_keep, engine.packed = True, False, []
    engine.stores = engine._plain_stores()
    engine._expert_maps, engine._expert_state, engine._padding = None, [], {}
    return engine


def check_engine_sleeps_and_wakes(directory: Path) -> None:
    """Level 2; after waking, storage is where it was and in kernel layout, and what cannot be re-sent is as before."""
    from rollout import vllm_params

    worker = Worker()
    engine = engine_of(worker)
    before = {name: (t.data_ptr(), t.shape) for name, t in engine.stores.items()}
    for _ in range(2):
        engine.sleep()
        engine.wake_weights()
        engine.wake_cache()
        after = {name: (t.data_ptr(), t.shape) for name, t in vllm_params.stores(worker.model).items()}
        assert after == before and all(t.is_contiguous() for t in engine.stores.values())
        assert worker.model.experts._expert_map.tolist() == [0, 1, 2] and worker.model.scale.item() == 3.0
        assert engine.stores["norm"].eq(77).all(), "weights are the sync's to write"
    assert worker.calls[:4] == [("sleep", 2), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"]), "reset_prefix_cache"]


def check_sleep_level_follows_the_worker(directory: Path) -> None:
    from rollout.vllm_params import sleep_level

    old = SimpleNamespace()
    assert (sleep_level(Worker()), sleep_level(old)) == (2, 1)
    worker = Worker()
    engine = engine_of(worker, sync=False)
    engine.sleep()
    assert worker.calls == [("sleep", 1)]


def check_transposed_experts_are_written_in_place(directory: Path) -> None:
    """Layout rules with transposed experts put each element of an HF tensor where the kernel reads it: W[e].T."""
    from parallel.family import model_shape
    from parallel.grid import RolloutGrid
    from rollout.vllm_layout import vllm_layout
    from rollout.vllm_params import experts_transposed

    shape = model_shape(small_moe())
    layout = vllm_layout(shape, RolloutGrid(2, 2, 1, True), "float32", transposed_experts=True)
    for rank in (0, 1):
        stores: dict[str, torch.Tensor] = {}
        for piece in layout.pieces(rank):
            if piece.kind not in ("expert_gate", "expert_up", "expert_down"):
                continue
            (_, _), (u0, u1), (r0, r1), (c0, c1) = piece.box
            down = piece.kind == "expert_down"
            size = (2, WIDTH, HIDDEN) if down else (2, HIDDEN, 2 * WIDTH)
            store = stores.setdefault(piece.store_name(0), torch.full(size, -1.0))
            unit, row, col = torch.meshgrid(*(torch.arange(a, b) for a, b in piece.box[1:]), indexing="ij")
            value = (unit * 10000 + row * 100 + col + (0.5 if piece.kind == "expert_up" else 0.0)).float()
            store.as_strided(value.shape, piece.strides, piece.offset).copy_(value)
        assert len(stores) == 2 and experts_transposed(stores, HIDDEN, on_npu=True)
        w13 = next(t for name, t in stores.items() if name.endswith("w13_weight"))
        w2 = next(t for name, t in stores.items() if name.endswith("w2_weight"))
        for local in (0, 1):
            e = 2 * rank + local
            gate = torch.arange(WIDTH)[:, None] * 100.0 + torch.arange(HIDDEN) + e * 10000
            down = torch.arange(HIDDEN)[:, None] * 100.0 + torch.arange(WIDTH) + e * 10000
            assert torch.equal(w13[local].t(), torch.cat([gate, gate + 0.5])) and torch.equal(w2[local].t(), down)


def small_moe() -> dict[str, Any]:
    from tests.megatron_cases import BASE, MOE

    sizes = dict(hidden_size=HIDDEN, num_experts=4, moe_intermediate_size=WIDTH, num_hidden_layers=1)
    return {**BASE, **MOE, **sizes, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}


def check_engine_options(directory: Path) -> None:
    from launch.config import Config, ModelConfig, RolloutConfig
    from parallel.family import model_shape
    from parallel.grid import RolloutGrid
    from rollout.engine_options import check_allocator, engine_arguments, environment

    shape, grid = model_shape(small_moe()), RolloutGrid(2, 2)

    def arguments(**rollout: Any) -> dict[str, Any]:
        return engine_arguments(
            Config(model=ModelConfig(path="m"), rollout=RolloutConfig(**rollout)), shape, grid, "npu"
        )

    passed = {"additional_config": {"enable_sleep_mode_extra_cleanup": True}}
    merged = arguments(vllm=passed)
    assert merged["additional_config"] == {
        "enable_cpu_binding": False,
        "enable_sleep_mode_extra_cleanup": True,
        "weight_nz_mode": 0,
        "enable_fused_mc2": 0,
    }
    bound = arguments(vllm={"additional_config": {"enable_cpu_binding": True}})
    assert bound["additional_config"]["enable_cpu_binding"]  # the user's word
    assert merged["enable_sleep_mode"] and "moe_backend" not in merged
    for name in ("weight_nz_mode", "enable_fused_mc2"):
        assert f"{name} = 1" in raised(lambda name=name: arguments(vllm={"additional_config": {name: 1}}))
    assert "redundant_experts" in raised(lambda: arguments(redundant_experts=2))
    assert "golden" in raised(lambda: arguments(sync_plan="golden"))
    expandable = {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:256,expandable_segments:True"}
    assert "unset" in raised(check_allocator, merged, expandable, "npu")
    check_allocator(merged, {}, "npu"), check_allocator({**merged, "enable_sleep_mode": False}, expandable, "npu")
    variables = environment("npu", grid)
    pinned = ("VLLM_ASCEND_ENABLE_NZ", "VLLM_ASCEND_ENABLE_FUSED_MC2", "VLLM_USE_V2_MODEL_RUNNER")
    assert all(variables[name] == "0" for name in pinned) and variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
