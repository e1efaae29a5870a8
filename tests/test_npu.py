"""The npu's own lines, on a stand-in device: every kernel call against the published signatures, numbers against cpu.

tests/npu/ holds the stand-in: a PrivateUse1 backend compiled once, named npu, with hccl over gloo, and torch_npu's
kernels in plain torch behind their published schemas. Real Megatron trains on it. What it cannot show: that the
hardware's kernels do what their documentation says, and how fast.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.megatron_cases import prepare
from tests.npu.lines import npu_lines, sources
from tests.ranks import run_ranks

NPU = Path(__file__).parent / "npu"
CHECKS = sorted(
    name
    for file in ("checks", "engine_checks")
    for name in re.findall(r"def (check_\w+)", (NPU / f"{file}.py").read_text())
)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("npu")
    return {name: prepare(name, folder / name, training=True) for name in ("moe", "qwen3")}


@pytest.fixture(scope="module")
def done(cases):
    return run_ranks(1, "tests.npu.checks:run", cases["moe"], timeout_s=280)[0]


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_on_the_stand_in(check, done):
    assert not done[0][check], done[0][check]


@pytest.mark.slow
def test_every_npu_line_is_reached(done):
    missed = {path: sorted(npu_lines(path) - done[1].get(path, set())) for path in sources()}
    assert not {path: lines for path, lines in missed.items() if lines}


def test_lines_of_the_npu_are_found():
    assert {"parallel/npu.py", "parallel/device.py", "rollout/engine_options.py", "launch/profiler.py"} <= {
        path for path in sources() if npu_lines(path)
    }
    assert not npu_lines("launch/inputs.py")


def layouts(rank: int, cases: Any) -> list[dict[str, float]]:
    from tests.megatron_cases import run_layouts
    from tests.npu.build import use

    use()
    return run_layouts(rank, cases, "npu")


def train(ranks: int, *cases: tuple[Path, dict[str, Any]]) -> None:
    for errors in run_ranks(ranks, layouts, [(str(d), layout, {}) for d, layout in cases], timeout_s=280):
        for error in errors:
            assert error["ppo"] == 0.0, error
            assert max(error[name] for name in ("logp", "entropy", "loss", "grad", "norm", "sgd")) < 1e-5, error


@pytest.mark.slow
def test_megatron_trains_as_in_float64(cases, done):
    """Log-probs, gradients, two SGD steps; whole layers are recomputed. `done`: the backend is compiled by now."""
    train(2, (cases["moe"], dict(tp=2, ep=2, recompute="full")))


@pytest.mark.slow
def test_first_run_reports(tmp_path, done):
    """What docs/platforms.md tells a person with an NPU to start with, rehearsed."""
    good, lines = run_ranks(1, "tests.npu.first_run:rehearse", tmp_path, timeout_s=120)[0]
    assert good, lines
    assert (
        "device Ascend910B3, 60 of 64 GiB free" in lines and len([line for line in lines if line.startswith("ok")]) == 7
    )


def sync(rank: int, directory: Path) -> list[str]:
    """Stores of the npu that differ after a verified sync to transposed experts over hccl."""
    import torch.distributed as dist

    from launch.config import RolloutConfig
    from parallel.device import Device
    from parallel.family import model_shape, read_config
    from parallel.grid import RolloutGrid, TrainGrid
    from parallel.megatron_layout import megatron_layout
    from parallel.weight_sync import WeightSync
    from rollout.vllm_layout import vllm_layout
    from tests.megatron_cases import world
    from tests.npu.build import use
    from tests.reshard_world import differing, expected

    use()
    shape, device = model_shape(read_config(directory)), Device("npu")
    with world("npu"):
        source = megatron_layout(shape, TrainGrid(2, tp=2, ep=2, etp=1), dtype="float32")
        target = vllm_layout(shape, RolloutGrid(2, 2, 1, True), "float32", transposed_experts=True)
        held = {name: store.to("npu") for name, store in expected(source, rank).items()}
        got = {name: store.new_full(store.shape, -1.0).to("npu") for name, store in expected(target, rank).items()}
        WeightSync(source, target, RolloutConfig(), rank, dist.group.WORLD, device).run(held, got)
        want = expected(target, rank)
        return differing({name: store.cpu() for name, store in got.items()}, want)


@pytest.mark.slow
def test_weight_sync_writes_transposed_experts(cases, done):
    assert run_ranks(2, sync, cases["moe"], timeout_s=120) == [[], []]


@pytest.mark.full
def test_megatron_trains_in_every_layout(cases):
    moe, dense = cases["moe"], cases["qwen3"]
    train(1, (dense, {}), (moe, {}))
    train(
        2, (moe, dict(pp=2)), (moe, dict(tp=2, etp=2, recompute="selective")), (dense, dict(cp=2)), (dense, dict(tp=2))
    )
    train(4, (moe, dict(tp=2, pp=2, ep=2, recompute="full")), (moe, dict(tp=2, ep=2, etp=2)))
