"""From text to gradient signal: rules and where they run (here), advantage.py, loss.py. No engine, no model.

    rules.py    what a good answer is          pool.py, worker.py   processes with deadlines
    remote.py   a reward over HTTP             advantage.py         scores -> advantages and loss weights
                                               loss.py              log-probs -> loss

This file imports neither numpy nor torch, so that reward workers start fast.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from launch.config import ConfigError, RewardConfig
from reward.pool import Pool
from reward.remote import Remote
from reward.rules import CHEAP, Item, Score, answer, check_sources, math_boxed, scorer

__all__ = ["Item", "Score", "Scorer", "answer", "build", "metrics", "score_samples"]
Sums = dict[str, tuple[float, float]]
"""Metric name -> (sum, weight)."""
log = logging.getLogger(__name__)
MIN_ERRORS = 8
"""This many samples, all with errors, mean a broken reward and stop the run; fewer may be odd text."""


class Backend(Protocol):
    def score(self, items: Sequence[Item]) -> list[Score]: ...

    def close(self) -> None: ...


class Inline:
    """Cheap built-in rules in the trainer's own process."""

    def __init__(self, rule: Callable[[Item], Score]):
        self.rule = rule

    def score(self, items: Sequence[Item]) -> list[Score]:
        return [self.rule(item) for item in items]

    def close(self) -> None:
        pass


class Scorer:
    """The configured reward. `score` keeps the order of the items and never takes forever; `close` ends processes."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self.has_worked = False

    def score(self, items: Sequence[Item]) -> list[Score]:
        scores = self.backend.score(items)
        errors = [score.failed for score in scores if score.failed.startswith("error")]
        if len(errors) == len(scores) >= MIN_ERRORS:
            kind = RuntimeError if self.has_worked else ConfigError
            raise kind(f"the reward failed on all {len(scores)} samples; the first: {errors[0]}")
        self.has_worked = True
        failed = errors or [score.failed for score in scores if score.failed]
        if failed:
            log.warning("the reward failed on %d of %d samples; the first: %s", len(failed), len(scores), failed[0])
        return scores

    def close(self) -> None:
        self.backend.close()


def build(config: RewardConfig, sources: Iterable[str]) -> Scorer:
    """The reward for data of these sources; ValueError at once for an unknown source or a function that won't load.

    With reward.workers = 0 cheap built-in rules run in this process and everything else in 2 workers.
    """
    if config.url:
        return Scorer(Remote(config))
    if config.function:
        return Scorer(Pool(config))
    rules = check_sources(sources)
    if not config.workers and all(rule in CHEAP for rule in rules):
        return Scorer(Inline(scorer(config)))
    return Scorer(Pool(config, preload=["math_verify"] if math_boxed in rules else []))


def score_samples(scorer: Scorer, tokenizer: Any, samples: Sequence[Any], prompts: Sequence[Any]) -> Sums:
    """Write the reward rule's value into each sample; (sum, weight) of failures and parts.

    `samples`: of rollout/batch.py; `prompts`: of rollout/prompts.py, those of the samples among them.
    """
    by_id, items = {prompt.prompt_id: prompt for prompt in prompts}, []
    for sample in samples:
        prompt = by_id[sample.prompt_id]
        text = tokenizer.decode(sample.response, skip_special_tokens=True)
        extra = prompt.extra | {"finish": sample.finish, "response_ids": sample.response.tolist()}
        items.append(Item(prompt.source, text, prompt.ground_truth, extra))
    scores = scorer.score(items)
    for sample, score in zip(samples, scores, strict=True):
        sample.score = score.value
    return metrics(scores)


def metrics(scores: Sequence[Score]) -> Sums:
    """(sum, weight) of the share of failed samples, by reason, and of every part that rules returned."""
    result = {f"reward/{reason}": (0.0, float(len(scores))) for reason in ("timeout", "memory", "crash", "error")}
    for score in scores:
        parts = {f"reward/part/{name}": value for name, value in score.parts.items()}
        if score.failed:
            parts[f"reward/{score.failed.partition(':')[0]}"] = 1.0
        for name, value in parts.items():
            total, weight = result.get(name, (0.0, 0.0))
            result[name] = (total + value, weight + (name.startswith("reward/part/")))
    return result
