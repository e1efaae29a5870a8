"""Debugging of ranks on real jobs: record and replay, rollout only, a breakpoint in one rank, stacks, named hangs."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from launch import debug
from launch.config import ConfigError, load
from rollout import recorded
from rollout.batch import Sample
from tests.hosts import environment, wait_for
from tests.jobs import ROOT, Job, prepare, run_job

QUICKSTART = "launch/recipes/quickstart.toml"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="session")
def options(tmp_path_factory) -> list[str]:
    data = prepare("copy", tmp_path_factory.mktemp("data") / "copy")
    files = [f"model.path={data}/model", f'data.train_files=["{data}/train.parquet"]', "data.val_files=[]"]
    small = ["data.prompts_per_step=4", "rollout.samples_per_prompt=4", "eval.every_steps=0", "log.tensorboard=false"]
    return [QUICKSTART, *files, *small, "checkpoint.at_end=false"]


def test_flags_are_options():
    argv = ["R.toml", "--debug-rank", "1", "--record", "d", "--rollout-only", "--profile-steps", "2"]
    expected = ["runtime.debug_rank=1", "runtime.record=d", "runtime.rollout_only=true", "log.profile_steps=[2]"]
    assert debug.flags(argv) == ["R.toml", *expected]
    assert debug.prepared(load(debug.flags(["--debug-rank", "0"]))).runtime.deadline_s == debug.PATIENCE_S


@pytest.mark.parametrize("words", [["--record"], ["--replay", "--rollout-only"], ["--debug-rank"]])
def test_a_flag_without_its_value_is_refused(words):
    with pytest.raises(ConfigError, match=f"{words[0]} needs a (rank|directory) after it"):
        debug.flags(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replay", "d", "--rollout-only"], "runtime.rollout_only"),
        (["--replay", "d", "--record", "e"], "runtime.record"),
        (["--replay", "nowhere"], "nowhere"),
        (["runtime.record_steps=[2]"], "runtime.record"),
    ],
)
def test_options_that_exclude_each_other_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        debug.prepared(load(debug.flags(words)))


def samples(count: int, owners: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 9, size=(2, 3 + i)).astype(np.int32) for i in range(count)]
    return [
        Sample(
            prompt_id=i // 2,
            sample_id=i % 2,
            prompt=ids[i][0],
            response=ids[i][1],
            logprobs=rng.random(3 + i).astype(np.float32),
            finish="stop",
            score=i / 7,
            owner=i % owners,
            routes=rng.integers(0, 8, size=(5 + 2 * i, 2, 2)).astype(np.uint8),
        )
        for i in range(count)
    ]


def test_recorded_samples_come_back_under_any_number_of_ranks(tmp_path):
    kept = samples(7, owners=3)
    for rank in range(3):
        recorded.write(tmp_path, 4, rank, 3, kept)
    for world in (1, 2, 5):
        owned = 0
        for rank in range(world):
            found = recorded.read(tmp_path, 4, rank, world)
            assert [s.key for s in found] == [s.key for s in kept]
            for ours, theirs in zip(found, kept, strict=True):
                assert ours.score == theirs.score and ours.finish == theirs.finish
                for name in ("prompt", "response", "logprobs"):
                    assert np.array_equal(getattr(ours, name), getattr(theirs, name))
                if ours.routes is not None:
                    owned += 1
                    assert ours.owner == rank and np.array_equal(ours.routes, theirs.routes)
        assert owned == 7
    with pytest.raises(ValueError, match=r"holds steps \[4\]"):
        recorded.read(tmp_path, 5, 0, 1)
    damaged = tmp_path / "step_000004" / "rank_001.npz"
    os.truncate(damaged, damaged.stat().st_size // 2)
    with pytest.raises(ValueError, match="rank_001.npz: not a recording, or damaged"):
        recorded.read(tmp_path, 4, 0, 1)
    damaged.unlink()
    with pytest.raises(ValueError, match="2 of 3 ranks"):
        recorded.read(tmp_path, 4, 0, 1)


def same(ours: dict[str, float], theirs: dict[str, float]) -> None:
    for name in ("actor/loss", "actor/grad_norm"):
        print(f"{name}: {ours[name]:.8f}, recorded {theirs[name]:.8f}")
        assert abs(ours[name] - theirs[name]) <= 1e-5 * max(1.0, abs(theirs[name]))
    for name in ("critic/rewards/mean", "response_length/mean"):
        assert ours[name] == theirs[name]


@pytest.mark.slow
def test_a_recorded_step_trains_the_same_without_an_engine_under_another_layout(tmp_path, options):
    """The second step under TP2 from the checkpoint after the first, which EP2 wrote."""
    record = ["--record", str(tmp_path / "kept"), "runtime.record_steps=[2]", "checkpoint.every_steps=1"]
    made = run_job(tmp_path / "made", 2, *options, "total_steps=2", *record)
    assert [d.name for d in (tmp_path / "kept").iterdir()] == ["step_000002"]
    start = f"checkpoint.resume={tmp_path}/made/checkpoints/step_000001"
    layout = ["train.tp=2", "train.ep=1"]
    again = run_job(
        tmp_path / "again", 2, *options, "total_steps=2", "--replay", str(tmp_path / "kept"), start, *layout
    )
    assert len(again.metrics) == 1 and "timing_s/generate_sequences" not in again.metrics[0]
    same(again.metrics[0], made.metrics[1])


@pytest.mark.full
@pytest.mark.parametrize("layout", [["train.pp=2", "train.ep=1"], ["train.cp=2", "train.ep=1"], ["train.ep=1"], []])
def test_recorded_steps_train_the_same_under_every_layout(tmp_path, options, layout):
    made = run_job(tmp_path / "made", 2, *options, "total_steps=1", "--record", str(tmp_path / "kept"))
    again = run_job(tmp_path / "again", 2, *options, "total_steps=1", "--replay", str(tmp_path / "kept"), *layout)
    same(again.metrics[0], made.metrics[0])


@pytest.mark.full
def test_routes_are_recorded_too(tmp_path, options):
    replay = ["rollout.routing_replay=R3", "total_steps=1"]
    made = run_job(tmp_path / "made", 2, *options, *replay, "--record", str(tmp_path / "kept"))
    again = run_job(
        tmp_path / "again", 1, *options, *replay, "--replay", str(tmp_path / "kept"), "world=1", "train.ep=1"
    )
    same(again.metrics[0], made.metrics[0])


@pytest.mark.full
def test_rollout_only_draws_the_samples_of_the_whole_job_and_trains_nothing(tmp_path, options):
    whole = run_job(tmp_path / "whole", 2, *options, "total_steps=1")
    only = run_job(tmp_path / "only", 2, *options, "total_steps=2", "--rollout-only")
    assert [s["response"] for s in only.samples(1)] == [s["response"] for s in whole.samples(1)]
    assert len(only.metrics) == 2 and "actor/loss" not in only.metrics[0]
    assert only.metrics[0]["critic/rewards/mean"] == whole.metrics[0]["critic/rewards/mean"]
    assert not list((only.run_dir / "checkpoints").glob("step_*"))


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, command: list[str]):
        self.text = ""
        self.fd, follower = pty.openpty()
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdin=follower, stdout=follower, stderr=follower
        )
        os.close(follower)

    def until(self, pattern: str, timeout_s: float) -> str:
        """What came up to the pattern, which is consumed."""
        end = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < end, f"no {pattern!r} in {timeout_s} s:\n{self.text[-4000:]}"
            if select.select([self.fd], [], [], 0.2)[0]:
                self.text += os.read(self.fd, 65536).decode(errors="replace")
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def type(self, line: str) -> None:
        os.write(self.fd, f"{line}\n".encode())


@pytest.mark.full
def test_a_breakpoint_in_one_rank_while_the_other_waits_at_a_named_barrier(tmp_path, options):
    run_dir = tmp_path / "run"
    command = [*TORCHRUN, "trainer.py", *options, "total_steps=1", "--debug-rank", "1", f"run_dir={run_dir}"]
    terminal = Terminal([*command, "runtime.deadline_s=4"])
    try:
        terminal.until(r"rank 1 stops here", 120)
        terminal.until(r"\(Pdb\) ", 20)
        time.sleep(6)  # longer than the deadline of a phase: it must not matter now
        terminal.type("up")
        terminal.until(r"\(Pdb\) ", 20)
        terminal.type("p (self.rank, self.inputs.total_steps, len(self.model.chunks) > 0)")
        assert "(1, 1, True)" in terminal.until(r"\(Pdb\) ", 20)
        waiting = (run_dir / "logs" / "attempt_1" / "rank_000.log").read_text()
        assert "waiting at barrier debug_rank_1 until rank 1 goes on" in waiting
        assert not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").read_text()
        terminal.type("c")
        until = time.monotonic() + 120
        while terminal.process.poll() is None and time.monotonic() < until:
            if select.select([terminal.fd], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):  # the last process has closed its end
                    os.read(terminal.fd, 65536)
        assert terminal.process.wait(10) == 0
    finally:
        terminal.process.terminate()
    assert Job(0, "", run_dir).status["state"] == "finished" and len(Job(0, "", run_dir).metrics) == 1


@pytest.mark.full
def test_a_breakpoint_without_a_terminal_is_one_clear_error(tmp_path, options):
    job = run_job(tmp_path / "run", 2, *options, "total_steps=1", "--debug-rank", "0", expect=1)
    assert "this rank has no terminal; start torchrun from one" in job.status["why"]


PHASES = [
    *("build", "load", "reshard", "gen", "generate_sequences", "reward", "old_log_prob", "ref", "adv"),
    *("update_actor", "save_checkpoint", "testing", "start_profile", "stop_profile", "routes"),
]
SEVERAL = ["algorithm.old_log_probs=recompute", "algorithm.kl_loss=0.01", "checkpoint.at_end=true"]


def hang(tmp_path: Path, options: list[str], phase: str, rank: int, deadline_s: float) -> Job:
    run_dir = tmp_path / "run"
    command = [*TORCHRUN, "tests/hanging.py", *options, *SEVERAL, "total_steps=1", f"run_dir={run_dir}"]
    command += [f"runtime.deadline_s={deadline_s}"]
    if phase == "testing":
        file = next(word for word in options if word.startswith("data.train_files"))
        command += [file.replace("train", "val"), "eval.every_steps=1", "eval.max_prompts=4"]
    command += ["rollout.routing_replay=R3"] if phase == "routes" else []
    env = environment({"TEST_HANG": f"{phase} {rank}"})
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180)
    return Job(done.returncode, done.stdout + done.stderr, run_dir)


def named(job: Job, phase: str, rank: int, deadline_s: float) -> str:
    """The one line that says what hangs."""
    found = [line for line in job.output.splitlines() if "CRITICAL hang: " in line]
    assert len(found) == 1, job.output[-5000:]
    line = found[0]
    assert re.search(rf"s in phase \w+; {phase}: ranks \[{rank}\] at stuck \(tests/hanging\.py:\d+\)", line), line
    silent = float(re.search(r"was silent for ([\d.]+) s", line)[1])
    assert silent <= deadline_s + 3, line
    return line


@pytest.mark.full
def test_a_rank_that_hangs_is_named_with_what_the_others_wait_for(tmp_path, options):
    job = hang(tmp_path, options, "reward", 1, 15)
    line = named(job, "reward", 1, 15)
    assert re.search(r"ranks \[0\] wait in \w*all_?gather\w* of \w+ \(rollout/\w+\.py:\d+\)", line), line
    assert job.status["state"] == "failed" and "silent" in job.status["why"]


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_a_hang_in_every_phase_and_rank_is_named(tmp_path, options, phase, rank):
    print(named(hang(tmp_path, options, phase, rank, 20), phase, rank, 20))


@pytest.mark.full
def test_stacks_of_every_rank_of_a_running_job(tmp_path, options):
    run_dir = tmp_path / "run"
    command = [*TORCHRUN, "tests/hanging.py", *options, "total_steps=1", f"run_dir={run_dir}"]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, cwd=ROOT, env=environment({"TEST_HANG": "adv 1"}), stdout=log, stderr=log)
    try:
        wait_for(lambda: "phase adv begins" in text(run_dir, 1), 120, "the phase")
        time.sleep(1)
        done = subprocess.run(
            ["bash", "launch/stacks.sh", str(run_dir)], cwd=ROOT, env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        first, second = done.stdout.split("=== rank 1 ")
        assert first.startswith("=== rank 0 ") and "in all_reduce" in first and "trainer.py" in first, done.stdout
        assert "in stuck" in second and "in all_reduce" not in second
        assert job.poll() is None, "the job goes on"
    finally:
        for file in (run_dir / "logs" / "attempt_1").glob("rank_*.json"):
            os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)
        job.wait(60)
    done = subprocess.run(
        ["bash", "launch/stacks.sh", str(run_dir)], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1 and "no rank" in done.stderr


def text(run_dir: Path, rank: int) -> str:
    file = run_dir / "logs" / "attempt_1" / f"rank_{rank:03d}.log"
    return file.read_text() if file.exists() else ""


def test_flight_recorders_are_set_for_nccl_and_hccl(tmp_path):
    for kind, prefix in (("cuda", "NCCL"), ("npu", "HCCL")):
        found = {f"TORCH_{prefix}_TRACE_BUFFER_SIZE": "7"}
        debug.flight_recorder(str(tmp_path), kind, found)
        assert found[f"TORCH_{prefix}_TRACE_BUFFER_SIZE"] == "7", "what the user set stays"
        assert found[f"TORCH_{prefix}_DUMP_ON_TIMEOUT"] == "1"
        assert found[f"TORCH_{prefix}_DEBUG_INFO_TEMP_FILE"] == f"{tmp_path}/logs/flight/rank_"
    nothing: dict[str, str] = {}
    debug.flight_recorder(str(tmp_path), "cpu", nothing)
    assert not nothing and json.dumps(nothing) == "{}"
