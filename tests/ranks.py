"""`run_ranks(n, function, *args)`: one function on n processes, the way torchrun would start it, for tests.

Plain subprocesses of the current interpreter, each the leader of its own session, with torchrun's environment
variables; arguments and results travel as pickle files in a temporary directory. What this file promises:
  - the traceback shown is that of the rank that failed first by the clock, not of the ranks it took along;
  - every process, and every child of one, has ended when the call returns, at the latest at its deadline;
  - when the deadline passes, the stacks of all ranks (faulthandler, SIGUSR1) are part of the error;
  - shared memory segments of the run are gone.
The function does its own initialisation (`init_process_group("gloo")` if it wants one). No torch in this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.02
GRACE_S = 0.5


def run_ranks(
    n: int,
    function: str | Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """[function(rank, *args) for rank in range(n)], each in its own process.

    `function` is importable by name: "package.module:name", or a module-level function. Results must pickle.
    AssertionError with the first failing rank's traceback, or with the stacks of all ranks after `timeout_s`.
    """
    directory = Path(tempfile.mkdtemp(prefix="ranks_"))
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    processes: list[subprocess.Popen] = []
    try:
        (directory / "payload.pkl").write_bytes(pickle.dumps(_target(function)) + pickle.dumps(args))
        port = _free_port()
        for rank in range(n):
            processes.append(_start(directory, rank, n, port, run_id, env or {}))
        failed = _wait(processes, directory, time.monotonic() + timeout_s)
        if failed is not None:
            raise AssertionError(_failure(directory, processes, failed))
        if any(process.poll() is None for process in processes):
            raise AssertionError(_timeout(directory, processes, timeout_s))
        return [pickle.loads((directory / f"result_{rank}.pkl").read_bytes()) for rank in range(n)]
    finally:
        segments = _mapped_segments(processes)
        _end(processes)
        _remove_segments(segments, run_id)
        shutil.rmtree(directory, ignore_errors=True)


def _target(function: str | Callable[..., Any]) -> tuple[str, str, list[str]]:
    """(module, name, sys.path of the caller), so that the child imports exactly what the test imported."""
    paths = [path or os.getcwd() for path in sys.path]
    if isinstance(function, str):
        module, _, name = function.partition(":")
        return module, name, paths
    return function.__module__, function.__qualname__, paths


def _free_port() -> int:
    """Below the range from which the system takes ports of outgoing connections: those come and go by themselves."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def _start(directory: Path, rank: int, n: int, port: int, run_id: str, env: dict[str, str]) -> subprocess.Popen:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": run_id,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    with open(directory / f"output_{rank}.log", "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", str(directory), str(rank)],
            env={**os.environ, **env, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(processes: list[subprocess.Popen], directory: Path, deadline: float) -> int | None:
    """Rank that failed first, or None when all ended well or the deadline passed."""
    ended: dict[int, float] = {}
    while time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.time()
        bad = [rank for rank in ended if processes[rank].returncode or not _file(directory, "result", rank).exists()]
        raised = [rank for rank in range(len(processes)) if _file(directory, "error", rank).exists()]
        if bad or raised:
            time.sleep(GRACE_S)  # an earlier failure may still be on its way to the disk
            return _first(directory, ended, processes)
        if len(ended) == len(processes):
            return None
        time.sleep(POLL_S)
    return None


def _first(directory: Path, ended: dict[int, float], processes: list[subprocess.Popen]) -> int:
    times = {}
    for rank, process in enumerate(processes):
        error = _file(directory, "error", rank)
        if error.exists():
            times[rank] = pickle.loads(error.read_bytes())[0]
        elif process.poll() or (process.poll() == 0 and not _file(directory, "result", rank).exists()):
            # Died without a word (a signal, os._exit): at most one poll before it was seen.
            times[rank] = ended.get(rank, time.time()) - 2 * POLL_S
    return min(times, key=times.__getitem__)


def _file(directory: Path, name: str, rank: int) -> Path:
    return directory / f"{name}_{rank}.pkl"


def _failure(directory: Path, processes: list[subprocess.Popen], rank: int) -> str:
    error = _file(directory, "error", rank)
    if error.exists():
        what = pickle.loads(error.read_bytes())[1]
    else:
        what = f"ended without a result, exit code {processes[rank].returncode}"
    return f"rank {rank} of {len(processes)} failed first:\n{what}\n{_output(directory, rank)}"


def _timeout(directory: Path, processes: list[subprocess.Popen], timeout_s: float) -> str:
    alive = [rank for rank, process in enumerate(processes) if process.poll() is None]
    for rank in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(GRACE_S)
    parts = [f"ranks {alive} of {len(processes)} still ran after {timeout_s:g} s"]
    for rank in alive:
        stacks = directory / f"stacks_{rank}.txt"
        text = stacks.read_text() if stacks.exists() else "(no stacks: the interpreter was still starting)"
        parts.append(f"--- stacks of rank {rank}\n{text}{_output(directory, rank, 20)}")
    return "\n".join(parts)


def _output(directory: Path, rank: int, num_lines: int = 60) -> str:
    lines = (directory / f"output_{rank}.log").read_text(errors="replace").splitlines()[-num_lines:]
    return "\n".join([f"--- last output of rank {rank}", *lines]) if lines else ""


def _end(processes: list[subprocess.Popen]) -> None:
    """SIGTERM, then SIGKILL, to each rank's whole process group: children of ended ranks included."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        until = time.monotonic() + 2.0
        while any(process.poll() is None for process in processes) and time.monotonic() < until:
            time.sleep(POLL_S)


def _mapped_segments(processes: list[subprocess.Popen]) -> set[Path]:
    """Segments that a rank still maps: those with random names would otherwise outlive a SIGKILL."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line and not line.endswith("(deleted)"):
                    found.add(Path(line[line.index("/dev/shm/") :]))
    return found


def _remove_segments(segments: set[Path], run_id: str) -> None:
    for segment in [*segments, *Path("/dev/shm").glob(f"*{run_id}*")]:
        with contextlib.suppress(OSError):
            segment.unlink()


def _child(directory: Path, rank: int) -> None:
    # If the test process is killed outright, its ranks go with it (PR_SET_PDEATHSIG = 1).
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    stacks = open(directory / f"stacks_{rank}.txt", "w")  # noqa: SIM115  (open for the life of the process)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable()
    try:
        with open(directory / "payload.pkl", "rb") as file:
            module, name, paths = pickle.load(file)
            sys.path.extend(path for path in paths if path not in sys.path)
            args = pickle.load(file)  # only now: arguments may be of classes that the caller's path reaches
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        _write(_file(directory, "result", rank), pickle.dumps(function(rank, *args)))
        _leave(0)  # taking apart a process that holds a live gloo group may abort it
    except BaseException:
        _write(_file(directory, "error", rank), pickle.dumps((time.time(), traceback.format_exc())))
        traceback.print_exc()
        _leave(1)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write(file: Path, data: bytes) -> None:
    part = file.with_suffix(".part")
    part.write_bytes(data)
    part.rename(file)


if __name__ == "__main__":
    _child(Path(sys.argv[1]), int(sys.argv[2]))
