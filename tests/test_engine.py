"""The engine is vLLM itself, on 2 and 4 ranks. One start-up serves many layouts: engines are closed and built anew.

Weights are written through the pieces of vllm_layout from the checkpoint's tensors and compared, bit for bit, with an
engine that vLLM loaded itself; greedy and sampled tokens must not depend on the layout.
"""

import dataclasses
import gc

import numpy as np
import pytest

from launch.config import Config, ConfigError, DataConfig, ModelConfig, RolloutConfig
from launch.tiny_models import EOS, FIRST_DIGIT, write_model
from parallel.family import kinds, model_shape, read_config
from parallel.grid import RolloutGrid
from rollout.batch import Request, request_seed
from rollout.engine_options import cpu_cache_bytes, engine_arguments, environment, model_stop_ids
from tests.ranks import run_ranks

PROMPT_TOKENS, RESPONSE_TOKENS = 8, 12
VLLM = {"max_num_seqs": 16}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A MoE model and a dense one with everything odd: QKV bias, tied head, vocabulary 500, one KV head."""
    root = tmp_path_factory.mktemp("models")
    moe = write_model(root / "moe", "qwen3-moe", initializer_range=0.2, vocab=36)
    odd = dict(vocab=500, num_key_value_heads=1, hidden_size=128)  # vLLM's Qwen2 has no head_dim but hidden / heads
    dense = write_model(root / "dense", "qwen2-tied", initializer_range=0.2, **odd)
    return str(moe), str(dense)


def config_of(path, schedule="queue", **rollout):
    return Config(
        model=ModelConfig(path=path),
        data=DataConfig(max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=RESPONSE_TOKENS),
        rollout=RolloutConfig(dtype="float32", schedule=schedule, **{"vllm": VLLM, **rollout}),
    )


def requests_of(count, temperature=1.0, step=0, lengths=None):
    return [
        Request(
            prompt_id=i // 4,
            sample_id=i % 4,
            prompt_ids=[4 + i // 4 % 20, 5, 6, 7 + i // 4 % 3][: 2 + i // 4 % 3],
            seed=request_seed(0, step, i // 4, i % 4),
            max_tokens=int(lengths[i]) if lengths is not None else RESPONSE_TOKENS,
            temperature=temperature,
            expected_tokens=float(lengths[i]) if lengths is not None else 0.0,
        )
        for i in range(count)
    ]


class World:
    """What a rank of these tests has: the default group, and engines built one after the other."""

    def __init__(self, start=True):
        import torch
        import torch.distributed as dist

        if start:
            torch.set_num_threads(1)
            dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def random_state(self):
        import random

        import torch

        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    def engine(self, path, **rollout):
        from parallel.device import pick
        from rollout.engine import Engine

        config, shape = config_of(path, **rollout), model_shape(read_config(path))
        r = config.rollout
        return Engine(config, shape, RolloutGrid(self.size, r.tp, r.dp, r.expert_parallel), pick("cpu"))

    def write(self, engine, path, scale=1.0):
        """The checkpoint's tensors, times `scale`, through the layout's pieces into the live parameters."""
        import torch
        from safetensors.torch import load_file

        tensors = load_file(f"{path}/model.safetensors")
        table = kinds(model_shape(read_config(path)))
        for piece in engine.layout.pieces(self.rank):
            kind, (layers, *box) = table[piece.kind], piece.box
            cut = tuple(slice(lo, hi) for lo, hi in box)
            for layer in range(*layers):
                names = [kind.tensor_name(layer, u) for u in (range(kind.shape[1]) if kind.unit_is_tensor else [0])]
                source = torch.stack([tensors[name] for name in names]).reshape(kind.shape[1:])[cut]
                target = engine.stores[piece.store_name(layer)].view(-1)
                target.as_strided(source.shape, piece.strides, piece.offset).copy_(source * scale)
        engine.reset_prefix_cache()

    def loaded_stores(self, path, **rollout):
        """Parameters of an engine that vLLM loads itself, copied."""
        from rollout.engine import _build
        from rollout.vllm_params import stores

        config, shape = config_of(path, **rollout), model_shape(read_config(path))
        r = config.rollout
        arguments = engine_arguments(config, shape, RolloutGrid(self.size, r.tp, r.dp, r.expert_parallel), "cpu")
        engine = _build(arguments | {"load_format": "auto"}, "cpu")
        model = engine.model_executor.driver_worker.worker.model_runner.get_model()
        copies = {name: tensor.clone() for name, tensor in stores(model).items()}
        del engine, model
        gc.collect()
        return copies

    def sampled(self, engine, requests):
        """(prompt id, sample id) -> (tokens, log-probs, finish, owner), of the whole world."""
        from rollout.batch import gather

        batch = gather(engine.generate(requests))
        assert [s.key for s in batch] == sorted((r.prompt_id, r.sample_id) for r in requests)
        return {s.key: (s.response.tolist(), s.logprobs.tolist(), s.finish, s.owner) for s in batch}


def tokens(samples):
    return {key: value[0] for key, value in samples.items()}


def unequal(live, loaded):
    """Parameters that differ in any bit from vLLM's own."""
    import torch

    assert live.keys() == loaded.keys()
    return [n for n, t in live.items() if not torch.equal(t.view(torch.int32), loaded[n].view(torch.int32))]


