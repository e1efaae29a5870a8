"""The executor on synthetic stores: virtual worlds in one process, real processes on gloo."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from parallel.device import Device
from parallel.family import ModelShape
from parallel.grid import RolloutGrid, TrainGrid
from parallel.layout import Layout
from parallel.megatron_layout import megatron_layout
from parallel.reshard import Resharder, Stores, views
from parallel.reshard_plan import plan
from rollout.vllm_layout import vllm_layout
from tests.ranks import run_ranks

CPU = Device("cpu")


def small_shape(moe: bool = True, **changes) -> ModelShape:
    values = dict(
        family="qwen3_moe" if moe else "qwen2",
        num_layers=4,
        hidden=16,
        heads=8,
        kv_heads=2,
        head_dim=4,
        ffn=24,
        vocab=200,
        tied=not moe,
        qkv_bias=not moe,
        qk_norm=moe,
        norm_eps=1e-6,
        max_positions=64,
        rope_theta=1e4,
        rope_scaling=None,
        experts=8 if moe else 0,
        experts_per_token=2 if moe else 0,
        expert_ffn=8 if moe else 0,
    )
    return ModelShape(**{**values, **changes})


def expected(layout: Layout, rank: int, modulus: int = 251) -> Stores:
    """Stores of a rank in which every element is a hash of its kind and global place; padding is 0."""
    dtype = getattr(torch, layout.dtype)
    size: dict[str, int] = {}
    for piece in layout.pieces(rank):
        for view in views(piece, piece.box):
            size[view.store] = max(size.get(view.store, 0), view.end)
    stores = {name: torch.zeros(count, dtype=dtype) for name, count in size.items()}
    for piece in layout.pieces(rank):
        number = list(layout.kinds).index(piece.kind)
        _, units, rows, cols = layout.kinds[piece.kind].shape
        u, r, c = (torch.arange(*span) for span in piece.box[1:])
        inner = ((u[:, None, None] * rows + r[:, None]) * cols + c).to(torch.int64)
        for layer, view in zip(range(*piece.box[0]), views(piece, piece.box), strict=True):
            place = inner + layer * units * rows * cols
            view.of(stores).copy_(((place * 2654435761 + number * 40503) % 4294967291 % modulus).to(dtype))
    return stores


def fresh(layout: Layout, rank: int) -> Stores:
    return {name: torch.zeros_like(store) for name, store in expected(layout, rank).items()}


def differing(got: Stores, want: Stores) -> list[str]:
    return [name for name in want if not torch.equal(got[name], want[name])]


def train_layouts(shape: ModelShape, world: int) -> dict[str, Layout]:
    grids = {"dp": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "pp2 vpp2": {"pp": 2, "vpp": 2}}
    if shape.is_moe:
        grids |= {"ep2": {"ep": 2}, "tp2 ep2": {"tp": 2, "ep": 2}, "tp2 etp2": {"tp": 2, "etp": 2}}
    if world >= 4:
        grids |= {"tp2 pp2": {"tp": 2, "pp": 2}}
    return {name: megatron_layout(shape, TrainGrid(world, **degrees)) for name, degrees in grids.items()}


def rollout_layouts(shape: ModelShape, world: int) -> dict[str, Layout]:
    degrees = [(tp, dp) for tp in (1, 2, 4) for dp in (1, 2) if tp * dp <= world and (dp == 1 or shape.is_moe)]
    flags = (False, True) if shape.is_moe else (False,)
    return {
        f"tp{tp} dp{dp} {'ep' if ep else ''}": vllm_layout(shape, RolloutGrid(world, tp, dp, ep))
        for (tp, dp), ep in itertools.product(degrees, flags)
    }


def test_one_rank_needs_no_group():
    shape = small_shape()
    source, target = megatron_layout(shape, TrainGrid(1)), vllm_layout(shape, RolloutGrid(1))
    stores = fresh(target, 0)
    Resharder(plan(source, target), 0, None, source, target, CPU).run(expected(source, 0), stores)
    assert differing(stores, expected(target, 0)) == []


def test_missing_and_small_stores_are_named():
    shape = small_shape()
    source, target = megatron_layout(shape, TrainGrid(1)), vllm_layout(shape, RolloutGrid(1))
    moved = Resharder(plan(source, target), 0, None, source, target, CPU)
    stores = expected(source, 0)
    name = "0:decoder.layers.1.mlp.experts.weight1"
    small = {**stores, name: stores[name][:-1]}
    with pytest.raises(ValueError, match=rf"{name}.*hold {stores[name].numel()} elements"):
        moved.run(small, fresh(target, 0))
    del small[name]
    with pytest.raises(ValueError, match=f"no store '{name}'"):
        moved.run(small, fresh(target, 0))


def pairs_on_gloo(rank: int, world: int, moe: bool, cap: int) -> int:
    dist.init_process_group("gloo")
    shape, count = small_shape(moe), 0
    for source in train_layouts(shape, world).values():
        for target in rollout_layouts(shape, world).values():
            there = plan(source, target, node_size=2, cap_bytes=cap)
            resharder = Resharder(there, rank, dist.group.WORLD, source, target, CPU)
            stores = fresh(target, rank)
            for _ in range(2):
                resharder.run(expected(source, rank), stores)
                assert differing(stores, expected(target, rank)) == [], (source.name, target.name)
            back = plan(target, source, node_size=2, cap_bytes=cap)
            trained = fresh(source, rank)
            Resharder(back, rank, dist.group.WORLD, target, source, CPU).run(stores, trained)
            assert differing(trained, expected(source, rank)) == [], (target.name, source.name)
            count += there.rounds > 1
    dist.destroy_process_group()
    return count


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_every_pair_of_layouts_on_gloo(world, moe):
    counts = run_ranks(world, pairs_on_gloo, world, moe, 4096, timeout_s=300)
    assert counts[0] > 0
