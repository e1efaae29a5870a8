"""The executor on synthetic stores: virtual worlds in one process, real processes on gloo, and every check tripped."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.config import RolloutConfig
from parallel.family import ModelShape
from parallel.grid import RolloutGrid, TrainGrid
from parallel.layout import Layout
from parallel.megatron_layout import megatron_layout
from parallel.reshard import Resharder
from parallel.reshard_check import agree, prepare, verify
from parallel.reshard_golden import gather_full
from parallel.reshard_plan import plan
from parallel.weight_sync import WeightSync
from rollout.vllm_layout import vllm_layout
from tests.ranks import run_ranks
from tests.reshard_bound import Job
from tests.reshard_world import CPU, check_virtual_world, differing, expected, fresh
from tests.test_reshard_plan import ROWS, layouts, random_job


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


def train_layouts(shape: ModelShape, world: int) -> dict[str, Layout]:
    grids: dict[str, dict[str, int]] = {"dp": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "vpp2": {"pp": 2, "vpp": 2}}
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


def one_rank() -> tuple[Layout, Layout, Resharder]:
    shape = small_shape()
    source, target = megatron_layout(shape, TrainGrid(1)), vllm_layout(shape, RolloutGrid(1), dtype="float32")
    return source, target, Resharder(plan(source, target), 0, None, source, target, CPU)


def test_one_rank_needs_no_group_and_casts():
    source, target, resharder = one_rank()
    stores = fresh(target, 0)
    assert len(resharder.compare(expected(source, 0), stores)) > 20
    resharder.run(expected(source, 0), stores)
    assert differing(stores, expected(target, 0)) == []
    assert resharder.compare(expected(source, 0), stores) == []
    assert resharder.compare(expected(source, 0), {name: store * (1 + 1e-5) for name, store in stores.items()}) == []
    assert resharder.compare(expected(source, 0), {name: store * 1.02 for name, store in stores.items()})
    verify(source, target, expected(source, 0), stores, 0, None, CPU)


@pytest.mark.parametrize(("train", "rollout"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_sender_casts_to_what_the_target_holds(train, rollout):
    """Messages have the target's type, so that both ends count the same bytes; every rank of a virtual world."""
    shape = small_shape()
    source = megatron_layout(shape, TrainGrid(4, pp=2, ep=2), dtype=train)
    target = vllm_layout(shape, RolloutGrid(4, 2, 2, True), dtype=rollout)
    moves = plan(source, target, cap_bytes=4096)
    item = torch.empty(0, dtype=getattr(torch, rollout)).element_size()
    sender = Resharder(moves, 0, None, source, target, CPU)
    packed = sender.pack(0, expected(source, 0))
    assert packed.dtype == getattr(torch, rollout) and moves.item_bytes == item
    assert packed.numel() * item == sum(sender.rounds[0].send_splits) * item <= 4096
    check_virtual_world(source, target, moves)


def test_buffers_are_bounded_and_shared():
    source, target = layouts(Job(**{**ROWS["30B 2x8 ep16"][0], **SHRUNK}))
    moves = plan(source, target, cap_bytes=1 << 16)
    first = Resharder(moves, 3, None, source, target, CPU)
    assert moves.rounds > 2 and sum(b.nbytes for slot in first.slots for b in slot) <= 2 * 2 * moves.cap_bytes
    before = [buffer.data_ptr() for slot in first.slots for buffer in slot]
    assert Resharder(moves, 3, None, source, target, CPU, first.slots).slots is first.slots
    assert [buffer.data_ptr() for slot in first.slots for buffer in slot] == before
    smaller = [[buffer[:1] for buffer in slot] for slot in first.slots]
    grown = Resharder(moves, 3, None, source, target, CPU, smaller).slots
    assert grown is smaller
    assert [[len(b) for b in slot] for slot in grown] == [[len(b) for b in slot] for slot in first.slots]