def visit(rank, cases):
    """Build each (name, path, rollout options) in turn on all ranks; name -> what the tests look at."""
    from vllm.distributed.parallel_state import destroy_model_parallel

    world, seen = World(), {}
    for name, path, rollout in cases:
        state = world.random_state()
        engine = world.engine(path, **rollout)
        case = {"rng kept": state == world.random_state(), "stop": engine.stop_token_ids}
        dummy = tokens(world.sampled(engine, requests_of(12, 0.0)))
        world.write(engine, path)
        case["greedy"] = world.sampled(engine, requests_of(12, 0.0))
        case["dummy differs"] = dummy != tokens(case["greedy"])
        case["sampled"] = world.sampled(engine, requests_of(40))
        case["static"] = world.sampled(_with_schedule(engine, "static"), requests_of(40))
        case["one"] = world.sampled(_with_schedule(engine, "queue"), requests_of(1))
        case["none"] = world.sampled(engine, [])
        case["again"] = world.sampled(engine, requests_of(40))
        engine.sleep(), engine.wake_weights(), engine.wake_cache()
        world.write(engine, path, scale=1.5)
        case["changed"] = world.sampled(engine, requests_of(12, 0.0))
        world.write(engine, path)
        case["back"] = world.sampled(engine, requests_of(12, 0.0))
        live = {key: tensor.clone() for key, tensor in engine.stores.items()}
        engine.close()
        case["unequal"] = unequal(live, world.loaded_stores(path, **rollout))
        destroy_model_parallel()
        seen[name] = case
    return seen


def two_ranks(rank, cases, path):
    seen = visit(rank, cases)
    return seen | {"stop": stopped_by_text(path)}


def stopped_by_text(path):
    """Samples with and without a stop string; the same requests otherwise."""
    world = World(start=False)
    engine = world.engine(path, stop=["5"])
    world.write(engine, path)
    plain = requests_of(24)
    return world.sampled(engine, plain), world.sampled(engine, [dataclasses.replace(r, stop=["5"]) for r in plain])


def _with_schedule(engine, schedule):
    rollout = dataclasses.replace(engine.config.rollout, schedule=schedule)
    engine.config = dataclasses.replace(engine.config, rollout=rollout)
    return engine


def layouts(name, path):
    """TP1 x 2 (the reference), TP2, and EP2 for a MoE model."""
    cases = [(f"{name} tp1", path, {}), (f"{name} tp2", path, dict(tp=2))]
    return cases + [(f"{name} ep2", path, dict(tp=2, expert_parallel=True))] * ("moe" in name)


@pytest.fixture(scope="module")
def seen(models):
    moe, dense = models
    return run_ranks(2, two_ranks, [*layouts("moe", moe), *layouts("dense", dense)], moe, timeout_s=240)


CASES = ["moe tp1", "moe tp2", "moe ep2", "dense tp1", "dense tp2"]


