"""Who samples which request: the hand-out of a step's requests to workers, and the loop that drives an engine.

A *worker* is one (replica, dp) pair: tp ranks with one scheduler, in lock-step. All workers know all requests in the
same order, longest expected first. The first slots are dealt like cards, without communication; after that a worker
takes the next requests from a shared counter whenever slots are free ("queue"), or everything is dealt ("static").
Pure: the engine, the counter and the clock are passed in, so that a counting fake can stand for the engine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollout.batch import Request, Sample


class StepEngine(Protocol):
    """What the loop needs of an engine; each call is made alike on all ranks of a worker."""

    slots: int
    """Requests that can run at the same time."""

    def add(self, request: Request) -> None: ...

    def busy(self) -> bool:
        """Whether this worker, or another one of its replica, has unfinished requests. Collective over the replica."""

    def step(self) -> list[Sample]:
        """One forward pass; the samples that it finished."""


def longest_first(requests: Sequence[Request]) -> list[Request]:
    """Hand-out order: expected length, then token limit, then ids; a pure function of the set of requests."""
    return sorted(requests, key=lambda r: (-r.expected_tokens, -r.max_tokens, r.prompt_id, r.sample_id))


@dataclass
class Dealt:
    """schedule = "static": worker w has requests w, w + workers, w + 2 * workers, ..."""

    total: int
    workers: int
    worker: int
    position: int = 0

    def take(self, room: int) -> range:
        """Indices of the next requests, at most `room`."""
        mine = range(self.worker, self.total, self.workers)[self.position : self.position + room]
        self.position += len(mine)
        return mine


@dataclass
class Queue:
    """schedule = "queue": the first slots are dealt, the rest is taken from a counter when slots are free.

    The deal is at most an equal share: else the first worker with many slots would take everything. `advance(n)` adds
    n to the shared counter and returns its value before; it is the only call that communicates.
    """

    total: int
    workers: int
    worker: int
    slots: int
    advance: Callable[[int], int]
    exhausted: bool = False
    _first: Dealt | None = field(init=False)

    def __post_init__(self) -> None:
        self.dealt = min(self.total, self.workers * min(self.slots, -(-self.total // self.workers)))
        self._first = Dealt(self.dealt, self.workers, self.worker)

    def take(self, room: int) -> range:
        if self._first is not None:
            first, self._first = self._first, None
            self.exhausted = self.dealt == self.total
            return first.take(room)
        if self.exhausted or room == 0:
            return range(0)
        start = self.dealt + self.advance(room)
        self.exhausted = start + room >= self.total
        return range(min(start, self.total), min(start + room, self.total))


def hand_out(engine: StepEngine, requests: Sequence[Request], feed: Dealt | Queue) -> Iterator[list[Sample]]:
    """Drive one worker until its replica is idle and the feed is empty; yields what each engine step finished.

    A worker without requests steps along as long as its replica is busy.
    """
    flying = 0
    while True:
        for index in feed.take(engine.slots - flying):
            engine.add(requests[index])
            flying += 1
        if not engine.busy():  # then nobody in the replica has a request, so everybody saw the feed empty
            return
        finished = engine.step()
        flying -= len(finished)
        yield finished


class Progress:
    """Finished samples of all workers: a bar on a terminal, a line every 10 % elsewhere; nothing within a second.

    `publish(n)` adds n to a count shared by all workers and returns it; it is called at most once a second, so short
    generations never communicate. Only the rank with show = True prints.
    """

    def __init__(
        self,
        total: int,
        publish: Callable[[int], int],
        show: bool,
        label: str = "generate",
        clock: Callable[[], float] = time.monotonic,
        every_s: float = 1.0,
    ):
        self.total, self.publish, self.show, self.label = total, publish, show, label
        self.clock, self.every_s = clock, every_s
        self.start = self.last = clock()
        self.unpublished, self.tenth = 0, 0
        self.bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def count(self, finished: int) -> None:
        self.unpublished += finished
        now = self.clock()
        if now - self.last < self.every_s:
            return
        self.last = now
        done, self.unpublished = self.publish(self.unpublished), 0
        if self.show:
            self._draw(done, now - self.start)

    def _draw(self, done: int, elapsed_s: float) -> None:
        if sys.stdout.isatty():
            self._advance_bar(done)
        elif done * 10 // self.total > self.tenth:
            self.tenth = done * 10 // self.total
            left_s = elapsed_s * (self.total - done) / done
            print(f"{self.label}: {done}/{self.total} samples, {elapsed_s:.0f} s, {left_s:.0f} s left", flush=True)

    def _advance_bar(self, done: int) -> None:
        if self.bar is None:
            from rich.progress import Progress as Bar

            self.bar = Bar(transient=True)
            self.task = self.bar.add_task(self.label, total=self.total)
            self.bar.start()
        self.bar.update(self.task, completed=done)
