"""Bad input of the job as a whole: one message, at most 5 lines, that names file or option; never a traceback.

1,000 seeded mutations of valid TOML, parquet, jsonl, config.json, index and safetensors headers go through the same
function that trainer.py calls before any engine starts; some go through a real process, for exit code and time.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch import config as options
from launch.inputs import read_inputs
from launch.tiny_models import write_model
from tests.jobs import ROOT

SEED = 20261201


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    """A small valid job: recipe.toml, model/ (two shards), train.parquet, val.jsonl."""
    directory = tmp_path_factory.mktemp("job")
    write_model(directory / "model", shard_bytes=60_000)
    rows = [
        {
            "data_source": "copy",
            "prompt": [{"role": "user", "content": f"{i:04d}"}],
            "ability": "digits",
            "reward_model": {"style": "rule", "ground_truth": f"{i:04d}"},
            "extra_info": {"index": i},
        }
        for i in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), directory / "train.parquet")
    (directory / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "recipe.toml").write_text(
        f"""run_dir = "{directory}/run"
total_steps = 2

[model]
path = "{directory}/model"

[data]
train_files = ["{directory}/train.parquet"]
val_files = ["{directory}/val.jsonl"]
prompts_per_step = 4
max_prompt_tokens = 16
max_response_tokens = 8

[train]
dtype = "float32"
micro_batch_tokens = 256
lr = 1e-3

