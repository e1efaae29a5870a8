"""Memory hand-over on real Megatron: state leaves and comes back as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.offload import SMALLEST_PIECE, TrainOffload, twin_sizes
from tests.megatron_cases import TEMPERATURE, build_case, loss_fn, make_micro_batches, prepare, world
from tests.ranks import run_ranks

BOTH = ["params", "optimizer"]
ADAM: dict[str, Any] = dict(lr=1e-3, optimizer=dict(kind="adam", weight_decay=0.1, clip_grad=0.05))


def train(
    directory: Path, layout: dict[str, Any], offload: list[str], cycles: int, rounds: int, **options: Any
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """(state after `rounds` updates with `cycles` hand-overs before each, bytes while away) of this rank."""
    from parallel import megatron_step as step
    from parallel.train_state import training_state

    model, table, case = build_case(directory, layout, offload=offload, **(ADAM | options))
    away, held = TrainOffload(model), {}
    for _ in range(rounds):
        for _ in range(cycles):
            away.free_optimizer()
            held["with params"] = storage_bytes(model)
            read = {name: store.clone() for name, store in model.stores().items()} if "params" in offload else {}
            away.free_params()
            held["away"] = storage_bytes(model)
            away.restore()
            assert all(torch.equal(read[name], store) for name, store in model.stores().items() if name in read)
            assert not offload or not any(buffer.grad_data.any() for buffer in model.buffers)
        step.update(model, make_micro_batches(model, case, 128), loss_fn, TEMPERATURE, True)
    held["on device"] = storage_bytes(model)
    rank = torch.distributed.get_rank()
    states = training_state(model, table, rank)
    return {f"{s} {n}": t.clone() for s, (_, stores) in states.items() for n, t in stores.items()}, held


def storage_bytes(model: Any) -> int:
    """Bytes of everything that training keeps on the device."""
    tensors = [t for b in model.buffers for t in (b.param_data, b.grad_data)]
    for part in model.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            states = [part.optimizer.state.get(tensor, {}) for tensor in group["params"]]
            tensors += [*group["params"], *(state[m] for state in states for m in ("exp_avg", "exp_avg_sq") if state)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def compare(rank: int, directory: Path, layout: dict[str, Any], dtype: str, cycles: int) -> dict[str, int]:
    with world():
        plain, _ = train(directory, layout, [], 0, 3, dtype=dtype)
    with world():
        moved, held = train(directory, layout, BOTH, cycles, 3, dtype=dtype)
    assert plain.keys() == moved.keys() and plain
    assert all(torch.equal(plain[name], moved[name]) for name in plain), "training differs after hand-overs"
    return held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fifty_cycles_leave_training_bit_identical(tmp_path: Path, dtype: str) -> None:
    held = run_ranks(1, compare, prepare("moe", tmp_path), {}, dtype, 17, timeout_s=300)[0]
    assert held["away"] == 0 and 0 < held["with params"] < held["on device"]


@pytest.mark.slow
def test_every_layout_keeps_its_state(tmp_path: Path) -> None:
    directory = prepare("moe", tmp_path)
    for held in run_ranks(2, compare, directory, {"ep": 2, "etp": 1}, "bfloat16", 2, timeout_s=300):
        assert held["away"] == 0
    for held in run_ranks(2, compare, directory, {"pp": 2, "vpp": 2}, "bfloat16", 2, timeout_s=300):
        assert held["away"] == 0


def parts(rank: int, directory: Path) -> list[dict[str, int]]:
    found = []
    for offload in ([], ["params"], ["optimizer"]):
        with world():
            found.append(train(directory, {}, offload, 1, 2, dtype="bfloat16")[1])
    return found


def test_only_what_is_asked_for_moves(tmp_path: Path) -> None:
    nothing, params, optimizer = run_ranks(1, parts, prepare("qwen3", tmp_path), timeout_s=300)[0]
    # bytes a parameter, in bf16: 2 parameter, 4 gradient, 4 master, 8 moments; padding of the buffers apart
    assert nothing["away"] == nothing["on device"]
    share = {name: held["away"] / held["on device"] for name, held in (("params", params), ("optimizer", optimizer))}
    assert share["params"] == pytest.approx(12 / 18, abs=0.01) and share["optimizer"] == pytest.approx(2 / 18, abs=0.01)


def sgd(rank: int, directory: Path) -> list[int]:
    with world():
        model, *_ = build_case(directory, {}, offload=BOTH, dtype="bfloat16")
        away = TrainOffload(model)
        return [away.nbytes, sum(b.param_data.nbytes for b in model.buffers), len(away.optimizer)]


def test_sgd_has_masters_only(tmp_path: Path) -> None:
    moved, params, arenas = run_ranks(1, sgd, prepare("qwen3", tmp_path), timeout_s=200)[0]
    assert arenas == 1 and moved == pytest.approx(3 * params, rel=0.01)


def test_twins_are_powers_of_two_and_waste_little() -> None:
    for numel in (0, 1, SMALLEST_PIECE, SMALLEST_PIECE + 1, 3 * SMALLEST_PIECE - 5, 4_022_468_096):
        sizes = twin_sizes(numel)
        assert sum(sizes) == numel and len(sizes) < 12
        assert all(size & (size - 1) == 0 for size in sizes[:-1]) and all(size <= SMALLEST_PIECE for size in sizes[-1:])


def test_precision_aware_adam_is_refused_early() -> None:
    from launch.config import ConfigError
    from parallel.megatron_options import split_passthrough

    with pytest.raises(ConfigError, match="use_precision_aware_optimizer is not free: needs TransformerEngine's Adam"):
        split_passthrough({"use_precision_aware_optimizer": True})
