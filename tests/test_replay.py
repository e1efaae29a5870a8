"""Recorded routes through packing, zigzag, sequence-parallel runs, stages and recomputation, against transformers.

The reference forces the same experts in transformers' own routers, in float64, sequence by sequence; the last token of
each sequence routes natively. Routes are random: any row, layer or rank that is off by one changes every figure.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallel.device import Device
from parallel.family import model_shape, read_config
from parallel.grid import TrainGrid, stage_layers
from parallel.micro_batches import build_micro_batches
from parallel.replay import NATIVE, RouteQueue, RoutingReplay, layers_of_ranks, local_routes
from tests import megatron_cases as cases
from tests.ranks import run_ranks

LAYERS, EXPERTS, TOPK = 4, 8, 2
FULL = dict(recompute="full")
TOLERANCE = 1e-5


def random_routes(sequences, seed=5, experts=EXPERTS):
    """Sequence number -> distinct experts [tokens - 1, layers, k]."""
    rng = np.random.default_rng(seed)

    def draw(rows):
        return rng.random((rows, LAYERS, experts)).argsort(-1)[..., :TOPK].astype(np.uint8)

    return {i: draw(len(ids) - 1) for i, ids in enumerate(sequences)}


def force(model, routes):
    """Transformers' routers take the experts of `routes[model.sequence]`; each row's weights are still its own."""

    def forward_of(layer, gate):
        def forward(hidden):
            probs = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight).softmax(-1)
            native = probs.topk(TOPK, -1).indices[-1:]
            chosen = torch.cat([torch.from_numpy(routes[model.sequence][:, layer].astype(np.int64)), native])
            weights = probs.gather(1, chosen)
            return None, weights / weights.sum(-1, keepdim=True), chosen

        return forward

    for layer, block in enumerate(model.model.layers):
        block.mlp.gate.forward = forward_of(layer, block.mlp.gate)
    model.register_forward_pre_hook(lambda module, args: setattr(module, "sequence", module.sequence + 1))


def prepare(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    model = cases.make_model("moe", directory)
    batch = cases.make_batch(cases.BASE["vocab_size"])
    routes = random_routes(batch["sequences"])
    weights = cases.hf_tensors({k: v.detach().float() for k, v in model.named_parameters()})
    model.sequence = -1
    force(model, routes)
    reference = cases.reference(model, batch)
    torch.save(dict(weights=weights, batch=batch, reference=reference, routes=routes), directory / "case.pt")
    return directory


def build(directory, layout, **train):
    from parallel.megatron_layout import megatron_layout
    from parallel.megatron_model import build as build_model
    from parallel.replay import ReplayRouter

    case = torch.load(directory / "case.pt", weights_only=False)
    shape, rank = model_shape(read_config(directory)), dist.get_rank()
    axes = {k: layout.get(k, 1) for k in ("tp", "pp", "vpp", "cp", "ep", "etp")}
    grid = TrainGrid(dist.get_world_size(), **axes)
    config = cases.make_config(layout, **train)
    model = build_model(shape, config, grid, Device("cpu"), 10, ReplayRouter)
    stages = (config.train.first_stage_layers, config.train.last_stage_layers)
    table = megatron_layout(shape, grid, *stages, "float32")
    cases.fill(model.stores(), table, rank, case["weights"])
    model.after_load()
    return model, table, case, grid.coord(rank)


def replayed(directory, layout, shift="", mode="R3", **train):
    """Errors of the score and update passes with forced routes; with `shift` the routes are moved by one."""
    from parallel import megatron_step as step
    from parallel.micro_batches import unpack

    model, table, case, coord = build(directory, layout, **train)
    reference, routes = case["reference"], case["routes"]
    if shift:
        routes = {i: np.roll(rows, 1, axis="token layer".split().index(shift)) for i, rows in routes.items()}
    replay = RoutingReplay("R3", model, coord)
    assert layers_of_ranks(model)[dist.get_rank()] == replay.layers
    replay.sequences = {i: rows[:, replay.layers] for i, rows in routes.items()}
    batches = cases.make_micro_batches(model, case, 128)
    replay.attach(batches)
    with replay.recording(batches):
        scored = step.score(model, batches, cases.TEMPERATURE)
    counts = [replay.require_consumed(batches)]
    if mode == "R2":  # what the pass recorded is what was forced, row for row; the update replays the record
        for batch in batches:
            if batch.indices:
                forced, kept = batch.routes, replay.recorded[tuple(batch.indices)]
                assert torch.equal(torch.where(forced == NATIVE, forced, kept), forced)
                batch.routes = None
        replay.mode = "R2"
        replay.attach(batches)
    stats = step.update(model, batches, cases.loss_fn, cases.TEMPERATURE, True)
    counts.append(replay.require_consumed(batches))
    logps = unpack(batches, [logp for logp, _ in scored])
    cases.gather_grads(model)
    errors = {
        "logp": max([float(np.abs(v - reference["logps"][i]).max()) for i, v in logps.items()], default=0.0),
        "loss": abs(stats["loss"][0] - reference["loss"]),
        "grad": cases.grad_error(model, table, reference["grads"]),
        "norm": abs(stats["grad_norm"][0] - reference["norm"]) / reference["norm"],
    }
    total = torch.tensor(counts)
    dist.all_reduce(total)
    return errors, total.tolist(), replay.take_tally()


def visit(rank, directory, layouts):
    results = []
    for name, layout, options in layouts:
        with cases.world():
            results.append((name, *replayed(Path(directory), layout, **options)))
    return results


LAYOUTS = [
    ("dp4", {}, {}),
    ("tp2 ep2 pp2, recomputed", dict(tp=2, ep=2, pp=2), FULL),
    ("cp2 pp2 vpp2, recomputed", dict(cp=2, pp=2, vpp=2), FULL),
    ("R2: tp2 cp2 ep4, recomputed", dict(tp=2, cp=2, ep=4), dict(mode="R2", **FULL)),
    ("pp2 ep2, MoE layers recomputed", dict(pp=2, ep=2), dict(recompute="selective")),
    ("token", {}, dict(shift="token")),
    ("layer", dict(pp=2), dict(shift="layer")),
]
MORE = [
    ("pp2 uneven", dict(pp=2, first_stage_layers=1, last_stage_layers=3), FULL),
    ("pp4", dict(pp=4), FULL),
    ("tp4 ep4", dict(tp=4, ep=4), {}),
    ("cp4", dict(cp=4, ep=4), FULL),
    ("pp2 vpp2 ep2", dict(pp=2, vpp=2, ep=2), dict(recompute="selective")),
    ("R2: pp2 vpp2 tp2", dict(pp=2, vpp=2, tp=2), dict(mode="R2", **FULL)),
]


def check(directory, layouts):
    seen = run_ranks(4, visit, str(prepare(directory)), layouts, timeout_s=280)
    batch = torch.load(directory / "case.pt", weights_only=False)["batch"]
    pairs = LAYERS * sum(len(ids) - 1 for ids in batch["sequences"])
    for cell in zip(*seen, strict=True):
        name = cell[0][0]
        worst = {key: max(part[1][key] for part in cell) for key in cell[0][1]}
        differs = sum(part[3][1] for part in cell) / sum(part[3][0] for part in cell)
        print(f"{name}: {worst}, replayed {cell[0][2]} of {pairs}, {differs:.1%} differ from native")
        if name in ("token", "layer"):
            assert worst["logp"] > 0.01
            continue
        assert max(worst.values()) < TOLERANCE, (name, worst)
        if "R2" not in name:
            assert cell[0][2] == [pairs, pairs]
            assert differs > 0.5  # random routes


@pytest.mark.slow
def test_forced_routes_in_layouts(tmp_path):
    check(tmp_path / "moe", LAYOUTS)


@pytest.mark.full
def test_forced_routes_in_more_layouts(tmp_path):
    check(tmp_path / "moe", MORE)


# Without a model


def rows_of(lengths, cp_rank=0, cp=1, tp=1):
    sequences = [np.arange(n) for n in lengths]
    return build_micro_batches(sequences, [1] * len(lengths), [list(range(len(lengths)))], {}, cp_rank, cp, tp)[0]


@pytest.mark.parametrize("cp, tp", [(1, 1), (2, 1), (1, 4), (2, 2), (4, 2)])
def test_every_row_lands_on_one_rank_with_its_token(cp, tp):
    """A route's value tells its sequence, position and layer; gathered over ranks each is found once, at its token."""
    lengths = [5, 1, 17, 8, 2]
    table = {
        i: (1000 * i + np.arange(n - 1)[:, None, None] * 10 + np.arange(4)[None, :, None]) * np.ones((1, 1, 2), int)
        for i, n in enumerate(lengths)
    }
    found = []
    for cp_rank in range(cp):
        batch = rows_of(lengths, cp_rank, cp, tp)
        for tp_rank in range(tp):
            local = local_routes(table, batch, [1, 3], 2, tp_rank, tp)
            tokens, numbers = batch.tokens.chunk(tp)[tp_rank], batch.segments.chunk(tp)[tp_rank]
            assert local.shape == (len(tokens), 2, 2)
            for row, token, number in zip(local.tolist(), tokens.tolist(), numbers.tolist(), strict=True):
                if row[0][0] == NATIVE:
                    assert set(sum(row, [])) == {NATIVE}
                    continue
                assert row == [[1000 * number + 10 * token + layer] * 2 for layer in (1, 3)]
                found.append((number, token))
    assert len(found) == len(set(found)) == sum(lengths) - len(lengths)


