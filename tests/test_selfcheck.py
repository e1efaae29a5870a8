"""The first-step self-check: bounds by hand, and real jobs with one fault each (tests/scripts/patched_trainer.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.selfcheck import CAUSES, bounds, check_first_step, memory_shares
from tests.jobs import prepare, run_job

QUICKSTART = "launch/recipes/quickstart.toml"
OPTIONS = [
    "data.val_files=[]",
    "eval.every_steps=0",
    "total_steps=2",
    "log.tensorboard=false",
    "checkpoint.at_end=false",
]
AGREEMENT, POLICY = "training/rollout_probs_diff_mean", {"actor/ppo_kl", "actor/pg_clipfrac"}
FAULTS = {
    "wrong_temperature": (AGREEMENT,),
    "permuted_experts": (AGREEMENT,),
    "stale_weight": (AGREEMENT,),
    "shifted_mask": (AGREEMENT,),
    "changed_weights": ("actor/ppo_kl", "train.mini_batches=2"),
    "changed_weights with a reference": ("actor/kl_loss", "train.mini_batches=2", "algorithm.kl_loss=0.01"),
    "full_host": ("memory/host_share",),
}


def test_bounds_by_device_and_dtype():
    exact = bounds("float32", exact=True, probs_diff=0.0)
    memory = {"memory/kept_share": 0.05, "memory/host_share": 0.95}
    assert exact == {AGREEMENT: 1e-4, "actor/kl_loss": 0.0, "actor/ppo_kl": 0.0, "actor/pg_clipfrac": 0.0, **memory}
    loose = bounds("bfloat16", False, 0.0)
    assert loose["actor/ppo_kl"] == 1e-3 and loose[AGREEMENT] == 2e-2
    assert bounds("bfloat16", False, 0.05)[AGREEMENT] == 0.05
    assert exact.keys() - bounds("float32", True, 0.0, bypass=True).keys() == POLICY
    assert exact.keys() - bounds("float32", False, 0.0, renormalised=True).keys() == {AGREEMENT}


def test_memory_shares_by_hand():
    before = {"total": 80, "free": 60, "host_total": 100, "host_used": 50}
    ledger = {"wake_cache": before | {"free": 2, "host_used": 90}, "restore_training": before | {"free": 52}}
    assert memory_shares(before, ledger) == {"memory/kept_share": 0.1, "memory/host_share": 0.9}
    assert memory_shares(before | {"total": 0}, ledger) == {"memory/host_share": 0.9}  # cpu
    assert memory_shares({}, {}) == {}  # a replay moves nothing


@pytest.mark.parametrize("name", CAUSES)
def test_a_number_out_of_bounds_is_told_with_its_bound_and_three_causes(name):
    limits = bounds("float32", False, 0.0)
    check_first_step(dict.fromkeys(limits, 1e-5), limits)
    check_first_step({}, limits)
    for bad in (1.25, -1.25, float("nan")):
        with pytest.raises(RuntimeError) as error:
            check_first_step({name: bad}, limits)
        text = str(error.value)
        assert f"{name} = {bad:.3g}, must be within {limits[name]:.3g}" in text
        assert re.findall(r"^  (\d)\. .{10,}", text, re.M) == ["1", "2", "3"]


@pytest.fixture(scope="session")
def options(tmp_path_factory) -> list[str]:
    data = prepare("copy", tmp_path_factory.mktemp("data") / "copy")
    return [f"model.path={data}/model", f'data.train_files=["{data}/train.parquet"]', *OPTIONS]


def faulty(run_dir: Path, options: list[str], fault: str):
    script = "tests/scripts/patched_trainer.py"
    env = {"PATCH": fault.partition(" ")[0]}
    job = run_job(run_dir, 2, QUICKSTART, *options, script=script, env=env, timeout_s=200, expect=None)
    assert job.code not in (0, 2), job.output[-3000:]
    return job


def check_caught(run_dir: Path, options: list[str], fault: str) -> None:
    metric, *more = FAULTS[fault]
    job = faulty(run_dir, [*options, *more], fault)
    number = r"([0-9.e+-]+|nan)"
    found = re.search(rf"first-step self-check: (\S+) = {number}, must be within {number}; likely causes:", job.output)
    assert found, job.output[-6000:]
    print(f"{fault}: {found.group(0)}")
    assert found.group(1) == metric
    for cause in CAUSES[found.group(1)]:
        assert cause in job.output
    assert not (job.run_dir / "metrics.jsonl").read_text(), "the run went past step 1"


@pytest.mark.slow
def test_a_wrong_temperature_stops_the_run_at_step_1(tmp_path, options):
    check_caught(tmp_path / "run", options, "wrong_temperature")


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_stops_the_run_at_step_1(tmp_path, options, fault):
    check_caught(tmp_path / "run", options, fault)


@pytest.mark.full
def test_a_tensor_that_the_sync_leaves_out_is_named(tmp_path, options):
    job = faulty(tmp_path / "run", options, "unsynced_weight")
    assert "o_proj" in job.output and not (job.run_dir / "metrics.jsonl").exists()


@pytest.mark.full
def test_without_a_fault_the_script_is_the_job(tmp_path, options):
    script = "tests/scripts/patched_trainer.py"
    more = ["train.mini_batches=2", "algorithm.kl_loss=0.01"]
    job = run_job(tmp_path / "run", 2, QUICKSTART, *options, *more, script=script, env={"PATCH": "nothing"})
    assert len(job.metrics) == 2 and job.status["state"] == "finished"
    assert job.metrics[0]["actor/ppo_kl"] != 0, "the second update moved on: only the first is on policy"
    assert not any(name.startswith("self_check") for row in job.metrics for name in row)