class Module:
    """A packed module of the engine, by the names of its stores alone."""

    def __init__(self, *names: str):
        self.names = names


@pytest.mark.parametrize("vpp", [1, 2, 4])
def test_buffers_of_many_packed_modules_are_those_of_the_largest(vpp):
    """Plans with one and with two rounds take turns: they share one set of buffers, which grows."""
    shape = small_shape(moe=False, num_layers=16, hidden=512, head_dim=64, ffn=2048)
    source, target = megatron_layout(shape, TrainGrid(2, pp=2, vpp=vpp)), vllm_layout(shape, RolloutGrid(2, 2))
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    packed = [Module(f"model.layers.{layer}.{part}.weight") for layer in range(16) for part in parts]
    options = RolloutConfig(sync_staging_mib=1)
    weights = WeightSync(source, target, options, 0, None, CPU, packed)
    assert len(weights.parts) == 1 + 16 * 4 and len({id(part.resharder.slots) for part in weights.parts}) == 1
    buffers = {b.data_ptr(): b.nbytes for part in weights.parts for slot in part.resharder.slots for b in slot}
    rounds = {part.resharder.plan.rounds for part in weights.parts}
    print(f"rounds {rounds}, {len(buffers)} buffers, {sum(buffers.values())} bytes")
    assert len(buffers) <= 4 and sum(buffers.values()) <= 4 << 20


def test_sums_are_verified_at_the_first_three_syncs_and_every_nth(monkeypatch):
    """Damage at one element after the sync's own writes is found by exactly these runs."""
    source, target, _ = one_rank()
    weights = WeightSync(source, target, RolloutConfig(verify_every_steps=4, dtype="float32"), 0, None, CPU)
    stores, caught = fresh(target, 0), []

    def damage(*arguments):
        next(iter(stores.values())).view(-1)[3] += 1
        return []

    monkeypatch.setattr("parallel.weight_sync.faults", damage)
    for run in range(1, 13):
        try:
            weights.run(expected(source, 0), stores)
        except RuntimeError:
            caught.append(run)
    assert caught == [1, 2, 3, 4, 8, 12]


def test_missing_and_small_stores_are_named():
    source, target, resharder = one_rank()
    stores = expected(source, 0)
    name = "0:decoder.layers.1.mlp.experts.weight1"
    small = {**stores, name: stores[name][:-1]}
    with pytest.raises(ValueError, match=rf"{name}.*hold {stores[name].numel()} elements"):
        resharder.run(small, fresh(target, 0))
    del small[name]
    with pytest.raises(ValueError, match=f"no store '{name}'"):
        resharder.run(small, fresh(target, 0))


def test_transposed_experts():
    shape = small_shape()
    source = megatron_layout(shape, TrainGrid(4, ep=2))
    for parallel in (True, False):
        target = vllm_layout(shape, RolloutGrid(4, 2, 2, parallel), transposed_experts=True)
        check_virtual_world(source, target, plan(source, target, cap_bytes=4096))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.sampled_from([1024, 8192, 1 << 20]))
def test_random_worlds_and_back(seed, cap_bytes):
    job = random_job(random.Random(seed))
    source, target = layouts(job)
    check_virtual_world(source, target, plan(source, target, job.node, cap_bytes))
    check_virtual_world(target, source, plan(target, source, job.node, cap_bytes))


SHRUNK = dict(hidden=8, head_dim=2, vocab=1519, expert_ffn=16)
BIG_WORLDS = [
    pytest.param("235B ep64", {}, id="128 ep64"),
    pytest.param("235B tp16", {}, id="128 tp16"),
    pytest.param("1024 ep64", {}, id="1024 ep64", marks=pytest.mark.full),
    pytest.param("1024 tp16", {}, id="1024 tp16", marks=pytest.mark.full),
    pytest.param("30B 2x8 ep16", {"world": 128}, id="128 30B ep16"),
    pytest.param("30B 2x8 tp16", {"world": 1024}, id="1024 30B tp16", marks=pytest.mark.full),
]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "changes"), BIG_WORLDS)
def test_worlds_of_the_reference_jobs(row, changes):
    """All ranks of the reference jobs, matrices shrunk, layers, experts, heads and degrees as they are."""
    source, target = layouts(Job(**{**ROWS[row][0], **SHRUNK, **changes}))
    check_virtual_world(source, target, plan(source, target, cap_bytes=1 << 16))


