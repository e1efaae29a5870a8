"""Worker processes that score samples with a hard deadline and a memory limit per sample.

Workers are fresh interpreters (`python -m reward.worker`), not forks: they neither inherit an engine's threads nor run
the parent's __main__ again, and get no LD_PRELOAD (vLLM's CPU build preloads its allocator). One thread watches them
all. A chunk of samples goes to a worker at a time and a line comes back per sample, so the one that hangs is known:

    no line within timeout_s    worker killed, sample scored 0 ("timeout"), rest of the chunk to a fresh worker
    memory limit reached        sample scored 0 ("memory"), worker replaced; also when many samples together filled it
    worker gone                 sample tried once more on a fresh worker, then scored 0 ("crash")

A call lasts at most about (number of bad samples / workers) * timeout_s longer than the good ones need.
Workers end with the parent, however it ends: they die when the pipe on their standard input closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict

from launch.config import RewardConfig
from reward.rules import Item, Score

START_S = 120.0
CHUNK = 32


class Worker:
    """A process, its channel, and the samples it has not answered yet."""

    def __init__(self, config: RewardConfig, preload: Sequence[str]):
        self.channel, theirs = socket.socketpair()
        lifeline, self.lifeline = os.pipe()
        options = {"socket": theirs.fileno(), "config": asdict(config), "preload": list(preload)}
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        environment["PYTHONPATH"] = os.pathsep.join([root, *(path for path in sys.path if path)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "reward.worker", json.dumps(options)],
            stdin=lifeline,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,  # Ctrl-C on the terminal is the parent's business
        )
        theirs.close()
        os.close(lifeline)
        self.ready = self.full = False
        self.pending: deque[int] = deque()
        self.deadline = time.monotonic() + START_S
        self.buffer = b""

    def send(self, indices: Sequence[int], items: Sequence[Item], timeout_s: float) -> None:
        self.pending.extend(indices)
        self.deadline = time.monotonic() + timeout_s
        self.channel.settimeout(timeout_s)
        try:
            self.channel.sendall(pickle.dumps([items[i] for i in indices]))
        except OSError:
            pass  # dead or stuck: the reading side finds out and hands the samples on

    def receive(self) -> tuple[list[object], bool]:
        """Messages that have arrived, and whether the worker is gone."""
        try:
            data = self.channel.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines], not data

    def end(self) -> None:
        """Kill it with what its reward function may have started: it leads a session of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()
        os.close(self.lifeline)


class Pool:
    """Scores samples in `config.workers` processes; started at once so that a broken reward function is found now."""

    def __init__(self, config: RewardConfig, preload: Sequence[str] = (), workers: int = 2):
        self.config, self.preload = config, preload
        self.workers = [Worker(config, preload) for _ in range(config.workers or workers)]
        self.failed_starts = 0
        self._serve(deque(), [], {}, set())

    def score(self, items: Sequence[Item]) -> list[Score]:
        """Scores in the order of the items."""
        size = min(CHUNK, -(-len(items) // (4 * len(self.workers))) or 1)
        todo = deque(list(range(start, min(start + size, len(items)))) for start in range(0, len(items), size))
        scores: dict[int, Score] = {}
        self._serve(todo, items, scores, set())
        return [scores[i] for i in range(len(items))]

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers = []

    def _serve(
        self, todo: deque[list[int]], items: Sequence[Item], scores: dict[int, Score], retried: set[int]
    ) -> None:
        """Until nothing is left: hand out, wait for a line or a deadline, replace what died."""
        while todo or any(worker.pending or not worker.ready for worker in self.workers):
            for worker in self.workers:
                if todo and worker.ready and not worker.pending:
                    worker.send(todo.popleft(), items, self.config.timeout_s)
            busy = {worker.channel: worker for worker in self.workers if worker.pending or not worker.ready}
            for worker in [busy[channel] for channel in _readable(busy, min(w.deadline for w in busy.values()))]:
                messages, gone = worker.receive()
                for message in messages:
                    self._accept(worker, message, scores)
                if gone or worker.full:
                    self._replace(worker, "full" if worker.full else "crash", todo, scores, retried)
            for worker in [worker for worker in self.workers if worker.pending or not worker.ready]:
                if time.monotonic() > worker.deadline:
                    self._replace(worker, "timeout", todo, scores, retried)

    def _accept(self, worker: Worker, message: object, scores: dict[int, Score]) -> None:
        if message == "full":
            worker.full = True
        elif message == "ready":
            worker.ready, self.failed_starts = True, 0
        elif isinstance(message, dict):
            self.close()
            raise ValueError(f"the reward function cannot be loaded:\n{message['error']}")
        else:
            assert isinstance(message, list)
            scores[worker.pending.popleft()] = Score(*message)
        worker.deadline = time.monotonic() + self.config.timeout_s

    def _replace(
        self, worker: Worker, reason: str, todo: deque[list[int]], scores: dict[int, Score], retried: set[int]
    ) -> None:
        """A fresh worker for one that died or was late; the sample it was at is scored 0 or tried again.

        One that says itself that it is full was at none.
        """
        worker.end()
        self.failed_starts += not worker.ready
        if self.failed_starts > 3:
            self.workers.remove(worker)
            self.close()
            raise ValueError(f"reward workers do not start ({reason}); run python -m reward.worker to see why")
        rest = list(worker.pending)
        if rest and reason != "full" and (reason == "timeout" or rest[0] in retried):
            scores[rest.pop(0)] = Score(0.0, {}, reason)
        elif rest and reason != "full":
            retried.add(rest[0])
        if rest:
            todo.appendleft(rest)
        self.workers[self.workers.index(worker)] = Worker(self.config, self.preload)


def _readable(channels: dict[socket.socket, Worker], deadline: float) -> list[socket.socket]:
    """Channels with data (or an end of file), at the latest at the deadline (monotonic seconds)."""
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            selector.register(channel, selectors.EVENT_READ)
        ready = selector.select(max(0.0, deadline - time.monotonic()) + 0.001)
        return [key.fileobj for key, _ in ready]  # type: ignore[misc]
