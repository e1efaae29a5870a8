"""job.sbatch on a real Slurm with two hosts: stopped and queued again, cancelled, a rank killed, a node lost.

The default tier stops a job by Slurm's signal and queues it again; the rest is in the full tier. tests/cluster.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.nodes import verdict
from tests.cluster import Cluster
from tests.hosts import ROOT, missing_slurm, tier, wait_for
from tests.jobs import Job, prepare, run_job

WHY_NOT = missing_slurm()
needs_slurm = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "PENDING")


@pytest.fixture(scope="session")
def options(tmp_path_factory) -> list[str]:
    data = prepare("copy", tmp_path_factory.mktemp("data") / "copy")
    files = [f"model.path={data}/model", f'data.train_files=["{data}/train.parquet"]', "data.val_files=[]"]
    small = ["data.prompts_per_step=4", "rollout.samples_per_prompt=4", "eval.every_steps=0", "log.tensorboard=false"]
    return ["launch/recipes/quickstart.toml", *files, *small]


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path / "slurm", ["n1", "n2"], slurmd_timeout_s=10) as cluster:
        yield cluster


def lines(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def ranks(run_dir: Path, attempt: int = 1) -> list[dict]:
    files = sorted((run_dir / "logs" / f"attempt_{attempt}").glob("rank_*.json"))
    return [json.loads(file.read_text()) for file in files]


def workers(network: Cluster, run_dir: Path) -> list[str]:
    """Command lines of the job's processes that still run."""
    shown = network.run("ctl", "ps", "-eo", "pid,args").stdout
    return [line for line in shown.splitlines() if str(run_dir) in line and "ps -eo" not in line]


@needs_slurm
@tier(WHY_NOT)
def test_a_job_near_its_end_stops_is_queued_again_and_is_as_if_nothing_had_been(tmp_path, options, cluster):
    run_dir, output = tmp_path / "run", tmp_path / "job.out"
    steps = [*options, "total_steps=6", f"run_dir={run_dir}"]
    job = cluster.submit(*steps, "log.hook=tests.hosts:pause", output=output)
    wait_for(lambda: lines(run_dir) >= 2 or cluster.state(job) in ENDED[:3], 90, "two steps")
    cluster.ask("scancel", "--batch", "--signal=USR1", str(job))  # what --signal=B:USR1@600 does by the clock
    wait_for(lambda: cluster.restarts(job) == 1, 60, "the second attempt")
    assert Job(0, "", run_dir).status["state"] == "stopped"
    assert cluster.wait(job, ("COMPLETED", "FAILED"), 90, output) == "COMPLETED", output.read_text()[-4000:]
    text = output.read_text()
    assert "requeue: " in text and "found " in text and "resumed after step" in text
    assert re.search(r"node 1 of 2 on n2: cpu, 1 ranks; head 10\.9\.0\.1:\d+;.* GLOO_SOCKET_IFNAME=eth0", text)
    assert [(r["host"], r["job"], r["restart"]) for r in ranks(run_dir, 2)] == [
        ("n1", str(job), "1"),
        ("n2", str(job), "1"),
    ]
    for attempt in (1, 2):
        kept = {p.name for p in (run_dir / "logs" / f"attempt_{attempt}").iterdir()}
        assert {"code.tar.gz", "launch.json", "config.toml", "rank_001.log"} <= kept
    whole = run_job(tmp_path / "whole", 2, *options, "total_steps=6")
    assert Job(0, "", run_dir).lasting == whole.lasting and len(Job(0, "", run_dir).lasting) == 6


@needs_slurm
@pytest.mark.full
def test_a_time_limit_of_slurm_ends_in_a_checkpoint_and_a_second_attempt(tmp_path, options, cluster):
    """Slurm's own clock: two minutes hold neither start-up nor all of 100 steps of a second or more."""
    run_dir, output = tmp_path / "run", tmp_path / "job.out"
    limits = ("--time", "2", "--signal", "B:USR1@5")
    steps = [*options, "total_steps=100", "log.hook=tests.hosts:pause", f"run_dir={run_dir}"]
    job = cluster.submit(*steps, output=output, options=limits, env={"TEST_PAUSE_S": "1"})
    assert cluster.wait(job, ("COMPLETED", "FAILED", "TIMEOUT"), 400, output) == "COMPLETED", output.read_text()[-4000:]
    text = output.read_text()
    assert cluster.restarts(job) == 1 and "requeue: " in text and "resumed after step" in text
    assert "time limit" in text or "found " in text
    whole = run_job(tmp_path / "whole", 2, *options, "total_steps=100")
    assert Job(0, "", run_dir).lasting == whole.lasting