def test_routes_of_another_sequence_length_are_refused():
    batch = rows_of([5, 4])
    good = {0: np.zeros((4, 2, 2), np.uint8), 1: np.zeros((3, 2, 2), np.uint8)}
    local_routes(good, batch, [0, 1], 2, 0, 1)
    for wrong in ({1: good[1]}, {**good, 0: good[1]}, {**good, 0: good[0][..., :1]}, {**good, 0: good[0][:, :1]}):
        with pytest.raises(ValueError, match="sequence 0"):
            local_routes(wrong, batch, [0, 1], 2, 0, 1)


def native_topk(scores, topk, groups, group_topk):
    return scores.topk(topk, 1)


def test_queue_forces_what_is_recorded_and_leaves_the_rest():
    queue, scores = RouteQueue(), torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [0.0, 0.5, 1.0]])
    queue.forward.append(torch.tensor([[2, 1], [NATIVE, NATIVE], [2, 1]]))
    values, indices = queue.get_replay_topk(scores, 2, None, None, native_topk)
    assert indices.tolist() == [[2, 1], [0, 1], [2, 1]] and values.tolist() == [[1, 2], [3, 2], [1, 0.5]]
    assert queue.tally.tolist() == [2, 1] and not queue.again  # the third row is the native set
    assert queue.get_replay_topk(scores, 2, None, None, native_topk)[1][0].tolist() == [0, 1]
    queue.forward.append(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="routes of"):
        queue.get_replay_topk(scores, 2, None, None, native_topk)


