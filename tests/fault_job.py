"""A job without engine and model for tests of faults: lock, resume, and a checkpoint after each step, all of it real.

The stores after step s hold the value s, so that every element tells which step it is of. `launch` runs it on ranks
forked from a server that has torch imported already: a launch takes about a second. A fault is a way to die in one of
the processes; it is given to `launch` and exists nowhere else.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launch.runtime import RunDir, StopRequest
from parallel.checkpoint import Saver, State, load_own, load_small
from parallel.device import Device
from parallel.layout import Kind, Piece
from parallel.restore import restore_newest

ROWS, COLS = 8, 32768
KINDS = {"k": Kind("k", "k.{layer}", (2, 1, ROWS, COLS))}
STATES = ("parameters", "exp_avg")


@dataclass(frozen=True)
class Fault:
    """How the process of `rank` dies (None: of every rank), in the save of step `step`."""

    event: str = ""
    """Audit event of Python before which it gets SIGKILL, for example "os.rename"."""
    part: str = ""
    """Part of the path of that event."""
    rank: int | None = 0
    step: int = 2
    count: int = 1
    """At the how many-th such event."""
    size: int = 0
    """The kernel refuses to let a file grow beyond so many bytes: dies there, or sees an error if `survives`."""
    survives: bool = False
    number: int = signal.SIGKILL
    """SIGTERM: a stop request and, at once, a second one."""


@dataclass(frozen=True)
class Launch:
    codes: list[int]
    """Exit codes of the ranks; -9 for SIGKILL."""
    said: list[dict[str, Any]]
    """For each rank: "resumed" (step or None), "done" (steps), "error"."""

    @property
    def resumed(self) -> Any:
        (found,) = {record.get("resumed") for record in self.said if "resumed" in record}
        return found


def launch(run_dir: Path, until: int, fault: Fault | None = None, world: int = 2, background: bool = False) -> Launch:
    """Run the job to step `until`. AssertionError when a rank has not ended after 60 s."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fault_job"])
    with tempfile.TemporaryDirectory(prefix="launch_") as box:  # not on the disk of the run, which may be full
        ranks = [
            context.Process(target=_rank, args=(rank, world, str(run_dir), until, fault, background, box))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        limit = time.monotonic() + 60
        for process in ranks:
            process.join(max(0.0, limit - time.monotonic()))
        late = [process.pid for process in ranks if process.is_alive()]
        for process in ranks:
            process.kill()
        assert not late, f"ranks still ran after 60 s: {late}"
        files = [Path(box, f"{rank}.json") for rank in range(world)]
        said = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        return Launch([process.exitcode for process in ranks], said)


def _rank(rank: int, world: int, run_dir: str, until: int, fault: Fault | None, background: bool, box: str) -> None:
    torch.set_num_threads(1)
    said: dict[str, Any] = {"done": []}
    code = 0
    try:
        dist.init_process_group("gloo", store=dist.FileStore(f"{box}/store", world), rank=rank, world_size=world)
        _job(rank, world, run_dir, until, fault, background, said)
    except BaseException as error:
        said["error"], code = f"{type(error).__name__}: {error}", 1
    Path(box, f"{rank}.json").write_text(json.dumps(said))
    os._exit(code)


def _job(
    rank: int, world: int, run_dir: str, until: int, fault: Fault | None, background: bool, said: dict[str, Any]
) -> None:
    group = dist.group.WORLD
    with RunDir.open(run_dir, "", rank, world, group) as run:
        states = make_states(rank, world)
        found = restore_newest(run_dir, "auto", KINDS, states, rank, group, Device("cpu"))
        done = load_small(found)["step"] if found else 0
        said["resumed"] = done if found else None
        if found:
            assert load_own(found, rank) == {"rank": rank}
            assert value(states) == {float(done)}, f"{found}: step {done} holds {value(states)}"
        StopRequest(run, grace_s=-1.0).install()
        saver = Saver(Path(run_dir) / "checkpoints", KINDS, rank, dist.new_group(backend="gloo"), background)
        for step in range(done + 1, until + 1):
            run.status("running", step=step - 1, total=until)
            for _, stores in states.values():
                for store in stores.values():
                    store.fill_(step)
            if fault and step == fault.step and fault.rank in (rank, None):
                saver.wait()  # the save before this one is not meant
                _arm(fault)
            saver.save(step, states, {"step": step}, {"rank": rank}, keep=2)
            said["done"].append(step)
        saver.wait()
        run.status("finished", step=until, total=until)
        dist.barrier()  # a rank that leaves while another one still connects would be its error


def make_states(rank: int, world: int) -> dict[str, State]:
    """Two states of two layers, rows cut over the ranks."""
    low, high = rank * ROWS // world, (rank + 1) * ROWS // world
    pieces = tuple(
        Piece("k", ((i, i + 1), (0, 1), (low, high), (0, COLS)), f"s{i}", 0, 0, (1, COLS, 1)) for i in (0, 1)
    )
    return {state: (pieces, {f"s{i}": torch.full((high - low, COLS), -1.0) for i in (0, 1)}) for state in STATES}


def value(states: dict[str, State]) -> set[float]:
    return {float(v) for _, stores in states.values() for store in stores.values() for v in store.unique()}


def _arm(fault: Fault) -> None:
    if fault.size:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN if fault.survives else signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.size, resource.RLIM_INFINITY))
        return
    left = [fault.count]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == fault.event and fault.part in " ".join(str(arg) for arg in args[:2]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), fault.number)
                if fault.number != signal.SIGKILL:
                    os.kill(os.getpid(), fault.number)

    sys.addaudithook(hook)
