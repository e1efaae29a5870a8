"""Injected faults: each is red, names the rank or host, and nothing else is red."""

from __future__ import annotations

import functools
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from launch import doctor, doctor_checks, doctor_groups
from launch.config import load
from launch.probe import probe, stale_segments
from tests.jobs import ROOT, prepare
from tests.ranks import run_ranks

RECIPES = ROOT / "launch" / "recipes"
H100 = str(RECIPES / "qwen3-235b-a22b-h100.toml")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return prepare("shrink", tmp_path_factory.mktemp("doctor") / "shrink")


def arguments(tiny: Path, run_dir: Path, *more: str) -> list[str]:
    train, val = (json.dumps([str(tiny / f"{split}.parquet")]) for split in ("train", "val"))
    paths = [f"model.path={tiny}", f"data.train_files={train}", f"data.val_files={val}", f"run_dir={run_dir}"]
    return [H100, str(RECIPES / "shrink.toml"), *paths, *more]


def login(tmp_path: Path, argv: list[str], **facts) -> dict[str, list[doctor_checks.Red]]:
    """Red findings of the login node's exam; /dev/shm is an empty directory."""
    shared = tmp_path / "shm"
    shared.mkdir(exist_ok=True)
    config = load(argv)
    found = doctor_checks.judge(doctor.login_exam(config, {**probe(config, shared_memory=shared), **facts}))
    return {name: reds for name, reds in found.items() if reds}


def test_a_sound_recipe_is_green(tiny, tmp_path):
    assert login(tmp_path, arguments(tiny, tmp_path / "run")) == {}


def held_port(monkeypatch):
    holder = socket.socket()
    holder.bind(("", 0))
    holder.listen()
    monkeypatch.setenv("MASTER_PORT", str(holder.getsockname()[1]))
    return holder


def test_held_port(tiny, tmp_path, monkeypatch):
    with held_port(monkeypatch):
        found = login(tmp_path, arguments(tiny, tmp_path / "run"))
    assert list(found) == ["port"] and os.environ["MASTER_PORT"] in found["port"][0].problem


