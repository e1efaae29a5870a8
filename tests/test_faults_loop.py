"""SIGKILL of one rank in the middle of a phase of the whole job: nothing beyond the last checkpoint is lost.

One of them is in the default tier: test_resume.py kills rank 1 in a save.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.processes import identity, is_alive
from parallel.checkpoint import find
from tests.jobs import Job, prepare, run_job

PHASES = {"generate": "generate_sequences", "score": "reward", "update": "update_actor", "reshard": "reshard"}
PHASES["save"] = "save_checkpoint"
CASES = [(phase, rank) for phase in PHASES for rank in (0, 1)]


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    data = prepare("copy", tmp_path_factory.mktemp("data") / "copy")
    files = [f"model.path={data}/model", f'data.train_files=["{data}/train.parquet"]', "data.val_files=[]"]
    steps = ["eval.every_steps=0", "total_steps=3", "checkpoint.every_steps=1", "log.tensorboard=false"]
    return ["launch/recipes/quickstart.toml", *files, *steps]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, options) -> Job:
    """The same job without a fault."""
    return run_job(tmp_path_factory.mktemp("whole") / "run", 2, *options)


def records(run_dir: Path, attempt: int) -> list[dict]:
    return [json.loads(f.read_text()) for f in sorted((run_dir / "logs" / f"attempt_{attempt}").glob("rank_*.json"))]


@pytest.mark.full
@pytest.mark.parametrize("phase, rank", CASES)
def test_killed_in_a_phase(tmp_path, options, whole, phase, rank):
    run_dir, fault = tmp_path / "run", {"FAULT": f"{PHASES[phase]} {rank} 2 kill"}
    killed = run_job(run_dir, 2, *options, expect=None, script="tests/faulty_trainer.py", env=fault)
    assert killed.code != 0 and "Signal 9" in killed.output, killed.output[-3000:]
    left = records(run_dir, 1)
    assert len(left) == 2 and not any(is_alive(record, identity()) for record in left), "a process stayed behind"
    assert find(run_dir).name == "step_000001"
    resumed = run_job(run_dir, 2, *options)
    assert "resumed after step 1" in resumed.output
    assert not [name for record in left for name in record["segments"] if Path(name).exists()]
    assert resumed.status["state"] == "finished" and resumed.lasting == whole.lasting
    assert all(resumed.samples(step) == whole.samples(step) for step in (1, 2, 3))
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["latest", "step_000002", "step_000003"]


@pytest.mark.full
def test_the_first_failing_rank_is_what_the_user_sees(tmp_path, options):
    fault = {"FAULT": "update_actor 1 2 raise"}
    run_dir = tmp_path / "run"
    job = run_job(run_dir, 2, *options, expect=None, script="tests/faulty_trainer.py", env=fault)
    assert job.status["state"] == "failed" and job.status["why"] == "rank 1: RuntimeError: injected in update_actor"
    assert "RuntimeError: injected in update_actor" in job.output and "strike(phase, how)" in job.output
    assert not any(is_alive(record, identity()) for record in records(run_dir, 1))
    assert find(run_dir).name == "step_000001"


@pytest.mark.full
def test_a_hanging_rank_ends_all_with_stacks_and_phases(tmp_path, options):
    fault, run_dir = {"FAULT": "reward 1 2 hang"}, tmp_path / "run"
    limit = "runtime.deadline_s=40"
    job = run_job(run_dir, 2, *options, limit, expect=None, script="tests/faulty_trainer.py", env=fault)
    assert job.status["state"] == "failed" and "hang: phase " in job.status["why"], job.output[-3000:]
    logs = run_dir / "logs" / "attempt_1"
    stacks = [(logs / f"stacks_rank_{rank:03d}.txt").read_text() for rank in (0, 1)]
    assert '"phase": "reward"' in stacks[1] and "faulty_trainer.py" in stacks[1] and "all_gather" in stacks[0]
    assert not any(is_alive(record, identity()) for record in records(run_dir, 1))
    assert find(run_dir).name == "step_000001"
