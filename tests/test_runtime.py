"""Run directory, lock, status, logs, stop requests and the watchdog; real processes where processes are the point."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from launch import processes
from launch.processes import acquire_lock, clean_leftovers, identity, is_alive
from launch.runtime import Exit, RunDir, StopRequest, read_status, setup_logging, share, write_atomic
from launch.watchdog import Watchdog, describe
from tests.ranks import ROOT, run_ranks


def start(code, *args, **options):
    """A Python process of its own session that runs `code`; its output is text in a pipe."""
    command = [sys.executable, "-c", "import sys, time, os, signal\n" + code, *map(str, args)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes, **options)


HOLD = """
from launch.runtime import RunDir
run = RunDir.open(sys.argv[1], "seed = 1\\n")
run.status("running", step=3, total=9)
print("open", run.attempt, flush=True)
time.sleep(60)
"""


def alone(tmp_path, **options):
    return RunDir.open(tmp_path / "run", "seed = 1\n", **options)


@contextmanager
def gloo(rank):
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    yield dist.group.WORLD
    dist.destroy_process_group()


# --- run directory


def test_open_writes_config_and_counts_attempts(tmp_path):
    for attempt in (1, 2, 3):
        with alone(tmp_path) as run:
            assert run.attempt == attempt
            assert run.log_file == tmp_path / "run" / "logs" / f"attempt_{attempt}" / "rank_000.log"
            assert (run.path / "config.toml").read_text() == (run.log_dir / "config.toml").read_text() == "seed = 1\n"
        assert not (tmp_path / "run" / "lock").exists()


def test_status_tells_every_ending(tmp_path):
    with alone(tmp_path) as run:
        run.status("running", step=2, total=5)
        assert read_status(run.path)["state"] == "running"
        run.status("stopped", "SIGTERM on rank 1", 3, 5)
    status = json.loads((run.path / "status.json").read_text())
    assert (status["state"], status["why"], status["step"], status["total"]) == ("stopped", "SIGTERM on rank 1", 3, 5)
    with pytest.raises(RuntimeError), alone(tmp_path) as run:
        run.status("running", step=4, total=5)
        raise RuntimeError("boom")
    status = read_status(run.path)
    assert (status["state"], status["why"], status["step"]) == ("failed", "rank 0: RuntimeError: boom", 4)


def test_first_failure_stays(tmp_path):
    with alone(tmp_path, world=1) as run:
        other = RunDir(run.path, run.attempt, 3, 4, run.lock)
        other.fail("ValueError: first")
        run.status("running", step=7, total=9)
        run.fail("connection closed")
    assert read_status(run.path)["why"] == "rank 3: ValueError: first"


def test_a_rank_that_died_is_named_beside_what_the_others_raise(tmp_path):
    peer = subprocess.Popen(["sleep", "60"])
    record = identity() | {"pid": peer.pid}
    peer.kill()
    peer.wait()
    with pytest.raises(RuntimeError), alone(tmp_path) as run:
        run.log_file.with_name("rank_001.json").write_text(json.dumps(record))
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
    assert read_status(run.path)["why"].startswith("rank 0: ranks [1] died without a word; RuntimeError: Connection")


def test_data_that_people_keep_in_shared_memory_stays(tmp_path):
    """Mapped files that are older than the process, or lie in a directory, are no leftovers."""
    name = f"alternator-test-{os.getpid()}"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        theirs, older, own = Path(directory, "model"), Path("/dev/shm", f"{name}-old"), Path("/dev/shm", f"{name}-own")
        older.write_bytes(bytes(4096))
        time.sleep(3)  # the clock ticks of a process's start are coarse
        code = (
            f"import sys\nopen({str(own)!r}, 'wb').write(bytes(4096))\nopen({str(theirs)!r}, 'wb').write(bytes(4096))\n"
        )
        code += f"files = {[str(f) for f in (theirs, older, own)]!r}\nimport mmap\n"
        code += "held = [open(f, 'r+b') for f in files]\nmaps = [mmap.mmap(f.fileno(), 4096) for f in held]\n"
        code += "from launch.processes import unlink_own_segments\nunlink_own_segments()"
        try:
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
            assert theirs.exists() and older.exists() and not own.exists()
        finally:
            older.unlink(missing_ok=True)
            own.unlink(missing_ok=True)


def test_a_segment_that_another_rank_unlinks_meanwhile_is_no_error(monkeypatch, tmp_path):
    here = tmp_path / "segment"
    monkeypatch.setattr(processes, "mapped_segments", lambda pid: {Path("/dev/shm/alternator-gone"), here})
    assert processes.own_segments(os.getpid()) == set()
    processes.unlink_own_segments()


@pytest.mark.parametrize("where", ["file/run", "file"])
def test_unwritable_is_one_clear_error(tmp_path, where):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run_dir .*: cannot write there .*; choose another run_dir"):
        RunDir.open(tmp_path / where, "")


def test_read_only_directory(tmp_path):
    if not Path("/proc/self/task").is_dir():
        pytest.skip("no /proc to stand for a read-only filesystem")
    with pytest.raises(ValueError, match="cannot write there"):
        RunDir.open("/proc/self/task/run", "")


def test_stop_file_of_the_attempt_before_is_removed(tmp_path):
    with alone(tmp_path) as run:
        (run.path / "STOP").touch()
        assert "STOP" in StopRequest(run).decide()
    with alone(tmp_path) as run:
        assert StopRequest(run).decide() is None


def open_together(rank, path):
    with gloo(rank) as group, RunDir.open(path, "", rank, 2, group) as run:
        assert share(f"from {rank}", group) == "from 0"
        return run.attempt, sorted(p.name for p in run.log_dir.glob("rank_*.json")) if rank == 0 else None


def open_refused(rank, path):
    with gloo(rank) as group:
        try:
            RunDir.open(path, "", rank, 2, group)
        except ValueError as error:
            said = str(error)  # not the error: its traceback would keep the group alive beyond its end
        return said


@pytest.mark.slow
def test_ranks_agree_on_attempt_and_on_errors(tmp_path):
    assert [attempt for attempt, _ in run_ranks(2, open_together, str(tmp_path / "run"))] == [1, 1]
    holder = start(HOLD, tmp_path / "run")
    try:
        assert holder.stdout.readline() == "open 2\n"
        first, second = run_ranks(2, open_refused, str(tmp_path / "run"))
        assert first == second and f"pid {holder.pid}" in first
    finally:
        holder.kill()
        holder.wait()


# --- lock


def test_second_job_is_refused_and_the_first_is_named(tmp_path):
    holder = start(HOLD, tmp_path / "run", env={**os.environ, "SLURM_JOB_ID": "4711"})
    try:
        assert holder.stdout.readline() == "open 1\n"
        with pytest.raises(ValueError, match=rf"in use by host \S+, pid {holder.pid}, job 4711, since \d"):
            alone(tmp_path)
        assert read_status(tmp_path / "run")["state"] == "running"
        holder.kill()
        time.sleep(0.2)  # a zombie now: its parent, this test, has not looked
        assert read_status(tmp_path / "run")["state"] == "failed"
        with alone(tmp_path) as run:
            assert run.attempt == 2
    finally:
        holder.kill()
        holder.wait()


def test_lost_lock_is_not_written_through(tmp_path, caplog):
    with alone(tmp_path) as run:
        run.status("running")
        write_atomic(run.path / "lock", json.dumps({**run.lock, "token": "other"}))
        run.status("finished")
        assert read_status(run.path)["state"] == "running" and "no longer ours" in caplog.text
    assert (run.path / "lock").exists()


def test_many_starters_one_winner(tmp_path):
    """Six processes want a dead job's lock at the same time: exactly one gets it."""
    dead = start("pass")
    dead.wait()
    (tmp_path / "run").mkdir()
    record = {**identity(), "pid": dead.pid, "ticks": "1"}
    (tmp_path / "run" / "lock").write_text(json.dumps(record))
    code = """
from pathlib import Path
from launch.processes import acquire_lock
time.sleep(max(0, float(sys.argv[2]) - time.time()))
try:
    acquire_lock(Path(sys.argv[1]))
    print("won", flush=True)
    time.sleep(3)
except ValueError as error:
    print(error)
"""
    racers = [start(code, tmp_path / "run" / "lock", time.time() + 1.5) for _ in range(6)]
    said = [racer.communicate()[0] for racer in racers]
    assert sum(text.endswith("won\n") for text in said) == 1, said
    assert sum("in use by" in text for text in said) == 5, said
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["lock"]


