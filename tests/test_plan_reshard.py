"""`python -m launch.plan reshard`: the JSON object, the report, its refusals, and that it needs numpy alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch.plan import main

ROOT = Path(__file__).resolve().parent.parent
RECIPE = """
world = 128
model.path = "launch/models/qwen3-235b-a22b"
train = { tp = 4, pp = 8, ep = 4, etp = 1, first_stage_layers = 11, last_stage_layers = 11 }
rollout = { tp = 8, dp = 8, expert_parallel = true }
"""
SPREAD = ("need", "received", "sent", "local", "nic_received", "nic_sent")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "job.toml"
    path.write_text(RECIPE)
    return str(path)


def planned(capsys, *arguments: str) -> dict:
    assert main(["reshard", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_of_the_reference_job(recipe, capsys):
    found = planned(capsys, recipe)
    for name in SPREAD:
        assert set(found[f"{name}_bytes"]) == {"min", "mean", "max"}
    assert found["world"] == 128
    assert found["need_bytes"]["max"] / 1e9 == pytest.approx(9.28, abs=0.01)
    assert found["nic_received_bytes"]["max"] / 1e9 == pytest.approx(8.14, abs=0.01)
    assert found["naive_received_bytes"] / 1e9 == pytest.approx(455, abs=1)
    assert found["peers_max"] <= 160 and found["buffer_bytes"] <= 2 * 2 * (256 << 20)
    assert found["rounds"] >= found["received_bytes"]["max"] / (256 << 20)
    assert 0 < found["plan_s"] and len(found["digest"]) == 32


def test_overrides_world_and_ranks(recipe, capsys):
    found = planned(capsys, recipe, "--world", "256", "rollout.tp=16", "rollout.dp=1", "--ranks", "--node-size", "16")
    assert found["world"] == 256 and len(found["ranks"]) == 256 and found["node_size"] == 16
    assert found["ranks"][3]["need_bytes"] == found["need_bytes"]["max"]
    more = planned(capsys, recipe, "rollout.redundant_experts=64")
    less = planned(capsys, recipe)
    copies = (more["need_bytes"]["mean"] - less["need_bytes"]["mean"]) * 64
    assert copies == 64 * 94 * 3 * 1536 * 4096 * 2  # one more expert a layer on each of 64 ranks


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-4b"])
def test_reference_models_by_name(recipe, capsys, model):
    one = ["train.ep=1", "train.tp=2", "train.pp=2", "train.first_stage_layers=0", "train.last_stage_layers=0"]
    found = planned(
        capsys, recipe, "--world", "8", f"model.path={model}", *one, "rollout.dp=1", "rollout.expert_parallel=false",
        "rollout.tp=2", "train.etp=0" if "4b" in model else "train.etp=2",
    )  # fmt: skip
    total = {"qwen3-30b-a3b": 61.1, "qwen3-4b": 8.04}[model]
    assert found["need_bytes"]["mean"] * 2 / 1e9 == pytest.approx(total, rel=0.01)


def test_report_shows_the_naive_gather_and_each_rank(recipe, capsys):
    assert main(["reshard", recipe, "--ranks", "--nic-gb-s", "25"]) == 0
    text = capsys.readouterr().out
    assert "naive gather" in text and "at 25 GB/s between" in text and "peers of a rank at most" in text
    assert len(text.splitlines()) > 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "100"], "does not divide 100 ranks"),
        (["model.path=nowhere"], "nowhere/config.json does not exist"),
        (["rollout.tp=7"], "rollout.tp*dp = 7*8 = 56 does not divide 128 ranks"),
        (["train.last_stage_layers=10"], "94 layers"),
        (["rollout.tpp=8"], "unknown option 'rollout.tpp'"),
        (["world=0"], "--world N"),
        (["train.tp=0"], "train.tp must be at least 1, got 0"),
        (["rollout.dp=0"], "rollout.dp must be at least 1, got 0"),
        (["train.pp=-1"], "train.pp must be at least 1, got -1"),
        (["rollout.redundant_experts=-8"], "rollout.redundant_experts must be at least 0, got -8"),
        (["--world", "-8"], "--world must be greater than 0"),
        (["--node-size", "0", "--json"], "--node-size must be greater than 0"),
        (["--node-size", "-3"], "--node-size must be greater than 0"),
        (["--nic-gb-s", "0"], "--nic-gb-s must be greater than 0"),
        (["--nic-gb-s", "nan"], "--nic-gb-s must be greater than 0 and finite"),
        (["--link-gb-s", "-1"], "--link-gb-s must be greater than 0"),
    ],
)
def test_refusals_are_one_message(recipe, capsys, arguments, message):
    assert main(["reshard", recipe, *arguments]) == 2
    out, error = capsys.readouterr()
    assert message in error and error.startswith("error: ") and not out


def test_needs_numpy_alone(recipe):
    code = (
        "import sys\n"
        "for name in ('torch', 'vllm', 'megatron'): sys.modules[name] = None\n"
        "from launch.plan import main\n"
        f"sys.exit(main(['reshard', {recipe!r}, '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world"] == 128
