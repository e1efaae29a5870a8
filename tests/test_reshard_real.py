"""Real Megatron parameters into a real vLLM, on gloo: every pair of layouts, bit for bit what vLLM's own loader writes.

One engine start serves all training layouts: Megatron models are built first and their parameters kept.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from launch.tiny_models import write_model
from tests.jobs import prepare, run_job
from tests.ranks import run_ranks
from tests.test_engine import World, unequal

TRAIN: dict[str, dict[str, int]] = {
    "tp1": {},
    "tp2": dict(tp=2),
    "pp2": dict(pp=2),
    "tp2 pp2": dict(tp=2, pp=2),
}
TRAIN_EXPERTS = {"ep2": dict(ep=2), "tp2 ep2": dict(tp=2, ep=2), "pp2 ep2": dict(pp=2, ep=2), "etp2": dict(tp=2, etp=2)}
ROLLOUT: dict[str, dict[str, Any]] = {"tp1": {}, "tp2": dict(tp=2), "tp4": dict(tp=4)}
ROLLOUT_EXPERTS = {"ep2": dict(tp=2, expert_parallel=True), "dp2 tp2 ep4": dict(tp=2, dp=2, expert_parallel=True)}


def megatron(path: str, world: World, degrees: dict[str, int]) -> tuple[Any, dict[str, Any]]:
    """(layout, parameters) of a Megatron model that read the checkpoint."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from launch.config import Config, ModelConfig, TrainConfig
    from parallel import hf
    from parallel.device import Device
    from parallel.family import model_shape, read_config
    from parallel.grid import TrainGrid
    from parallel.megatron_layout import megatron_layout
    from parallel.megatron_model import build

    train = TrainConfig(**{"etp": 1, "dtype": "float32", **degrees})
    shape, device = model_shape(read_config(path)), Device("cpu")
    etp = degrees.get("etp", 1) if shape.is_moe else train.tp
    grid = TrainGrid(world.size, tp=train.tp, pp=train.pp, ep=train.ep, etp=etp)
    layout = megatron_layout(shape, grid, dtype="float32")
    model = build(shape, Config(model=ModelConfig(path=path), train=train), grid, device, 1)
    hf.load(path, layout, model.stores(), world.rank, dist.group.WORLD, device)
    stores = model.stores()
    assert not [name for chunk in model.chunks for name, _ in chunk.module.named_buffers()]  # nothing else to move
    parallel_state.destroy_model_parallel()
    return layout, stores


def pairs(rank: int, path: str, train: dict[str, dict], rollout: dict[str, dict]) -> dict[str, list[str]]:
    """ "TRAIN -> ROLLOUT" -> parameters of the engine that differ after the planned and after the golden sync."""
    import torch.distributed as dist
    from safetensors.torch import load_file
    from vllm.distributed.parallel_state import destroy_model_parallel

    from parallel.device import Device
    from parallel.reshard import Resharder
    from parallel.reshard_check import verify
    from parallel.reshard_golden import gather_full
    from parallel.reshard_plan import plan

    world, device, found = World(), Device("cpu"), {}
    sources = {name: megatron(path, world, degrees) for name, degrees in train.items()}
    group = dist.group.WORLD
    for name, options in rollout.items():
        engine = world.engine(path, **options)
        engine.load(iter(load_file(f"{path}/model.safetensors").items()))
        loaded = {store: tensor.clone() for store, tensor in engine.stores.items()}
        for trained, (source, held) in sources.items():
            moves = plan(source, engine.layout, node_size=2, cap_bytes=1 << 16)
            resharder = Resharder(moves, rank, group, source, engine.layout, device)
            wrong = resharder.compare(held, engine.stores)
            empty(engine.stores)
            resharder.run(held, engine.stores)
            verify(source, engine.layout, held, engine.stores, rank, group, device)
            wrong += unequal_weights(engine, loaded)
            empty(engine.stores)
            engine.load(gather_full(source, held, rank, group, device, 1 << 18))
            found[f"{trained} -> {name}"] = wrong + unequal_weights(engine, loaded)
        engine.close()
        destroy_model_parallel()
    return found


def empty(stores: dict[str, Any]) -> None:
    for store in stores.values():
        store.fill_(-7.0)


