"""launch/convert.py: Hugging Face directory -> checkpoint -> directory, compared bit for bit, alone and on ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from launch.convert import main
from tests.hf_dirs import CONFIGS, same_bits, write_model
from tests.ranks import ROOT, run_ranks


def convert(*arguments) -> int:
    return main([str(argument) for argument in arguments])


def tensors_of(path: Path) -> dict:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", CONFIGS)
def test_there_and_back(tmp_path, capsys, family):
    tensors = write_model(tmp_path / "hf", CONFIGS[family], 3)
    checkpoint = tmp_path / "ckpt" / "step_000000"
    assert convert("import", tmp_path / "hf", tmp_path / "ckpt") == 0
    assert convert("verify", checkpoint, tmp_path / "hf") == 0
    assert (
        convert("export", checkpoint, tmp_path / "out", "--model", tmp_path / "hf", "--max-shard-gib", "0.00001") == 0
    )
    back = tensors_of(tmp_path / "out")
    assert set(back) == set(tensors) and all(same_bits(back[name], tensors[name]) for name in tensors)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert convert("verify", tmp_path / "out", tmp_path / "hf") == 0
    assert f"equal: {len(tensors)} of {len(tensors)}" in capsys.readouterr().out


def test_verify_names_the_tensors_that_differ(tmp_path, capsys):
    tensors = write_model(tmp_path / "a", CONFIGS["qwen3_moe"])
    write_model(tmp_path / "b", CONFIGS["qwen3_moe"])
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors[name][3, 4] += 1
    save_file(tensors, tmp_path / "b" / "model.safetensors")
    assert convert("verify", tmp_path / "a", tmp_path / "b") == 1
    out = capsys.readouterr().out
    assert "different" in out and name in out and len(out.splitlines()) == 2
    save_file({n: t.float() for n, t in tensors.items()}, tmp_path / "b" / "model.safetensors")
    assert convert("verify", tmp_path / "a", tmp_path / "b") == 1
    assert "bfloat16" in capsys.readouterr().out


def test_export_casts(tmp_path):
    tensors = write_model(tmp_path / "hf", CONFIGS["llama"])
    convert("import", tmp_path / "hf", tmp_path / "ckpt")
    arguments = ("export", tmp_path / "ckpt" / "step_000000", tmp_path / "out", "--model", tmp_path / "hf")
    assert convert(*arguments, "--dtype", "float32") == 0
    back = tensors_of(tmp_path / "out")
    assert all(same_bits(back[name], tensors[name].float()) for name in tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"


def test_bad_input_is_one_message_and_exit_code_2(tmp_path, capsys):
    write_model(tmp_path / "hf", CONFIGS["qwen3"], 3)
    write_model(tmp_path / "other", CONFIGS["llama"])
    convert("import", tmp_path / "hf", tmp_path / "ckpt")
    step = tmp_path / "ckpt" / "step_000000"
    model = ("--model", tmp_path / "hf")
    cases = [
        (("import", tmp_path / "nowhere", tmp_path / "x"), "does not exist"),
        (("export", tmp_path / "hf", tmp_path / "x", *model), "not a complete checkpoint"),
        (("export", step, tmp_path / "hf", *model), "made from"),
        (("export", step, tmp_path / "other", *model), "exists"),
        (("export", step, tmp_path / "x", *model, "--state", "master"), "no state 'master'"),
        (("export", step, tmp_path / "x", "--model", tmp_path / "other"), "another model"),
        (("verify", tmp_path / "hf", tmp_path / "other"), "does not have"),
    ]
    capsys.readouterr()
    for arguments, message in cases:
        assert convert(*arguments) == 2, arguments
        text = capsys.readouterr().err
        assert message in text and len(text.splitlines()) <= 5, (arguments, text)
    data = bytearray((step / "parameters-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (step / "parameters-00000.safetensors").write_bytes(data)
    assert convert("export", step, tmp_path / "x", *model) == 2
    assert "hash does not match" in capsys.readouterr().err


def test_help_is_fast_and_needs_nothing():
    code = (
        "import sys; from launch.convert import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "verify" in done.stdout, done.stderr


def _on_ranks(rank: int, command: list) -> int:
    return convert(*command)


@pytest.mark.slow
def test_on_several_ranks_and_back_on_one(tmp_path):
    tensors = write_model(tmp_path / "hf", CONFIGS["qwen3_moe"], 4)
    step = str(tmp_path / "ckpt" / "step_000000")
    commands = [
        ["import", str(tmp_path / "hf"), str(tmp_path / "ckpt")],
        ["export", step, str(tmp_path / "two"), "--model", str(tmp_path / "hf"), "--max-shard-gib", "0.00001"],
        ["verify", step, str(tmp_path / "two")],
    ]
    for command in commands:  # each a launch of its own, as under torchrun
        assert run_ranks(2, _on_ranks, command) == [0, 0]
    assert len(list(Path(step).glob("parameters-*"))) == 2
    assert convert("export", step, tmp_path / "one", "--model", tmp_path / "hf") == 0
    for out in ("one", "two"):
        back = tensors_of(tmp_path / out)
        assert set(back) == set(tensors) and all(same_bits(back[name], tensors[name]) for name in tensors)
    assert "WORLD_SIZE" not in os.environ
