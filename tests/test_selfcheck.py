"""The first-step self-check: bounds by hand, and real jobs with one fault each (tests/scripts/patched_trainer.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.selfcheck import CAUSES, bounds, check_first_step
from tests.jobs import prepare, run_job

QUICKSTART = "launch/recipes/quickstart.toml"
OPTIONS = [
    "data.val_files=[]",
    "eval.every_steps=0",
    "total_steps=2",
    "log.tensorboard=false",
    "checkpoint.at_end=false",
]
FAULTS = {
    "wrong_temperature": "training/rollout_probs_diff_mean",
    "permuted_experts": "training/rollout_probs_diff_mean",
    "stale_weight": "training/rollout_probs_diff_mean",
    "shifted_mask": "training/rollout_probs_diff_mean",
}


def test_bounds_by_device_dtype_and_updates():
    exact = bounds("float32", exact=True, updates_per_rollout=1, probs_diff=0.0)
    assert exact == {
        "training/rollout_probs_diff_mean": 1e-4,
        "actor/kl_loss": 0.0,
        "actor/ppo_kl": 0.0,
        "actor/pg_clipfrac": 0.0,
    }
    assert bounds("bfloat16", False, 1, 0.0)["actor/ppo_kl"] == 1e-3
    assert bounds("bfloat16", False, 4, 0.05) == {"training/rollout_probs_diff_mean": 0.05}
    assert bounds("float32", True, 1, 0.0, bypass=True).keys() == {"training/rollout_probs_diff_mean", "actor/kl_loss"}
    assert bounds("float32", False, 4, 0.0, renormalised=True) == {}  # the engine's differ by what was cut


@pytest.mark.parametrize("name", CAUSES)
def test_a_number_out_of_bounds_is_told_with_its_bound_and_three_causes(name):
    limits = bounds("float32", False, 1, 0.0)
    check_first_step(dict.fromkeys(limits, 1e-5), limits)
    check_first_step({}, limits)
    for bad in (0.25, -0.25, float("nan")):
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
    job = run_job(run_dir, 2, QUICKSTART, *options, script=script, env={"PATCH": fault}, timeout_s=200, expect=None)
    assert job.code not in (0, 2), job.output[-3000:]
    return job


def check_caught(run_dir: Path, options: list[str], fault: str) -> None:
    job = faulty(run_dir, options, fault)
    number = r"([0-9.e+-]+|nan)"
    found = re.search(rf"first-step self-check: (\S+) = {number}, must be within {number}; likely causes:", job.output)
    assert found, job.output[-6000:]
    print(f"{fault}: {found.group(0)}")
    assert found.group(1) == FAULTS[fault]
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
    job = run_job(tmp_path / "run", 2, QUICKSTART, *options, script=script, env={"PATCH": "nothing"})
    assert len(job.metrics) == 2 and job.status["state"] == "finished"