def unequal_weights(engine: Any, loaded: dict[str, Any]) -> list[str]:
    """Padding, which only the engine clears, aside."""
    from rollout import vllm_params

    vllm_params.clear_padding(engine.stores, engine._padding)
    return unequal(engine.stores, loaded)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    moe = write_model(root / "moe", "qwen3-moe", initializer_range=0.2, vocab=300)
    dense = write_model(root / "dense", "qwen2-tied", initializer_range=0.2, vocab=500, hidden_size=128)
    return {"moe": str(moe), "dense": str(dense)}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("model", ["moe", "dense"])
def test_every_pair_of_layouts(models, model, world):
    train = TRAIN | (TRAIN_EXPERTS if model == "moe" else {})
    rollout = ROLLOUT | (ROLLOUT_EXPERTS if model == "moe" else {})
    if world == 2:
        train = {name: degrees for name, degrees in train.items() if " " not in name}
        rollout = {name: options for name, options in rollout.items() if name in ("tp1", "tp2", "ep2")}
    for found in run_ranks(world, pairs, models[model], train, rollout, timeout_s=500):
        assert len(found) == len(train) * len(rollout)
        assert not {pair: names for pair, names in found.items() if names}


def compared(rank: int, path: str) -> dict[str, str]:
    """What the comparison at the start says: after a nap, with one element of vLLM's changed, and on resume."""
    import torch.distributed as dist

    from parallel.device import Device
    from parallel.weight_sync import WeightSync

    world, said = World(), {}
    layout, stores = megatron(path, world, dict(pp=2, ep=1))
    engine = world.engine(path, tp=2, expert_parallel=True, compare_at_start=True)
    engine.sleep(), engine.wake_weights()
    derived = re.compile(r"cos_sin_cache|_[kqv]_scale|_prob_scale|_expert_map")
    assert not [name for name, _ in engine.model.named_buffers() if not derived.search(name)]  # none is trained

    def attempt(name: str, resumed: bool = False) -> None:
        where = (rank, dist.group.WORLD, Device("cpu"))
        weights = WeightSync(layout, engine.layout, engine.config.rollout, *where, engine.packed)
        weights.is_resumed, said[name] = resumed, ""
        try:
            weights.update(stores, engine)
        except RuntimeError as error:
            said[name] = str(error)

    attempt("as loaded")
    if rank == 1:
        engine.stores["model.layers.1.self_attn.qkv_proj.weight"][3, 5] += 1e-3
    attempt("changed")
    attempt("changed, resumed", resumed=True)
    attempt("as written")
    return said


@pytest.mark.slow
def test_comparison_with_what_vllm_loaded_itself(models):
    said, other = run_ranks(2, compared, models["moe"], timeout_s=200)
    print(said["changed"])
    assert said == other and [name for name in said if said[name]] == ["changed"]
    assert "other weights than vLLM has loaded itself from model.path" in said["changed"]
    where = r"model.layers.1.self_attn.q_proj.weight: box \(\(1, 2\), .*\(layer, unit, row, col\) in model.layers.1."
    assert re.search(where + r"self_attn.qkv_proj.weight, from rank \d to rank 1: 1 of \d+ elem", said["changed"])


@pytest.mark.full
def test_jobs_compare_at_their_start_and_golden_jobs_draw_the_same(tmp_path):
    """The comparison is made by a new job, not by one that resumes; the golden path is the oracle of a whole job."""
    data = prepare("copy", tmp_path / "copy")
    small = [f"model.path={data}/model", f'data.train_files=["{data}/train.parquet"]', "data.val_files=[]"]
    small += ["eval.every_steps=0", "train.tp=2", "train.ep=1"]

    def job(name: str, steps: int, *options: str):
        options = ("launch/recipes/quickstart.toml", *small, *options, f"total_steps={steps}")
        return run_job(tmp_path / name, 2, *options)

    compared, golden = "rollout.compare_at_start=true", "rollout.sync_plan=golden"
    message = "every element equals what vLLM loaded itself"
    assert message in job("planned", 1, compared).output
    resumed = job("planned", 2, compared)
    assert message not in resumed.output
    oracle = job("golden", 2, golden)
    for step in (1, 2):
        assert [s["response"] for s in resumed.samples(step)] == [s["response"] for s in oracle.samples(step)]
