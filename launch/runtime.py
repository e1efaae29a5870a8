"""Everything around the loop that is neither model nor metric: run directory, lock, status, logs, stop requests.

    run_dir/  config.toml  status.json  lock  STOP (made by people)  logs/attempt_K/{rank_NNN.log, rank_NNN.json, ...}

Rank 0 alone touches what the job shares (lock, attempt number, STOP, clock); its findings are broadcast, so that all
ranks raise the same error and take the same decision. torch is imported only when there is a group to talk to.
Left out on purpose: restarting ranks, talking to the scheduler. A job that stops exits with a code.

    code  Exit           meaning
    0     FINISHED       all steps done
    1     FAILED         an exception; the traceback is in the rank's log and on the console
    2     BAD_INPUT      configuration or data refused before anything slow started
    75    STOPPED        asked to stop; a checkpoint was saved; start again to go on
    76    HANG           a phase was silent beyond its deadline; stacks of all ranks are in logs/attempt_K
    77    SECOND_SIGNAL  a second signal ended the rank at once; the last complete checkpoint is unharmed

torchrun answers a forwarded signal, or any rank's code but 0, with 1 of its own: status.json holds the truth.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from launch import snapshot
from launch.processes import (
    acquire_lock,
    clean_leftovers,
    identity,
    is_alive,
    lost_ranks,
    own_segments,
    parse_table,
    read_text,
    unlink_own_segments,
)

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
OUR_LOGGERS = ("launch", "parallel", "rollout", "reward", "trainer", "__main__")


class Exit(IntEnum):
    FINISHED = 0
    FAILED = 1
    BAD_INPUT = 2
    STOPPED = 75
    HANG = 76
    SECOND_SIGNAL = 77


def share(value: Any, group: Any = None) -> Any:
    """Rank 0's `value` on every rank of `group` (the host group of all ranks); `value` itself without a group."""
    if group is None:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def write_atomic(path: Path, text: str) -> None:
    """Readers see the old or the new text, never a part, whatever dies when."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with open(part, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


@dataclass
class RunDir:
    """One attempt of one job on a run directory. `with RunDir.open(...) as run:` records failures, frees the lock."""

    path: Path
    attempt: int
    """1 for the first launch."""
    rank: int
    world: int
    lock: dict[str, Any]
    """Rank 0's record in the lock file."""
    started: float = field(default_factory=time.time)
    """Unix seconds."""

    @classmethod
    def open(cls, path: str | Path, config_toml: str, rank: int = 0, world: int = 1, group: Any = None) -> RunDir:
        """Collective. ValueError, the same on all ranks, when the directory is unwritable or in use."""
        found: Any = _create(Path(path), config_toml) if rank == 0 else None
        found = share(found, group)
        if isinstance(found, str):
            raise ValueError(found)
        run = cls(Path(path), found[0], rank, world, found[1])
        _wait_visible(run.log_dir, rank)
        if int(os.environ.get("LOCAL_RANK", rank)) == 0:
            run.clean()
        run.note_process()
        return run

    def note_process(self) -> None:
        """Record pid, session and shared memory of this rank, for stack dumps and for the next start's cleaning."""
        record = identity() | {"segments": sorted(map(str, own_segments(os.getpid())))}
        write_atomic(self.log_file.with_suffix(".json"), json.dumps(record))

    def clean(self) -> None:
        """Remove processes and shared memory that dead ranks of the attempt before left on this host."""
        before = self.log_dir.with_name(f"attempt_{self.attempt - 1}")
        records = [parse_table(read_text(file)) for file in sorted(before.glob("rank_*.json"))]
        if removed := clean_leftovers(records):
            log.warning("removed what attempt %d left on this host: %s", self.attempt - 1, ", ".join(removed))

    @property
    def log_dir(self) -> Path:
        return self.path / "logs" / f"attempt_{self.attempt}"

    @property
    def log_file(self) -> Path:
        return self.log_dir / f"rank_{self.rank:03d}.log"

    def status(self, state: str, why: str = "", step: int = 0, total: int = 0) -> None:
        """Replace status.json. `state`: running, stopped, finished, failed. Of all ranks only 0 writes the first three.

        A status that cannot be written is a warning: it must not hide the error that it would tell.
        """
        if self.rank != 0 and state != "failed":
            return
        if state != "failed" and (self.log_dir / "failed").exists():
            return  # a rank failed while this one was still at work
        record = {"state": state, "why": why, "step": step, "total": total}
        record |= {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "attempt": self.attempt,
            "rank": self.rank,
            "world": self.world,
            "owner": self.lock,
        }
        try:
            if parse_table(read_text(self.path / "lock")).get("token") == self.lock["token"]:
                write_atomic(self.path / "status.json", json.dumps(record, indent=1) + "\n")
            else:
                log.warning("status %r not written: %s/lock is no longer ours", state, self.path)
        except OSError as error:
            log.warning("status %r not written: %s", state, error)

    def fail(self, why: str) -> None:
        """status.json says failed, by the words of the rank that called first; later calls change nothing."""
        before = read_status(self.path)
        try:
            (self.log_dir / "failed").touch(exist_ok=False)
        except OSError:
            return  # another rank was first, or the disk is gone
        self.status("failed", f"rank {self.rank}: {why}", before.get("step", 0), before.get("total", 0))

    def release(self) -> None:
        """Free the lock, if this is rank 0 and the lock is still its own."""
        path = self.path / "lock"
        if self.rank == 0 and self.lock["token"] in read_text(path):
            with contextlib.suppress(OSError):
                path.unlink()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: Any) -> None:
        if error is not None and not isinstance(error, SystemExit):
            lost = lost_ranks(self.log_dir) if "onnection" in str(error) else []
            self.fail(f"{f'ranks {lost} died without a word; ' if lost else ''}{type(error).__name__}: {error}")
        unlink_own_segments()
        self.release()