# Real processes


def pairs_on_gloo(rank: int, world: int, moe: bool, cap: int) -> int:
    dist.init_process_group("gloo")
    shape, count = small_shape(moe), 0
    for source in train_layouts(shape, world).values():
        held = expected(source, rank)
        for target in rollout_layouts(shape, world).values():
            there = plan(source, target, node_size=2, cap_bytes=cap)
            resharder = Resharder(there, rank, dist.group.WORLD, source, target, CPU)
            prepare(resharder, CPU)
            assert not resharder.pairwise
            stores = fresh(target, rank)
            for resharder.pairwise in (False, True, False):
                resharder.run(held, stores)
                assert differing(stores, expected(target, rank)) == [], (source.name, target.name)
                assert resharder.compare(held, stores) == []
            verify(source, target, held, stores, rank, dist.group.WORLD, CPU)
            back = plan(target, source, node_size=2, cap_bytes=cap)
            trained = fresh(source, rank)
            Resharder(back, rank, dist.group.WORLD, target, source, CPU).run(stores, trained)
            assert differing(trained, held) == [], (target.name, source.name)
            count += there.rounds > 1
    dist.destroy_process_group()
    return count


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_every_pair_of_layouts_on_gloo(world, moe):
    assert run_ranks(world, pairs_on_gloo, world, moe, 4096, timeout_s=400)[0] > 0


def damaged_on_gloo(rank: int) -> list[str]:
    """What each kind of damage makes `verify` say, and what differing plans make `agree` say."""
    dist.init_process_group("gloo")
    world, shape = dist.group.WORLD, small_shape()
    source, target = megatron_layout(shape, TrainGrid(2, pp=2)), vllm_layout(shape, RolloutGrid(2, 2, 1, True))
    held = expected(source, rank)
    resharder = Resharder(plan(source, target, cap_bytes=4096), rank, world, source, target, CPU)
    said = []

    def after(damage, first=None) -> None:
        stores = first or expected(target, rank)
        if rank == 1 or first:
            damage(stores)
        try:
            verify(source, target, held, stores, rank, world, CPU)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))

    w13, w2 = (f"model.layers.2.mlp.experts.routed_experts.{name}_weight" for name in ("w13", "w2"))

    def flip(stores):
        stores[w2].view(torch.uint8)[100] ^= 1

    def swap(stores):
        experts = stores[w13].view(4, -1)
        experts[[1, 2]] = experts[[2, 1]]

    def swap_rows(stores):
        rows = stores["model.layers.0.self_attn.o_proj.weight"].view(16, -1)
        rows[[3, 9]] = rows[[9, 3]]

    for damage in (flip, swap, swap_rows, lambda stores: None):
        after(damage)
    dropped = resharder.rounds.pop()
    after(lambda stores: resharder.run(held, stores), fresh(target, rank))
    resharder.rounds.append(dropped)
    after(lambda stores: resharder.run(held, stores), fresh(target, rank))
    for cap in (4096, 4096 * (rank + 1)):
        try:
            agree(plan(source, target, cap_bytes=cap), world, CPU)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    dist.destroy_process_group()
    return said