def test_liveness_rules():
    me = identity()
    assert is_alive(me, me) is True
    assert is_alive({**me, "ticks": "1"}, me) is False, "the pid was reused"
    assert is_alive({**me, "boot": "before"}, me) is False, "the machine restarted"
    elsewhere = {**me, "host": "node9", "boot": "other", "job": "12"}
    assert is_alive(elsewhere, me) is None
    assert is_alive(elsewhere, {**me, "job": "12", "restart": "1"}) is False, "Slurm requeued the job"
    assert is_alive(elsewhere, {**me, "job": "12"}) is None, "another step of the same job may run"
    assert is_alive({**me, "namespace": "pid:[1]"}, me) is None, "another container"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": "x"}'])
def test_broken_lock_names_the_file_to_remove(tmp_path, content):
    (tmp_path / "lock").write_text(content)
    with pytest.raises(ValueError, match=r"in use by (an unknown process|host x); if that job is dead, remove .*lock"):
        acquire_lock(tmp_path / "lock")


def test_next_start_cleans_what_a_killed_job_left(tmp_path):
    code = """
from multiprocessing import shared_memory, resource_tracker
import subprocess, mmap
from launch.runtime import RunDir
run = RunDir.open(sys.argv[1], "")
segment = shared_memory.SharedMemory(create=True, size=4096, name=sys.argv[2])
resource_tracker.unregister(segment._name, "shared_memory")
run.note_process()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""
    name = f"alternator_test_{os.getpid()}"
    holder = start(code, tmp_path / "run", name)
    try:
        child = int(holder.stdout.readline())
        assert clean_leftovers([json.loads(f.read_text()) for f in tmp_path.rglob("rank_*.json")]) == [], "it lives"
        holder.kill()
        holder.wait()
        assert Path("/dev/shm", name).exists() and is_alive({**identity(), "pid": child}, identity()) is False
        with alone(tmp_path) as run:
            assert run.attempt == 2
        time.sleep(0.1)
        assert not Path("/dev/shm", name).exists()
        assert Path(f"/proc/{child}/stat").read_text().split()[2] == "Z" if Path(f"/proc/{child}").exists() else True
    finally:
        holder.kill()
        if Path("/dev/shm", name).exists():
            shared_memory.SharedMemory(name=name).unlink()


# --- logs

LOGS = """
import logging
from launch.runtime import RunDir, setup_logging
run = RunDir.open(sys.argv[1], "", int(sys.argv[2]) if False else 0, 1)
run.rank = int(sys.argv[2])
setup_logging(run, time.time() - 2467)
for name in ("launch.x", "elsewhere"):
    for level in ("debug", "info", "warning"):
        getattr(logging.getLogger(name), level)(f"{name}-{level}")
