"""Rank grids against Megatron's RankGenerator and vLLM's reshape."""

from __future__ import annotations

import random

import numpy as np
import pytest

from parallel.grid import RolloutGrid, TrainGrid, stage_layers

NAMES = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp", "tp-pp": "tp-pp", "dp-cp": "dp-cp", "tp-cp": "tp-cp"}
EXPERT_NAMES = {"etp": "tp", "ep": "ep", "edp": "dp", "pp": "pp", "etp-ep": "tp-ep", "etp-ep-pp": "tp-ep-pp"}


def random_grid(rng: random.Random) -> TrainGrid:
    order = rng.choice(["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
    tp, cp, pp = (rng.choice([1, 2, 3, 4]) for _ in range(3))
    ep, etp = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 4])
    if order.endswith("dp") and pp > 1:
        ep, etp = rng.choice([(tp * cp, 1), (cp, tp)])
    world = int(np.lcm(tp * cp * pp, etp * ep * pp)) * rng.choice([1, 2, 4])
    return TrainGrid(world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, order=order)


def check_megatron(grid: TrainGrid) -> None:
    """As megatron.core.parallel_state.initialize_model_parallel makes its two generators."""
    from megatron.core.parallel_state import RankGenerator

    dense = RankGenerator(tp=grid.tp, ep=1, dp=grid.dp, pp=grid.pp, cp=grid.cp, order=grid.order)
    expert = RankGenerator(tp=grid.etp, ep=grid.ep, dp=grid.edp, pp=grid.pp, cp=1, order=grid.order)
    for names, generator in ((NAMES, dense), (EXPERT_NAMES, expert)):
        for ours, theirs in names.items():
            want = sorted(map(sorted, generator.get_ranks(theirs)))
            assert sorted(grid.groups(ours)) == want, (grid, ours)


@pytest.mark.parametrize("seed", range(60))
def test_random_grids_are_megatrons(seed):
    check_megatron(random_grid(random.Random(seed)))


@pytest.mark.parametrize(
    "grid",
    [
        TrainGrid(128, tp=4, pp=8, ep=4, etp=1),
        TrainGrid(128, tp=4, pp=8, ep=4, etp=4),
        TrainGrid(1024, tp=4, pp=8, ep=4, etp=1),
        TrainGrid(128, tp=4, pp=8, ep=4, etp=1, order="tp-cp-ep-pp-dp"),
        TrainGrid(16, tp=8, cp=2, ep=8, etp=1),
    ],
)
def test_reference_grids_are_megatrons(grid):
    check_megatron(grid)


def test_expert_group_of_the_reference_job_is_its_tensor_group():
    grid = TrainGrid(128, tp=4, pp=8, ep=4, etp=1)
    assert grid.groups("ep")[0] == [0, 1, 2, 3] and grid.groups("edp")[0] == [0, 4, 8, 12]
    assert TrainGrid(128, tp=4, pp=8, ep=4, etp=4).groups("ep")[0] == [0, 4, 8, 12]


@pytest.mark.parametrize(
    ("world", "tp", "dp"), [(1, 1, 1), (8, 2, 2), (8, 8, 1), (128, 8, 8), (128, 16, 1), (12, 3, 2)]
)
def test_rollout_grid_is_vllms_reshape(world, tp, dp):
    """vLLM: all_ranks.reshape(external dp, dp, pp, pcp, tp), tp groups along the last axis, experts over dp x tp."""
    ranks = np.arange(world).reshape(-1, dp, 1, 1, tp)
    grid = RolloutGrid(world, tp, dp, True)
    assert grid.groups("tp") == ranks.reshape(-1, tp).tolist()
    assert sorted(grid.groups("dp")) == sorted(ranks.swapaxes(1, 4).reshape(-1, dp).tolist())
    assert grid.groups("replica") == ranks.reshape(-1, dp * tp).tolist()
    for rank in range(world):
        replica, d, t = grid.coord(rank)
        assert ranks[replica, d, 0, 0, t] == rank and rank in grid.replica_ranks(rank)
    assert grid.replicas == world // (tp * dp) and grid.ep_size == tp * dp and grid.expert_tp == 1


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (dict(world=10, tp=4), r"train.tp\*cp\*pp = 4\*1\*1 = 4 does not divide 10 ranks; use 8, 12 ranks"),
        (dict(world=4, ep=8), r"train.etp\*ep\*pp = 1\*8\*1 = 8 does not divide 4 ranks; use 8 ranks"),
        (dict(world=8, tp=2, pp=2, order="tp-cp-ep-pp-dp"), "needs tp.cp = etp.ep, got 2.1 and 1.1"),
        (dict(world=8, vpp=2), "vpp = 2 needs train.pp of at least 2"),
    ],
)
def test_training_degrees_that_do_not_fit(degrees, message):
    with pytest.raises(ValueError, match=message):
        TrainGrid(**degrees)


def test_axes_that_do_not_mix():
    with pytest.raises(ValueError, match="mix dense and expert axes"):
        TrainGrid(8, tp=2, ep=2).groups("tp-ep")
    with pytest.raises(ValueError, match=r"rollout.tp\*dp = 3\*1 = 3 does not divide 8 ranks; use 6 or 9"):
        RolloutGrid(8, 3)


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ((94, 8, 1, 11, 11), [11, *[12] * 6, 11]),
        ((94, 8, 1, 0, 10), [*[12] * 7, 10]),
        ((4, 4), [1, 1, 1, 1]),
        ((5, 2, 1, 2), [2, 3]),
        ((5, 2, 1, 2, 3), [2, 3]),
        ((7, 1), [7]),
    ],
)
def test_stages(arguments, sizes):
    stages = stage_layers(*arguments)
    assert [len(chunks[0]) for chunks in stages] == sizes
    assert [layer for chunks in stages for layer in chunks[0]] == list(range(arguments[0]))


def test_interleaved_stages():
    assert stage_layers(8, 2, 2) == [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)]]
    assert stage_layers(12, 3, 2, 2, 2) == [
        [range(0, 1), range(6, 7)],
        [range(1, 5), range(7, 11)],
        [range(5, 6), range(11, 12)],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((94, 8), "94 layers do not spread over 8 stages: first even, last even leave 94 layers for 8 stages"),
        ((94, 8, 1, 0, 11), "leave 83 layers for 7 stages; the middle stages need a multiple of 7"),
        ((6, 2, 2), "not all multiples of train.vpp = 2"),
        ((6, 1, 1, 3), "need train.pp of at least 2"),
        ((6, 2, 1, 2, 3), "leave 1 layers for 0 stages"),
        ((6, 4, 1, 3, 3), "leave 0 layers for 2 stages"),
    ],
)
def test_stages_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        stage_layers(*arguments)
