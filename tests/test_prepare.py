"""Data sets in verl's schema, the quickstart's files, tiny models that transformers and our kinds agree on."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch import prepare
from launch.config import DataConfig
from launch.tiny_models import FAMILIES, write_model
from parallel.family import kinds, model_shape, read_config
from rollout.prompts import PromptSet, load_tokenizer
from tests.jobs import ROOT


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return pq.read_table(path).to_pylist()


def gsm8k_rows(n):
    return [{"question": f"How much is {i}?", "answer": f"It is <<{i}>>.\n#### 1,{i:03d}"} for i in range(n)]


def test_gsm8k_as_the_reference_prepares_it(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", gsm8k_rows(3))
    write_jsonl(tmp_path / "test.jsonl", gsm8k_rows(1))
    out = tmp_path / "out"
    assert prepare.main(["gsm8k", "--from", str(tmp_path), str(out)]) == 0
    row = read(out / "train.parquet")[2]
    assert row == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": 'How much is 2? Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1002"},
        "extra_info": {"split": "train", "index": 2},
    }
    assert len(read(out / "test.parquet")) == 1
    # the same from files that are named
    files = [str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl")]
    assert prepare.main(["gsm8k", "--from", *files, str(tmp_path / "again")]) == 0
    assert read(tmp_path / "again/train.parquet") == read(out / "train.parquet")


def test_sums_hold_out_pairs_in_both_orders(tmp_path):
    assert prepare.main(["sums", str(tmp_path)]) == 0
    rows = {split: read(tmp_path / f"{split}.parquet") for split in ("train", "test")}
    pairs = {}
    for split, found in rows.items():
        numbers = [[int(n) for n in re.findall(r"\d+", row["prompt"][0]["content"])] for row in found]
        truths = [int(row["reward_model"]["ground_truth"]) for row in found]
        assert [a + b for a, b in numbers] == truths
        pairs[split] = {frozenset(pair) for pair in numbers}
    assert sum(map(len, rows.values())) == 2500 and not pairs["train"] & pairs["test"]
    assert len(pairs["test"]) == 200


def test_math_takes_the_last_box(tmp_path):
    rows = [{"problem": "What?", "solution": r"Not \boxed{1} but \boxed{\frac{1}{2}}.", "level": "1"}]
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
    assert prepare.main(["math", "--from", str(tmp_path), str(tmp_path / "out")]) == 0
    row = read(tmp_path / "out/test.parquet")[0]
    assert row["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert row["prompt"][0]["content"].startswith("What? Let's think step by step")
    assert row["data_source"] == "DigitalLearningGmbH/MATH-lighteval"


def test_dapo_math_in_its_three_published_forms(tmp_path):
    verl = {"prompt": [{"role": "user", "content": "P"}], "reward_model": {"ground_truth": "34", "style": "rule"}}
    slime = {"prompt": [{"role": "user", "content": "Q"}], "label": "35"}
    plain = {"problem": "R", "answer": 36}
    write_jsonl(tmp_path / "any.jsonl", [verl, verl, slime, plain])
    assert prepare.main(["dapo-math", "--from", str(tmp_path / "any.jsonl"), str(tmp_path / "out")]) == 0
    rows = read(tmp_path / "out/train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["34", "35", "36"]
    assert {row["data_source"] for row in rows} == {"math_dapo"}
    assert rows[2]["prompt"][0]["content"].splitlines()[2] == "R"


def test_aime_has_a_test_split_only(tmp_path):
    write_jsonl(tmp_path / "aime-2024.jsonl", [{"Problem": "P", "Answer": 204, "Solution": "..."}])
    assert prepare.main(["aime", "--from", str(tmp_path), str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["test.parquet"]


def test_a_split_is_a_word_of_the_file_name(tmp_path):
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "train_latest.jsonl", gsm8k_rows(3))
    write_jsonl(tmp_path / "in" / "gsm8k-test.jsonl", gsm8k_rows(2))
    assert prepare.main(["gsm8k", "--from", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    counts = {name: pq.read_metadata(tmp_path / "out" / f"{name}.parquet").num_rows for name in ("train", "test")}
    assert counts == {"train": 3, "test": 2}


def test_mistakes_are_one_message_and_exit_code_2(tmp_path, capsys, monkeypatch):
    def message(*argv):
        assert prepare.main(list(argv)) == 2
        return capsys.readouterr().err

    out = str(tmp_path / "out")
    assert "no such file or directory" in message("gsm8k", "--from", str(tmp_path / "none"), out)
    write_jsonl(tmp_path / "train.jsonl", [{"question": "Q", "answer": "no marker"}])
    assert "no test.jsonl / test-*.parquet there" in message("gsm8k", "--from", str(tmp_path), out)
    write_jsonl(tmp_path / "test.jsonl", gsm8k_rows(1))
    assert "train.jsonl line 1: column 'answer' has no '#### number'" in message("gsm8k", "--from", str(tmp_path), out)
    with pytest.raises(SystemExit):
        prepare.main(["gsm8k"])
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(hub, "hf_hub_download", lambda *_, **__: (_ for _ in ()).throw(OSError("no route")))
    assert "from http://hub.invalid: no route\ngive local files with --from" in message("gsm8k", out)


class Hub(BaseHTTPRequestHandler):
    """The few answers of a hub that a download needs; `files`: path -> content."""

    files: dict[str, bytes] = {}

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        content = self.files.get(self.path)
        self.send_response(200 if content is not None else 404)
        content = content or b""
        headers = {"Content-Length": str(len(content)), "ETag": f'"{len(content)}"', "X-Repo-Commit": "0" * 40}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content if body else b"")

    def log_message(self, *_):
        pass


def test_a_hub_of_ones_own_is_used_when_it_is_named(tmp_path):
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(gsm8k_rows(4)), tmp_path / split)
        name = f"/datasets/openai/gsm8k/resolve/main/main/{split}-00000-of-00001.parquet"
        Hub.files[name] = (tmp_path / split).read_bytes()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        place = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home")}
        environment = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_HUB_CACHE")} | place
        command = [sys.executable, "-m", "launch.prepare", "gsm8k", str(tmp_path / "out")]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert len(read(tmp_path / "out/train.parquet")) == len(read(tmp_path / "out/test.parquet")) == 4
        command[3] = "math"
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "cannot get" in done.stderr and "--from" in done.stderr
    finally:
        server.shutdown()
        server.server_close()


def test_mutated_rows_are_converted_or_named(tmp_path):
    samples = {
        "gsm8k": gsm8k_rows(1)[0],
        "math": {"problem": "P", "solution": r"\boxed{1}"},
        "aime": {"prompt": [{"role": "user", "content": "P"}], "reward_model": {"ground_truth": "1"}},
    }
    junk = [None, "", 0, 1.5, True, [], {}, [None], {"a": 1}, "x"]
    outcomes = Counter()
    for number in range(300):
        random_source = random.Random(number)
        name = random_source.choice(list(samples))
        row = dict(samples[name])
        key = random_source.choice(list(row))
        kind = random_source.randrange(3)
        if kind == 0:
            del row[key]
        elif kind == 1:
            row[key] = random_source.choice(junk)
        line = json.dumps(row)
        if kind == 2:
            place = random_source.randrange(len(line))
            line = line[:place] + random_source.choice('{}[]",:x') + line[place + 1 :]
        file = tmp_path / "rows.jsonl"
        file.write_text(line + "\n")
        try:
            for where, raw in prepare._read(file):
                prepare.DATASETS[name].convert(raw, where)
            outcomes["accepted"] += 1
        except ValueError as error:
            assert str(error).startswith(f"{file} line 1: "), (number, str(error))
            assert "column" in str(error) or "JSON" in str(error), (number, str(error))
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20, outcomes


def test_copy_is_complete_and_held_out_prompts_are_not_trained_on(tmp_path):
    assert prepare.main(["copy", str(tmp_path)]) == 0
    tokenizer = load_tokenizer(tmp_path / "model")
    data = DataConfig(max_prompt_tokens=8)
    train = PromptSet([tmp_path / "train.parquet"], tokenizer, data, 0)
    val = PromptSet([tmp_path / "val.parquet"], tokenizer, data, 0)
    assert (len(train), len(val), train.sources) == (9800, 200, ["copy"])
    texts = [{tokenizer.decode(prompt.ids) for prompt in prompts.all()} for prompts in (train, val)]
    assert len(texts[0]) == 9800 and len(texts[1]) == 200 and not texts[0] & texts[1]
    prompt = train.batch(0, 16)[0]
    assert tokenizer.decode(prompt.ids) == prompt.ground_truth + "="
    assert len(prompt.ids) == 5
    config = read_config(tmp_path / "model")
    assert (config["num_experts"], config["vocab_size"], config["head_dim"]) == (4, 32, 32)
    generation = json.loads((tmp_path / "model/generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id == 1


def tensors_of(path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    found = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("vocab", "shard_bytes"), [(32, 0), (131, 60_000)])
def test_tiny_models_have_exactly_the_tensors_of_our_kinds(tmp_path, family, vocab, shard_bytes):
    path = write_model(tmp_path, family, vocab=vocab, shard_bytes=shard_bytes)
    shape = model_shape(read_config(path))
    expected = {
        kind.tensor_name(layer, unit): kind.tensor_shape
        for kind in kinds(shape).values()
        for layer in range(kind.shape[0])
        for unit in range(kind.shape[1] if kind.unit_is_tensor else 1)
    }
    assert tensors_of(path) == expected
    assert (path / "model.safetensors").exists() == (not shard_bytes)
    assert (path / "model.safetensors.index.json").exists() == bool(shard_bytes)
    assert shape.tied == family.endswith("-tied")
    load_tokenizer(path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe"])
def test_tiny_models_load_and_depend_on_the_seed_alone(tmp_path, family):
    import torch
    from transformers import AutoModelForCausalLM

    one, two, other = (write_model(tmp_path / str(i), family, seed=seed) for i, seed in enumerate((0, 0, 1)))
    states = [AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (one, two, other)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert not torch.equal(states[0]["lm_head.weight"], states[2]["lm_head.weight"])
    # Norms and biases differ from ones and zeros: a misplaced one must show.
    assert all(value.std() > 0 for value in states[0].values() if value.dim() == 1)


def test_every_id_of_the_tokenizer_can_be_printed(tmp_path):
    tokenizer = load_tokenizer(write_model(tmp_path, "llama"))
    assert tokenizer.decode(list(range(4, 32))) == "0123456789abcdefghijklmnopqr"
    assert tokenizer.decode([4, 5, 1]) == "01<eos>"
    assert tokenizer.decode([4, 5, 1], skip_special_tokens=True) == "01"


def test_unknown_family_and_small_vocabulary(tmp_path):
    with pytest.raises(ValueError, match="unknown family 'gpt'; one of llama"):
        write_model(tmp_path, "gpt")
    with pytest.raises(ValueError, match="vocabulary of 31"):
        write_model(tmp_path, "llama", vocab=31)


@pytest.mark.full
def test_smollm2_from_its_package(tmp_path):
    assert prepare.main(["smollm2", str(tmp_path)]) == 0
    shape = model_shape(read_config(tmp_path))
    assert (shape.heads, shape.kv_heads, shape.num_layers, shape.tied) == (9, 3, 30, True)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_template and tokenizer.eos_token == "<|im_end|>"
    assert "quantization_config" not in read_config(tmp_path)