@pytest.mark.slow
def test_damage_is_caught_and_named():
    first, second = run_ranks(2, damaged_on_gloo)
    flip, swap, rows, nothing, dropped, whole, same, other = first
    assert first[:6] == second[:6]  # every rank says the same
    assert "model.layers.2.mlp.experts.4.down_proj.weight: box ((0, 4), (4, 8)" in flip
    assert "of rank 1; trained by ranks 1" in flip  # the second pipeline stage
    assert "experts.5.gate_proj" in swap and "experts.6.up_proj" in swap and "experts.4" not in swap
    assert "model.layers.0.self_attn.o_proj.weight" in rows and "layers.1." not in rows
    assert nothing == whole == same == "" and "weights differ after the sync" in dropped
    assert "different plans" in other


def faulty_on_gloo(rank: int) -> dict[str, str]:
    """What the sync says of each fault that its checks after every run are for; what a comparison at the start says."""
    dist.init_process_group("gloo")
    shape, options = small_shape(), RolloutConfig(sync_staging_mib=1)
    source, target = megatron_layout(shape, TrainGrid(2, pp=2)), vllm_layout(shape, RolloutGrid(2, 2, 1, True))
    said = {}

    def attempt(name: str, runs: int, damage, held=None, compared: bool = False) -> None:
        weights = WeightSync(source, target, options, rank, dist.group.WORLD, CPU)
        weights.runs = 3  # no longer verified by hashes
        stores = expected(target, rank) if compared else fresh(target, rank)
        held, said[name] = held or expected(source, rank), ""
        for _ in range(runs):
            weights.run(held, stores) if not compared else None
        damage(weights, held, stores)
        try:
            weights.compare(held, stores) if compared else weights.run(held, stores)
        except RuntimeError as error:
            said[name] = str(error)

    def drop(weights, held, stores):
        weights.parts[0].resharder.rounds.pop()

    def move(weights, held, stores):
        if rank == 1:
            stores["model.layers.1.mlp.gate.weight"] = stores["model.layers.1.mlp.gate.weight"].clone()

    def poison(weights, held, stores):
        if rank == 1:  # its first layer is layer 2 of the model; two experts of every weight
            held["0:decoder.layers.0.mlp.experts.weight2"].view(8, -1)[5:7, 3] = float("nan")

    def change(weights, held, stores):
        if rank == 1:
            stores["model.layers.3.mlp.experts.routed_experts.w2_weight"].view(4, -1)[1, 7] += 1

    def nothing(weights, held, stores):
        pass

    attempt("clean", 2, nothing)
    attempt("dropped", 0, drop)
    attempt("moved", 1, move)
    attempt("nan elsewhere", 0, poison)  # layer 3 is looked at
    attempt("nan", 3, poison)  # layer 2
    attempt("equal", 0, nothing, compared=True)
    attempt("different", 0, change, compared=True)
    dist.destroy_process_group()
    return said


@pytest.mark.slow
def test_every_fault_after_a_run_names_tensor_box_and_ranks():
    said, other = run_ranks(2, faulty_on_gloo)
    assert said == other and {name for name in said if not said[name]} == {"clean", "nan elsewhere", "equal"}
    assert re.search(
        r"rank 0 sent 0 bytes, not \d+, to rank 1; their boxes begin with model\.\S+: box \(\(", said["dropped"]
    )
    assert re.search(r"rank 0 received 0 bytes, not \d+, from rank 1; their boxes begin with", said["dropped"])
    moved = (
        r"layers.1.mlp.gate.weight: box \(\(1, 2\), .*model.layers.1.mlp.gate.weight of rank 1 is at \d+, not at \d+"
    )
    assert re.search(moved, said["moved"]) and said["moved"].count("box") == 1
    nan = "model.layers.2.mlp.experts.5.down_proj.weight: box ((2, 3), (4, 8), (0, 16), (0, 8)) (layer, unit, row, col)"
    assert nan in said["nan"] and "from rank 1 to rank 1: 2 of 512 elements are not finite" in said["nan"]
    assert "layers.3.mlp.experts.5.down_proj.weight: box ((3, 4)" in said["different"]
    assert "from rank 1 to rank 1: 1 of " in said["different"] and "vLLM has loaded itself" in said["different"]