print("ready", flush=True)
def stuck_here(): time.sleep(60)
stuck_here()
"""


@pytest.mark.parametrize("rank", [0, 37])
def test_logs_and_stacks_on_request(tmp_path, rank):
    process = start(LOGS, tmp_path / "run", rank)
    try:
        lines = []
        while not lines or lines[-1] != "ready\n":
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        file = tmp_path / "run" / "logs" / "attempt_1" / f"rank_{rank:03d}.log"
        console = {line.split()[-1] for line in lines[:-1]}
        expected = {"launch.x-warning", "elsewhere-warning"} | ({"launch.x-info"} if rank == 0 else set())
        assert console == expected
        written = file.read_text()
        assert "launch.x-debug" in written and "elsewhere-info" in written and "elsewhere-debug" not in written
        assert re.search(rf"(?m)^\d\d:\d\d:\d\d \+00:41:0\d r{rank:03d} INFO launch.x-info$", written)

        def dumped() -> bool:
            os.kill(process.pid, signal.SIGUSR2)  # again and again: "ready" comes before the function is entered
            time.sleep(0.1)
            return "stuck_here" in file.read_text()

        wait_for(dumped)
    finally:
        process.kill()
        process.wait()


def test_logging_setup_in_process_is_removable(tmp_path):
    root = logging.getLogger()
    before = list(root.handlers)
    with alone(tmp_path) as run:
        setup_logging(run)
        for handler in [h for h in root.handlers if h not in before]:
            root.removeHandler(handler)
    import faulthandler

    faulthandler.unregister(signal.SIGUSR2)
    faulthandler.enable()
    logging.captureWarnings(False)


def wait_for(condition, timeout_s=10.0):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.05)


# --- stop requests


def test_deadline_stops_before_a_step_that_cannot_end(tmp_path):
    with alone(tmp_path) as run:
        now = time.time()
        stop = StopRequest(run, time_limit_s=100.0, started=now - 40)  # 60 s left
        assert stop.decide() is None
        stop.observe(step_s=30.0)
        stop.observe(step_s=20.0)
        assert stop.decide() is None
        stop.observe(save_s=31.0)
        assert re.fullmatch(r"time limit: (59|60) s left, a step and its checkpoint take up to 62 s", stop.decide())
        late = StopRequest(run, time_limit_s=100.0, started=now - 150)
        assert late.decide() == "time limit: 0 s left, a step and its checkpoint take up to 1 s"
        assert StopRequest(run).deadline == float("inf")


def test_slurm_end_time_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 10))
    with alone(tmp_path) as run:
        stop = StopRequest(run, time_limit_s=1000.0)
        stop.observe(step_s=20.0)
        assert "time limit" in stop.decide()


STOPS = {
    "SIGTERM": "SIGTERM on rank 1",
    "SIGUSR1": "SIGUSR1 on rank 1",
    "SIGINT": "SIGINT on rank 1",
    "STOP": "found ",
    "deadline": "time limit: ",
}


def decide_together(rank, path):
    """Four boundaries per way to stop; the event comes before the third, on one rank only."""
    reasons = {}
    with gloo(rank) as group:
        for how in STOPS:
            with RunDir.open(f"{path}_{how}", "", rank, 2, group) as run:
                stop = StopRequest(run, time_limit_s=50.0 if how == "deadline" and rank == 0 else 0.0)
                stop.install()
                reasons[how] = []
                for boundary in range(4):
                    if boundary == 2:
                        cause(how, rank, run, stop)
                    reasons[how].append(stop.decide(group))
    return reasons


def cause(how, rank, run, stop):
    if how.startswith("SIG") and rank == 1:
        os.kill(os.getpid(), getattr(signal, how))
    elif how == "STOP" and rank == 0:
        (run.path / "STOP").touch()
    elif how == "deadline":
        stop.observe(step_s=100.0 if rank == 0 else 0.1)


@pytest.mark.slow
def test_one_rank_sees_it_all_ranks_stop(tmp_path):
    first, second = run_ranks(2, decide_together, str(tmp_path / "run"))
    assert first == second and list(first) == list(STOPS)
    for how, reasons in first.items():
        assert reasons[:2] == [None, None]
        assert all(reason.startswith(STOPS[how]) for reason in reasons[2:]), (how, reasons)


SIGNALS = """
from launch.runtime import RunDir, StopRequest
with RunDir.open(sys.argv[1], "") as run:
    run.status("running", step=5, total=9)
    stop = StopRequest(run, grace_s=0.3)
    stop.install()
    print("ready", flush=True)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        time.sleep(0.02)
        if len(sys.argv) > 2 and stop.decide():
            run.status("stopped", stop.decide(), 6, 9)
            sys.exit(75)
