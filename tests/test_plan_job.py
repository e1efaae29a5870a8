"""Dry runs: what is printed, refused and proposed, and that refusals are upstream's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from launch import plan, plan_job, plan_search
from launch.config import load
from launch.estimate import bubble, expected_work, micro_batches
from launch.hardware import HARDWARE, find
from tests.jobs import ROOT

RECIPES = ROOT / "launch" / "recipes"
A2, H100 = str(RECIPES / "qwen3-235b-a22b-a2.toml"), str(RECIPES / "qwen3-235b-a22b-h100.toml")
NEMO = ["data.prompts_per_step=32", "data.max_prompt_tokens=2048", "data.max_response_tokens=8192"]
"""NeMo-RL's published job: 512 samples of 5.7 k tokens in 395 s on 128 H100."""


def job(*argv: str, hardware: str = "", prompt: float = 0, response: float = 0):
    config = load(list(argv))
    device = find(hardware, config.runtime.device)
    return plan_job.make(config, config.world, device, expected_work(config, prompt, response))


@pytest.mark.parametrize("recipe", sorted(p.stem for p in RECIPES.glob("qwen3-*.toml")))
def test_every_recipe_fits_its_hardware(recipe, capsys):
    assert plan.main(["job", str(RECIPES / f"{recipe}.toml")]) == 0
    shown = capsys.readouterr().out
    assert "stage 0" in shown and "process groups" in shown and "weight sync" in shown and "CANNOT" not in shown


def test_etp_1_does_not_fit_a2_without_host_adam(capsys):
    assert plan.main(["job", A2, "train.etp=1"]) == 1
    shown = capsys.readouterr().out
    assert "CANNOT RUN" in shown and "GiB of 61.0" in shown
    assert "nearest that can: train.optimizer.cpu_offload=true" in shown
    assert plan.main(["job", A2, "train.etp=1", "train.optimizer.cpu_offload=true"]) == 0


def test_json_has_every_number(capsys):
    assert plan.main(["job", H100, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and len(found["stages"]) == 8 and [s["layers"] for s in found["stages"]] == [12] * 7 + [10]
    assert set(found["stages"][0]["phases"]) == {"generate", "sync", "log_probs", "update"}
    assert found["step_s"] == pytest.approx(sum(found["terms_s"].values()))
    assert found["sync"]["received_bytes"] / 1e9 == pytest.approx(28.7, abs=0.1)
    assert found["sync"]["naive_received_bytes"] / 1e9 == pytest.approx(455, abs=1)


def test_bad_input_is_one_message(capsys):
    assert plan.main(["job", H100, "train.tp=3"]) == 2
    assert "train.tp" in capsys.readouterr().err
    assert plan.main(["job", H100, "--hardware", "abacus"]) == 2
    assert "a2, h100, h200" in capsys.readouterr().err


def test_two_nodes_hold_no_235b(capsys):
    few = ["world=16", "train.pp=4", "train.first_stage_layers=23", "train.last_stage_layers=23"]
    assert plan.main(["job", H100, *few]) == 1
    assert "no single change fits; see `plan search`" in capsys.readouterr().out
    assert all("rank" in text or "host" in text for text in job(H100, *few).problems)


def test_many_ranks_warn_of_groups(capsys):
    assert plan.main(["job", str(RECIPES / "qwen3-4b.toml"), "world=4096", "--json"]) == 0
    capsys.readouterr()
    assert plan.main(["job", str(RECIPES / "qwen3-4b.toml"), "world=4096", "data.prompts_per_step=4096"]) == 0
    assert "warning: vLLM's groups of one rank" in capsys.readouterr().out


def test_bubble_and_micro_batches():
    config = load([H100])
    work = expected_work(config, 84, 1329)
    assert micro_batches(config, work, 4) == 59
    assert bubble(config, 59) == pytest.approx(7 / 66)


def test_terms_follow_the_algorithm():
    terms = job(A2).terms
    assert terms["old log-probs"] == 0 < terms["reference log-probs"] < terms["update"]
    assert job(A2, "algorithm.kl_loss=0").terms["reference log-probs"] == 0
    assert job(A2, "train.mini_batches=2").terms["old log-probs"] > 0
    assert job(A2, "rollout.vllm.enforce_eager=false").terms["generate"] < terms["generate"] / 3


def test_change_replaces_one_option():
    config = load([H100])
    changed = plan_job.change(config, {"train.optimizer.cpu_offload": False, "rollout.tp": 8, "world": 64})
    assert (changed.train.optimizer.cpu_offload, changed.rollout.tp, changed.world) == (False, 8, 64)
    assert changed.train.pp == 8 and config.rollout.tp == 16


def test_hardware_is_guessed_from_the_device():
    assert find("", "npu") is HARDWARE["a2"] and find("", "auto") is HARDWARE["h100"] and find("H200", "npu").hbm > 4e12


@pytest.mark.slow
def test_search_beats_the_published_step_of_the_235b_job():
    config = load([H100, *NEMO])
    work = expected_work(config, 300, 5400)
    assert (work.samples, work.prompt_tokens + work.response_tokens) == (512, 5700)
    jobs = plan_search.search(config, 128, HARDWARE["h100"], work, 8, 3)
    assert jobs and jobs[0].step_s < 395 and not jobs[0].problems
    assert [j.step_s for j in jobs] == sorted(j.step_s for j in jobs)
    assert jobs[0].terms["generate"] + jobs[0].terms["update"] > 0.8 * jobs[0].step_s
    again = load([H100, *NEMO, *plan_search.arguments(jobs[0].config).split()])
    assert plan_job.make(again, 128, HARDWARE["h100"], work).step_s == pytest.approx(jobs[0].step_s, rel=0.02)


@pytest.mark.slow
def test_search_says_where_the_seconds_of_the_reference_job_went(capsys):
    assert plan.main(["search", A2, "--top", "2"]) == 0
    shown = capsys.readouterr().out
    assert "where the reference job's 2814 s went" in shown
    for term in ("generate", "weight sync", "old log-probs", "update"):
        assert any(line.startswith(term) for line in shown.splitlines()), term


def test_search_of_a_model_that_fits_nowhere():
    config = load(
        [H100, "world=8", "train.tp=1", "train.pp=1", "train.ep=8", "rollout.tp=8", "train.last_stage_layers=0"]
    )
    with pytest.raises(ValueError, match="fits 8 x H100"):
        plan_search.search(config, 8, HARDWARE["h100"], expected_work(config), 8, 1)


@pytest.mark.slow
def test_500_random_layouts_are_refused_exactly_when_upstream_refuses(tmp_path):
    from launch.tiny_models import write_model

    sizes = dict(num_hidden_layers=12, num_experts=8, num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    model = write_model(tmp_path / "m", "qwen3-moe", **sizes)
    command = [sys.executable, "-m", "tests.layout_refusals", str(model), "500"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 500 and 100 < sum(bool(ours) for _, ours, _ in found) < 400
    assert not [case for case in found if bool(case[1]) != bool(case[2])]