@needs_slurm
@pytest.mark.full
def test_a_cancelled_job_leaves_a_checkpoint_and_nothing_else(tmp_path, options, cluster):
    run_dir, output = tmp_path / "run", tmp_path / "job.out"
    job = cluster.submit(*options, "total_steps=100000", f"run_dir={run_dir}", output=output)
    wait_for(lambda: lines(run_dir) >= 2, 90, "two steps")
    cluster.ask("scancel", str(job))
    wait_for(lambda: not workers(cluster, run_dir), 60, "the end of all processes")
    assert cluster.wait(job, ENDED, 60, output) == "CANCELLED" and cluster.restarts(job) == 0
    status = Job(0, "", run_dir).status
    assert status["state"] == "stopped" and "SIGTERM" in status["why"], status
    assert (run_dir / "checkpoints" / f"step_{status['step']:06d}" / "complete.json").exists()


@needs_slurm
@pytest.mark.full
def test_a_killed_rank_ends_the_job_on_all_nodes_and_the_same_line_goes_on(tmp_path, options, cluster):
    run_dir, output = tmp_path / "run", tmp_path / "job.out"
    more = [*options, "checkpoint.every_steps=1", "log.hook=tests.hosts:pause", f"run_dir={run_dir}"]
    job = cluster.submit(*more, "total_steps=100000", output=output)
    wait_for(lambda: lines(run_dir) >= 2, 90, "two steps")
    began = time.monotonic()
    cluster.run("ctl", "kill", "-9", str(ranks(run_dir)[1]["pid"]))
    assert cluster.wait(job, ENDED, 90, output) == "FAILED" and cluster.restarts(job) == 0
    print(f"ended {time.monotonic() - began:.1f} s after the kill")
    wait_for(lambda: not workers(cluster, run_dir), 10, "the end of all processes")
    text = output.read_text()
    assert re.search(r"local_rank: 0.*exitcode: -9|exitcode +: -9|Signal 9", text, re.S), text[-4000:]
    assert Job(0, "", run_dir).status["state"] == "failed"
    done = lines(run_dir)
    again = cluster.submit(*more, f"total_steps={done + 2}", output=output)
    assert cluster.wait(again, ("COMPLETED", "FAILED"), 120, output) == "COMPLETED"
    assert lines(run_dir) == done + 2 and "resumed after step" in output.read_text()


@needs_slurm
@pytest.mark.full
def test_a_lost_node_requeues_the_job_which_goes_on_when_the_node_is_back(tmp_path, options, cluster):
    run_dir, output = tmp_path / "run", tmp_path / "job.out"
    more = [*options, "total_steps=30", "checkpoint.every_steps=2", "log.hook=tests.hosts:pause", f"run_dir={run_dir}"]
    job = cluster.submit(*more, output=output)
    wait_for(lambda: lines(run_dir) >= 5, 90, "five steps")
    cluster.cut("n2")  # first, so that nothing says goodbye
    everything = cluster.run("n2", "sh", "-c", "for p in /proc/[0-9]*; do echo $(readlink $p/ns/net) ${p#/proc/}; done")
    own = cluster.run("n2", "readlink", "/proc/self/ns/net").stdout.strip()
    holder = (cluster.directory / "pid_n2").read_text().strip()
    found = [line.split()[1] for line in everything.stdout.splitlines() if line.startswith(own)]
    cluster.run("ctl", "kill", "-9", *[pid for pid in found if pid != holder])
    began = time.monotonic()
    wait_for(lambda: cluster.state(job) != "RUNNING", 120, "Slurm to miss the node", 0.5)
    print(f"requeued {time.monotonic() - began:.1f} s after the loss")
    cluster.mend("n2")
    cluster.slurmd("n2")
    assert cluster.wait(job, ("COMPLETED", "FAILED", "NODE_FAIL"), 240, output) == "COMPLETED", output.read_text()[
        -4000:
    ]
    assert cluster.restarts(job) == 1 and "resumed after step" in output.read_text()
    assert [row["training/global_step"] for row in Job(0, "", run_dir).lasting] == list(range(1, 31))