"""


def test_signal_stops_at_the_boundary(tmp_path):
    process = start(SIGNALS, tmp_path / "run", "boundary")
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert "SIGTERM: stopping after this step" in process.communicate(timeout=10)[0]
    assert process.returncode == Exit.STOPPED
    status = read_status(tmp_path / "run")
    assert (status["state"], status["why"], status["step"]) == ("stopped", "SIGTERM on rank 0", 6)


def test_second_signal_ends_at_once_but_an_echo_does_not(tmp_path):
    process = start(SIGNALS, tmp_path / "run")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # within the grace time: Slurm and torchrun deliver the same request
    time.sleep(0.6)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode == Exit.SECOND_SIGNAL
    status = read_status(tmp_path / "run")
    assert status["state"] == "failed" and "second signal, SIGINT" in status["why"] and status["step"] == 5
    assert not (tmp_path / "run" / "lock").exists()


# --- watchdog


def test_phases_nest_and_are_timed(tmp_path):
    with alone(tmp_path) as run:
        dog = Watchdog(run, deadline_s=60.0)
        with dog.phase("gen"):
            time.sleep(0.05)
            with dog.phase("reshard"):
                time.sleep(0.1)
            assert dog._phase.name == "gen"
        with dog.phase("reshard"):
            time.sleep(0.05)
        seconds = dog.timings()
        assert list(seconds) == ["reshard", "gen"] and dog.timings() == {}
        assert 0.15 <= seconds["reshard"] < 5 and 0.15 <= seconds["gen"] < 5
        dog.close()
        assert not list(run.log_dir.glob("stacks*"))


def test_heartbeats_keep_a_long_phase_alive(tmp_path):
    with alone(tmp_path) as run:
        left = []
        dog = Watchdog(run, deadline_s=1.0, grace_s=0.1, leave=left.append)
        with dog.phase("long"):
            for _ in range(12):
                time.sleep(0.15)
                dog.heartbeat()
        with dog.phase("free", deadline_s=0):
            time.sleep(1.5)
        with dog.phase("patient", deadline_s=20):
            time.sleep(1.5)
        assert not left
        with dog.phase("short", deadline_s=0.1):
            wait_for(lambda: left == [Exit.HANG])
        assert "phase short was silent" in read_status(run.path)["why"]
        dog.close()


def hang_on_one(rank, path):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=3)
    group = dist.group.WORLD
    run = RunDir.open(path, "", rank, 3, group)
    setup_logging(run)
    run.status("running", step=4, total=8)
    dog = Watchdog(run, deadline_s=30.0 if rank != 1 else 1.0, grace_s=8.0)
    if rank == 1:
        with dog.phase("reward"):
            wait_for_a_lost_sample()
    with dog.phase("update_actor"):
        dist.all_reduce(torch.ones(1), group=group)


def wait_for_a_lost_sample():
    time.sleep(60)


LAUNCH = """
import tests.test_runtime as t
t.hang_on_one(int(os.environ["RANK"]), sys.argv[1])
"""


@pytest.mark.slow
def test_hang_dumps_all_ranks_and_names_the_phase(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [start(LAUNCH, tmp_path / "run", env={**common, "RANK": str(rank)}) for rank in range(3)]
    try:
        said = [process.communicate(timeout=60)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [Exit.HANG] * 3, "\n".join(said)
    logs = tmp_path / "run" / "logs" / "attempt_1"
    stacks = [(logs / f"stacks_rank_{rank:03d}.txt").read_text() for rank in range(3)]
    assert "wait_for_a_lost_sample" in stacks[1] and '"phase": "reward"' in stacks[1]
    assert all("all_reduce" in stacks[rank] and '"phase": "update_actor"' in stacks[rank] for rank in (0, 2))
    (line,) = [line for line in said[1].splitlines() if "CRITICAL" in line]
    assert re.search(
        r"hang: rank 1 was silent for \d\.\d s in phase reward; reward: ranks \[1\] at wait_for_a_lost_s", line
    )
    assert "update_actor: ranks [0, 2] wait in all_reduce of hang_on_one (tests/test_runtime.py:" in line
    assert not said[2]
    status = read_status(tmp_path / "run")
    assert status["state"] == "failed" and status["step"] == 4
    assert re.search(r"rank 1: hang: phase reward was silent for \d\.\d s", status["why"])
    assert not (tmp_path / "run" / "lock").exists()


NO_TURN = """
import ctypes
from launch.runtime import RunDir
from launch.watchdog import Watchdog
run = RunDir.open(sys.argv[1], "")
dog = Watchdog(run, deadline_s=0.5, grace_s=0.2)
with dog.phase("native"):
    time.sleep(0.2)
    ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the interpreter lock
