"""Checkpoints that Megatron's own dist_checkpointing wrote on gloo ranks, imported and compared with their source."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from launch.convert import main
from tests.hf_dirs import CONFIGS, write_model
from tests.ranks import run_ranks
from tests.torch_dist_writer import write


def convert(*arguments) -> int:
    return main([str(argument) for argument in arguments])


SINGLE = {"singleton_local_shards": True}
NUMBERED = {"non_homogeneous_layers": True}
CASES = {  # model, ranks, layout, names, metadata
    "moe stacked te": ("qwen3_moe", 4, dict(tp=2, pp=2, ep=2, first=1), "te", {}),
    "moe one rank local": ("qwen3_moe", 1, {}, "local", {}),
    "moe singleton local": ("qwen3_moe", 4, dict(tp=2, pp=2, ep=2, first=1), "local", SINGLE),
    "moe numbered te": ("qwen3_moe", 2, dict(ep=2), "te", NUMBERED),
    "dense stacked te": ("qwen3", 4, dict(tp=2, pp=2, first=2), "te", {}),
    "dense singleton te": ("qwen3", 2, dict(tp=2), "te", SINGLE),
    "tied local": ("llama", 2, dict(pp=2, first=1), "local", {}),
    "bias te": ("qwen2", 2, dict(tp=2), "te", {}),
}
DEFAULT = ("moe stacked te", "moe one rank local")


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in DEFAULT else pytest.mark.full) for c in CASES])
def test_a_checkpoint_of_megatron_equals_the_directory_it_came_from(tmp_path, capsys, case):
    model, ranks, layout, names, metadata = CASES[case]
    hf, source = tmp_path / "hf", tmp_path / "megatron" / "iter_0000003"
    tensors = write_model(hf, CONFIGS[model])
    source.parent.mkdir()
    (source.parent / "latest_checkpointed_iteration.txt").write_text("3\n")
    run_ranks(ranks, write, str(source), CONFIGS[model], tensors, layout, names, metadata)
    assert convert("import", source.parent, tmp_path / "out", "--model", hf) == 0
    assert convert("verify", tmp_path / "out" / "step_000000", hf) == 0
    assert f"equal: {len(tensors)} of {len(tensors)}" in capsys.readouterr().out


# -- refusals: a small checkpoint of torch's own writer, with Megatron's keys


def small_checkpoint(path: Path, change=lambda tensors: None) -> dict:
    """A llama of one layer, written by torch.distributed.checkpoint without ranks."""
    import torch
    import torch.distributed.checkpoint as dcp

    config = {**CONFIGS["llama"], "num_hidden_layers": 1}
    tensors = write_model(path / "hf", config)
    at = "model.layers.0."
    fused = torch.cat([tensors[f"{at}self_attn.{x}_proj.weight"].unflatten(0, (2, -1)) for x in "qkv"], 1)
    state = {
        "embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": tensors[at + "input_layernorm.weight"][None],
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": tensors[at + "post_attention_layernorm.weight"][None],
        "decoder.layers.self_attention.linear_qkv.weight": fused.flatten(0, 1)[None],
        "decoder.layers.self_attention.linear_proj.weight": tensors[at + "self_attn.o_proj.weight"][None],
        "decoder.layers.0.mlp.linear_fc1.weight": torch.cat(
            [tensors[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        ),
        "decoder.layers.0.mlp.linear_fc2.weight": tensors[at + "mlp.down_proj.weight"],
    }
    change(state)
    dcp.save(state, checkpoint_id=str(path / "megatron"), no_dist=True)
    return tensors


def imported(path: Path) -> int:
    return convert("import", path / "megatron", path / "out", "--model", path / "hf")


def test_one_process_writes_one_reads(tmp_path):
    small_checkpoint(tmp_path)
    assert imported(tmp_path) == 0
    assert convert("verify", tmp_path / "out" / "step_000000", tmp_path / "hf") == 0
    assert convert("verify", tmp_path / "megatron", tmp_path / "hf") == 0


def replaced(key: str, value):
    return lambda state: state.update({key: value(state[key])})


QKV = "decoder.layers.self_attention.linear_qkv.weight"
NUMBERED_FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
WRONG = {
    "a tensor is missing": (lambda s: s.pop(QKV), "does not hold the whole model of config.json: q: 0 of"),
    "an unknown parameter": (lambda s: s.update({QKV + "_2": s[QKV]}), "no such parameter"),
    "another shape": (replaced(QKV, lambda t: t[:, :-1]), "config.json makes it [1, 64, 32]"),
    "more layers": (replaced(QKV, lambda t: t.repeat(2, 1, 1)), "shape [2, 64, 32], config.json makes it [1, 64, 32]"),
    "a layer too far": (lambda s: s.update({NUMBERED_FC2.replace("0", "7"): s[NUMBERED_FC2]}), "has only 1 of them"),
    "a float64 weight": (replaced(QKV, lambda t: t.double()), "dtype float64 is not a weight type"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_another_model_is_one_message(tmp_path, capsys, wrong):
    change, message = WRONG[wrong]
    small_checkpoint(tmp_path, change)
    assert imported(tmp_path) == 2
    said = capsys.readouterr().err
    assert message in said and str(tmp_path / "megatron") in said and len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path(self.file),))

    def __init__(self, file: Path):
        self.file = str(file)


def poison_metadata(megatron: Path, mark: Path) -> None:
    (megatron / ".metadata").write_bytes(pickle.dumps(Evil(mark)))


def poison_tensors(megatron: Path, mark: Path) -> None:
    import torch

    (file,) = megatron.glob("*.distcp")
    size = file.stat().st_size
    torch.save(Evil(mark), file)
    file.write_bytes(file.read_bytes().ljust(size, b"\0"))


DAMAGE = {
    "metadata that runs code": (poison_metadata, "it asks for pathlib"),
    "tensors that run code": (poison_tensors, "cannot be read"),
    "cut metadata": (
        lambda m, _: (m / ".metadata").write_bytes((m / ".metadata").read_bytes()[:-50]),
        "not the metadata",
    ),
    "empty metadata": (lambda m, _: (m / ".metadata").write_bytes(b""), "not the metadata"),
    "metadata of something else": (
        lambda m, _: (m / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        "not the metadata",
    ),
    "a deleted file": (lambda m, _: next(m.glob("*.distcp")).unlink(), "which does not exist there"),
    "a cut file": (lambda m, _: next(m.glob("*.distcp")).write_bytes(b"PK"), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_message_and_nothing_runs(tmp_path, capsys, damage):
    cause, message = DAMAGE[damage]
    small_checkpoint(tmp_path)
    cause(tmp_path / "megatron", tmp_path / "ran")
    assert imported(tmp_path) == 2
    said = capsys.readouterr().err
    assert message in said and str(tmp_path / "megatron") in said and len(said.splitlines()) == 1
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_config_json_must_be_given(tmp_path, capsys):
    small_checkpoint(tmp_path)
    assert convert("import", tmp_path / "megatron", tmp_path / "out") == 2
    assert "--model DIR" in capsys.readouterr().err
