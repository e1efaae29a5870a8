"""Validation: the metrics against brute force, sets kept apart, votes on answers; training does not notice it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import reward
from launch.config import load
from rollout.batch import Sample
from rollout.evaluate import evaluate, means, validation_metrics
from rollout.prompts import Prompt
from tests.jobs import prepare, run_job


def test_one_sample_per_prompt_is_the_mean():
    metrics = validation_metrics([3, 1, 2], ["a", "a", "b"], [1.0, 0.0, 0.5], [None] * 3)
    assert metrics == {"val-core/a/reward/mean@1": 0.5, "val-core/b/reward/mean@1": 0.5}


def test_best_and_majority_of_all_samples_are_exact():
    scores, answers = [0.0, 1.0, 0.0, 1.0, 1.0, 0.2], ["7", "8", "7", "5", "5", None]
    metrics = validation_metrics([1, 1, 1, 2, 2, 2], ["a"] * 6, scores, answers)
    assert metrics["val-core/a/reward/mean@3"] == pytest.approx((1 / 3 + 2.2 / 3) / 2)
    assert metrics["val-core/a/reward/best@3/mean"] == 1.0
    assert metrics["val-core/a/reward/maj@3/mean"] == pytest.approx(0.5)  # 7 is wrong, 5 is right
    assert metrics["val-aux/a/reward/std@3"] == pytest.approx(
        np.mean([np.std(scores[:3], ddof=1), np.std(scores[3:], ddof=1)])
    )


def test_bootstrap_agrees_with_all_draws():
    scores, answers = [0.0, 1.0, 0.3, 0.0], ["x", "y", "z", "x"]
    metrics = validation_metrics([5] * 4, ["a"] * 4, scores, answers)
    draws = list(itertools.product(range(4), repeat=2))
    best = np.mean([max(scores[i] for i in draw) for draw in draws])
    first = np.mean([scores[draw[0]] for draw in draws])  # of two votes the first wins a tie
    assert metrics["val-aux/a/reward/best@2/mean"] == pytest.approx(best, abs=0.04)
    assert metrics["val-aux/a/reward/maj@2/mean"] == pytest.approx(first, abs=0.04)
    assert metrics == validation_metrics([5] * 4, ["a"] * 4, scores, answers), "the seed is fixed"


def test_no_answers_no_majority():
    metrics = validation_metrics([1, 1], ["a", "a"], [0.0, 1.0], [None, None])
    assert not any("maj" in key for key in metrics)


def test_means_over_ranks_that_know_different_names():
    assert means([{"a": (1.0, 2.0)}, {"a": (2.0, 1.0), "b": (0.0, 0.0), "c": (3.0, 4.0)}]) == {"a": 1.0, "c": 0.75}


@pytest.mark.parametrize(
    "source, text, expected",
    [
        ("openai/gsm8k", "so 3 #### 1,000\nwait #### 72", "72"),
        ("openai/gsm8k", "so 72", None),
        ("math_dapo", "Answer: $x=5$", "5"),
        ("math_dapo", "five", None),
        ("lighteval/MATH", "\\boxed{1} or \\boxed{\\frac{1}{2} }", "1/2"),
        ("lighteval/MATH", "none", None),
        ("copy", "1234", "1234"),
        ("my/own", "  text ", "text"),
    ],
)
def test_answers_that_are_voted_on(source, text, expected):
    assert reward.answer(source, text) == expected


def test_flexible_answers():
    assert reward.answer("gsm8k", "it is 1,200 dollars.", "flexible") == "1200"
    assert reward.answer("gsm8k", "about 42.50...", "flexible") == reward.answer("gsm8k", "42.5", "flexible")


@pytest.mark.parametrize(
    "equal", [("0.5", "\\frac{1}{2}", "1/2", " \\dfrac{2}{4}"), ("1,000", "1000.0"), ("x + 1", "x+1")]
)
def test_equal_answers_vote_together(equal):
    assert len({reward.answer("lighteval/MATH", f"\\boxed{{{text}}}") for text in equal}) == 1


class Set:
    def __init__(self, source: str, count: int):
        self.sources, self.count = [source], count

    def all(self, limit: int):
        prompts = [Prompt(i, [1, 2], self.sources[0], "", {}, i) for i in range(self.count)]
        return prompts[: limit or None]


class Engine:
    def __init__(self):
        self.asked = []

    def generate(self, wanted, label):
        self.asked += wanted
        response = np.array([1], np.int32)
        return [Sample(r.prompt_id, r.sample_id, response, response, np.zeros(1), "stop") for r in wanted]


def test_sets_of_one_source_stay_apart_and_sampling_is_validations_own(monkeypatch):
    monkeypatch.setattr("rollout.evaluate.gather", lambda samples, group: samples)  # a world of one
    monkeypatch.setattr("rollout.evaluate._all_gather", lambda sums, group: [sums])
    files = {"x/one.parquet": Set("s", 3), "x/two.parquet": Set("s", 2), "x/three.parquet": Set("t", 1)}
    config = load(["eval.samples_per_prompt=2", "eval.temperature=0.5", "eval.top_p=0.7", "eval.max_prompts=2"])
    engine = Engine()

    def score(samples, prompts):
        for sample in samples:
            sample.score = float(sample.prompt_id)
        return {"reward/timeout": (0.0, float(len(samples))), "reward/part/form": (sum(s.score for s in samples), 4.0)}

    metrics, samples = evaluate(engine, files, config, score, lambda sample, source: source, None)
    assert metrics["val-core/s:one/reward/mean@2"] == 0.5 and metrics["val-core/t/reward/mean@2"] == 0.0
    forms = {key.split("/")[1]: value for key, value in metrics.items() if key.endswith("/reward/part/form")}
    assert forms == {"one": 0.5, "two": 0.5, "t": 0.0} and metrics["val-aux/t/reward/timeout"] == 0.0
    assert len(samples) == 2 * (2 + 2 + 1) and {name for name, _ in samples} == {"s:one", "s:two", "t"}
    assert {(r.temperature, r.top_p) for r in engine.asked} == {(0.5, 0.7)}


@pytest.mark.slow
def test_training_is_bit_equal_with_and_without_validation(tmp_path):
    data = prepare("copy", tmp_path / "copy")
    options = [
        "launch/recipes/quickstart.toml",
        *(
            "world=1",
            "train.ep=1",
            "total_steps=3",
            "log.samples_per_step=0",
            "checkpoint.at_end=false",
            "checkpoint.export=true",
        ),
        *(f"model.path={data}/model", f'data.train_files=["{data}/train.parquet"]'),
        f'data.val_files=["{data}/val.parquet"]',
    ]
    sampling = ["eval.before_training=true", "eval.every_steps=1", "eval.samples_per_prompt=2", "eval.temperature=1"]
    plain = run_job(tmp_path / "plain", 1, *options, "eval.every_steps=0")
    checked = run_job(tmp_path / "checked", 1, *options, *sampling, "eval.max_prompts=20")
    steps = [row for row in checked.lasting if row["training/global_step"]]
    for mine, theirs in zip(plain.lasting, steps, strict=True):
        assert len(mine) > 40 and mine == {key: theirs[key] for key in mine}
    assert all(plain.samples(step) == checked.samples(step) for step in (1, 2, 3))
    plain_files, checked_files = (sorted((job.run_dir / "export").glob("*.safetensors")) for job in (plain, checked))
    assert plain_files and [f.read_bytes() for f in plain_files] == [f.read_bytes() for f in checked_files]
    assert "val-core/copy/reward/best@2/mean" in checked.metrics[0] and len(checked.metrics) == 4
    files = sorted(Path(tmp_path / "checked" / "samples").glob("val_*.jsonl"))
    assert [file.name for file in files] == [f"val_{step:06d}.jsonl" for step in range(4)]
    assert len(json.loads(files[0].read_text().splitlines()[0])) == 8 and len(files[0].read_text().splitlines()) == 40
