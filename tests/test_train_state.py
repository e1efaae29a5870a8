"""State of the real training side: it covers everything, resumes bit for bit, and onto other layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel.boxes import cover_gap, disjoint
from parallel.checkpoint import load_small, save
from parallel.device import Device
from parallel.layout import elements
from parallel.restore import restore
from parallel.train_state import after_restore, optimizer_steps, set_optimizer_steps, training_state
from tests import megatron_cases as cases
from tests.ranks import run_ranks

ADAM = dict(kind="adam", clip_grad=cases.CLIP, weight_decay=0.1, beta1=0.9, beta2=0.95)


def _model(directory: Path, layout: dict, **train):
    from parallel.megatron_layout import megatron_layout

    options = {"lr": 1e-2, "optimizer": ADAM, **train}
    model, table, case = cases.build_case(directory, layout, **options)
    stages = (model.config.train.first_stage_layers, model.config.train.last_stage_layers)
    table = megatron_layout(model.shape, model.grid, *stages, dtype=model.config.train.dtype)
    return model, table, case


def _steps(model, case, count: int) -> list[tuple[float, float]]:
    from parallel import megatron_step as step

    found = []
    for _ in range(count):
        batches = cases.make_micro_batches(model, case, 128, 1)
        stats = step.update(model, batches, cases.loss_fn, cases.TEMPERATURE, True)
        model.scheduler.step(1)
        found.append((stats["loss"][0], stats["grad_norm"][0]))
    return found


def _everything(model, states) -> dict[str, torch.Tensor]:
    found = {f"store {name}": store.clone() for name, store in model.stores().items()}
    for state, (_, stores) in states.items():
        found |= {f"{state} {name}": store.clone() for name, store in stores.items()}
    return found


def _destroy(model, states) -> None:
    """Nothing that a resume forgets may survive."""
    for store in [*model.stores().values(), *(s for _, stores in states.values() for s in stores.values())]:
        store.fill_(7.0)


def _save_then_resume(rank: int, directory: str, root: str, pairs: list) -> list:
    return [_one_pair(rank, Path(directory), f"{root}/{i}", *pair) for i, pair in enumerate(pairs)]


def _one_pair(rank: int, directory: Path, root: str, source: dict, target: dict, train: dict) -> dict:
    with cases.world():
        model, table, case = _model(directory, source, **train)
        _steps(model, case, 2)
        states = training_state(model, table, rank)
        covered = {state: _cover(table, pieces) for state, (pieces, _) in states.items()}
        path = save(root, 2, table.kinds, states, {}, rank, None)
        count, scheduler = optimizer_steps(model), model.scheduler.state_dict()
        whole, before, after = _logical(table, states), _everything(model, states), _steps(model, case, 2)
        end = _everything(model, states)
    with cases.world():
        model, table, case = _model(directory, target, **train)
        states = training_state(model, table, rank)
        _destroy(model, states)
        restore(path, table.kinds, states, rank, None, Device("cpu"))
        after_restore(model)
        set_optimizer_steps(model, count)
        model.scheduler.load_state_dict(scheduler)
        restored = _logical(table, states)
        assert all(torch.equal(restored[key], tensor) for key, tensor in whole.items())
        found, again = _everything(model, states), _steps(model, case, 2)
        final = _everything(model, states)
        if source == target:
            assert list(found) == list(before)
            assert all(torch.equal(found[name], before[name]) for name in found)
            assert again == after and all(torch.equal(final[name], end[name]) for name in final)
    return dict(covered=covered, after=after, again=again, states=sorted(states), count=count)


def _logical(table, states) -> dict[tuple[str, str], torch.Tensor]:
    """(state, kind) -> the whole logical tensor, from the ranges of all ranks."""
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, states)
    found = {(s, k): torch.full(kind.shape, float("nan")) for s in states for k, kind in table.kinds.items()}
    for held in everybody:
        for state, (pieces, stores) in held.items():
            for piece in pieces:
                (layers, units, rows, cols) = piece.box
                whole = found[state, piece.kind][layers[0], slice(*units), slice(*rows), slice(*cols)]
                whole.copy_(cases.view(stores[piece.store], piece))
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


def _cover(table, pieces) -> str:
    """What is missing, over all ranks; and that data parallel ranks save nothing twice."""
    rows: list = [None] * dist.get_world_size()
    dist.all_gather_object(rows, pieces)
    once = disjoint(rows, table.kinds)
    assert all(elements(piece.box) for row in rows for piece in row)
    return cover_gap([piece for row in once for piece in row], table.kinds)


TP2, PP2, DP2, EP2 = dict(tp=2, etp=1), dict(pp=2), dict(), dict(ep=2)
BF16 = dict(dtype="bfloat16")


def check(results: list, states: list[str], tolerance: float = 1e-5) -> None:
    for rank in results:
        for pair in rank:
            assert set(pair["covered"].values()) == {""} and pair["states"] == states and pair["count"] == 2
            for (loss, norm), (loss2, norm2) in zip(pair["after"][:1], pair["again"][:1], strict=True):
                assert abs(loss - loss2) <= tolerance * max(1, abs(loss))
                assert abs(norm - norm2) <= tolerance * max(1, norm)


@pytest.mark.slow
def test_moe_resumes_on_the_same_and_on_other_layouts(tmp_path):
    directory = cases.prepare("moe", tmp_path / "case")
    pairs = [(EP2, EP2, {}), (EP2, dict(tp=2, etp=1, ep=2), {}), (dict(tp=2, etp=1, ep=2), PP2, {}), (PP2, DP2, {})]
    results = run_ranks(2, _save_then_resume, str(directory), str(tmp_path / "out"), pairs, timeout_s=400)
    check(results, ["exp_avg", "exp_avg_sq", "parameters"])


@pytest.mark.slow
def test_tied_bf16_resumes_with_masters(tmp_path):
    directory = cases.prepare("qwen2", tmp_path / "case")
    pairs = [(PP2, PP2, BF16), (TP2, TP2, BF16)]
    results = run_ranks(2, _save_then_resume, str(directory), str(tmp_path / "out"), pairs, timeout_s=400)
    check(results, ["exp_avg", "exp_avg_sq", "master", "parameters"])
    pairs = [(PP2, TP2, BF16), (TP2, DP2, BF16)]  # bit-equal as tensors; what is computed from them rounds elsewhere
    results = run_ranks(2, _save_then_resume, str(directory), str(tmp_path / "moved"), pairs, timeout_s=400)
    check(results, ["exp_avg", "exp_avg_sq", "master", "parameters"], tolerance=0.03)
    pairs = [(PP2, TP2, {}), (TP2, DP2, {})]
    results = run_ranks(2, _save_then_resume, str(directory), str(tmp_path / "fp32"), pairs, timeout_s=400)
    check(results, ["exp_avg", "exp_avg_sq", "parameters"])


@pytest.mark.slow
def test_sgd_has_no_moments(tmp_path):
    directory = cases.prepare("llama", tmp_path / "case")
    train = dict(optimizer=dict(kind="sgd"), lr=0.1)
    results = run_ranks(2, _save_then_resume_sgd, str(directory), str(tmp_path / "out"), train, timeout_s=400)
    assert results == [["parameters"], ["parameters"]]


def _save_then_resume_sgd(rank: int, directory: str, root: str, train: dict) -> list[str]:
    with cases.world():
        model, table, case = _model(Path(directory), DP2, **train)
        states = training_state(model, table, rank)
        _steps(model, case, 1)
        assert optimizer_steps(model) == 0
        set_optimizer_steps(model, 3)
        return list(states)


# -- onto another number of ranks, with context and expert tensor parallelism


def _save_alone(rank: int, directory: str, root: str, layout: dict) -> tuple[float, float]:
    with cases.world():
        model, table, case = _model(Path(directory), layout)
        _steps(model, case, 2)
        states = training_state(model, table, rank)
        small = {"steps": optimizer_steps(model), "scheduler": model.scheduler.state_dict()}
        save(root, 2, table.kinds, states, small, rank, None)
        whole = _logical(table, states)
        if rank == 0:
            torch.save(whole, f"{root}/whole.pt")
        return _steps(model, case, 1)[0]


def _restore_alone(rank: int, directory: str, root: str, layout: dict) -> tuple[float, float]:
    with cases.world():
        model, table, case = _model(Path(directory), layout)
        states = training_state(model, table, rank)
        _destroy(model, states)
        path = f"{root}/step_000002"
        restore(path, table.kinds, states, rank, None, Device("cpu"))
        after_restore(model)
        set_optimizer_steps(model, load_small(path)["steps"])
        model.scheduler.load_state_dict(load_small(path)["scheduler"])
        found, whole = _logical(table, states), torch.load(f"{root}/whole.pt")
        assert found.keys() == whole.keys() and all(torch.equal(found[key], whole[key]) for key in whole)
        return _steps(model, case, 1)[0]


WORLDS = {
    "EP2 on 2 -> TP2 CP2 on 4": (2, EP2, 4, dict(tp=2, etp=1, cp=2)),
    "TP2 PP2 EP2 on 4 -> CP2 on 2": (4, dict(tp=2, etp=1, pp=2, ep=2), 2, dict(cp=2)),
    "CP2 on 2 -> 1": (2, dict(cp=2), 1, {}),
    "1 -> TP2 ETP2 on 2": (1, {}, 2, dict(tp=2, etp=2)),
    "TP2 ETP2 PP2 on 4 -> PP2 VPP2 on 2": (4, dict(tp=2, etp=2, pp=2), 2, dict(pp=2, vpp=2)),
}


@pytest.mark.full
@pytest.mark.parametrize("case", WORLDS)
def test_state_goes_on_with_another_number_of_ranks(tmp_path, case):
    """Bit-equal as logical tensors after loading; loss and gradient norm of the next step within 1e-5."""
    before, source, after, target = WORLDS[case]
    directory, root = cases.prepare("moe", tmp_path / "case"), str(tmp_path / "out")
    loss, norm = run_ranks(before, _save_alone, str(directory), root, source, timeout_s=400)[0]
    for again, norm2 in run_ranks(after, _restore_alone, str(directory), root, target, timeout_s=400):
        assert abs(loss - again) <= 1e-5 * max(1, abs(loss)) and abs(norm - norm2) <= 1e-5 * max(1, norm)
