"""What routing replay is for: engine and trainer in bf16 on a MoE model whose router logits are nearly tied.

    share   (token, layer) pairs whose experts in training are not those that the engine chose
    probs_diff   mean |p_engine - p_trainer| of the sampled tokens

without replay, with it, and with routes that are off by one token or one layer.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from launch.tiny_models import write_model
from tests.ranks import run_ranks

PROMPTS, SAMPLES, RESPONSE = 16, 4, 24


def near_ties(path: Path, spread=0.02) -> Path:
    """A model directory: every router's rows are one vector plus a little noise."""
    import torch
    from safetensors.torch import load_file, save_file

    sizes = dict(initializer_range=0.2, num_experts=8, num_hidden_layers=4, moe_intermediate_size=64)
    write_model(path, "qwen3-moe", dtype="bfloat16", **sizes)
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, weight in tensors.items():
        if name.endswith("mlp.gate.weight"):
            noise = torch.randn(weight.shape, generator=generator) * spread
            tensors[name] = (weight[:1].float() + noise).to(weight.dtype).contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def figures(rank, path):
    import torch.distributed as dist

    from launch.config import Config, DataConfig, ModelConfig, RolloutConfig, TrainConfig
    from parallel import hf, megatron_step
    from parallel.device import pick
    from parallel.family import model_shape, read_config
    from parallel.grid import RolloutGrid, TrainGrid
    from parallel.megatron_layout import megatron_layout
    from parallel.megatron_model import build
    from parallel.micro_batches import unpack
    from parallel.replay import ReplayRouter, RoutingReplay
    from parallel.weight_sync import WeightSync
    from rollout.batch import canonical
    from rollout.engine import Engine
    from tests.test_engine import requests_of

    dist.init_process_group("gloo")
    config = Config(
        model=ModelConfig(path=path),
        data=DataConfig(max_prompt_tokens=8, max_response_tokens=RESPONSE),
        train=TrainConfig(dtype="bfloat16", micro_batch_tokens=256),
        rollout=RolloutConfig(dtype="bfloat16", routing_replay="R3", vllm={"max_num_seqs": 32}),
    )
    shape, device, grid = model_shape(read_config(path)), pick("cpu"), TrainGrid(1)
    engine = Engine(config, shape, RolloutGrid(1), device)
    model = build(shape, config, grid, device, 10, ReplayRouter)
    layout = megatron_layout(shape, grid, dtype="bfloat16")
    hf.load(path, layout, model.stores(), 0, dist.group.WORLD, device)
    model.after_load()
    WeightSync(layout, engine.layout, config.rollout, 0, dist.group.WORLD, device).run(model.stores(), engine.stores)
    engine.reset_prefix_cache()
    requests = [dataclasses.replace(r, max_tokens=RESPONSE) for r in requests_of(PROMPTS * SAMPLES)]
    samples = canonical(engine.generate(requests))
    sequences = [np.concatenate([s.prompt, s.response]) for s in samples]
    lengths = [len(s.prompt) for s in samples]
    packs = [list(range(i, min(i + 8, len(samples)))) for i in range(0, len(samples), 8)]
    replay = RoutingReplay("R3", model, grid.coord(0))

    def scored(routes):
        """(share of differing choices, probs_diff mean, share that the replay's own tally finds) of a scoring pass."""
        batches = megatron_step.micro_batches(model, sequences, lengths, packs, {})
        if routes is not None:
            replay.sequences = routes
            replay.attach(batches)
        with replay.recording(batches):
            results = megatron_step.score(model, batches, 1.0)
        replay.require_consumed(batches)
        differing = total = 0
        for batch in batches:
            used = replay.recorded[tuple(batch.indices)].numpy()
            for start, index in zip(batch.cu_seqlens.tolist(), batch.indices, strict=False):
                chosen = samples[index].routes
                rows = used[start : start + len(chosen)]
                differing += int((np.sort(rows) != np.sort(chosen)).any(-1).sum())
                total += rows.shape[0] * rows.shape[1]
        logps = unpack(batches, [logp for logp, _ in results])
        gaps = np.concatenate([np.abs(np.exp(samples[i].logprobs) - np.exp(v)) for i, v in logps.items()])
        replayed, natively_other = replay.take_tally()
        return differing / total, float(gaps.mean()), natively_other / max(1, replayed)

    routes = {i: s.routes for i, s in enumerate(samples)}
    moved = {axis: {i: np.roll(r, 1, axis) for i, r in routes.items()} for axis in (0, 1)}
    return [scored(None), scored(routes), scored(moved[0]), scored(moved[1])]


@pytest.mark.slow
def test_near_ties_in_bf16(tmp_path):
    found = run_ranks(1, figures, str(near_ties(tmp_path / "model")), timeout_s=200)[0]
    for name, (share, gap, tally) in zip(("none", "R3", "token + 1", "layer + 1"), found, strict=True):
        print(f"{name}: {share:.2%} of choices differ, probs_diff mean {gap:.2e}, by the tally {tally:.1%}")
    none, replayed, token, layer = found
    assert none[0] > 0.01 and replayed[0] == 0
    assert replayed[1] <= none[1] / 2
    for shifted in (token, layer):
        assert shifted[1] > 2 * none[1] and shifted[2] > 0.5  # above replay.MOST_DIFFERING: the step would fail