def check_case(seen, name):
    case, reference = seen[0][name], seen[0][name.split()[0] + " tp1"]
    for rank in seen:
        assert rank[name]["unequal"] == [] and rank[name]["dummy differs"]
    for kind in ("greedy", "sampled"):
        assert tokens(case[kind]) == tokens(reference[kind])
        for key, (_, logprobs, _, _) in case[kind].items():
            # Logits of tens (wide random weights) in fp32, summed in another order; weights are compared bit for bit.
            assert np.abs(np.subtract(logprobs, reference[kind][key][1])).max() < 5e-5
    assert tokens(case["static"]) == tokens(case["again"]) == tokens(case["sampled"])
    assert tokens(case["one"]) == {(0, 0): tokens(case["sampled"])[0, 0]} and case["none"] == {}
    assert tokens(case["changed"]) != tokens(case["greedy"]) == tokens(case["back"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layouts_agree_with_vllms_loader_and_with_each_other(seen, name):
    """Bitwise parameters; tokens of greedy, sampled, static, single and no requests; weight changes take effect."""
    check_case(seen, name)


@pytest.mark.full
def test_all_families(tmp_path):
    cases = []
    for family in ("llama", "llama-tied", "qwen2", "qwen3", "qwen3-tied", "qwen3-moe"):
        sizes = dict(hidden_size=128) if family == "qwen2" else {}
        path = str(write_model(tmp_path / family, family, initializer_range=0.2, vocab=200, **sizes))
        cases += layouts(family, path)
    seen = run_ranks(2, visit, cases, timeout_s=600)
    for name, *_ in cases:
        check_case(seen, name)


@pytest.mark.full
def test_wide_layouts(models):
    wide = dict(dp=4, expert_parallel=True)
    cases = [("moe tp1", models[0], {}), ("moe 2 x tp2", models[0], dict(tp=2)), ("moe dp4 ep4", models[0], wide)]
    seen = run_ranks(4, visit, cases, timeout_s=400)
    for name, *_ in cases:
        check_case(seen, name)


@pytest.mark.slow
def test_stop_strings(seen):
    plain, stopped = seen[0]["stop"]
    five = FIRST_DIGIT + 5
    assert any(five in tokens for tokens, *_ in plain.values())
    for key, (response, _, finish, _) in plain.items():
        cut = response[: response.index(five) + 1] if five in response else response
        assert stopped[key][0] == cut
        assert stopped[key][2] == ("stop" if five in response else finish)


@pytest.mark.slow
def test_samples_come_from_both_ranks_and_end_where_they_should(seen):
    for name in CASES:
        assert seen[0][name] == seen[1][name]  # every rank holds the whole batch
        case = seen[0][name]
        assert case["rng kept"] and case["stop"] == [EOS]
        assert {owner for *_, owner in case["sampled"].values()} == {0, 1}
        for response, logprobs, finish, _ in case["sampled"].values():
            assert len(response) == len(logprobs) <= RESPONSE_TOKENS
            assert (finish == "stop") == (response[-1] == EOS) and EOS not in response[:-1]
            assert finish == "stop" or len(response) == RESPONSE_TOKENS
            assert max(logprobs) <= 0


def four_ranks(rank, moe):
    world, seen = World(), {}
    for name, rollout in (
        ("4 x tp1", dict()),
        ("2 x dp2 ep2", dict(dp=2, expert_parallel=True)),
        ("dp2 tp2 ep4", dict(dp=2, tp=2, expert_parallel=True)),
    ):
        engine = world.engine(moe, **rollout)
        world.write(engine, moe)
        seen[name] = [world.sampled(engine, requests_of(count)) for count in (0, 1, 5, 64)]
        world.write(engine, moe, scale=1.5)
        world.sampled(engine, requests_of(3))
        world.write(engine, moe)
        seen[name].append(world.sampled(engine, requests_of(64)))
        if name == "4 x tp1":
            seen["steps"] = paced(world, engine)
        engine.close()
    return seen


def paced(world, engine):
    """Steps of this replica through the shipped loop, replicas kept at one pace, and the lower bound."""
    import torch
    import torch.distributed as dist

    from rollout.schedule import hand_out, longest_first

    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(4), 0.7, 96), 1, RESPONSE_TOKENS).astype(int)
    engine.slots, engine.stop_token_ids = 4, []
    params = [dataclasses.replace(r) for r in requests_of(96, lengths=lengths)]
    loop = hand_out(engine, ordered := longest_first(params), engine._feed(len(ordered), "paced"))
    steps, tokens, alive = 0, 0, torch.ones(1)
    while alive:
        finished = next(loop, None)
        steps += finished is not None
        tokens += sum(len(s.response) for s in finished or [])
        alive = torch.tensor([float(finished is not None)])
        dist.all_reduce(alive)
    totals = torch.tensor([tokens])
    dist.all_reduce(totals)
    return steps, max(int(totals) / (4 * world.size), lengths.max())


