"""The hand-out: each request exactly once, close to the lower bound, replicas that step along, progress lines.

The engine here only counts steps; tests/test_engine.py drives the same loop with vLLM.
"""

import contextlib
import os
import pty
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.batch import Request, Sample
from rollout.lengths import LengthHistory
from rollout.schedule import Dealt, Progress, Queue, hand_out, longest_first
from tests.jobs import ROOT

CAP = 4096


class Counter:
    """The shared counter; one process, so no store."""

    def __init__(self):
        self.value = 0

    def advance(self, count):
        self.value += count
        return self.value - count


class CountingEngine:
    """A request of n tokens runs for n steps; nothing else."""

    def __init__(self, slots, lengths):
        self.slots, self.lengths = slots, lengths
        self.steps, self.dummy_steps, self.flying, self.ends = 0, 0, 0, defaultdict(list)

    def add(self, request):
        self.flying += 1
        assert self.flying <= self.slots
        self.ends[self.steps + self.lengths[request.prompt_id, request.sample_id]].append(request)

    def busy(self):
        return self.flying > 0

    def step(self):
        self.dummy_steps += not self.flying
        self.steps += 1
        done = self.ends.pop(self.steps, [])
        self.flying -= len(done)
        empty = np.empty(0)
        return [Sample(r.prompt_id, r.sample_id, empty, empty, empty, "stop") for r in done]


def requests_of(lengths, expected):
    prompts, samples = lengths.shape
    return longest_first(
        [
            Request(p, s, [1], seed=0, max_tokens=CAP, expected_tokens=float(expected[p, s]))
            for p in range(prompts)
            for s in range(samples)
        ]
    )


def feeds(schedule, total, workers, slots):
    counter = Counter()
    if schedule == "static":
        return [Dealt(total, workers, w) for w in range(workers)]
    return [Queue(total, workers, w, slots, counter.advance) for w in range(workers)]


def run(engines, requests, schedule):
    """All workers in lock-step; keys of what each one sampled."""
    loops = [
        hand_out(engine, requests, feed)
        for engine, feed in zip(engines, feeds(schedule, len(requests), len(engines), engines[0].slots), strict=True)
    ]
    taken = [[] for _ in loops]
    alive = set(range(len(loops)))
    while alive:
        for worker in sorted(alive):
            finished = next(loops[worker], None)
            if finished is None:
                alive.remove(worker)
            else:
                taken[worker] += [sample.key for sample in finished]
    return taken


def draw(rng, difficulty, share):
    """Lengths [prompts, samples]: log-normal with sigma 1, of whose variance prompts explain `share`."""
    noise = rng.normal(size=(len(difficulty), 16))
    z = share**0.5 * difficulty[:, None] + (1 - share) ** 0.5 * noise
    return np.clip(400 * np.exp(z), 1, CAP).astype(int)


def makespan(lengths, expected, schedule, workers=4, slots=16):
    """Steps until the last replica ends / max(total work / slots, longest sample)."""
    requests = requests_of(lengths, expected)
    engines = [CountingEngine(slots, lengths) for _ in range(workers)]
    taken = run(engines, requests, schedule)
    assert sorted(key for part in taken for key in part) == sorted((r.prompt_id, r.sample_id) for r in requests)
    return max(e.steps for e in engines) / max(lengths.sum() / (workers * slots), lengths.max())


def learned(history, lengths):
    """Expected lengths [prompts, samples] of the history; then it sees the lengths, as the collector does."""
    rows = np.repeat(np.arange(len(lengths)), lengths.shape[1])
    expected = history.expected(rows).reshape(lengths.shape)
    history.observe(rows, lengths.ravel())
    return expected


def epoch(seed, share, earlier=1, drift=0.0):
    """(queue, static) of an epoch after `earlier` ones: 64 prompts x 16 samples, expected lengths as the trainer's.

    `drift`: how far the policy moves each prompt's log length between epochs.
    """
    rng, history = np.random.default_rng(seed), LengthHistory(64)
    difficulty = rng.normal(size=64)
    for _ in range(earlier):
        learned(history, draw(rng, difficulty, share))
        difficulty += drift * rng.normal(size=64)
    lengths = draw(rng, difficulty, share)
    expected = learned(history, lengths)
    return [makespan(lengths, expected, schedule) for schedule in ("queue", "static")]


def steps_over_bound(name, seeds=20, **world):
    """(queue [seeds], static [seeds]), printed."""
    queue, static = np.array([epoch(seed, **world) for seed in range(seeds)]).T
    print(f"{name}: queue {queue.mean():.3f} (worst {queue.max():.3f}), "
          f"static split {static.mean():.3f} (worst {static.max():.3f})")  # fmt: skip
    return queue, static


def test_queue_is_within_five_percent_of_the_lower_bound():
    """Each prompt was sampled in an earlier epoch, as in every epoch but the first; prompts explain 4/5 of the variance
    of log length. In the mean of 20 seeds; one seed in twenty has a far too long sample of a short prompt.
    """
    queue, static = steps_over_bound("second epoch", share=0.8)
    assert queue.mean() <= 1.05 and np.quantile(queue, 0.9) <= 1.05 and queue.mean() < static.mean()


@pytest.mark.full
def test_what_the_queue_reaches_with_less_foresight():
    """Without any, all orders of the queue have one distribution of the steps: no hand-out without preemption is nearer
    to the bound than about 1.27 in the mean then. That is the first epoch, and lengths that follow no pattern.
    """
    for earlier, drift in ((1, 0.0), (1, 0.2), (3, 0.2)):
        name = f"prompts explain 3/4, {earlier} earlier epochs, drift {drift}"
        queue, static = steps_over_bound(name, share=0.75, earlier=earlier, drift=drift)
        assert queue.mean() <= 1.05 and queue.mean() < static.mean()
    half, _ = steps_over_bound("prompts explain half", share=0.5)
    for name, world in (("first epoch", dict(share=0.8, earlier=0)), ("no pattern", dict(share=0.0))):
        queue, static = steps_over_bound(name, **world)
        assert half.mean() < queue.mean() < static.mean() and queue.mean() > 1.2


