"""Reward workers under fire: hangs, memory, crashes, signals, and a parent that is killed."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import reward
from launch.config import RewardConfig
from reward.rules import Item

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = """
import mmap, os, re, signal, sys, time
KEPT = []

def score(data_source, solution, ground_truth, extra):
    if solution == "hang": time.sleep(3600)
    if solution == "regex": re.match(r"(a+)+$", "a" * 64 + "b")
    if solution == "memory": return len("x" * 2**33)
    if solution == "crash": os._exit(3)
    if solution == "crash once":
        if not os.path.exists(ground_truth):
            open(ground_truth, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    if solution == "deep":
        def f(): return f()
        f()
    if solution == "raise": raise KeyError("no")
    if solution == "exit": sys.exit(1)
    if solution == "nan": return float("nan")
    if solution == "print": print("hello")
    if solution == "pid": return os.getpid()
    if solution == "preload": return float("LD_PRELOAD" in os.environ)
    if solution == "slow": time.sleep(0.2)
    if solution == "child":
        import subprocess
        open(ground_truth, "w").write(str(subprocess.Popen(["sleep", "3600"]).pid))
        time.sleep(3600)
    if solution == "keep": KEPT.append(mmap.mmap(-1, 200 << 20))
    return 1.0
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A pool of two workers for the function above, and items for it."""
    (tmp_path / "hostile_reward.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/x86_64-linux-gnu/libm.so.6")
    config = RewardConfig(function="hostile_reward:score", timeout_s=1.0, memory_mib=512)
    scorer = reward.build(config, ["anything"])
    yield scorer
    scorer.close()


def items(*solutions, truth=""):
    return [Item("any", solution, truth, {}) for solution in solutions]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "solution, reason",
    [
        ("hang", "timeout"),
        ("regex", "timeout"),
        ("memory", "memory"),
        ("deep", "memory"),
        ("crash", "crash"),
        ("exit", "crash"),
        ("raise", "error: KeyError: 'no'"),
        ("nan", "error: ValueError: the reward is nan"),
    ],
)
def test_a_bad_sample_scores_zero_and_hurts_no_other(hostile, solution, reason):
    batch = ["good"] * 100
    batch[17] = batch[80] = solution
    scores = hostile.score(items(*batch))
    assert [i for i, s in enumerate(scores) if s.failed] == [17, 80]
    assert {s.failed for s in scores if s.failed} == {reason} and scores[17].value == scores[80].value == 0
    assert sum(s.value for s in scores) == 98
    assert all(s.value == 1 for s in hostile.score(items("good", "print")))


def test_all_bad_samples_end_in_bounded_time(hostile):
    start = time.monotonic()
    scores = hostile.score(items("regex", "hang", "regex", "hang"))
    assert [s.failed for s in scores] == ["timeout"] * 4
    assert time.monotonic() - start < 10


def test_slow_samples_are_not_late_together(hostile):
    """The deadline is per sample: a chunk may take longer than timeout_s."""
    assert all(s.value == 1 for s in hostile.score(items(*["slow"] * 16)))


def test_a_worker_killed_from_outside_costs_nothing(hostile, tmp_path):
    assert [s.value for s in hostile.score(items("crash once", truth=str(tmp_path / "mark")))] == [1.0]
    for worker in hostile.backend.workers:
        os.kill(worker.process.pid, signal.SIGKILL)
    assert [s.value for s in hostile.score(items(*["good"] * 50))] == [1.0] * 50


def test_workers_ignore_the_signals_that_stop_a_job(hostile):
    before = {worker.process.pid for worker in hostile.backend.workers}
    for pid in before:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    assert {int(s.value) for s in hostile.score(items(*["pid"] * 50))} <= before
    assert all(os.getsid(pid) != os.getsid(0) for pid in before)


def test_what_a_late_sample_started_ends_with_it(hostile, tmp_path):
    assert hostile.score(items("child", truth=str(tmp_path / "pid")))[0].failed == "timeout"
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not alive(pid))


def test_memory_is_counted_for_each_sample(hostile):
    """Each keeps 200 of 512 MiB: the worker is replaced before what earlier samples left makes a good one fail."""
    assert [s.value for s in hostile.score(items(*["keep"] * 24))] == [1.0] * 24


def test_workers_get_no_preload(hostile):
    assert hostile.score(items("preload"))[0].value == 0


def test_close_leaves_no_process(hostile):
    pids = [worker.process.pid for worker in hostile.backend.workers]
    hostile.close()
    assert not any(alive(pid) for pid in pids)


def test_a_broken_function_is_an_error_at_start(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_reward.py").write_text("import nothing_of_this_name")
    for function, message in (
        ("broken_reward:score", "No module named 'nothing_of_this_name'"),
        ("json:nothing", "json has no function 'nothing'"),
        ("json", "not of the form package.module:function"),
    ):
        with pytest.raises(ValueError, match=message):
            reward.build(RewardConfig(function=function), [])


def test_a_function_that_always_raises_stops_the_run(hostile):
    with pytest.raises(ValueError, match="failed on all 9 samples; the first: error: KeyError"):
        hostile.score(items(*["raise"] * 9))


def test_a_function_in_a_file(tmp_path):
    (tmp_path / "my_reward.py").write_text("def f(source, solution, truth, extra): return {'a': 1, 'b': 2}")
    scorer = reward.build(RewardConfig(function=f"{tmp_path}/my_reward.py:f", weights={"a": 1.0, "b": 0.25}), [])
    assert [s.value for s in scorer.score(items("x"))] == [1.5]
    scorer.close()


@pytest.mark.parametrize("solution", ["good", "hang", "regex"])
def test_no_worker_outlives_a_killed_parent(hostile, tmp_path, solution):
    """kill -9 of the parent while its workers idle, sleep, or are inside C code that never looks at a signal."""
    parent = tmp_path / "parent.py"
    parent.write_text(
        textwrap.dedent(f"""
        raise_if_run_twice = open({str(tmp_path / "once")!r}, "x")
        import sys
        sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]
        import reward, time
        from launch.config import RewardConfig
        from reward.rules import Item
        scorer = reward.build(RewardConfig(function="hostile_reward:score", timeout_s=600.0), [])
        print([worker.process.pid for worker in scorer.backend.workers], flush=True)
        scorer.score([Item("any", {solution!r}, "", {{}})] * 2)
        time.sleep(600)
        """)
    )
    process = subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True)
    pids = json.loads(process.stdout.readline())
    time.sleep(0.3)
    assert all(alive(pid) for pid in pids)
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(lambda: not any(alive(pid) for pid in pids))


def test_sympy_bombs_cannot_stop_the_step():
    bombs = ["9^{9^{9^{9}}}", "\\sum_{i=1}^{10^{99}} i!", "10^{10^{10}}!", "{" * 5000 + "}" * 5000]
    batch = [Item("math", f"\\boxed{{{bomb}}}", "\\frac{1}{2}+x", {}) for bomb in bombs]
    batch += [Item("math", "\\boxed{0.50}", "\\frac{1}{2}", {})] * 10
    scorer = reward.build(RewardConfig(timeout_s=2.0, memory_mib=1024), ["math"])
    start = time.monotonic()
    scores = scorer.score(batch)
    scorer.close()
    print(time.monotonic() - start, [(s.value, s.failed) for s in scores])
    assert [s.value for s in scores] == [0.0] * 4 + [1.0] * 10
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("workers", [0, 2])
def test_2048_samples_in_a_second(workers):
    text = "She sold 48 / 2 = <<48/2=24>>24 clips in May.\n" * 40 + "#### 72"
    batch = [Item("openai/gsm8k", text, "72", {"index": i}) for i in range(2048)]
    scorer = reward.build(RewardConfig(workers=workers), ["openai/gsm8k"])
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        assert sum(s.value for s in scorer.score(batch)) == 2048
        seconds.append(time.perf_counter() - start)
    scorer.close()
    print(seconds)
    assert min(seconds) < 1.0
