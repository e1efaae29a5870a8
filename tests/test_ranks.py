"""The rank runner itself: results, the first failure, deadlines with stacks, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import run_ranks


def describe(rank, word):
    return rank, word, int(os.environ["WORLD_SIZE"]), os.environ["TORCHELASTIC_RUN_ID"]


def fail_late_on_zero(rank):
    time.sleep(0.0 if rank == 1 else 0.2)
    raise RuntimeError(f"boom {rank}")


def die_silently(rank, file):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hang_with_children(rank, directory):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(directory, str(rank)).write_text(f"{os.getpid()} {child.pid}")
    Path("/dev/shm", f"x_{os.environ['TORCHELASTIC_RUN_ID']}_y").touch()
    sleep_here()


def sleep_here():
    time.sleep(60)


def all_reduce(rank):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_results_come_back_in_rank_order():
    results = run_ranks(2, describe, "hello", timeout_s=30)
    assert [r[:3] for r in results] == [(0, "hello", 2), (1, "hello", 2)]
    assert results[0][3] == results[1][3]


def test_function_by_name():
    assert run_ranks(1, "tests.test_ranks:describe", 7, timeout_s=30)[0][1] == 7


def test_the_first_failure_is_shown():
    with pytest.raises(AssertionError, match="rank 1 of 2 failed first(.|\n)*boom 1"):
        run_ranks(2, fail_late_on_zero, timeout_s=30)


def test_a_killed_rank_is_named():
    with pytest.raises(AssertionError, match="rank 1 of 2 failed first:\nended without a result, exit code -9"):
        run_ranks(2, die_silently, "", timeout_s=30)


def test_deadline_ends_everything_and_shows_stacks(tmp_path):
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] of 2 still ran after 2 s(.|\n)*in sleep_here"):
        run_ranks(2, hang_with_children, str(tmp_path), timeout_s=2)
    assert time.monotonic() - start < 12
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 4
    time.sleep(0.2)
    alive = [p for p in pids if Path(f"/proc/{p}/stat").exists() and " Z " not in Path(f"/proc/{p}/stat").read_text()]
    assert not alive
    assert not list(Path("/dev/shm").glob("x_test-*_y"))


@pytest.mark.slow
def test_gloo_works():
    assert run_ranks(2, all_reduce, timeout_s=60) == [3.0, 3.0]