[rollout]
dtype = "float32"
samples_per_prompt = 4
"""
    )
    return directory


def read(recipe: Path) -> str | None:
    """None when the input is accepted, else the message."""
    try:
        read_inputs(options.load([str(recipe)]), 1)
        return None
    except ValueError as error:
        return str(error)


def test_a_table_as_ground_truth_needs_a_function(job, tmp_path):
    rows = [json.loads(line) for line in (job / "val.jsonl").read_text().splitlines()]
    for row in rows:
        row["reward_model"]["ground_truth"] = {"tests": [1, 2.0]}
    file = tmp_path / "tables.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(job / "recipe.toml"), f'data.val_files=["{file}"]']
    with pytest.raises(ValueError, match=r"tables.jsonl line 1: the ground truth is a table, which only"):
        read_inputs(options.load(arguments), 1)
    inputs = read_inputs(options.load([*arguments, "reward.function=tests.scripts.parity:score"]), 1)
    inputs.scorer.close()
    assert [prompt.ground_truth for prompt in inputs.validation[str(file)].all()] == ['{"tests": [1, 2.0]}'] * 8


def mutate_text(text: str, rng: random.Random) -> str:
    """One damage: a character, a cut, a value or a line."""
    lines = text.splitlines(keepends=True)
    kind = rng.randrange(5)
    at = rng.randrange(max(1, len(text)))
    if kind == 0:
        return text[:at] + rng.choice('"[]{}=,:0x\x00\ufffd-') + text[at + 1 :]
    if kind == 1:
        return text[:at]
    if kind == 2:
        words = rng.choice(["null", "-1", "1e99", '"text"', "true", "[]", "{}", "nan", "0", "3.5"])
        place = rng.choice([i for i, c in enumerate(text) if c in ":="] or [0])
        end = min([e for e in (text.find(c, place) for c in ",\n}") if e > 0] or [len(text)])
        return text[: place + 1] + " " + words + text[end:]
    row = rng.randrange(len(lines))
    if kind == 3:
        return "".join(lines[:row] + lines[row + 1 :])
    return "".join(lines[:row] + [lines[row]] * 2 + lines[row + 1 :])


def mutate_bytes(data: bytes, rng: random.Random, header: int) -> bytes:
    """Damage within the first `header` bytes, or a cut anywhere."""
    if rng.random() < 0.2:
        return data[: rng.randrange(len(data))]
    at = rng.randrange(min(header, len(data)))
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def mutate(directory: Path, rng: random.Random) -> Path:
    """Damage one file in place; returns it."""
    files = ["recipe.toml", "train.parquet", "val.jsonl", "model/config.json", "model/model.safetensors.index.json"]
    shards = sorted(f"model/{f.name}" for f in (directory / "model").glob("*.safetensors"))
    target = directory / rng.choice([*files, rng.choice(shards)])
    if target.suffix == ".parquet":
        data = target.read_bytes()
        tail = len(data) - rng.randrange(1, 600)  # the footer holds the schema
        damaged = data[:tail] + bytes([rng.randrange(256)]) + data[tail + 1 :]
        target.write_bytes(damaged if rng.random() < 0.7 else mutate_bytes(data, rng, len(data)))
    elif target.suffix == ".safetensors":
        data = target.read_bytes()
        target.write_bytes(mutate_bytes(data, rng, 8 + int.from_bytes(data[:8], "little")))
    else:
        target.write_text(mutate_text(target.read_text(), rng))
    return target


def test_the_valid_job_is_accepted(job):
    assert read(job / "recipe.toml") is None


@pytest.mark.slow
def test_a_thousand_mutations_are_accepted_or_give_one_short_message(job, tmp_path):
    print("seed", SEED)
    rng = random.Random(SEED)
    refused = 0
    for number in range(1000):
        copy = tmp_path / "job"
        shutil.copytree(job, copy)
        recipe = copy / "recipe.toml"
        recipe.write_text(recipe.read_text().replace(str(job), str(copy)))
        target = mutate(copy, rng)
        began = time.monotonic()
        message = read(recipe)
        seconds = time.monotonic() - began
        assert seconds < 5, (number, target, seconds)
        if message is not None:
            refused += 1
            assert 0 < len(message.splitlines()) <= 5 and len(message) < 2000, (number, target.name, message)
            named = target.name in message or target.suffix == ".toml" or "model" in message or "data." in message
            assert named, (number, target.name, message)
        shutil.rmtree(copy)
    print(f"{refused} of 1000 refused")
    assert refused > 300


CASES = {
    "unknown option": (["train.tpp=2"], "train.tp"),
    "world": (["train.tp=2"], "train.tp"),
    "no such model": (["model.path=/nowhere"], "/nowhere"),
    "batch": (["train.mini_batches=3"], "train.mini_batches"),
    "unknown source": (['data.source_key="ability"'], "'ability'"),
    "passed prompts": (["data.max_prompt_tokens=1"], "max_prompt_tokens"),
    "vllm field": (["rollout.vllm.max_num_seq=4"], "did you mean 'max_num_seqs'?"),
    "vllm type": (["rollout.vllm.max_num_seqs=abc"], "rollout.vllm.max_num_seqs must be int, got 'abc'"),
    "vllm owned": (["rollout.vllm.seed=1"], "rollout.vllm.seed is not free"),
    "megatron field": (["train.megatron.lrr=1"], "did you mean 'train.lr'?"),
    "no such checkpoint": (["checkpoint.resume=/nowhere/step_000001"], "/nowhere/step_000001: no such checkpoint"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_process_ends_with_code_2_and_one_message(job, case):
    overrides, wanted = CASES[case]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "trainer.py", str(job / "recipe.toml"), *overrides], cwd=ROOT, capture_output=True, text=True
    )
    seconds = time.monotonic() - began
    print(f"{case}: {seconds:.1f} s: {done.stderr.strip()}")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and wanted in done.stderr and len(done.stderr.splitlines()) <= 6
    assert seconds < (40 if "field" in case or "vllm" in case else 15)  # 5 idle, 10 with vLLM's import


@pytest.mark.slow
def test_an_unwritable_run_directory_is_named(job, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = subprocess.run(
        [sys.executable, "trainer.py", str(job / "recipe.toml"), f"run_dir={blocked}/run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and str(blocked) in done.stderr and "Traceback" not in done.stderr
