"""Wide expert parallelism in the engine, with route capture on: real vLLM on 4 ranks, and the groups of 128.

Tokens must not depend on the layout; captured routes must be those of transformers' routers on the same tokens.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from launch.tiny_models import write_model
from parallel.grid import RolloutGrid
from tests.ranks import run_ranks
from tests.test_engine import World, requests_of

COUNTS = (0, 1, 5, 40)
LAYOUTS = [("2 x tp2", dict(tp=2)), ("dp4 ep4", dict(dp=4, expert_parallel=True))]
MORE = [
    ("2 x dp2 ep2", dict(dp=2, expert_parallel=True)),
    ("dp2 tp2 ep4", dict(dp=2, tp=2, expert_parallel=True)),
    ("tp4 ep4", dict(tp=4, expert_parallel=True)),
    ("tp4", dict(tp=4)),
]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    sizes = dict(initializer_range=0.2, num_experts=8, num_hidden_layers=3, num_key_value_heads=4)
    return str(write_model(tmp_path_factory.mktemp("moe") / "model", "qwen3-moe", **sizes))


def generate(world, engine, count):
    """(prompt, sample) -> (ids, routes) that every rank's engine returned, of the whole world."""
    import torch.distributed as dist

    own = {s.key: (np.concatenate([s.prompt, s.response]), s.routes) for s in engine.generate(requests_of(count))}
    parts = [None] * world.size
    dist.all_gather_object(parts, own)
    assert sum(map(len, parts)) == count and engine._capture.rows == {}
    return {key: value for part in parts for key, value in part.items()}


def visit(rank, path, layouts):
    """name -> generations with 0, 1, few and many requests, other weights in between, and many again."""
    world, seen = World(), {}
    for name, rollout in layouts:
        engine = world.engine(path, routing_replay="R3", **rollout)
        world.write(engine, path)
        rounds = [generate(world, engine, count) for count in COUNTS]
        world.write(engine, path, scale=1.5)
        generate(world, engine, 3)
        world.write(engine, path)
        seen[name] = [*rounds, generate(world, engine, COUNTS[-1])]
        engine.close()
    return seen


def native_routes(path, sequences):
    """Experts that transformers' routers choose, [tokens - 1, layers, k] per sequence."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found = []
    for ids in sequences:
        logits = model(torch.from_numpy(ids.astype(np.int64))[None], output_router_logits=True).router_logits
        found.append(torch.stack([layer.topk(2, -1).indices for layer in logits], 1).numpy()[:-1])
    return found


def check(path, layouts):
    seen = run_ranks(4, visit, path, layouts, timeout_s=280)
    for name, _ in layouts:
        rounds = seen[0][name]
        assert [len(part) for part in rounds] == [*COUNTS, COUNTS[-1]]
        many, again = rounds[-2:]
        for key, (ids, routes) in many.items():
            assert np.array_equal(again[key][0], ids) and np.array_equal(again[key][1], routes)
            assert routes.dtype == np.uint8 and routes.shape == (len(ids) - 1, 3, 2)
        expected = native_routes(path, [ids for ids, _ in many.values()])
        same = [(np.sort(r) == np.sort(e)).all(-1).mean() for (_, r), e in zip(many.values(), expected, strict=True)]
        print(f"{name}: {len(same)} samples, {np.mean(same):.2%} of routes as in transformers")
        assert np.mean(same) == 1.0
        first = seen[0][layouts[0][0]][-1]
        assert all(np.array_equal(ids, first[key][0]) for key, (ids, _) in many.items())


@pytest.mark.slow
def test_wide_layouts(moe):
    check(moe, LAYOUTS)


@pytest.mark.full
def test_more_wide_layouts(moe):
    check(moe, MORE)


# 128 ranks


def vllm_groups(world, dp, tp):
    """axis -> [group of rank r for every r], by vLLM's own initialiser on fake process groups."""
    import torch.distributed as dist
    import vllm.config
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state

    names = {"tp": "_TP", "dp": "_DP", "ep": "_EP"}
    settings = SimpleNamespace(data_parallel_size=dp, enable_elastic_ep=False, enable_eplb=False, use_all2all=True)
    config = SimpleNamespace(parallel_config=settings, model_config=None, engram_config=None)
    vllm.config.get_current_vllm_config = lambda: config
    found = {axis: [] for axis in names}
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        parallel_state._WORLD = SimpleNamespace(local_rank=rank % 8, device_group=dist.group.WORLD)

        def group(ranks, *args, rank=rank, **kwargs):
            held = next(held for held in ranks if rank in held)
            return SimpleNamespace(ranks=held, rank_in_group=held.index(rank), world_size=len(held))

        parallel_state.init_model_parallel_group = group
        parallel_state.initialize_model_parallel(tp, backend="fake")
        for axis, name in names.items():
            found[axis].append(getattr(parallel_state, name).ranks)
        for name in [n for n, v in vars(parallel_state).items() if n.startswith("_") and n[1:].isupper()]:
            setattr(parallel_state, name, None)
        dist.destroy_process_group()
    return found


GRIDS = [(128, 8, 8), (128, 1, 16), (24, 3, 8), (16, 4, 2)]


def groups_of_grids(rank):
    return [vllm_groups(*grid) for grid in GRIDS]


def test_groups_of_all_ranks_are_vllms():
    """2 x (DP8 x TP8, EP64) on 128 ranks first."""
    for (world, dp, tp), found in zip(GRIDS, run_ranks(1, groups_of_grids)[0], strict=True):
        grid = RolloutGrid(world, tp, dp, True)
        for axis, ours in (("tp", "tp"), ("dp", "dp"), ("ep", "replica")):
            by_rank = {rank: held for held in grid.groups(ours) for rank in held}
            assert [by_rank[rank] for rank in range(world)] == found[axis], (world, dp, tp, axis)
        if (dp, tp) == (8, 8):
            assert found["ep"][127] == list(range(64, 128)) and found["dp"][127] == list(range(71, 128, 8))