"""


def test_a_rank_that_holds_the_interpreter_lock_ends_too(tmp_path):
    process = start(NO_TURN, tmp_path / "run")
    process.communicate(timeout=20)
    assert process.returncode == Exit.FAILED
    stacks = (tmp_path / "run" / "logs" / "attempt_1" / "stacks_rank_000.part").read_text()
    assert "Timeout" in stacks and 'File "<string>"' in stacks


def test_describe_puts_the_odd_one_first():
    reports = [{"rank": r, "phase": "update_actor"} for r in (0, 1, 3)] + [{"rank": 2, "phase": "gen"}]
    assert describe(reports, 5) == "gen: ranks [2], update_actor: ranks [0, 1, 3], no stacks: ranks [4]"


def test_light_imports():
    modules = ", ".join(f"launch.{name}" for name in ("runtime", "watchdog", "processes", "metrics", "writers"))
    code = f"import {modules}; print('torch' in sys.modules)"
    assert start(code).communicate()[0] == "False\n"


UNDER_TORCHRUN = """
import os, sys, time
import torch.distributed as dist
from launch.runtime import RunDir, StopRequest, setup_logging
dist.init_process_group("gloo")
rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
with RunDir.open(sys.argv[1], "", rank, world, group) as run:
    setup_logging(run)
    stop = StopRequest(run)
    stop.install()
    for step in range(1000):
        run.status("running", step=step, total=1000)
        if why := stop.decide(group):
            time.sleep(3)  # a checkpoint, longer than the grace time of a second signal
            run.status("stopped", why, step, 1000)
            break
        time.sleep(0.05)
dist.destroy_process_group()
sys.exit(75)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_signal_to_torchrun_stops_cleanly(tmp_path, number):
    script = tmp_path / "job.py"
    script.write_text(UNDER_TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "output", "w") as output:
        agent = subprocess.Popen(
            [*command, str(script), str(tmp_path / "run")],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_for(lambda: read_status(tmp_path / "run").get("step", 0) > 5, 60.0)
        ranks = [json.loads(file.read_text()) for file in tmp_path.rglob("rank_*.json")]
        agent.send_signal(number)
        agent.wait(timeout=30)
        wait_for(lambda: not any(is_alive(record, identity()) for record in ranks), 30.0)
    finally:
        agent.kill()
    said = (tmp_path / "output").read_text()
    status = read_status(tmp_path / "run")
    why = r"the launcher of rank 0 \(torchrun\) is gone" if number == signal.SIGKILL else r"SIG(TERM|INT) on rank [01]$"
    assert status["state"] == "stopped" and re.match(why, status["why"]), said
    assert len(ranks) == 2
