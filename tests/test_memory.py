"""parallel/memory.py against Megatron itself and against arithmetic done by hand."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from launch.config import load
from launch.plan import layouts, read_shape
from launch.plan_job import process_groups
from parallel import memory
from parallel.memory import GIB
from rollout.vllm_layout import VOCAB_MULTIPLE

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "launch" / "recipes"
A2, H100 = str(RECIPES / "qwen3-235b-a22b-a2.toml"), str(RECIPES / "qwen3-235b-a22b-h100.toml")
SMALL = str(RECIPES / "qwen3-30b-a3b.toml")


@functools.cache
def fake_world(rank: int, world: int, *arguments: str) -> dict:
    command = [sys.executable, "-m", "tests.fake_world", str(rank), str(world), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def prepared(world: int, *arguments: str):
    config = load(list(arguments))
    shape = read_shape(config.model.path)
    return config, shape, *memory.grids(config, world)


CASES = [
    pytest.param(20, 128, (H100,), id="h100-middle"),
    pytest.param(127, 128, (A2,), id="a2-last", marks=pytest.mark.full),
    pytest.param(0, 128, (A2,), id="a2-first", marks=pytest.mark.full),
    pytest.param(117, 128, (H100,), id="h100-last", marks=pytest.mark.full),
    pytest.param(3, 8, (SMALL,), id="30b"),
    pytest.param(5, 8, (str(RECIPES / "qwen3-4b.toml"),), id="4b-tied", marks=pytest.mark.full),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "world", "arguments"), CASES)
def test_parameters_and_groups_are_those_of_megatron_and_vllm(rank, world, arguments):
    found = fake_world(rank, world, *arguments)
    config, shape, train, rollout = prepared(world, *arguments)
    layout, _ = layouts(config, shape, world)
    sizes = {name: math.prod(dims) for name, (dims, _) in found["parameters"].items()}
    assert memory.train_parameters(layout, shape, train, rank) == sizes
    told = memory.train_memory(config, shape, layout, rank, 1)
    assert told.params == sum(sizes[name] * item for name, (_, item) in found["parameters"].items())
    every_row_is_filled(layout, rank, {name: dims for name, (dims, _) in found["parameters"].items()})
    groups = process_groups(config, shape, world)
    assert groups["Megatron"][0] == found["megatron"][0]
    assert 0 <= groups["Megatron"][1] - found["megatron"][1] <= 2  # embedding groups hold the ends of a pipeline
    assert list(groups["vLLM"]) == found["vllm"]


def every_row_is_filled(layout, rank, shapes):
    """Pieces fill parameters of Megatron's shapes to the last row, each element once; only vocabularies are padded."""
    filled = {name: np.zeros(math.prod(dims[:-1]), np.int64) for name, dims in shapes.items()}
    for piece in layout.pieces(rank):
        (first, stop), *sides = piece.box
        units, rows, cols = (end - start for start, end in sides)
        at = piece.offset + piece.strides[0] * np.arange(units)[:, None] + piece.strides[1] * np.arange(rows)
        assert piece.strides[2] == 1 or cols == 1
        for name in {piece.store_name(layer) for layer in range(first, stop)}:
            width = shapes[name][-1]
            assert (at % width + cols <= width).all(), f"{piece} leaves a row of {shapes[name]}"
            np.add.at(filled[name], at.ravel() // width, cols)
    for name, counts in filled.items():
        width = shapes[name][-1]
        if "embedding" in name or "output_layer" in name:
            assert set(counts.tolist()) <= {0, width}
        else:
            assert (counts == width).all(), name


def one(config, shape, device, overhead, rank):
    return memory.rank_memory(config, shape, layouts(config, shape, 128), rank, device, overhead)


def test_235b_sums_to_the_published_total():
    config, shape, train, rollout = prepared(
        128, H100, "train.last_stage_layers=0", "train.pp=1", "train.recompute=full"
    )
    layout, _ = layouts(config, shape, 128)
    held = memory.train_parameters(layout, shape, train, 0)
    expert = sum(n for name, n in held.items() if ".experts." in name)
    assert expert * 4 == 94 * 128 * 3 * 4096 * 1536
    assert abs((sum(held.values()) - expert) * 4 + expert * 4 - 235.1e9) < 2.5e9  # replicated router and norms, padding


def test_worked_example_of_a_middle_stage():
    """13.9 GiB of parameters, 27.8 of gradients, 20.9 of Adam, 8.6 of engine weights at EP64, 48 kB a cached token."""
    config, shape, *_ = prepared(128, A2, "train.etp=1")
    middle = one(config, shape, 64 * GIB, 0, 20)
    for size, expected in ((middle.params, 13.9), (middle.grads, 27.8), (middle.optimizer, 20.9), (middle.engine, 8.6)):
        assert size / GIB == pytest.approx(expected, abs=0.06)
    assert memory.cache_token_bytes(config, shape) == 94 * 2 * 128 * 2


def test_both_pad_the_vocabulary_alike():
    assert memory.ENGINE_VOCAB_MULTIPLE == VOCAB_MULTIPLE


def test_host_adam_moves_moments_and_gradients():
    config, shape, train, _ = prepared(128, H100)
    dense, expert = 1_000, 4_000
    device, host = memory.optimizer_bytes(config, dense, expert, train)
    share = dense // 4 + expert // 4
    assert (device, host) == (share * 4, share * 16)
    config, *_ = prepared(128, H100, "train.optimizer.cpu_offload=false")
    assert memory.optimizer_bytes(config, dense, expert, train) == (share * 12, 0)


@pytest.mark.parametrize("option", ["train.recompute=none", "train.micro_batch_tokens=40000", "train.offload=[]"])
def test_more_is_more(option):
    config, shape, *_ = prepared(128, H100)
    more, *_ = prepared(128, H100, option)
    a, b = (one(c, shape, 79 * GIB, 0, 20) for c in (config, more))
    assert any(b.phases[name] > a.phases[name] for name in a.phases)
    assert all(b.phases[name] >= a.phases[name] for name in a.phases)


def test_refusals_say_numbers():
    config, shape, *_ = prepared(128, A2, "train.etp=1")
    m = one(config, shape, 61 * GIB, 3 * GIB, 20)
    assert "update: rank 20 needs" in memory.refusals(m, 61 * GIB, 12288)[-1]
    config, shape, *_ = prepared(128, H100, "rollout.tp=4", "rollout.vllm.gpu_memory_utilization=0.3")
    m = one(config, shape, 79 * GIB, 0, 0)
    assert m.cache < 0 and "KV cache of 0 tokens" in memory.refusals(m, 500 * GIB, 13008)[0]