def test_low_open_file_limit(tiny, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        found = login(tmp_path, arguments(tiny, tmp_path / "run"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert list(found) == ["open-file limit"] and "512 open files" in found["open-file limit"][0].problem
    assert "rank 0" in found["open-file limit"][0].where and "ulimit" in found["open-file limit"][0].fix


def segment_of(shared: Path, name: str) -> subprocess.Popen:
    code = f"import mmap,time; f=open({str(shared / name)!r},'w+b'); f.truncate(4096); m=mmap.mmap(f.fileno(),4096)"
    return subprocess.Popen(
        [sys.executable, "-c", code + "; print('made', flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )


def test_stale_shared_memory_of_a_killed_job(tiny, tmp_path):
    shared = tmp_path / "shm"
    shared.mkdir()
    process = segment_of(shared, "x-tp:0-[0-1]-cpushm_0")
    assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = login(tmp_path, arguments(tiny, tmp_path / "run"))
    assert list(found) == ["shared memory"] and "x-tp:0-[0-1]-cpushm_0" in found["shared memory"][0].problem
    assert found["shared memory"][0].where == socket.gethostname()


def test_segments_in_use_are_not_stale(tmp_path):
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    name = Path(f"/dev/shm/psm_doctor_{os.getpid()}")
    with open(name, "w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            assert name.name not in stale_segments(name.parent)
    name.unlink()


def test_little_shared_memory(tiny, tmp_path):
    found = login(tmp_path, arguments(tiny, tmp_path / "run"), shared_memory_free=8 << 20)
    assert list(found) == ["shared memory"] and "--shm-size" in found["shared memory"][0].fix


@pytest.mark.parametrize("what", ["truncated", "missing", "garbage"])
def test_unreadable_model_shard(tmp_path, what):
    from launch.tiny_models import write_model

    model = write_model(
        tmp_path / "models" / "qwen3-moe", "qwen3-moe", num_hidden_layers=6, num_experts=8, shard_bytes=200_000
    )
    shard = sorted(model.glob("model-*.safetensors"))[2]
    if what == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-64] if what == "truncated" else b"\xff" * 4096)
    data = tmp_path / "d.parquet"
    data.write_bytes(b"x")
    files = [f"data.train_files={json.dumps([str(data)])}", "data.val_files=[]", "eval.every_steps=0"]
    argv = [
        H100,
        str(RECIPES / "shrink.toml"),
        f"model.path={tmp_path / 'models'}",
        f"run_dir={tmp_path / 'run'}",
        *files,
    ]
    found = login(tmp_path, argv)
    assert list(found) == ["files"] and shard.name in found["files"][0].problem


def test_missing_data_file(tiny, tmp_path):
    found = login(tmp_path, arguments(tiny, tmp_path / "run", 'data.train_files=["/nowhere/train.parquet"]'))
    assert list(found) == ["files"] and "/nowhere/train.parquet: No such file" in found["files"][0].problem


def test_full_disk(tiny, tmp_path):
    found = login(tmp_path, arguments(tiny, tmp_path / "run"), disk_free=1 << 20)
    assert list(found) == ["disk for checkpoints"] and "1 + 1 checkpoints" in found["disk for checkpoints"][0].problem


def test_degrees_that_do_not_divide(tiny, tmp_path):
    found = login(tmp_path, arguments(tiny, tmp_path / "run", "data.prompts_per_step=4", "train.mini_batches=3"))
    assert list(found) == ["options divide"] and "mini_batches" in found["options divide"][0].problem


def test_missing_packages(tmp_path, tiny):
    argv = [H100, str(RECIPES / "te.toml"), f"model.path={tiny}/qwen3-moe", "checkpoint.keep=1", f"run_dir={tmp_path}"]
    argv += [f"data.train_files={json.dumps([str(tiny / 'train.parquet')])}", "data.val_files=[]", "eval.every_steps=0"]
    found = login(tmp_path, argv, packages=["transformer_engine"])
    named = {red.problem.split()[0] for red in found["packages"]}
    assert named == {"apex", "deep_ep"} and all(red.where == socket.gethostname() for red in found["packages"])


def test_memory_that_does_not_fit():
    config = load([str(RECIPES / "qwen3-235b-a22b-a2.toml"), "train.etp=1"])
    facts = {"host": "login", "rank": 0, "local_world": 8, "device": {"kind": "cpu"}}
    reds = doctor_checks._memory(doctor.login_exam(config, facts))
    assert "rank 0 needs" in reds[0].problem and "plan job" in reds[0].fix
    assert not doctor_checks._memory(doctor.login_exam(load([str(RECIPES / "qwen3-235b-a22b-a2.toml")]), facts))


# On the job's ranks: real groups, facts of one rank changed


DEADLINE_S = 4.0
FAULTS = {
    "none": {},
    "version": {2: {"versions": {"python": "3.11", "torch": "2.0.0"}}},
    "clock": {1: {"clock": time.time() + 5}},
    "loopback": {3: {"addresses": ["127.0.1.1"]}},
    "code": {0: {"code": "0"}},
    "memory held": {
        2: {"device": {"kind": "cuda", "free": 10 << 30, "total": 80 << 30, "count": 2, "holders": ["77, python"]}}
    },
    "no device": {1: {"device": {"kind": "cuda", "problem": "local rank 1 has no cuda device"}}},
    "fewer devices": {
        3: {"device": {"kind": "cuda", "free": 1, "total": 1, "count": 1, "holders": []}, "local_world": 2}
    },
    "other size": {2: {"local_world": 1}},
    "wrong interface": {1: {"interface_variables": {"GLOO_SOCKET_IFNAME": "ib7"}}},
    "loopback interface": {0: {"interface_variables": {"NCCL_SOCKET_IFNAME": "lo"}}},
    "disk of one host": {2: {"disk_free": 0}},
    "sleeper": {},
    "silent": {},
}
RED = {
    "version": ("versions", "node1 rank 2", "torch 2.0.0"),
    "clock": ("clocks", "node0 rank 1", "off by"),
    "loopback": ("host names", "node1", "127.0.1.1"),
    "code": ("code and options", "node0 rank 0", "differ"),
    "memory held": ("devices", "node1 rank 2", "77, python"),
    "no device": ("devices", "node0 rank 1", "no cuda device"),
    "fewer devices": ("ranks and hosts", "node1", "1 devices for 2 ranks"),
    "wrong interface": ("interfaces", "node0 rank 1", "ib7"),
    "loopback interface": ("interfaces", "node0 rank 0", "=lo"),
    "other size": ("ranks and hosts", "node1", "1 ranks, the other hosts have 2"),
    "disk of one host": ("disk for checkpoints", "node1", "0.0 GB free"),
    "sleeper": ("groups", "node1 rank 2", "was not there for the group train pp"),
    "silent": ("ranks and hosts", "rank 3", "did not report"),
}


def examine(rank: int, argv: list[str], shared: str) -> dict:
    """All faults, one after the other, on two pretended hosts of two ranks: fault -> check -> red findings."""
    config = load(argv)
    base = probe(config, rank, rank % 2, Path(shared))
    base |= {
        "host": f"node{rank // 2}",
        "local_world": 2,
        "addresses": [f"10.0.0.{rank}"],
        "interfaces": ["lo", "eth0"],
    }
    base |= {"interface_variables": {}, "versions": {"python": "3.11", "torch": "2.13"}}
    found, names = {}, list(FAULTS)
    dist.init_process_group("gloo")
    spare = [dist.new_group(range(4)) for _ in names]  # one group more in each exam: names of groups are not used twice
    for fault, changes in FAULTS.items():
        dist.destroy_process_group(spare.pop())
        change = dict(changes)
        if (
            rank // 2 == 1
            and "fewer" in fault
            or rank // 2 == 1
            and fault in ("loopback", "disk of one host", "other size")
        ):
            change = {rank: next(iter(changes.values()))}  # what a host has, all of its ranks see
        restore = doctor_groups.sign_in
        if fault == "sleeper" and rank == 2:
            doctor_groups.sign_in = functools.partial(late, restore)
        if fault == "silent" and rank == 3:
            time.sleep(2.5 * DEADLINE_S)
            continue
        if fault == "clock":
            change = {r: {"clock": time.time() + 5} for r in change}
        exam = doctor.job_exam(config, {**base, **change.get(rank, {})}, DEADLINE_S, name=fault)
        doctor_groups.sign_in = restore
        reds = {name: reds for name, reds in doctor_checks.judge(exam).items() if reds}
        found[fault] = {name: [[red.where, red.problem, red.fix] for red in each] for name, each in reds.items()}
        found[fault + " rows"] = [row["axis"] for row in exam.groups if "gb_s" in row]
    return found


def late(sign_in, store, key, *rest):
    if "pp" in key:
        time.sleep(1.5 * DEADLINE_S)
    return sign_in(store, key, *rest)


@pytest.fixture(scope="module")
def examined(tiny, tmp_path_factory):
    shared = tmp_path_factory.mktemp("shm")
    argv = arguments(tiny, tmp_path_factory.mktemp("run"))
    return run_ranks(4, examine, argv, str(shared), timeout_s=240)


@pytest.mark.slow
def test_a_sound_job_is_green_and_every_group_is_measured(examined):
    assert examined[0]["none"] == {}
    axes = ", ".join(examined[0]["none rows"])
    assert all(name in axes for name in ("world", "train tp", "train pp", "train ep", "rollout tp"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", RED)
def test_fault_is_red_and_nothing_else(examined, fault):
    check, where, problem = RED[fault]
    found = examined[0][fault]
    assert list(found) == [check], found
    assert all(red[0] == where for red in found[check]), found
    assert problem in found[check][0][1] and found[check][0][2]


@pytest.mark.slow
def test_command_prints_a_table_and_an_exit_code(tiny, tmp_path):
    argv = arguments(tiny, tmp_path / "run", "checkpoint.keep=1")
    done = subprocess.run(
        [sys.executable, "-m", "launch.doctor", *argv, "train.mini_batches=3"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and "RED options divide" in done.stdout and "fix: " in done.stdout
    bad = subprocess.run(
        [sys.executable, "-m", "launch.doctor", "nothing.toml"], cwd=ROOT, capture_output=True, text=True
    )
    assert bad.returncode == 2 and "no such recipe file" in bad.stderr