def test_queue_with_lengths_known_within_a_factor():
    """Each sample's length known within a factor of about 1.6 (sigma 0.5): every seed is within the bound."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(20):
        lengths = draw(rng, rng.normal(size=64), 0.0)
        found.append(makespan(lengths, lengths * rng.lognormal(0, 0.5, lengths.shape), "queue"))
    assert max(found) <= 1.05


def test_history_of_lengths_in_closed_form():
    """Posterior of a normal with known variances; unknown rows early, long rows early; old samples fade."""
    history = LengthHistory(4)
    assert not history.expected([0, 1, 2, 3]).any()
    history.observe([0, 1, 0, 1], [100, 1000, 100, 1000])
    prior = (np.log(100) + np.log(1000)) / 2
    mean = (prior / 0.75 + 2 * np.log(100) / 0.25) / (1 / 0.75 + 2 / 0.25)
    assert np.allclose(history.expected([0]), np.exp(mean + (1 / 0.75 + 2 / 0.25) ** -0.5))
    short, long, unknown, _ = history.expected([0, 1, 2, 3])
    assert short < unknown < long
    for _ in range(20):
        history.observe([0, 0], [2000, 2000])
    assert history.expected([0]) > history.expected([1])
    assert history.weight[0] < 4 and history.weight[1] == 2


def test_history_is_saved_and_belongs_to_its_rows():
    rng = np.random.default_rng(3)
    rows, tokens = rng.integers(0, 8, 64), rng.integers(1, CAP, 64)
    one, two, other = LengthHistory(8), LengthHistory(8), LengthHistory(9)
    one.observe(rows, tokens)
    two.load(one.state())
    other.load(one.state())
    assert np.array_equal(one.expected(range(8)), two.expected(range(8))) and not other.weight.any()


@given(
    st.sampled_from(["queue", "static"]),
    st.integers(0, 40),
    st.integers(1, 5),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_each_request_is_handed_out_once(schedule, total, workers, slots, random):
    """Any pace of the workers: whoever comes next has any number of free slots."""
    parts = feeds(schedule, total, workers, slots)
    taken, idle = [], set()
    while len(idle) < workers:
        worker = random.randrange(workers)
        room = random.randint(1, slots)
        got = list(parts[worker].take(slots if isinstance(parts[worker], Queue) and parts[worker]._first else room))
        taken += got
        if not got:
            idle.add(worker)
    assert sorted(taken) == list(range(total))


def test_first_worker_does_not_take_everything():
    parts = feeds("queue", 8, 4, 256)
    assert [list(part.take(256)) for part in parts] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [list(part.take(256)) for part in parts] == [[]] * 4


class ReplicaEngine(CountingEngine):
    """A DP rank: `busy` is a collective over the replica, a barrier among threads here."""

    def __init__(self, slots, lengths, replica, barrier):
        super().__init__(slots, lengths)
        self.replica, self.barrier = replica, barrier
        replica.append(self)

    def busy(self):
        self.barrier.wait(10)
        answer = any(engine.flying for engine in self.replica)
        self.barrier.wait(10)
        return answer


@pytest.mark.parametrize("total", [0, 1, 3, 7])
def test_idle_ranks_of_a_replica_step_along(total):
    lengths = np.arange(3, 3 + total).reshape(total, 1)
    replica, barrier = [], Barrier(3)
    for _ in range(3):
        ReplicaEngine(4, lengths, replica, barrier)
    requests = requests_of(lengths, lengths)
    with ThreadPoolExecutor(3) as pool:
        loops = zip(replica, feeds("queue", total, 3, 4), strict=True)
        taken = list(pool.map(lambda pair: sum(hand_out(pair[0], requests, pair[1]), []), loops))
    assert sum(map(len, taken)) == total
    assert {engine.steps for engine in replica} == {lengths.max() if total else 0}
    assert all(engine.dummy_steps for engine in replica[1:]) == (total > 0)


def test_longest_first_ignores_the_given_order():
    lengths = np.array([[5, 9], [9, 1]])
    requests = requests_of(lengths, lengths)
    assert [(r.prompt_id, r.sample_id) for r in requests] == [(0, 1), (1, 0), (0, 0), (1, 1)]
    assert longest_first(requests[::-1]) == requests


def test_progress_prints_a_line_every_ten_percent(capsys):
    now = [0.0]
    with Progress(100, Counter().advance, show=True, clock=lambda: now[0]) as progress:
        counts = []
        progress.publish = lambda n: counts.append(n) or sum(counts)
        for _ in range(50):
            now[0] += 0.5
            progress.count(2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and lines[0] == "generate: 12/100 samples, 3 s, 22 s left"
    assert len(counts) == 25  # once a second, not once a step


TERMINAL = """
from rollout.schedule import Progress
now, done = iter(range(1000)), []
with Progress(100, lambda n: done.append(n) or sum(done), show=True, clock=lambda: next(now)) as progress:
    for _ in range(10):
        progress.count(10)
"""


def test_on_a_terminal_progress_is_a_bar():
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", TERMINAL], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end was closed
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert process.wait(30) == 0, shown
    assert "━".encode() in shown and b"generate" in shown and b"100%" in shown and b"samples" not in shown


def test_short_generations_neither_print_nor_communicate(capsys):
    def never(count):
        raise AssertionError("communicated")

    with Progress(4, never, show=True) as progress:
        progress.count(4)
    assert capsys.readouterr().out == ""
