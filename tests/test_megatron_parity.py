"""Every layout gives the log-probs, loss, gradients and gradient norm of transformers in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.megatron_cases import MODELS, prepare, run_layouts
from tests.ranks import run_ranks

BOUND = 1e-5
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("megatron")
    return {name: prepare(name, root / name) for name in MODELS}


def check(world: int, cases: list[tuple[Path, dict[str, Any], dict[str, Any]]], timeout_s: float = 240) -> None:
    jobs = [(str(path), layout, options) for path, layout, options in cases]
    results = run_ranks(world, run_layouts, jobs, timeout_s=timeout_s, env=ENVIRONMENT)
    for (path, layout, options), errors in zip(cases, results[0], strict=True):
        where = f"{path.name} {layout} {options}: {errors}"
        assert errors["ppo"] == 0, where  # the update computes the log-probs that scoring did, bit for bit
        assert max(v for k, v in errors.items() if k != "num_mb") < BOUND, where


def test_one_rank_all_families(cases: dict[str, Path]) -> None:
    check(1, [(path, {}, {}) for path in cases.values()])


def test_two_ranks(cases: dict[str, Path]) -> None:
    dense = [{}, {"tp": 2}, {"pp": 2, "first_stage_layers": 1, "last_stage_layers": 3}, {"cp": 2}]
    jobs = [(cases[name], layout, {}) for name in ("qwen3", "moe") for layout in dense]
    jobs += [(cases["moe"], layout, {}) for layout in ({"ep": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "etp": 2})]
    jobs += [(cases["qwen2"], {"pp": 2, "vpp": 2}, {"budget": 48})]
    check(2, jobs)