@needs_slurm
@pytest.mark.full
def test_bad_input_is_refused_before_srun(tmp_path, options, cluster):
    output = tmp_path / "job.out"
    job = cluster.submit(*options, "train.lrr=1", f"run_dir={tmp_path}/run", output=output)
    assert cluster.wait(job, ENDED, 60, output) == "FAILED"
    assert output.read_text().splitlines()[0].startswith("error: ") and "train.lr" in output.read_text()


def status(run_dir: Path, state: str, why: str, step: int) -> str:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "status.json").write_text(json.dumps({"state": state, "why": why, "step": step}))
    return str(run_dir)


@pytest.mark.parametrize(
    ("state", "why", "step", "announced", "expected"),
    [
        ("finished", "", 9, False, "finished"),
        ("stopped", "time limit: 3 s left", 9, False, "requeue"),
        ("stopped", "found RUN/STOP", 9, True, "requeue"),
        ("stopped", "found RUN/STOP", 9, False, "stop"),  # a person's
        ("stopped", "SIGTERM on rank 3", 9, False, "stop"),  # scancel; preemption is requeued by Slurm
        ("stopped", "time limit: 3 s left", 4, False, "stop"),  # no step: it would go on for ever
        ("failed", "rank 1: ValueError", 9, True, "stop"),
        ("running", "", 9, True, "stop"),
    ],
)
def test_only_an_unfinished_run_that_was_stopped_in_time_is_queued_again(
    tmp_path, state, why, step, announced, expected
):
    said = verdict(status(tmp_path / "run", state, why, step), 4, announced)
    assert said.startswith(f"{expected}: ") and (why in said or not why)


def test_the_job_script_kills_nothing_by_name_and_asks_for_the_right_signal():
    for name in ("job.sbatch", "node.sh", "stacks.sh"):
        text = (ROOT / "launch" / name).read_text()
        assert not re.search(r"pkill|killall|kill -9", text)
        assert subprocess.run(["bash", "-n", f"launch/{name}"], cwd=ROOT).returncode == 0
    head = (ROOT / "launch" / "job.sbatch").read_text()
    assert "--signal=B:USR1@" in head and "--requeue" in head and "--kill-on-bad-exit=1" in head


def node_environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    """What node.sh gives to the program, by a program that prints it."""
    program = tmp_path / "show.py"
    program.write_text("import json, os, sys\njson.dump(dict(os.environ), open(sys.argv[1], 'w'))\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HCCL", "CUDA", "TASK", "VLLM_", "RANK"))}
    environment |= {"PYTHON": sys.executable, "NPROC": "1", "MASTER_PORT": "29611", **variables}
    words = ["bash", "launch/node.sh", str(program), str(tmp_path / "found.json")]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    return found | {"told": done.stdout}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}),
        (
            "npu",
            {
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "TASK_QUEUE_ENABLE": "2",
                "VLLM_ASCEND_ENABLE_NZ": "0",
                "HCCL_CONNECT_TIMEOUT": "3600",
                "HCCL_EXEC_TIMEOUT": "1800",  # the user's own
                "HCCL_ASYNC_ERROR_HANDLING": "1",
            },
        ),
    ],
)
def test_node_sh_sets_and_prints_the_platform_s_environment(tmp_path, platform, expected):
    found = node_environment(tmp_path, PLATFORM=platform, HCCL_EXEC_TIMEOUT="1800")
    assert {name: found[name] for name in expected} == expected
    assert all(f"{name}={value}" in found["told"] for name, value in expected.items())
    assert "ulimit -n" in found["told"]


def test_both_of_ascend_s_scripts_are_read_and_a_failing_one_is_told(tmp_path):
    for name, text in (("ascend-toolkit", "ASCEND_HOME_PATH=/x"), ("nnal/atb", "ATB_HOME_PATH=/y; false")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "set_env.sh").write_text(f"export {text}\n")
    names = {"ASCEND_HOME_PATH": "", "ATB_HOME_PATH": ""}
    found = node_environment(tmp_path, PLATFORM="npu", ASCEND_ROOT=str(tmp_path), **names)
    assert (found["ASCEND_HOME_PATH"], found["ATB_HOME_PATH"]) == ("/x", "/y")


def test_a_head_node_without_address_is_named(tmp_path):
    for name, text in (("scontrol", "echo nowhere-17.invalid"), ("srun", "exit 9"), ("squeue", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": "7", "PYTHON": sys.executable}
    env = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "launch/job.sbatch", "launch/recipes/quickstart.toml", f"run_dir={tmp_path}/run"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "the head node nowhere-17.invalid does not resolve" in done.stderr, done.stderr