@pytest.mark.slow
def test_four_ranks(models):
    """Replicas beside each other, DP inside a replica and both; requests for none, one and all of the ranks."""
    seen = run_ranks(4, four_ranks, models[0], timeout_s=240)
    reference = seen[0]["4 x tp1"]
    for name in ("4 x tp1", "2 x dp2 ep2", "dp2 tp2 ep4"):
        for rank in range(4):
            assert seen[rank][name] == seen[0][name]
        assert [len(samples) for samples in seen[0][name]] == [0, 1, 5, 64, 64]
        for samples, expected in zip(seen[0][name], reference, strict=True):
            assert tokens(samples) == tokens(expected)
        assert tokens(seen[0][name][-1]) == tokens(seen[0][name][-2])
        assert {owner for *_, owner in seen[0][name][-1].values()} == {0, 1, 2, 3}
    steps, bound = zip(*(part["steps"] for part in seen), strict=True)
    print(f"steps {steps}, lower bound {bound[0]:.1f}")
    assert max(steps) <= 1.05 * bound[0] + 1  # a short run: rounding to whole steps is allowed for


# Without an engine


def test_arguments_of_the_platforms(models):
    config, shape, grid = config_of(models[0], tp=2), model_shape(read_config(models[0])), RolloutGrid(4, 2)
    cpu, cuda, npu = (engine_arguments(config, shape, grid, kind) for kind in ("cpu", "cuda", "npu"))
    assert cpu["enforce_eager"] and "enable_sleep_mode" not in cpu and cpu["kv_cache_memory_bytes"] > 0
    assert cuda["moe_backend"] == "triton" and cuda["enable_sleep_mode"]
    own = {"enable_cpu_binding": False, "weight_nz_mode": 0, "enable_fused_mc2": 0}
    assert npu["additional_config"] == own and npu["enable_sleep_mode"]
    for arguments in (cpu, cuda, npu):
        assert arguments["load_format"] == "dummy" and arguments["tensor_parallel_size"] == 2
        assert arguments["max_model_len"] == PROMPT_TOKENS + RESPONSE_TOKENS and arguments["max_num_seqs"] == 16
        assert arguments["logprobs_mode"] == "processed_logprobs" and arguments["skip_tokenizer_init"]
    assert environment("cuda", RolloutGrid(8, 2, 2, True))["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert not engine_arguments(config_of(models[0], stop=["x"]), shape, grid, "cpu")["skip_tokenizer_init"]


def test_cpu_cache_holds_the_slots_within_its_limit(models):
    shape = model_shape(read_config(models[0]))
    block = 2 * 2 * 2 * 32 * 4 * 128
    assert cpu_cache_bytes(shape, 1, 20, 16, 4) == 17 * block
    assert cpu_cache_bytes(shape, 1, 10**6, 256, 4) == (2 << 30) + block
    assert cpu_cache_bytes(shape, 1, 10**7, 256, 4) == (2 * 78125 + 1) * block


def test_owned_engine_options_name_ours(models):
    from launch.config import check_passthrough
    from rollout.engine_options import OWNED

    with pytest.raises(ConfigError, match="rollout.vllm.tensor_parallel_size .*rollout.tp"):
        check_passthrough({"tensor_parallel_size": 2}, {}, OWNED, "rollout.vllm", "vLLM")


def test_stop_ids_of_a_model_directory(tmp_path):
    assert model_stop_ids(tmp_path) == set()
    for text, ids in (('{"eos_token_id": 2}', {2}), ('{"eos_token_id": [2, 5]}', {2, 5}), ("{}", set())):
        (tmp_path / "generation_config.json").write_text(text)
        assert model_stop_ids(tmp_path) == ids
    for text in ("[]", "{", '{"eos_token_id": "x"}', '{"eos_token_id": [true]}'):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match="generation_config.json"):
            model_stop_ids(tmp_path)
