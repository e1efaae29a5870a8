"""The hand-out: each request exactly once, close to the lower bound, replicas that step along, progress lines.

The engine here only counts steps; tests/test_engine.py drives the same loop with vLLM.
"""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.batch import Request, Sample
from rollout.schedule import Dealt, Progress, Queue, hand_out, longest_first

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


def makespan(seed, schedule, noise, workers=4, slots=16):
    """Steps until the last replica ends / max(total work / slots, longest sample)."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(400), 1, (64, 16)), 1, CAP).astype(int)
    requests = requests_of(lengths, lengths * rng.lognormal(0, noise, lengths.shape))
    engines = [CountingEngine(slots, lengths) for _ in range(workers)]
    taken = run(engines, requests, schedule)
    assert sorted(key for part in taken for key in part) == sorted((r.prompt_id, r.sample_id) for r in requests)
    return max(e.steps for e in engines) / max(lengths.sum() / (workers * slots), lengths.max())


def test_queue_is_within_five_percent_of_the_lower_bound():
    """Log-normal lengths, known within a factor of about 1.6 (sigma 0.5), as from an earlier epoch."""
    queue, static = (np.array([makespan(seed, s, 0.5) for seed in range(20)]) for s in ("queue", "static"))
    print(f"steps / lower bound: queue {queue.max():.3f} (mean {queue.mean():.3f}), "
          f"static {static.max():.3f} (mean {static.mean():.3f})")  # fmt: skip
    assert queue.max() <= 1.05
    assert queue.mean() < static.mean()


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


def test_short_generations_neither_print_nor_communicate(capsys):
    def never(count):
        raise AssertionError("communicated")

    with Progress(4, never, show=True) as progress:
        progress.count(4)
    assert capsys.readouterr().out == ""
