"""Hugging Face directories: validation, rounds, load and export, bitwise round trips."""

from __future__ import annotations

import json
import os
import random
import time
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel import hf
from parallel.device import Device
from parallel.family import kinds, model_shape
from parallel.grid import TrainGrid
from parallel.hf import (
    NO_FILE,
    deal,
    export,
    hf_layouts,
    load,
    read_index,
    shards,
    tensor_table,
)
from parallel.layout import elements
from parallel.megatron_layout import megatron_layout
from parallel.reshard_plan import plan
from parallel.tensor_file import read, read_header, write
from tests.hf_dirs import CONFIGS, empty_stores, gathered, gloo, logical, same_bits, write_model
from tests.ranks import run_ranks

CPU = Device("cpu")


def index_json(path: Path) -> Path:
    return path / "model.safetensors.index.json"


# -- files


def test_write_is_what_the_safetensors_package_reads(tmp_path):
    tensors = {
        "odd": torch.randn(3).bfloat16(),
        "b": torch.randn(5, 7),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        "strided": torch.randn(6, 4).t(),
    }
    size, digest, _ = write(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    back = load_file(tmp_path / "x.safetensors")
    assert all(same_bits(back[name], tensor) for name, tensor in tensors.items())
    assert size == (tmp_path / "x.safetensors").stat().st_size
    header = read_header(tmp_path / "x.safetensors")
    stores = {name: torch.empty_like(back[name]) for name in ("b", "odd")}
    assert read(tmp_path / "x.safetensors", header, stores, hashed=True) == digest
    assert all(same_bits(stores[name], back[name]) for name in stores)
    assert header.metadata == {"format": "pt"}


# -- index


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_index_of_a_good_directory(tmp_path, family, num_shards):
    tensors = write_model(tmp_path, CONFIGS[family], num_shards)
    index = read_index(tmp_path)
    assert set(index.tensors) == set(tensors) and index.dtype == "bfloat16"
    for name, (_, entry) in index.tensors.items():
        assert entry.shape == tuple(tensors[name].shape)


def test_tied_model_may_carry_a_head(tmp_path):
    tensors = write_model(tmp_path, CONFIGS["llama"])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    index = read_index(tmp_path)
    assert "lm_head.weight" not in index.tensors and index.skipped
    layout = hf_layouts(index, index.shape, 1)[0]
    assert sum(elements(p.box) for p in layout.pieces(0)) == sum(elements(k.full_box) for k in layout.kinds.values())


def _edit_index(path, change):
    table = json.loads(index_json(path).read_text())
    change(table["weight_map"])
    index_json(path).write_text(json.dumps(table))


def _rewrite(path, change):
    file = path / "model-00001-of-00003.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


NORM = "model.norm.weight"
BROKEN = {
    "no index": (lambda p: index_json(p).unlink(), "neither model.safetensors.index.json"),
    "no files": (lambda p: [f.unlink() for f in p.glob("model*")], "has no model.safetensors"),
    "file missing": (lambda p: (p / "model-00002-of-00003.safetensors").unlink(), "names files that do not exist"),
    "stale single": (lambda p: save_file({"a": torch.ones(1)}, p / "model.safetensors"), "remove the one"),
    "not a table": (lambda p: index_json(p).write_text("[]"), "expected a JSON object"),
    "bad json": (lambda p: index_json(p).write_text('{"weight_map": {'), "not valid JSON"),
    "deep json": (lambda p: index_json(p).write_text('{"a":' + "[" * 100_000), "not valid JSON"),
    "outside": (lambda p: _edit_index(p, lambda m: m.update({NORM: "../x.safetensors"})), "is not the name of"),
    "missing in index": (lambda p: _edit_index(p, lambda m: m.pop(NORM)), NORM),
    "moved in index": (
        lambda p: _edit_index(p, lambda m: m.update(dict.fromkeys(m, "model-00001-of-00003.safetensors"))),
        "lacks tensors",
    ),
    "surplus": (
        lambda p: (
            _rewrite(p, lambda t: t.update(extra=torch.ones(1).bfloat16())),
            _edit_index(p, lambda m: m.update(extra="model-00001-of-00003.safetensors")),
        ),
        "does not have",
    ),
    "shape": (
        lambda p: _rewrite(p, lambda t: t.update({"model.embed_tokens.weight": torch.ones(36, 32)})),
        r"model.embed_tokens.weight: shape is \[36, 32\]",
    ),
    "integer weights": (
        lambda p: _rewrite(p, lambda t: t.update({"model.embed_tokens.weight": torch.ones(37, 32, dtype=torch.int8)})),
        "not a weight type",
    ),
    "truncated": (
        lambda p: os.truncate(p / "model-00001-of-00003.safetensors", 3000),
        "model-00001-of-00003.safetensors",
    ),
    "empty": (lambda p: os.truncate(p / "model-00001-of-00003.safetensors", 0), "truncated"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_directory_is_one_short_error(tmp_path, what):
    damage, message = BROKEN[what]
    write_model(tmp_path, CONFIGS["qwen3"], 3)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        read_index(tmp_path)
    assert str(tmp_path) in str(error.value) and len(str(error.value).splitlines()) <= 5


def test_a_qwen2_with_heads_of_another_width_is_refused():
    config = {**CONFIGS["qwen2"], "head_dim": 16}
    with pytest.raises(
        ValueError, match="head_dim 16 x num_attention_heads 4 is not hidden_size 32, which vLLM's Qwen2"
    ):
        model_shape(config)
    assert model_shape({**config, "head_dim": 8}).head_dim == 8 == model_shape(CONFIGS["qwen2"]).head_dim
    assert model_shape({**CONFIGS["llama"], "head_dim": 16}).head_dim == 16


def test_fused_experts_are_refused(tmp_path):
    tensors = write_model(tmp_path, CONFIGS["qwen3_moe"])
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.ones(4, 48, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="fused into 3-D"):
        read_index(tmp_path)


def _set_header(file: Path, change) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    change(table)
    text = json.dumps(table).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_headers_that_lie(tmp_path):
    file = tmp_path / "x.safetensors"

    def lie(name, **row):
        save_file({"a": torch.ones(4), "b": torch.ones(4)}, file)
        _set_header(file, lambda table: table[name].update(row))
        with pytest.raises(ValueError, match=f"{file}: .*{name}") as error:
            read_header(file)
        return str(error.value)

    assert "takes 16 bytes" in lie("a", data_offsets=[0, 8])
    assert "overlaps" in lie("b", data_offsets=[8, 24])
    assert "hole" in lie("b", data_offsets=[20, 36])
    assert "not supported" in lie("a", dtype="F8_E4M3")
    assert "non-negative" in lie("a", shape=[-4])
    assert "non-negative" in lie("a", shape=[True, 4])
    assert "takes" in lie("a", shape=[2**62, 2**62])
    file.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="not safetensors, or truncated"):
        read_header(file)


# -- mutations


def mutate(path: Path, random: random.Random) -> Path:
    """Damage one file: bytes flipped, cut, doubled, or a JSON value replaced."""
    file = random.choice([path / "config.json", index_json(path), *sorted(path.glob("model-*"))])
    data = bytearray(file.read_bytes())
    start, length = (8, int.from_bytes(data[:8], "little")) if file.suffix == ".safetensors" else (0, len(data))
    kind = random.randrange(5)
    if kind == 0:
        data[random.randrange(min(len(data), start + length))] ^= 1 << random.randrange(8)
    elif kind == 1:
        del data[random.randrange(len(data)) :]
    elif kind == 2:
        at = start + random.randrange(length)
        data[at:at] = data[at : at + random.randrange(1, 40)]
    else:
        table = json.loads(data[start : start + length])
        _replace_value(table, random)
        text = json.dumps(table).encode()
        head = len(text).to_bytes(8, "little") if start else b""
        data = bytearray(head + text + (data[start + length :] if start else b""))
    file.write_bytes(data)
    return file


def _replace_value(table, random) -> None:
    values = [None, -1, 0, 1, 2**31, 2**70, 1.5, "x", "", [], [1], {}, {"a": 1}, True, "\udc80", float("nan")]
    while True:
        key = random.choice(list(table) if isinstance(table, dict) else range(len(table)))
        inner = table[key]
        if isinstance(inner, (dict, list)) and inner and random.random() < 0.7:
            table = inner
            continue
        if random.random() < 0.2 and isinstance(table, dict):
            del table[key]
        else:
            table[key] = random.choice(values)
        return


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_mutations_are_accepted_or_one_short_error(tmp_path, family):
    write_model(tmp_path / "good", CONFIGS[family], 3)
    good = {f.name: f.read_bytes() for f in (tmp_path / "good").iterdir()}
    refused = 0
    for seed in range(150):
        path = tmp_path / "bad"
        path.mkdir(exist_ok=True)
        for name, data in good.items():
            (path / name).write_bytes(data)
        file = mutate(path, random.Random(seed))
        began = time.process_time()
        try:
            read_index(path)
        except ValueError as error:
            lines = str(error).splitlines()
            refused += 1
            assert len(lines) <= 5 and str(path) in lines[0] and all(len(line) < 400 for line in lines), (seed, lines)
        assert time.process_time() - began < 5, (seed, file)
    assert refused > 75


# -- rounds


def test_files_are_dealt_evenly_and_over_nodes():
    rounds = deal({f"{i:03d}": 100 for i in range(118)}, 128)
    assert len(rounds) == 1 and rounds[0].count(NO_FILE) == 10
    rounds = deal({"a": 10, "b": 9, "c": 2, "d": 1}, 2)
    assert rounds == [("a", "b"), ("d", "c")] or rounds == [("a", "b"), ("c", "d")]
    first = [rank for rank, file in enumerate(deal({"a": 1, "b": 1}, 16)[0]) if file]
    assert first == [0, 8]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_element_is_in_one_round_once(tmp_path, family, world):
    write_model(tmp_path, CONFIGS[family], 3)
    index = read_index(tmp_path)
    boxes: dict = {}
    for layout in hf_layouts(index, index.shape, world):
        for kind, table in layout.table.items():
            for box, ranks in table.items():
                assert len(ranks) == 1 and box not in boxes.setdefault(kind, set())
                boxes[kind].add(box)
    for name, kind in kinds(index.shape).items():
        assert sum(map(elements, boxes[name])) == elements(kind.full_box)


def test_shards_follow_the_forward_pass_and_the_limit():
    shape = model_shape(CONFIGS["qwen3_moe"])
    files, sizes = shards(shape, "bfloat16", 20_000)
    assert list(files)[0] == f"model-00001-of-{len(files):05d}.safetensors" and max(sizes.values()) <= 20_000
    assert [n for names in files.values() for n in names] == list(tensor_table(shape))
    assert list(tensor_table(shape))[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert list(shards(shape, "bfloat16", 1 << 40)[0]) == ["model.safetensors"]


@pytest.mark.slow
def test_the_235b_directory_is_checked_and_planned_in_seconds(tmp_path):
    """36,945 tensors in 118 files, tiny shapes: index, rounds and plan onto 128 ranks in 5 s of processor time."""
    config = {
        **CONFIGS["qwen3_moe"],
        **dict(hidden_size=8, num_hidden_layers=94, num_attention_heads=8, num_key_value_heads=4, head_dim=2),
        **dict(num_experts=128, moe_intermediate_size=4, vocab_size=64),
    }
    assert len(write_model(tmp_path, config, 118)) == 36_945
    grid = TrainGrid(128, tp=4, pp=8, ep=4, etp=4)
    began = time.process_time()
    index = read_index(tmp_path)
    (layout,) = hf_layouts(index, index.shape, 128)
    moved = plan(layout, megatron_layout(index.shape, grid, first=11, last=11), partial=True)
    assert time.process_time() - began < 5
    assert moved.world == 128 and len(shards(index.shape, "bfloat16", 20_000)[0]) > 100


# -- load and export

GRIDS = {
    1: [dict()],
    2: [dict(tp=2, etp=2), dict(pp=2, vpp=1), dict(ep=2), dict()],
    4: [dict(tp=2, pp=2, ep=2), dict(ep=4)],
}


def _there_and_back(rank: int, path: str, out: str, world: int, family: str) -> dict:
    with gloo(world):
        return _load_and_export(rank, path, out, world, family)


def _load_and_export(rank: int, path: str, out: str, world: int, family: str) -> dict:
    results = {}
    shape = model_shape(CONFIGS[family])
    for number, options in enumerate(GRIDS[world]):
        if not shape.is_moe:
            options = {**options, "ep": 1, "etp": options.get("tp", 1)}
        first = 1 if options.get("pp", 1) > 1 else 0
        layout = megatron_layout(shape, TrainGrid(world, **options), first=first)
        stores = empty_stores(layout, rank, fill=float("nan"))
        load(path, layout, stores, rank, None, CPU)
        results[number] = {name: store.view(torch.int16).numpy() for name, store in stores.items()}
        export(f"{out}/{world}_{number}", layout, stores, shape, path, rank, None, CPU, max_shard_bytes=20_000)
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, world", [("llama", 1), ("qwen3_moe", 1), ("qwen2", 2), ("llama", 2), ("qwen3_moe", 2), ("qwen3_moe", 4)]
)
def test_round_trip_is_bitwise(tmp_path, family, world):
    config = CONFIGS[family]
    tensors = write_model(tmp_path / "in", config, 3)
    expected = logical(config, tensors)
    args = (str(tmp_path / "in"), str(tmp_path / "out"), world, family)
    stores = run_ranks(world, _there_and_back, *args) if world > 1 else [_there_and_back(0, *args)]
    shape = model_shape(config)
    for number, options in enumerate(GRIDS[world]):
        if not shape.is_moe:
            options = {**options, "ep": 1, "etp": options.get("tp", 1)}
        layout = megatron_layout(shape, TrainGrid(world, **options), first=1 if options.get("pp", 1) > 1 else 0)
        held = [{n: torch.from_numpy(s).view(torch.bfloat16) for n, s in s[number].items()} for s in stores]
        full = gathered(layout, held)
        assert all(same_bits(full[kind], expected[kind]) for kind in expected)
        out = tmp_path / "out" / f"{world}_{number}"
        back = {}
        for file in out.glob("*.safetensors"):
            back.update(load_file(file))
        assert set(back) == set(tensors) and all(same_bits(back[n], tensors[n]) for n in tensors)
        assert (out / "tokenizer.json").exists() and (out / "generation_config.json").exists()
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
        assert len(list(out.glob("*.safetensors"))) >= 3


def _load_fails(rank: int, path: str) -> str:
    layout = megatron_layout(model_shape(CONFIGS["qwen3"]), TrainGrid(2))
    with gloo(2), pytest.raises(ValueError) as error:
        load(path, layout, {}, rank, None, CPU)
    return str(error.value)


@pytest.mark.slow
def test_a_bad_directory_fails_on_every_rank(tmp_path):
    write_model(tmp_path, CONFIGS["qwen3"], 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    for message in run_ranks(2, _load_fails, str(tmp_path)):
        assert "model-00002-of-00003.safetensors" in message and len(message.splitlines()) <= 5


def test_one_file_at_a_time_is_in_memory_and_each_is_read_once(tmp_path, monkeypatch):
    tensors = write_model(tmp_path, CONFIGS["qwen3"], 4)
    layout = megatron_layout(model_shape(CONFIGS["qwen3"]), TrainGrid(1))
    real, held, files, count = hf.read_stores, [], [], 0

    def watched(index, file, dtype):
        nonlocal count
        assert not any(reference() is not None for reference in held), "the file before is still in memory"
        found = real(index, file, dtype)
        held.extend(weakref.ref(tensor) for tensor in found.values())
        files.append(file)
        count += sum(tensor.nbytes for tensor in found.values())
        return found

    monkeypatch.setattr(hf, "read_stores", watched)
    load(tmp_path, layout, empty_stores(layout, 0), 0, None, CPU)
    assert len(files) == len(set(files)) == 4 and count == sum(tensor.nbytes for tensor in tensors.values())


def test_load_casts_and_export_refuses_to_overwrite(tmp_path):
    config = CONFIGS["qwen3"]
    tensors = write_model(tmp_path / "in", config, 3, dtype=torch.float32)
    shape = model_shape(config)
    layout = megatron_layout(shape, TrainGrid(1))
    stores = empty_stores(layout, 0, fill=float("nan"))
    load(tmp_path / "in", layout, stores, 0, None, CPU)
    export(tmp_path / "out", layout, stores, shape, tmp_path / "in", 0, None, CPU)
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert all(same_bits(back[name], tensors[name].bfloat16()) for name in tensors)
    with pytest.raises(ValueError, match="exists"):
        export(tmp_path / "out", layout, stores, shape, tmp_path / "in", 0, None, CPU)
    with pytest.raises(ValueError, match="made from"):
        export(tmp_path / "in", layout, stores, shape, tmp_path / "in", 0, None, CPU, overwrite=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="holds no model that could be overwritten"):
        export(tmp_path / "run", layout, stores, shape, tmp_path / "in", 0, None, CPU, overwrite=True)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="would replace .*/in, which it is made from"):
        export(tmp_path, layout, stores, shape, tmp_path / "in", 0, None, CPU, overwrite=True)
    assert (tmp_path / "in" / "config.json").exists() and (tmp_path / "run" / "metrics.jsonl").exists()
    export(tmp_path / "out", layout, stores, shape, tmp_path / "in", 0, None, CPU, dtype="float32", overwrite=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_transformers_agrees(tmp_path, family):
    """Names and shapes are those that transformers writes; an export loads and gives the same tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{k: v for k, v in CONFIGS[family].items() if k != "architectures"})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    index = read_index(tmp_path / "in")
    layout = megatron_layout(index.shape, TrainGrid(1))
    stores = empty_stores(layout, 0, fill=float("nan"))
    load(tmp_path / "in", layout, stores, 0, None, CPU)
    export(tmp_path / "out", layout, stores, index.shape, tmp_path / "in", 0, None, CPU, max_shard_bytes=30_000)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for (name, a), (_, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert same_bits(a, b), name
