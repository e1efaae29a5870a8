"""Group membership against the rank grid, and the line that names a rank."""

from __future__ import annotations

import pytest

from parallel.grid import RolloutGrid, TrainGrid
from parallel.groups import check_members, describe


def test_describe_names_the_axes_in_use() -> None:
    train = TrainGrid(64, tp=4, pp=4, ep=4)
    assert describe(37, train, RolloutGrid(64, tp=8)).startswith("rank 037 | train pp2 dp1 tp1")
    assert describe(37, train, RolloutGrid(64, tp=8)).endswith("| rollout replica 4 dp0 tp5")
    assert describe(0, TrainGrid(1), RolloutGrid(1)) == "rank 000 | train alone | rollout replica 0 dp0 tp0"


def test_wrong_members_are_named_with_the_degrees() -> None:
    grid = TrainGrid(8, tp=2, pp=2)
    check_members(5, grid, {"tp": [4, 5], "dp-cp": [7, 5]})
    with pytest.raises(RuntimeError, match=r"rank 5: Megatron's tp group is \[5, 7\], the rank grid says \[4, 5\]"):
        check_members(5, grid, {"tp": [5, 7]})
