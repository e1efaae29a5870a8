"""`launch.bench`: rows run on real processes and report what they promise."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from launch.bench import main
from tests.ranks import run_ranks


def bench(rank: int, *arguments: str) -> dict:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["reshard", "--json", "--repeats", "5", *arguments]) == 0
    return json.loads(output.getvalue()) if rank == 0 else {}


SMALL = ("model.path=bench-moe", "train.ep=2", "train.etp=1", "rollout.tp=2", "rollout.expert_parallel=true")


@pytest.mark.slow
def test_reshard_row_counts_bytes_and_verifies():
    found = run_ranks(2, bench, *SMALL)[0]
    assert found["tensors"] == 3147 and found["world"] == 2
    whole = 2 * 110_000_000  # elements of the model, rounded up
    assert found["planned"]["received_bytes"] < found["golden"]["received_bytes"] < whole
    assert found["bare"]["received_bytes"] == found["planned"]["received_bytes"]
    assert all(found[row]["median_s"] > 0 for row in ("planned", "bare", "golden"))


def test_reshard_row_on_one_rank(capsys):
    assert main(["reshard", "--repeats", "1", "model.path=bench-moe"]) == 0
    text = capsys.readouterr().out
    assert "both results verified" in text and "golden" in text


def test_bad_input_is_one_message(capsys):
    assert main(["reshard", "model.path=nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: model.path: nowhere/config.json does not exist")


@pytest.mark.full
def test_planned_is_five_times_faster_than_golden_and_near_a_bare_exchange():
    found = run_ranks(4, bench, timeout_s=500)[0]
    seconds = {row: found[row]["min_s"] for row in ("planned", "bare", "golden")}
    assert 5 * seconds["planned"] <= seconds["golden"] and seconds["planned"] <= 2 * seconds["bare"]
    replicas = run_ranks(
        4, bench, "model.path=bench-moe", "train.ep=2", "train.etp=1", "train.pp=2", "rollout.tp=1", timeout_s=500
    )[0]
    assert replicas["planned"]["min_s"] <= replicas["golden"]["min_s"]
