"""`launch.bench`: rows run on real processes and report what they promise."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch import plan_job
from launch.bench import main
from launch.bench_rows import model_flops
from launch.config import load, to_toml
from launch.estimate import Work
from launch.hardware import find
from launch.tiny_models import write_model
from parallel.family import model_shape, read_config
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent


def bench(rank: int, *arguments: str) -> dict:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["reshard", "--json", "--repeats", "5", *arguments]) == 0
    return json.loads(output.getvalue()) if rank == 0 else {}


WAYS = ("planned", "bare", "golden")
SMALL = ("model.path=bench-moe", "train.ep=2", "train.etp=1", "rollout.tp=2", "rollout.expert_parallel=true")


@pytest.mark.slow
def test_reshard_row_counts_bytes_and_verifies():
    found = run_ranks(2, bench, *SMALL)[0]
    assert found["tensors"] == 3147 and found["world"] == 2
    whole = 2 * 110_000_000  # elements of the model, rounded up
    assert found["planned"]["received_bytes"] < found["golden"]["received_bytes"] < whole
    assert found["bare"]["received_bytes"] == found["planned"]["received_bytes"]
    assert all(found[row]["median_s"] > 0 for row in WAYS)


def test_reshard_row_on_one_rank(capsys):
    assert main(["reshard", "--repeats", "1", "model.path=bench-moe"]) == 0
    text = capsys.readouterr().out
    assert "both results verified" in text and "golden" in text


def test_bad_input_is_one_message(capsys):
    assert main(["reshard", "model.path=nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: model.path: nowhere/config.json does not exist")


@pytest.mark.full
def test_planned_is_five_times_faster_than_golden_and_near_a_bare_exchange():
    """Quotients of runs next to each other in time, medians of eleven: other load meets all three alike."""
    many = ("--repeats", "11")
    found = run_ranks(4, bench, *many, timeout_s=500)[0]
    print({row: (round(found[row]["median_s"], 4), round(found[row]["x_planned"], 2)) for row in WAYS})
    assert found["tensors"] >= 3000 and 5 <= found["golden"]["x_planned"] and 1 / 2 <= found["bare"]["x_planned"]
    replicas = ("model.path=bench-moe", "train.ep=2", "train.etp=1", "train.pp=2", "rollout.tp=1")
    found = run_ranks(4, bench, *many, *replicas, timeout_s=500)[0]
    print({row: (round(found[row]["median_s"], 4), round(found[row]["x_planned"], 2)) for row in WAYS})
    assert found["golden"]["x_planned"] >= 1


ROWS = {
    "offload": ["--cycles", "3"],
    "train": ["--tokens", "64", "--micro-batches", "2", "--repeat", "1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_rows_of_one_model(row, tmp_path):
    model = write_model(tmp_path / "model")
    command = [sys.executable, "-m", "launch.bench", row, f"model.path={model}", "train.dtype=bfloat16", *ROWS[row]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    names = {
        "offload": ("offload to host", "drift while away, 3 cycles"),
        "train": ("update, a device", "optimizer step"),
    }
    assert all(name in done.stdout for name in names[row])


def test_checkpoint_row_saves_and_loads(tmp_path, capsys):
    """That it measures, not how fast: figures belong to the command."""
    assert main(["checkpoint", "--gb", "0.02", "--repeat", "2", "--dir", str(tmp_path)]) == 0
    save, load = (line.split() for line in capsys.readouterr().out.splitlines()[1:])
    for row in (save, load):
        value, floor, ratio = map(float, row[2:5])
        assert value > 0 and floor > 0 and ratio == pytest.approx(value / floor, rel=0.01)
    assert not list(tmp_path.iterdir())


def test_step_row_tells_shares_and_leaves_out_the_first_step(tmp_path, capsys):
    model = write_model(tmp_path / "model")
    rows = [{"timing_s/step": s, "timing_s/gen": s / 4} for s in (90.0, 2.0, 4.0, 3.0)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["step", "--run", str(tmp_path), f"model.path={model}"]) == 0
    gen = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("gen"))
    assert gen.split()[1:4] == ["0.75", "3", "0.250"]


def test_step_row_stands_a_run_on_a_device_beside_its_plan(tmp_path, capsys):
    recipe = str(ROOT / "launch/recipes/qwen3-4b.toml")
    change = ["model.path=qwen3-4b", "train.optimizer.cpu_offload=false"]
    (tmp_path / "config.toml").write_text(to_toml(load([recipe, *change])))
    lengths = {"prompt_length/mean": 100.0, "response_length/mean": 1000.0, "response_length/max": 4000.0}
    peaks = {"memory_peak_gb/generate": 60.0, "memory_peak_gb/sync": 20.0, "memory_peak_gb/update": 50.0}
    rows = [{"timing_s/step": 9.0, "timing_s/update_actor": 4.0, **lengths, **peaks}] * 2
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["step", "--run", str(tmp_path), "--hardware", "h200"]) == 0
    told = {line.split(", against")[0].strip(): line.split("plan")[1].split() for line in lines_with(capsys, "against")}
    config, work = load([recipe, *change]), Work(100, 1000, 4000, 256)
    job = plan_job.make(config, 8, find("h200", "cuda"), work)
    want = max(max(memory.phases["update"], memory.phases["log_probs"]) for memory in job.stages) / 2**30
    assert float(told["peak while update"][0]) == 50 and float(told["peak while update"][1]) == pytest.approx(
        want, 1e-3
    )
    assert float(told["step"][1]) == pytest.approx(job.step_s, 1e-3) and float(told["update"][0]) == 4
    assert main(["step", "--run", str(tmp_path / "none")]) == 2


def lines_with(capsys, word):
    return [line for line in capsys.readouterr().out.splitlines() if word in line]


def test_model_flops_count_matrices_and_half_of_attention():
    shape = model_shape(read_config(ROOT / "launch/models/qwen3-4b"))
    assert model_flops(shape, [[1]]) == pytest.approx(6 * 4.02e9, rel=0.01)
    attention = model_flops(shape, [[1000]]) - 1000 * model_flops(shape, [[1]])
    assert attention == pytest.approx(6 * 36 * 32 * 128 * (1000**2 - 1000), rel=1e-6)