def read_status(path: str | Path) -> dict[str, Any]:
    """status.json as a table; a run that says running while its process is dead on this host has failed. {} if none."""
    status, me = parse_table(read_text(Path(path) / "status.json")), identity()
    owner = status.get("owner", {})
    if status.get("state") == "running" and me.keys() <= owner.keys() and is_alive(owner, me) is False:
        status |= {"state": "failed", "why": f"process {owner['pid']} died without a word"}
    return status


def _create(path: Path, config_toml: str) -> tuple[int, dict[str, Any]] | str:
    """Rank 0's part of RunDir.open: (attempt, lock record), or the error's text."""
    lock = None
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(path / "lock")
        numbers = [int(d.name[8:]) for d in (path / "logs").glob("attempt_*") if d.name[8:].isdigit()]
        attempt = max(numbers, default=0) + 1
        directory = path / "logs" / f"attempt_{attempt}"
        directory.mkdir()
        write_atomic(path / "config.toml", config_toml)
        write_atomic(directory / "config.toml", config_toml)
        snapshot.keep(directory)
        (path / "STOP").unlink(missing_ok=True)  # it stopped the attempt before this one
        return attempt, lock
    except ValueError as error:
        return str(error)
    except OSError as error:
        if lock is not None:
            with contextlib.suppress(OSError):
                (path / "lock").unlink()
        return f"run_dir {path}: cannot write there ({error.strerror}: {error.filename}); choose another run_dir"


def _wait_visible(directory: Path, rank: int, timeout_s: float = 30.0) -> None:
    """Shared filesystems show a new directory late to other nodes; a filesystem that is not shared never does."""
    until = time.monotonic() + timeout_s
    while not directory.is_dir():
        if time.monotonic() > until:
            raise ValueError(f"rank {rank} on {socket.gethostname()} does not see {directory}; run_dir must be shared")
        time.sleep(0.2)


