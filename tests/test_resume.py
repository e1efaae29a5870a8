"""Invariant 6 with the whole job: steps, a killed process and a resume equal the same steps without interruption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.jobs import ROOT, Job, prepare, run_job

QUICKSTART = "launch/recipes/quickstart.toml"
TIMES = ("timing", "perf/", "memory_", "slowest_rank", "val-")


@pytest.fixture(scope="session")
def options(tmp_path_factory) -> list[str]:
    data = prepare("copy", tmp_path_factory.mktemp("data") / "copy")
    files = [f"model.path={data}/model", f'data.train_files=["{data}/train.parquet"]', "data.val_files=[]"]
    return [*files, "eval.every_steps=0", "total_steps=6", "checkpoint.every_steps=2", "log.tensorboard=false"]


def lasting(job: Job) -> list[dict[str, float]]:
    """Metrics that do not depend on the clock."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in job.metrics]


def tensors(job: Job, step: int) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted((job.run_dir / "checkpoints" / f"step_{step:06d}").glob("*.safetensors")):
        if file.name != "small.safetensors":
            found |= {f"{file.name}/{name}": tensor for name, tensor in load_file(file).items()}
    return found


def kill_after_checkpoint(run_dir: Path, step: int, *arguments: str) -> None:
    """Start the job, wait for a complete checkpoint of `step`, then SIGKILL every process of it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "trainer.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(run_dir.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(
            [*command, *arguments, f"run_dir={run_dir}"],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until = time.monotonic() + 200
    while not (run_dir / "checkpoints" / f"step_{step:06d}" / "complete.json").exists():
        assert time.monotonic() < until and process.poll() is None, run_dir.with_suffix(".log").read_text()[-4000:]
        time.sleep(0.02)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    for pid in [*map(int, children), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, options):
    whole = run_job(tmp_path / "whole", 2, QUICKSTART, *options)
    kill_after_checkpoint(tmp_path / "cut", 2, QUICKSTART, *options)
    resumed = run_job(tmp_path / "cut", 2, QUICKSTART, *options)
    assert "resumed after step" in resumed.output
    assert [row["training/global_step"] for row in resumed.metrics] == [1, 2, 3, 4, 5, 6]
    assert lasting(resumed) == lasting(whole)
    for step in range(1, 7):
        assert resumed.samples(step) == whole.samples(step), step
    expected, found = tensors(whole, 6), tensors(resumed, 6)
    assert expected.keys() == found.keys() and len(expected) > 50
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.slow
def test_a_stop_signal_saves_and_another_layout_goes_on(tmp_path, options):
    """SIGTERM ends the job at a step boundary with a checkpoint; TP2 continues what EP2 began."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "trainer.py"]
    endless = [*options, "total_steps=100000", "checkpoint.every_steps=0", f"run_dir={run_dir}"]
    process = subprocess.Popen(
        [*command, QUICKSTART, *endless], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    until = time.monotonic() + 200
    while not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").read_text():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    stopped = Job(process.returncode, output, run_dir)
    assert stopped.status["state"] == "stopped" and "SIGTERM" in stopped.status["why"], output[-3000:]
    done = stopped.status["step"]
    steps = [f"total_steps={done + 2}", "train.tp=2", "train.ep=1", "rollout.tp=2"]
    other = run_job(run_dir, 2, QUICKSTART, *options, *steps)
    assert f"resumed after step {done}" in other.output and len(other.metrics) == done + 2
    same = run_job(tmp_path / "same", 2, QUICKSTART, *options, f"total_steps={done + 2}")
    ours, theirs = other.metrics[done], same.metrics[done]
    assert abs(ours["actor/loss"] - theirs["actor/loss"]) <= 1e-5
    assert abs(ours["actor/grad_norm"] - theirs["actor/grad_norm"]) <= 1e-5 * max(1, theirs["actor/grad_norm"])
