"""The optimizer step: guard, clipping, Adam, masters, reference policy, auxiliary losses, statistics, refusals.

The functions that begin with an underscore run on two ranks each; they assert, and run_ranks shows the first failure.
"""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from launch.config import Config, OptimizerConfig, TrainConfig
from parallel.device import Device
from parallel.family import model_shape, read_config
from parallel.grid import TrainGrid
from tests.megatron_cases import (
    BASE,
    TEMPERATURE,
    build_case,
    fill,
    gather_grads,
    grad_error,
    hf_tensors,
    loss_fn,
    make_batch,
    make_micro_batches,
    make_model,
    prepare,
    world,
)
from tests.ranks import run_ranks

ADAM = dict(kind="adam", clip_grad=0.0, weight_decay=0.1, beta1=0.9, beta2=0.95)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("update")
    return {name: prepare(name, root / name) for name in ("qwen3", "moe")}


def on_two_ranks(*functions: Any, paths: dict[str, Path]) -> None:
    run_ranks(2, _all, [f.__name__ for f in functions], paths, timeout_s=240, env={"OMP_NUM_THREADS": "1"})


def _all(rank: int, names: list[str], paths: dict[str, Path]) -> None:
    for name in names:
        with world():
            globals()[name](rank, paths)


def copies(model: Any) -> dict[str, torch.Tensor]:
    return {name: store.clone() for name, store in model.stores().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def run(model: Any, batches: list[Any], function: Any = loss_fn) -> dict[str, Any]:
    from parallel import megatron_step as step

    return step.update(model, batches, function, TEMPERATURE, True)


def _guard(rank: int, paths: dict[str, Path]) -> None:
    model, _, case = build_case(paths["moe"], {"ep": 2}, lr=1e-3, optimizer=ADAM)
    batches = make_micro_batches(model, case, 128, 3)
    run(model, batches)
    before, lr = copies(model), model.learning_rate()
    states = copy.deepcopy([part.optimizer.state_dict()["state"] for part in model.optimizer.chained_optimizers])
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("parallel.megatron_step").addHandler(handler)

    def broken(logp: torch.Tensor, entropy: torch.Tensor, mb: Any) -> Any:
        loss, stats = loss_fn(logp, entropy, mb)
        return loss * (float("nan") if rank == 1 and mb is batches[1] else 1.0), stats

    stats = run(model, batches, broken)
    assert stats["skipped"] == (1.0, 1.0) and math.isnan(stats["grad_norm"][0]) and model.skipped_steps == 1
    assert same(before, copies(model)) and model.learning_rate() == lr
    after = [part.optimizer.state_dict()["state"] for part in model.optimizer.chained_optimizers]
    for old, new in zip(states, after, strict=True):
        assert all(torch.equal(v, new[i][k]) for i in old for k, v in old[i].items())
    assert "0:embedding.word_embeddings.weight" in records[0] and "rank 1" in records[0], records
    assert run(model, batches)["skipped"] == (0.0, 1.0) and not same(before, copies(model))


def _clip(rank: int, paths: dict[str, Path]) -> None:
    for name, layout in (("qwen3", {}), ("qwen3", {"tp": 2}), ("moe", {"tp": 2, "ep": 2}), ("moe", {"pp": 2})):
        model, table, case = build_case(paths[name], layout, lr=2.0, optimizer={"clip_grad": 0.01})
        stats = run(model, make_micro_batches(model, case, 128))
        norm = case["reference"]["norm"]
        assert abs(stats["grad_norm"][0] / norm - 1) < 1e-5  # before clipping
        gather_grads(model)  # in fp32 the clipped gradients are these buffers
        clipped = {name: grad * (0.01 / norm) for name, grad in case["reference"]["grads"].items()}
        assert grad_error(model, table, clipped) < 2e-5


def _adam(rank: int, paths: dict[str, Path]) -> None:
    model, _, case = build_case(paths["moe"], {}, lr=1e-3, optimizer=ADAM)
    batches = make_micro_batches(model, case, 128)
    own = {name: torch.nn.Parameter(store.clone()) for name, store in model.stores().items()}
    groups = [{"params": [p for p in own.values() if p.dim() > 1], "weight_decay": 0.1}]
    groups += [{"params": [p for p in own.values() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    for _ in range(3):
        run(model, batches)
        gather_grads(model)
        for name, parameter in model.named_parameters():
            own[name].grad = parameter.main_grad.clone()
        optimizer.step()
        assert same(copies(model), {name: p.data for name, p in own.items()})


def _masters(rank: int, paths: dict[str, Path]) -> None:
    model, _, case = build_case(paths["moe"], {"ep": 2}, dtype="bfloat16", lr=1e-3, optimizer=ADAM)

    def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(fp32 master, bf16 parameter shard)."""
        return [
            (master, low)
            for part in model.optimizer.chained_optimizers
            for masters, lows in zip(part.shard_fp32_from_float16_groups, part.shard_float16_groups, strict=True)
            for master, low in zip(masters, lows, strict=True)
        ]

    assert pairs() and all(m.dtype == torch.float32 and torch.equal(m, p.float()) for m, p in pairs())
    for store in model.stores().values():
        store.mul_(1.5)
    assert not any(torch.equal(m, p.float()) for m, p in pairs())
    model.after_load()
    assert all(torch.equal(m, p.float()) for m, p in pairs())
    run(model, make_micro_batches(model, case, 128))
    assert all(torch.equal(m.bfloat16(), p) for m, p in pairs())
    assert any(not torch.equal(m, p.float()) for m, p in pairs())  # masters keep what bf16 cannot
    assert all(b.grad_data.dtype == torch.float32 for b in model.buffers)


def _reference_policy(rank: int, paths: dict[str, Path]) -> None:
    from parallel import megatron_step as step
    from parallel.megatron_model import snapshot, swapped

    model, _, case = build_case(paths["moe"], {"tp": 2, "ep": 2}, lr=1e-2, optimizer=ADAM)
    batches = make_micro_batches(model, case, 128)

    def scores() -> list[torch.Tensor]:
        return [logp.clone() for logp, _ in step.score(model, batches, TEMPERATURE)]

    start, state = scores(), snapshot(model)
    for _ in range(2):
        run(model, batches)
    moved, live = scores(), copies(model)
    assert not any(map(torch.equal, start, moved))
    for _ in range(2):
        with swapped(model, state):
            assert all(map(torch.equal, start, scores()))
        assert same(live, copies(model)) and all(map(torch.equal, moved, scores()))
    with pytest.raises(KeyError), swapped(model, state):
        raise KeyError("inside")
    assert same(live, copies(model))


def _auxiliary_loss(rank: int, paths: dict[str, Path]) -> None:
    """Gradients with load-balancing loss equal autograd of its formula, in layouts that share a micro-batch."""
    options = {"megatron": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}}
    for layout in ({"tp": 2}, {"cp": 2}, {"pp": 2}, {"tp": 2, "ep": 2}):
        model, table, case = build_case(paths["balanced"], layout, **options)
        stats = run(model, make_micro_batches(model, case, 2000), lambda logp, *_: (logp.sum() * 0, {}))
        gather_grads(model)
        assert stats["moe/load_balancing_loss"] == (pytest.approx(case["loss"], rel=1e-5), 1.0), layout
        error = grad_error(model, table, case["auxiliary"])
        assert error < 1e-5, (layout, error)


def _global_loss_and_z_loss(rank: int, paths: dict[str, Path]) -> None:
    """Gradients and metrics of the options that look at all ranks equal autograd of their formulas in every layout."""
    options = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.3}
    layouts = [({}, "none"), ({"tp": 2}, "full"), ({"cp": 2}, "none"), ({"pp": 2}, "full"), ({"ep": 2}, "selective")]
    for layout, recompute in layouts:
        model, table, case = build_case(paths["even"], layout, megatron=options, recompute=recompute)
        batches = make_micro_batches(model, case, 2000)
        run(model, batches, lambda logp, *_: (logp.sum() * 0, {}))
        fill(model.stores(), table, rank, case["weights"])
        model.after_load()
        stats = run(model, batches, lambda logp, *_: (logp.sum() * 0, {}))  # the first update's counts are forgotten
        gather_grads(model)
        assert grad_error(model, table, case["auxiliary"]) < 1e-5, (layout, recompute)
        for name, value in case["metrics"].items():
            assert stats[name] == (pytest.approx(value, rel=1e-5), 1.0), (layout, recompute, name)


def _unequal_counts(rank: int, paths: dict[str, Path]) -> None:
    from parallel import megatron_step as step

    model, _, case = build_case(paths["qwen3"], {})
    batches = make_micro_batches(model, case, 128, 2)
    with pytest.raises(RuntimeError, match="between 1 and 2 micro-batches"):
        run(model, batches[: rank + 1])
    with pytest.raises(RuntimeError, match="between 1 and 2 micro-batches"):
        step.score(model, batches[: rank + 1], 1.0)


def _no_tokens(rank: int, paths: dict[str, Path]) -> None:
    """One sequence on two ranks: the other has none at all, in any micro-batch."""
    from parallel import megatron_step as step
    from parallel.micro_batches import unpack

    for name, layout in (("qwen3", {}), ("moe", {"ep": 2})):
        model, table, case = build_case(paths[name], layout, lr=0.0)
        case["batch"] = {k: v for k, v in case["batch"].items()}
        mine = [[0]] if rank == 1 else [[]]
        batch = case["batch"]
        batches = step.micro_batches(model, batch["sequences"], batch["prompts"], mine, batch["fields"])
        scored = step.score(model, batches, TEMPERATURE)
        values = unpack(batches, [logp for logp, _ in scored])
        assert list(values) == ([0] if rank == 1 else [])
        stats = run(model, batches)
        assert math.isfinite(stats["grad_norm"][0]) and stats["grad_norm"][0] > 0


def _sequence_sums(rank: int, paths: dict[str, Path]) -> None:
    """A loss of whole sequences has the same gradient whether a sequence lies on one rank or on two."""
    from parallel.micro_batches import build_micro_batches

    batch = make_batch(50)
    arguments = batch["sequences"], batch["prompts"], [[3, 5, 1]], batch["fields"]
    gradients = []
    for cp, part, group in ((1, 0, None), (2, rank, dist.group.WORLD)):
        (mb,) = build_micro_batches(*arguments, part, cp, cp_group=group)
        weight = mb.fields["weight"]
        logp = mb.fields["old"].clone().requires_grad_()
        sums = mb.sequence_sums(logp * weight) / mb.sequence_sums(weight)
        own = [batch["prompts"][i] for i in (3, 5, 1)]
        (sums.exp()[mb.segments] * weight * mb.fields["advantage"]).sum().backward()
        starts = [start - prompt + 1 for (start, _), prompt in zip(mb.spans, own, strict=True)]
        found: dict[tuple[int, int], float] = {}
        for row, grad in zip(mb.rows.tolist(), logp.grad.tolist(), strict=True):
            sequence = max(k for k, start in enumerate(starts) if start <= row)
            if row - starts[sequence] < len(batch["sequences"][(3, 5, 1)[sequence]]):
                found[sequence, row - starts[sequence]] = grad
        gradients.append(found)
    whole, split = gradients
    assert any(whole.values()) and 0 < len(split) < len(whole)
    assert all(abs(whole[place] - grad) < 1e-6 for place, grad in split.items())


def _statistics(rank: int, paths: dict[str, Path]) -> None:
    for layout in ({}, {"pp": 2}, {"cp": 2}, {"tp": 2}):
        model, _, case = build_case(paths["qwen3"], layout)
        ref, weights = case["reference"], case["batch"]["fields"]["weight"]
        stats = run(model, make_micro_batches(model, case, 128, 3))
        total, weight = stats["entropy"]
        want = sum(float((e * w).sum()) for e, w in zip(ref["entropies"], weights, strict=True))
        assert abs(total - want) < 1e-5 and abs(weight - 1) < 1e-5, layout
        assert all(chunk.training for chunk in model.chunks)
        seen = [None] * 2
        dist.all_gather_object(seen, stats)
        assert seen[0] == seen[1]


def _scoring_has_no_dropout(rank: int, paths: dict[str, Path]) -> None:
    from parallel import megatron_step as step

    model, _, case = build_case(paths["qwen3"], {"pp": 2, "vpp": 2})
    modes = []
    for chunk in model.chunks:
        chunk.module.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    step.score(model, make_micro_batches(model, case, 2000, 2), 1.0)
    assert modes and not any(modes)
    assert model.tconfig.hidden_dropout == model.tconfig.attention_dropout == 0
    assert not model.tconfig.deallocate_pipeline_outputs  # gloo still sends from it


def test_guard_clipping_and_adam(cases: dict[str, Path]) -> None:
    on_two_ranks(_guard, _clip, _adam, paths=cases)


def test_masters_and_reference_policy(cases: dict[str, Path]) -> None:
    on_two_ranks(_masters, _reference_policy, paths=cases)


def test_counts_empty_ranks_and_statistics(cases: dict[str, Path]) -> None:
    on_two_ranks(_sequence_sums, _unequal_counts, _no_tokens, _statistics, _scoring_has_no_dropout, paths=cases)


def test_auxiliary_loss(cases: dict[str, Path], tmp_path: Path) -> None:
    model = make_model("moe", tmp_path)
    batch = make_batch(BASE["vocab_size"], 4, multiple=8)
    case = torch.load(cases["moe"] / "case.pt", weights_only=False)
    metrics: dict[str, float] = {}
    gradients = auxiliary_gradients(model, batch, 0.5, metrics=metrics)
    case |= {"batch": batch, "auxiliary": gradients, "loss": metrics["moe/global_load_balancing_loss"]}
    torch.save(case, tmp_path / "case.pt")
    on_two_ranks(_auxiliary_loss, paths={**cases, "balanced": tmp_path})


def test_global_loss_z_loss_and_metrics(cases: dict[str, Path], tmp_path: Path) -> None:
    model = make_model("moe", tmp_path)
    batch = make_batch(BASE["vocab_size"], 4, multiple=64)  # equal lengths: every rank has the same number of tokens
    assert {len(ids) for ids in batch["sequences"]} == {64}
    case = torch.load(cases["moe"] / "case.pt", weights_only=False)
    metrics: dict[str, float] = {}
    gradients = auxiliary_gradients(model, batch, 0.5, 0.3, metrics)
    torch.save(case | {"batch": batch, "auxiliary": gradients, "metrics": metrics}, tmp_path / "case.pt")
    on_two_ranks(_global_loss_and_z_loss, paths={"even": tmp_path})


def auxiliary_gradients(
    model: Any, batch: dict[str, Any], coefficient: float, z: float = 0.0, metrics: dict[str, float] | None = None
) -> dict[str, torch.Tensor]:
    """Per layer, over all tokens of the batch: Switch Transformer's loss, coefficient * experts * sum_i f_i P_i, and
    ST-MoE's z * mean of logsumexp^2. `metrics` gets what an update should tell of them, and of the load of experts.
    """
    layers, hooks = {}, []
    for number, layer in enumerate(model.model.layers):
        inputs: list[torch.Tensor] = []
        layers[number] = inputs
        hooks.append(layer.mlp.gate.register_forward_pre_hook(lambda _, args, seen=inputs: seen.append(args[0])))
    model.zero_grad()
    for ids in batch["sequences"]:
        model(input_ids=torch.from_numpy(ids)[None])
    loss, told = torch.zeros((), dtype=torch.float64), []
    for number, layer in enumerate(model.model.layers):
        hidden = torch.cat([x.reshape(-1, x.size(-1)) for x in layers[number]])
        logits = hidden @ layer.mlp.gate.weight.t()
        probs = logits.softmax(-1)
        chosen = probs.topk(2, -1).indices
        share = torch.bincount(chosen.flatten(), minlength=8) / chosen.numel()
        balance, z_loss = 8 * (share * probs.mean(0)).sum(), logits.logsumexp(-1).square().mean()
        loss = loss + coefficient * balance + z * z_loss
        told.append((float(balance), float(z_loss), 8 * float(share.max())))
    loss.backward()
    if metrics is not None:
        balance, z_loss, busiest = np.mean(told, 0)
        metrics |= {"moe/global_load_balancing_loss": balance, "moe/z_loss": z_loss}
        metrics |= {"experts/load_max_over_mean": busiest, "experts/load_max_over_mean_worst": max(t[2] for t in told)}
    for hook in hooks:
        hook.remove()
    return hf_tensors({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()})


def schedule(**options: Any) -> list[float]:
    """Learning rates of 10 steps."""
    from parallel.megatron_model import _scheduler

    class Fake:
        param_groups = [{"lr": 0.0, "max_lr": 1.0, "min_lr": options.get("min_lr", 0.0), "wd_mult": 1.0}]
        config = None

    optimizer = Fake()
    scheduler = _scheduler(optimizer, Config(train=TrainConfig(lr=1.0, optimizer=OptimizerConfig(**options))), 10)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return rates


def test_learning_rate_schedules() -> None:
    assert schedule() == [1.0] * 10
    assert schedule(lr_warmup_steps=4)[:6] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    linear = schedule(lr_schedule="linear", lr_warmup_steps=2, min_lr=0.2)
    assert linear == pytest.approx([0, 0.5] + [0.2 + 0.8 * (1 - k / 8) for k in range(8)])
    cosine = schedule(lr_schedule="cosine", min_lr=0.1)
    assert cosine == pytest.approx([0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 10)) for k in range(10)])


def test_a_run_shorter_than_its_warmup_is_the_beginning_of_a_longer_one(caplog) -> None:
    caplog.set_level(logging.INFO)
    assert schedule(lr_warmup_steps=10) == pytest.approx([k / 10 for k in range(10)])
    assert "10 optimizer steps, train.optimizer.lr_warmup_steps = 10" in caplog.text
    assert schedule(lr_schedule="cosine", lr_warmup_steps=40, min_lr=0.1) == pytest.approx([k / 40 for k in range(10)])


def refusal(path: Path, world_size: int = 8, kind: str = "cpu", **train: Any) -> str:
    from parallel.megatron_options import check, split_passthrough

    config = Config(train=TrainConfig(**train))
    axes = {k: v for k, v in train.items() if k in ("tp", "pp", "cp", "ep", "etp", "vpp")}
    with pytest.raises(ValueError) as error:
        split_passthrough(config.train.megatron)
        check(config, model_shape(read_config(path)), TrainGrid(world_size, **axes), Device(kind))
    return str(error.value)


def test_what_cannot_work_is_refused_early(cases: dict[str, Path]) -> None:
    moe, dense = cases["moe"], cases["qwen3"]
    assert "8 experts do not divide by train.ep = 3" in refusal(moe, world_size=3, ep=3)
    assert "4 attention heads do not divide by train.tp = 8" in refusal(dense, tp=8)
    assert "no experts" in refusal(dense, ep=2)
    assert "transformer_engine does not run on cpu" in refusal(dense, spec="te")
    assert "TransformerEngine" in refusal(dense, megatron={"use_precision_aware_optimizer": True})
    assert "train.tp" in refusal(dense, megatron={"tensor_model_parallel_size": 2})
    assert "always 0" in refusal(dense, megatron={"attention_dropout": 0.1})
    assert "moe_aux_loss_coeff" in refusal(dense, megatron={"moe_aux_los_coeff": 0.1})
    assert "config.json" in refusal(dense, megatron={"num_layers": 3})