class RankFormatter(logging.Formatter):
    """`12:03:55 +00:41:07 r037 INFO message`: wall clock, time since the job began, rank."""

    def __init__(self, rank: int, started: float) -> None:
        super().__init__()
        self.rank, self.started = rank, started

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (the name is logging's)
        minutes, seconds = divmod(max(0, int(record.created - self.started)), 60)
        elapsed = f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"{clock} +{elapsed} r{self.rank:03d} {record.levelname} {record.message}"


def setup_logging(run: RunDir, started: float | None = None) -> None:
    """This rank's log file (DEBUG of our modules, INFO of others), the console (rank 0: INFO of our modules; warnings
    of every rank), and stacks of all threads into the log file on SIGUSR2 and on crashes.
    """
    formatter = RankFormatter(run.rank, time.time() if started is None else started)
    stream = open(run.log_file, "a")  # open until the process ends, faulthandler writes there too
    to_file = logging.StreamHandler(stream)
    console = logging.StreamHandler(sys.stderr)
    least = logging.INFO if run.rank == 0 else logging.WARNING
    ours = tuple(f"{name}." for name in OUR_LOGGERS)
    console.addFilter(lambda r: r.levelno >= (least if f"{r.name}.".startswith(ours) else logging.WARNING))
    console.addFilter(lambda r: r.name != "py.warnings")  # the file has them
    root = logging.getLogger()
    for handler in (to_file, console):
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    faulthandler.enable(file=stream, all_threads=True)
    faulthandler.register(signal.SIGUSR2, file=stream, all_threads=True)


class StopRequest:
    """SIGTERM, SIGINT or SIGUSR1 on any rank, a STOP file, a time limit, or torchrun gone (killed, it cannot tell its
    ranks): one decision at the step boundary.

    Signals within `grace_s` of the first count as one, because Slurm and torchrun may both deliver it; a later one
    ends the rank at once with Exit.SECOND_SIGNAL.
    """

    def __init__(self, run: RunDir, time_limit_s: float = 0.0, started: float | None = None, grace_s: float = 2.0):
        """`started`: the job's start in Unix seconds, from which `time_limit_s` (0: none) counts."""
        self.run, self.grace_s, self.pid = run, grace_s, os.getpid()
        self.launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        start = time.time() if started is None else started
        ends = [float(os.environ.get("SLURM_JOB_END_TIME") or "inf")]
        self.deadline = min([*ends, start + time_limit_s] if time_limit_s > 0 else ends)
        self.signal, self.signal_at = 0, 0.0
        self.steps_s: deque[float] = deque(maxlen=20)
        self.saves_s: deque[float] = deque(maxlen=5)

    def install(self) -> None:
        """Take over the stop signals; main thread only."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: Any) -> None:
        if os.getpid() != self.pid:
            return  # a forked child inherits the handler, but must not speak for the rank
        now = time.monotonic()
        name = signal.Signals(number).name
        if not self.signal:
            self.signal, self.signal_at = number, now
            if self.run.rank == 0:  # os.write: a handler may interrupt the logging module while it holds its locks
                os.write(2, f"{name}: stopping after this step; once more to end at once\n".encode())
        elif now - self.signal_at > self.grace_s:
            self.run.fail(f"ended at once by a second signal, {name}")
            unlink_own_segments()
            self.run.release()
            os._exit(Exit.SECOND_SIGNAL)

    def observe(self, step_s: float | None = None, save_s: float | None = None) -> None:
        """Seconds of a finished step or checkpoint, from which the next one's length is guessed."""
        if step_s is not None:
            self.steps_s.append(step_s)
        if save_s is not None:
            self.saves_s.append(save_s)

    def decide(self, group: Any = None) -> str | None:
        """Why to stop now, the same on every rank, or None. Collective; call it before a step starts.

        Rank 0's clock and disk count. A step is not started when the longest recent step and save would end too late.
        """
        mine = self.run.world - self.run.rank  # of several ranks the first is named
        votes = [0, 0, 0, self.signal * self.run.world + mine - 1 if self.signal else 0]
        votes.append(mine if self.launcher not in (0, os.getppid()) else 0)
        if self.run.rank == 0:
            need_s = max(self.steps_s, default=0.0) + max(self.saves_s, default=0.0)
            left_s = self.deadline - time.time()
            if left_s <= need_s:
                votes[1:3] = [max(0, int(left_s)), int(need_s) + 1]
            votes[0] = int((self.run.path / "STOP").exists())
        stop_file, left, need, sent, orphan = _maximum(votes, group)
        if sent:
            number, rank = sent // self.run.world, self.run.world - 1 - sent % self.run.world
            return f"{signal.Signals(number).name} on rank {rank}"
        if orphan:
            return f"the launcher of rank {self.run.world - orphan} (torchrun) is gone"
        if stop_file:
            return f"found {self.run.path / 'STOP'}"
        return f"time limit: {left} s left, a step and its checkpoint take up to {need} s" if need else None


def _maximum(values: list[int], group: Any) -> list[int]:
    """Element-wise maximum over the ranks of `group`."""
    if group is None:
        return values
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor.tolist()
