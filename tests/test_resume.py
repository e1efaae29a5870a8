"""Invariant 6 with the whole job: steps, a killed process and a resume equal the same steps without interruption."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from parallel.checkpoint import find, load_small, read_marker
from tests.jobs import ROOT, Job, prepare, run_job

QUICKSTART = "launch/recipes/quickstart.toml"


@pytest.fixture(scope="session")
def options(tmp_path_factory) -> list[str]:
    data = prepare("copy", tmp_path_factory.mktemp("data") / "copy")
    files = [f"model.path={data}/model", f'data.train_files=["{data}/train.parquet"]', "data.val_files=[]"]
    return [*files, "eval.every_steps=0", "total_steps=6", "checkpoint.every_steps=2", "log.tensorboard=false"]


def tensors(job: Job, step: int) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted((job.run_dir / "checkpoints" / f"step_{step:06d}").glob("*.safetensors")):
        if file.name != "small.safetensors":
            found |= {f"{file.name}/{name}": tensor for name, tensor in load_file(file).items()}
    return found


@dataclass(frozen=True)
class Cut:
    """Where a job is killed and from which step it must resume."""

    arguments: list[str]
    fault: str
    """Of tests/faulty_trainer.py."""
    saved: int


def small_file(options: list[str], out: Path) -> str:
    """48 prompts, three steps an epoch."""
    (train,) = [json.loads(a.partition("=")[2])[0] for a in options if a.startswith("data.train_files")]
    pq.write_table(pq.read_table(train).slice(0, 48), out)
    return f'data.train_files=["{out}"]'


DYNAMIC = ["algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_max_rounds=0", "rollout.samples_per_prompt=4"]
CUTS = {
    "in a save": Cut([], "save_checkpoint 1 2 kill", 2),
    "at the end of an epoch": Cut(["checkpoint.every_steps=3", "algorithm.kl_loss=0.01"], "update_actor 0 4 kill", 3),
    "in dynamic sampling": Cut(DYNAMIC, "generate_sequences 1 ROUND kill", 2),
    "all at once, in background saves": Cut(["checkpoint.background=true"], "", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(c, marks=[] if c == "in a save" else pytest.mark.full) for c in CUTS])
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, options, name):
    cut = CUTS[name]
    arguments = [QUICKSTART, *options, *cut.arguments]
    if "epoch" in name:
        arguments.append(small_file(options, tmp_path / "train.parquet"))
    whole = run_job(tmp_path / "whole", 2, *arguments)
    run_dir = tmp_path / "cut"
    if cut.fault:
        rounds = [int(row.get("sampling/rounds", 1)) for row in whole.metrics]
        fault = {"FAULT": cut.fault.replace("ROUND", str(sum(rounds[:2]) + 2))}  # the second round of step 3
        print(fault, rounds)
        killed = run_job(run_dir, 2, *arguments, expect=None, script="tests/faulty_trainer.py", env=fault)
        assert killed.code != 0 and "Signal 9" in killed.output, killed.output[-3000:]
    else:
        kill_after_checkpoint(run_dir, cut.saved, *arguments)
    saved = find(run_dir)
    resumed = run_job(run_dir, 2, *arguments)
    assert saved is not None and f"resumed after step {load_step(resumed)}" in resumed.output
    assert not cut.fault or load_step(resumed) == cut.saved
    assert [row["training/global_step"] for row in resumed.metrics] == [1, 2, 3, 4, 5, 6]
    assert resumed.lasting == whole.lasting
    for step in range(1, 7):
        assert resumed.samples(step) == whole.samples(step), step
    expected, found = tensors(whole, 6), tensors(resumed, 6)
    assert expected.keys() == found.keys() and len(expected) > 50
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    check_what_was_cut(name, resumed)
    small = load_small(find(run_dir))
    assert small["step"] == small["optimizer_steps"] == 6 and {"scheduler", "collector", "kl", "config"} <= set(small)
    assert "total_steps = 6" in small["config"]
    assert read_marker(find(run_dir)).versions["megatron-core"] == metadata.version("megatron-core")


def load_step(job: Job) -> int:
    return int(re.findall(r"resumed after step (\d+)", job.output)[0])


def check_what_was_cut(name: str, job: Job) -> None:
    """The case is what it says: an epoch ended there, samples were left over, the reference was not the policy."""
    rows = {row["training/global_step"]: row for row in job.metrics}
    if "epoch" in name:
        assert (rows[3]["training/epoch"], rows[4]["training/epoch"]) == (0, 1)
        assert rows[1]["actor/kl_loss"] == 0 < rows[4]["actor/kl_loss"]
    if "dynamic" in name:
        assert rows[2]["sampling/surplus_groups"] > 0 and rows[3]["sampling/rounds"] >= 2


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


STOPS = {"SIGINT": "SIGINT on rank", "SIGUSR1": "SIGUSR1 on rank", "STOP": "found ", "deadline": "time limit: "}


@pytest.mark.full
@pytest.mark.parametrize("how", STOPS)
def test_every_way_to_stop_saves_and_tells(tmp_path, options, how):
    run_dir = tmp_path / "run"
    limit = ["runtime.time_limit_s=60"] if how == "deadline" else []
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "trainer.py"]
    endless = [*options, *limit, "total_steps=100000", "checkpoint.every_steps=0", f"run_dir={run_dir}"]
    process = subprocess.Popen(
        [*command, QUICKSTART, *endless],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    until = time.monotonic() + 200
    while not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").read_text():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    ranks = sorted((run_dir / "logs" / "attempt_1").glob("rank_*.json"))
    if how == "STOP":
        (run_dir / "STOP").touch()
    elif how != "deadline":  # to the second rank alone, as a person would with kill
        os.kill(json.loads(ranks[1].read_text())["pid"], getattr(signal, how))
    output, _ = process.communicate(timeout=150)
    stopped = Job(process.returncode, output, run_dir)
    assert stopped.status["state"] == "stopped" and stopped.status["why"].startswith(STOPS[how]), output[-3000:]
    assert find(run_dir).name == f"step_{stopped.status['step']:06d}" and "exitcode  : 75" in output