def broken_all_to_all(rank: int) -> tuple[bool, str]:
    """A backend whose all_to_all_single delivers zeros: the pairwise exchange takes over and is right. Then none is."""
    dist.init_process_group("gloo")
    shape = small_shape()
    source, target = megatron_layout(shape, TrainGrid(2, ep=2)), vllm_layout(shape, RolloutGrid(2, 2))
    resharder = Resharder(plan(source, target, cap_bytes=4096), rank, dist.group.WORLD, source, target, CPU)
    real = dist.all_to_all_single

    def zeros(receive, send, *splits, **options):
        work = real(receive, send, *splits, **options)
        work.wait()
        receive.zero_()
        return work

    def absent(*_, **__):
        raise RuntimeError("ProcessGroupXYZ does not support alltoall_base")

    dist.all_to_all_single = absent
    prepare(resharder, CPU)
    assert resharder.pairwise
    resharder.pairwise = False
    dist.all_to_all_single = zeros
    prepare(resharder, CPU)
    stores = fresh(target, rank)
    resharder.run(expected(source, rank), stores)
    assert differing(stores, expected(target, rank)) == []
    taken_over, said = resharder.pairwise, ""
    dist.batch_isend_irecv = lambda operations: []
    try:
        prepare(resharder, CPU)
    except RuntimeError as error:
        said = str(error)
    dist.destroy_process_group()
    return taken_over, said


@pytest.mark.slow
def test_a_broken_exchange_is_replaced():
    for taken_over, said in run_ranks(2, broken_all_to_all):
        assert taken_over and "neither all_to_all_single nor pairs of isend and irecv deliver" in said


def golden_on_gloo(rank: int, moe: bool) -> list[str]:
    """Names in order; every whole tensor must equal the one that a single rank's checkpoint layout holds."""
    dist.init_process_group("gloo")
    shape, names = small_shape(moe), []
    for source in train_layouts(shape, 2).values():
        names = []
        held = expected(source, rank)
        for name, tensor in gather_full(source, held, rank, dist.group.WORLD, CPU, bucket_bytes=3000):
            names.append(name)
            kind = next(k for k in source.kinds.values() if match(k.template, name))
            number = list(source.kinds).index(kind.name)
            layer, unit = position(kind.template, name)
            first = layer * kind.shape[1] + (unit if kind.unit_is_tensor else 0)
            place = torch.arange(tensor.numel()) + first * kind.shape[2] * kind.shape[3]
            want = (place * 2654435761 + number * 40503) % 4294967291 % 251
            assert torch.equal(tensor.flatten().long(), want), (source.name, name)
    dist.destroy_process_group()
    return names


def position(template: str, name: str) -> tuple[int, int]:
    found = match(template, name)
    return int(found.groupdict().get("layer") or 0), int(found.groupdict().get("unit") or 0)


def match(template: str, name: str):
    pattern = re.escape(template).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{unit\}", r"(?P<unit>\d+)")
    return re.fullmatch(pattern, name)


@pytest.mark.slow
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_golden_path_gathers_every_tensor(moe):
    first, second = run_ranks(2, golden_on_gloo, moe)
    shape = small_shape(moe)
    count = 3 + 4 * (9 + 3 * 8) if moe else 2 + 4 * (6 + 3 + 3)
    assert first == second and len(first) == len(set(first)) == count, shape


def test_sums_do_not_depend_on_chunks(monkeypatch):
    from parallel import reshard_check

    source, _, _ = one_rank()
    stores = expected(source, 0)

    def sums() -> list[list[int]]:
        pieces = source.pieces(0)
        found = (reshard_check.box_sums(source.kinds[p.kind], p, p.box, stores, torch.bfloat16) for p in pieces)
        return [f.flatten().tolist() for f in found]

    whole = sums()
    for chunk in (5, 64, 300):
        monkeypatch.setattr(reshard_check, "CHUNK", chunk)
        assert sums() == whole
