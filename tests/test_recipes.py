"""The reference jobs: their options, their checks, and two steps of each on CPU through shrink.toml."""

from __future__ import annotations

import json

import pytest

from launch.checks import check
from launch.config import load, to_toml
from launch.layout_checks import check_model
from launch.plan import read_shape
from launch.shrink import LARGEST_DEGREE, MOST_RANKS, is_moe
from parallel.family import model_shape, read_config
from parallel.grid import stage_layers
from tests.jobs import ROOT, prepare, run_job

RECIPES = ROOT / "launch" / "recipes"
JOBS = {
    "a2": ("qwen3-235b-a22b-a2",),
    "a2-dapo": ("qwen3-235b-a22b-a2", "dapo"),
    "h100": ("qwen3-235b-a22b-h100",),
    "h100-dapo": ("qwen3-235b-a22b-h100", "dapo"),
    "h100-te": ("qwen3-235b-a22b-h100", "te"),
    "30b": ("qwen3-30b-a3b",),
    "30b-2x8": ("qwen3-30b-a3b-2x8",),
    "30b-24": ("qwen3-30b-a3b-24",),
    "4b": ("qwen3-4b",),
}
RUN_BY_DEFAULT = ("h100", "a2-dapo", "30b-2x8")


def files(job: str, *more: str) -> list[str]:
    return [str(RECIPES / f"{name}.toml") for name in (*JOBS[job], *more)]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return prepare("shrink", tmp_path_factory.mktemp("recipes") / "shrink")


def paths(tiny) -> list[str]:
    train, val = (json.dumps([str(tiny / f"{split}.parquet")]) for split in ("train", "val"))
    return [f"model.path={tiny}", f"data.train_files={train}", f"data.val_files={val}"]


@pytest.mark.parametrize("job", JOBS)
def test_recipe_is_sound_for_its_model_and_world(job):
    config = load(files(job))
    check(config)
    check_model(config, read_shape(config.model.path))
    assert config.world and config.train.recompute == "full"


def test_every_recipe_file_belongs_to_a_job():
    named = {name for names in JOBS.values() for name in names} | {"shrink", "quickstart"}
    named |= {"smollm2-gsm8k", "smollm2-gsm8k-gpu", "smollm2-sums"}
    assert {path.stem for path in RECIPES.glob("*.toml")} == named


def test_degrees_of_the_seeds():
    a2, h100 = load(files("a2")), load(files("h100"))
    layers = [
        [len(stage[0]) for stage in stage_layers(94, 8, 1, c.train.first_stage_layers, c.train.last_stage_layers)]
        for c in (a2, h100)
    ]
    assert layers == [[11, *[12] * 6, 11], [*[12] * 7, 10]]
    assert (a2.train.etp, h100.train.etp) == (4, 1) and h100.train.optimizer.cpu_offload
    assert (a2.rollout.tp, a2.rollout.dp, h100.rollout.tp, h100.rollout.expert_parallel) == (8, 8, 16, False)
    assert h100.train.micro_batch_tokens == 13008 == h100.data.max_prompt_tokens + h100.data.max_response_tokens
    two = load(files("30b-2x8"))
    assert (two.train.tp, two.train.ep, two.train.cp, two.rollout.tp) == (8, 8, 2, 16)
    assert (two.algorithm.policy_loss, two.rollout.routing_replay) == ("gspo", "R3")
    wide = load(files("30b-24"))
    assert (128 + wide.rollout.redundant_experts) % 24 == 0


@pytest.mark.parametrize("job", JOBS)
def test_shrink_keeps_what_it_can(job, tiny):
    recipe, small = load(files(job)), load(files(job, "shrink") + paths(tiny))
    check(small)
    check_model(small, model_shape(read_config(small.model.path)))
    assert small.world <= MOST_RANKS
    for axis in ("tp", "pp", "vpp", "cp"):
        assert getattr(small.train, axis) == min(getattr(recipe.train, axis), LARGEST_DEGREE)
    experts = small.train.ep * (small.train.etp or 1)
    assert experts == min(recipe.train.ep * (recipe.train.etp or 1), LARGEST_DEGREE)
    assert (small.rollout.tp, small.rollout.dp) == (min(recipe.rollout.tp, 2), min(recipe.rollout.dp, 2))
    assert bool(small.rollout.redundant_experts) == bool(recipe.rollout.redundant_experts)
    assert bool(small.train.first_stage_layers) == bool(recipe.train.first_stage_layers)
    tail = small.algorithm.overlong_buffer_tokens
    assert bool(tail) == bool(recipe.algorithm.overlong_buffer_tokens)
    kept = {**vars(recipe.algorithm), "overlong_buffer_tokens": tail}
    assert vars(small.algorithm) == kept and small.rollout.routing_replay == recipe.rollout.routing_replay


def test_shrinking_twice_changes_nothing(tiny, tmp_path):
    small = load(files("a2-dapo", "shrink") + paths(tiny))
    (tmp_path / "config.toml").write_text(to_toml(small))
    assert load([str(tmp_path / "config.toml")]) == small


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", [pytest.param(job, marks=[] if job in RUN_BY_DEFAULT else pytest.mark.full) for job in JOBS]
)
def test_two_steps_on_cpu(job, tiny, tmp_path):
    arguments = [*files(job, "shrink"), "total_steps=2", *paths(tiny)]
    run = run_job(tmp_path / "run", load(arguments).world, *arguments)
    assert [row["training/global_step"] for row in run.metrics] == [1, 2]
    first = run.metrics[0]
    assert first["actor/ppo_kl"] == 0 and first["actor/pg_clipfrac"] == 0
    assert first.get("actor/kl_loss", 0) == 0
    assert ("experts/load_max_over_mean" in first) == is_moe(load(arguments))
    assert 1 <= first.get("experts/load_max_over_mean", 1) <= first.get("experts/load_max_over_mean_worst", 1) <= 8