class Chunk(torch.nn.Module):
    """Looks like a model chunk of the given global layers."""

    def __init__(self, layers, dense=()):
        super().__init__()
        moe = [SimpleNamespace(router=SimpleNamespace(router_replay=RouteQueue())) for _ in layers]
        pairs = zip(layers, moe, strict=True)
        held = [SimpleNamespace(layer_number=n + 1, mlp=SimpleNamespace() if n in dense else m) for n, m in pairs]
        self.decoder = SimpleNamespace(layers=held)


def fake_replay(chunks, mode="R3"):
    grid = TrainGrid(1)
    model = SimpleNamespace(
        chunks=[SimpleNamespace(module=chunk) for chunk in chunks],
        shape=SimpleNamespace(experts_per_token=2, num_layers=4),
        grid=grid,
    )
    return RoutingReplay(mode, model, grid.coord(0))


def test_unconsumed_routes_are_noticed():
    replay = fake_replay([Chunk(list(held)) for held in stage_layers(4, 1, 2, 0, 0)[0]])
    assert replay.layers == [0, 1, 2, 3]
    batch = rows_of([5])
    replay.sequences = {0: np.zeros((4, 4, 2), np.uint8)}
    replay.attach([batch])
    with pytest.raises(RuntimeError, match="layer 0: 0 of 1 recorded routes replayed"):
        replay.require_consumed([batch])


def test_the_total_of_all_ranks_and_unbelievable_routes_are_checked():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        replay = fake_replay([Chunk([0, 1, 2, 3])])
        replay.consumed, replay.queues[0].tally = 16, torch.tensor([16, 4])
        assert replay.finish(4, 1, None) == {"training/routes_differ": (4.0, 16.0)}
        replay.consumed = 12
        with pytest.raises(RuntimeError, match=r"12 recorded .* not 16"):
            replay.finish(4, 1, None)
        replay.consumed, replay.queues[0].tally = 16, torch.tensor([16, 9])
        with pytest.raises(RuntimeError, match="9 of 16 replayed choices"):
            replay.finish(4, 1, None)
    finally:
        dist.destroy_process_group()
