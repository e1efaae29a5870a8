"""Samples: seeds, canonical order, the flat encoding, and the exchange of samples and routes over real gloo ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.batch import Sample, canonical, decode, encode, fetch_routes, gather, request_seed
from tests.ranks import run_ranks

LAYERS, TOPK = 3, 2
HELD = [[0, 1], [2], [0, 2]]
"""Layers of each of three ranks."""


def sample(prompt_id, sample_id, prompt_tokens=3, response_tokens=4, routes=False):
    rng = np.random.default_rng([prompt_id, sample_id])
    rows = prompt_tokens + response_tokens - 1
    return Sample(
        prompt_id,
        sample_id,
        prompt=rng.integers(0, 2**31 - 1, prompt_tokens).astype(np.int32),
        response=rng.integers(0, 2**31 - 1, response_tokens).astype(np.int32),
        logprobs=rng.normal(size=response_tokens).astype(np.float32),
        finish="stop" if sample_id % 2 else "length",
        score=float(rng.normal()),
        routes=rng.integers(0, 256, (rows, LAYERS, TOPK)).astype(np.uint8) if routes else None,
    )


def assert_equal(a, b):
    assert (a.key, a.finish, a.score) == (b.key, b.finish, b.score)
    for name in ("prompt", "response", "logprobs"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and np.array_equal(x, y)


def test_request_seed_is_fixed_by_its_counters():
    assert request_seed(1, 2, 3, 4) == request_seed(1, 2, 3, 4) == 7597657864365363701
    seeds = {request_seed(a, b, c, d) for a in range(6) for b in range(6) for c in range(6) for d in range(6)}
    assert len(seeds) == 6**4 and all(0 <= s < 2**63 for s in seeds)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 9), st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_encoding_is_lossless(shapes):
    samples = [sample(*shape) for shape in shapes]
    back = decode(np.concatenate([encode(samples), np.zeros(8, np.uint8)]))
    assert len(back) == len(samples)
    for a, b in zip(samples, back, strict=True):
        assert_equal(a, b)


def test_canonical_order_and_double_samples():
    samples = [sample(2, 0), sample(1, 1), sample(1, 0)]
    assert [s.key for s in canonical(samples)] == [(1, 0), (1, 1), (2, 0)]
    with pytest.raises(ValueError, match="prompt 1 sample 1 was sampled twice"):
        canonical([*samples, sample(1, 1)])


def exchange(rank, world):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    everything = [sample(p, s, 1 + p, s, routes=True) for p in range(5) for s in range(4)]
    mine = [s for i, s in enumerate(everything) if i % 7 < 4 and i % (world - 1) == rank]  # the last rank has none
    mine += [s for i, s in enumerate(everything) if i % 7 >= 4] if rank == 0 else []
    batch = gather(mine[::-1])
    wanted = [[i for i in range(len(batch)) if i % world == r] for r in range(world)]
    routes = fetch_routes(batch, wanted, HELD, TOPK, np.uint8)
    dist.destroy_process_group()
    return batch, routes


@pytest.mark.slow
def test_every_rank_gets_the_batch_and_the_routes_it_wants():
    world = 3
    expected = [sample(p, s, 1 + p, s, routes=True) for p in range(5) for s in range(4)]
    for rank, (batch, routes) in enumerate(run_ranks(world, exchange, world)):
        assert len(batch) == len(expected)
        for a, b in zip(batch, expected, strict=True):
            assert_equal(a, b)
            assert (a.routes is not None) == (a.owner == rank)
        layers = HELD[rank]
        assert sorted(routes) == [i for i in range(len(batch)) if i % world == rank]
        for i, array in routes.items():
            assert array.dtype == np.uint8 and np.array_equal(array, expected[i].routes[:, layers])
