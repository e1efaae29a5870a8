"""Faults while a checkpoint is written, kept or read: real processes, two ranks, the real run directory and saves.

Whatever dies when, the previous or the new checkpoint is complete, the next launch resumes from it on all ranks, and
goes on to the end. Faults of the whole loop, with engine and model: test_faults_loop.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.runtime import Exit
from parallel.checkpoint import MARKER, find
from tests.fault_job import Fault, launch

SHARD = "parameters-0000{}.safetensors"


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def check_next_launch(run_dir: Path, allowed: set[int | None], until: int = 4) -> int | None:
    """The next launch resumes from one of the `allowed` steps, ends well, and leaves nothing but whole checkpoints."""
    after = launch(run_dir, until)
    assert after.codes == [0, 0], after
    assert after.resumed in allowed, after
    assert [step for step in after.said[0]["done"]] == list(range((after.resumed or 0) + 1, until + 1))
    assert names(run_dir) == ["latest", f"step_{until - 1:06d}", f"step_{until:06d}"]
    assert json.loads((run_dir / "status.json").read_text())["state"] == "finished"
    again = launch(run_dir, until)
    assert again.codes == [0, 0] and again.resumed == until
    return after.resumed


# -- death of one rank, or of all, at a point of the save of step 3; steps 1 and 2 are complete

KILLS = {
    "rank 0 makes room for the attempt": (Fault("os.mkdir", "step_000003.part"), 2),
    "rank 0 opens its first shard": (Fault("open", SHARD.format(0)), 2),
    "rank 1 opens its first shard": (Fault("open", SHARD.format(1), rank=1), 2),
    "rank 0 in the middle of a shard": (Fault(size=300_000), 2),
    "rank 1 in the middle of a shard": (Fault(size=300_000, rank=1), 2),
    "all ranks in the middle of a shard": (Fault(size=300_000, rank=None), 2),
    "rank 0 in the header of a shard": (Fault(size=100), 2),
    "rank 0 opens its second shard": (Fault("open", "exp_avg-00000"), 2),
    "rank 1 opens its second shard": (Fault("open", "exp_avg-00001", rank=1), 2),
    "rank 0 writes its own state": (Fault("open", "own-00000"), 2),
    "rank 1 writes its own state": (Fault("open", "own-00001", rank=1), 2),
    "rank 0 writes what all know": (Fault("open", "small.safetensors"), 2),
    "before the rename": (Fault("os.rename", "step_000003.part"), 2),
    "between rename and marker": (Fault("open", f".{MARKER}.part"), 2),
    "between the marker's text and its name": (Fault("os.rename", f".{MARKER}.part"), 2),
    "between marker and latest": (Fault("open", ".latest.part"), 3),
    "between the text of latest and its name": (Fault("os.rename", ".latest.part"), 3),
    "before pruning": (Fault("os.rename", "step_000001"), 3),
    "pruning, before the first file": (Fault("os.rmdir", "trash", count=1), 3),
    "pruning, between files": (Fault("os.remove", "", count=2), 3),
    "all ranks, between rename and marker": (Fault("open", f".{MARKER}.part", rank=None), 2),
}
DEFAULT = ("rank 1 in the middle of a shard", "between rename and marker", "pruning, between files")


def marked(table: dict) -> list:
    return [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.full) for name in table]


@pytest.mark.slow
@pytest.mark.parametrize("kill", marked(KILLS))
def test_killed_at_a_point_of_a_save(tmp_path, kill):
    fault, expected = KILLS[kill]
    run_dir = tmp_path / "run"
    struck = launch(run_dir, 4, Fault(**{**vars(fault), "step": 3}))
    assert any(code < 0 for code in struck.codes) and 0 not in struck.codes, struck
    assert find(run_dir) == run_dir / "checkpoints" / f"step_{expected:06d}"
    assert check_next_launch(run_dir, {expected}) == expected


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_second_signal_in_a_save_ends_at_once_and_harms_nothing(tmp_path, rank):
    run_dir = tmp_path / "run"
    fault = Fault("open", f"exp_avg-0000{rank}", rank, step=3, number=signal.SIGTERM)
    struck = launch(run_dir, 4, fault)
    assert struck.codes[rank] == Exit.SECOND_SIGNAL and struck.codes[1 - rank] == 1, struck
    status = json.loads((run_dir / "status.json").read_text())
    assert status["state"] == "failed" and "second signal, SIGTERM" in status["why"]
    check_next_launch(run_dir, {2})


@pytest.mark.full
@pytest.mark.parametrize("kill", ["rank 0 in the middle of a shard", "between rename and marker", "before pruning"])
def test_killed_in_a_background_save(tmp_path, kill):
    run_dir = tmp_path / "run"
    struck = launch(run_dir, 4, Fault(**{**vars(KILLS[kill][0]), "step": 3}), background=True)
    assert any(code < 0 for code in struck.codes), struck
    check_next_launch(run_dir, {KILLS[kill][1]})


@pytest.mark.full
def test_killed_before_every_single_change_of_a_directory(tmp_path):
    """Step 2 is saved again over a complete one, with pruning: killed before each rename, removal and creation."""
    base = tmp_path / "base"
    assert launch(base, 2).codes == [0, 0]
    shutil.copytree(base, base2 := tmp_path / "base2")
    (base2 / "checkpoints" / "step_000002" / MARKER).unlink()  # torn: step 2 comes again, in its place
    points = 0
    for event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
        for count in range(1, 40):
            run_dir = tmp_path / f"{event}{count}" / "run"
            shutil.copytree(base2, run_dir)
            struck = launch(run_dir, 2, Fault(event, "", step=2, count=count))
            if struck.codes == [0, 0]:
                break
            points += 1
            assert find(run_dir).name in ("step_000001", "step_000002")
            assert launch(run_dir, 2).codes == [0, 0] and find(run_dir).name == "step_000002"
            shutil.rmtree(run_dir.parent)
    assert points >= 8


# -- an error instead of a death: every rank ends with it, at once, and names rank and file


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_file_that_cannot_grow_ends_all_ranks(tmp_path, rank, background):
    run_dir = tmp_path / "run"
    struck = launch(run_dir, 4, Fault(size=300_000, rank=rank, step=3, survives=True), background=background)
    assert struck.codes == [1, 1]
    errors = [said["error"] for said in struck.said]
    assert all("File too large" in error and SHARD.format(rank) in error for error in errors), errors
    assert not [name for name in names(run_dir) if name.startswith(".")]
    assert json.loads((run_dir / "status.json").read_text())["state"] == "failed"
    check_next_launch(run_dir, {2})


def tmpfs(path: Path, size: str) -> None:
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs needs root")


@pytest.mark.full
def test_a_full_disk_ends_all_ranks(tmp_path):
    disk = tmp_path / "disk"
    tmpfs(disk, "9m")  # four checkpoints of 4 MB do not fit
    try:
        run_dir = disk / "run"
        struck = launch(run_dir, 4)
        assert struck.codes == [1, 1] and all("No space left" in said["error"] for said in struck.said), struck
        assert find(run_dir).name == "step_000002" and not [n for n in names(run_dir) if n.startswith(".")]
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        check_next_launch(run_dir, {2})
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.full
def test_a_run_directory_that_turns_read_only(tmp_path):
    disk = tmp_path / "disk"
    tmpfs(disk, "64m")
    try:
        run_dir = disk / "run"
        assert launch(run_dir, 2).codes == [0, 0]
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        from parallel.checkpoint import save
        from tests.fault_job import KINDS, make_states

        with pytest.raises(OSError, match="Read-only"):
            save(run_dir / "checkpoints", 3, KINDS, make_states(0, 1), {"step": 3}, 0)
        assert find(run_dir).name == "step_000002"
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        check_next_launch(run_dir, {2})
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.full
def test_a_second_job_is_refused_and_harms_nothing(tmp_path):
    from launch.runtime import RunDir

    run_dir = tmp_path / "run"
    with RunDir.open(run_dir, ""):
        second = launch(run_dir, 2)
    assert second.codes == [1, 1] and all(f"pid {os.getpid()}" in said["error"] for said in second.said)
    check_next_launch(run_dir, {None})


# -- damage between two launches; steps 1 and 2 are complete before it


def swap_shards(path: Path) -> None:
    a, b = (path / SHARD.format(rank) for rank in (0, 1))
    a.rename(path / "x"), b.rename(a), (path / "x").rename(b)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


DAMAGE: dict[str, tuple[Callable[[Path], object], int | None]] = {
    "truncated shard of rank 0": (lambda c: os.truncate(c / "step_000002" / SHARD.format(0), 5000), 1),
    "truncated shard of rank 1": (lambda c: os.truncate(c / "step_000002" / SHARD.format(1), 5000), 1),
    "empty shard": (lambda c: os.truncate(c / "step_000002" / SHARD.format(1), 0), 1),
    "flipped byte in rank 0's data": (lambda c: flip(c / "step_000002" / SHARD.format(0), -3), 1),
    "flipped byte in rank 1's data": (lambda c: flip(c / "step_000002" / SHARD.format(1), -3), 1),
    "flipped byte in a header": (lambda c: flip(c / "step_000002" / SHARD.format(1), 30), 1),
    "flipped byte in the second state": (lambda c: flip(c / "step_000002" / "exp_avg-00001.safetensors", -3), 1),
    "shard of zeros, as after a power cut": (lambda c: zeroed(c / "step_000002" / SHARD.format(0)), 1),
    "two shards swapped": (lambda c: swap_shards(c / "step_000002"), 1),
    "shard of another step": (
        lambda c: shutil.copy(c / "step_000001" / SHARD.format(0), c / "step_000002" / SHARD.format(0)),
        1,
    ),
    "deleted shard": (lambda c: (c / "step_000002" / SHARD.format(1)).unlink(), 1),
    "deleted own state": (lambda c: (c / "step_000002" / "own-00001.safetensors").unlink(), 1),
    "deleted small state": (lambda c: (c / "step_000002" / "small.safetensors").unlink(), 1),
    "deleted marker": (lambda c: (c / "step_000002" / MARKER).unlink(), 1),
    "cut marker": (lambda c: os.truncate(c / "step_000002" / MARKER, 40), 1),
    "marker of zeros": (lambda c: zeroed(c / "step_000002" / MARKER), 1),
    "flipped byte in the marker": (lambda c: flip(c / "step_000002" / MARKER, 15), 1),
    "marker of another step": (lambda c: shutil.copy(c / "step_000001" / MARKER, c / "step_000002" / MARKER), 1),
    "deleted checkpoint": (lambda c: shutil.rmtree(c / "step_000002"), 1),
    "a file in place of the checkpoint": (
        lambda c: (shutil.rmtree(c / "step_000002"), (c / "step_000002").write_text("")),
        1,
    ),
    "stale latest": (lambda c: (c / "latest").write_text("step_000001\n"), 2),
    "latest of nothing": (lambda c: (c / "latest").write_text("step_000077\n"), 2),
    "empty latest": (lambda c: (c / "latest").write_text(""), 2),
    "deleted latest": (lambda c: (c / "latest").unlink(), 2),
    "an attempt left behind": (lambda c: shutil.copytree(c / "step_000002", c / ".step_000003.part"), 2),
    "half a removal left behind": (lambda c: shutil.copytree(c / "step_000001", c / ".step_000001.trash"), 2),
    "an empty checkpoint of a later step": (lambda c: (c / "step_000003").mkdir(), 2),
    "all checkpoints deleted": (lambda c: (shutil.rmtree(c), c.mkdir()), None),
}
DEFAULT += ("flipped byte in rank 1's data", "stale latest")


@pytest.mark.slow
@pytest.mark.parametrize("damage", marked(DAMAGE))
def test_damaged_between_launches(tmp_path, damage):
    cause, expected = DAMAGE[damage]
    run_dir = tmp_path / "run"
    assert launch(run_dir, 2).codes == [0, 0]
    cause(run_dir / "checkpoints")
    check_next_launch(run_dir, {expected})


@pytest.mark.full
@pytest.mark.parametrize("name", ["own-00001.safetensors", "small.safetensors"])
def test_a_flipped_byte_in_small_files_is_never_taken_for_a_value(tmp_path, name):
    run_dir = tmp_path / "run"
    assert launch(run_dir, 2).codes == [0, 0]
    flip(run_dir / "checkpoints" / "step_000002" / name, -1)
    after = launch(run_dir, 4)
    assert after.codes == [0, 0] and after.resumed == 1, after


def test_there_are_at_least_forty():
    others = (
        10 + 2 + 3 + 4 + 1 + 1 + 1 + 2
    )  # whole loop, second signal, background, no growth, full, read-only, lock, small
    assert len(KILLS) + len(DAMAGE) + others >= 40
