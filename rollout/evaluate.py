"""Validation with the training engine: mean@k, best@k and maj@k of each data source.

Keys follow verl: val-core/SOURCE/reward/mean@k for the largest k, best@k/mean and maj@k/mean beside it, smaller k under
val-aux. best and maj of n < k samples are bootstrap means (1,000 draws with replacement, seed 42). A source that is in
several files is told per file, as SOURCE:FILE. Parts of the reward and failed samples are means under
val-aux/SOURCE/reward/, FILE for a file of several. Groups are found by prompt id, so equal prompts stay apart. Nothing
here touches the random state of training.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from launch.config import Config
from rollout.batch import Sample, gather, requests
from rollout.prompts import Prompt, PromptSet

DRAWS, SEED = 1000, 42


STEP = -1
"""Validation's seeds are those of no training step."""


def evaluate(
    engine: Any,
    sets: Mapping[str, PromptSet],
    config: Config,
    score: Callable[[Sequence[Sample], Sequence[Prompt]], Any],
    answer: Callable[[Sample, str], str | None],
    group: Any,
) -> tuple[dict[str, float], list[tuple[str, Sample]]]:
    """(metrics, samples with their source) of all sets by [eval]; collective. `sets`: by file. `score` writes
    Sample.score and returns sums by name (reward.score_samples); `answer` (of a sample and its data source) is what is
    voted on.
    """
    options = config.eval
    sampling = dict(temperature=options.temperature, top_p=options.top_p, top_k=options.top_k, stop=config.rollout.stop)
    most = config.data.max_response_tokens
    count = Counter(source for data in sets.values() for source in set(data.sources))
    ids, names, answers, all_samples = [], [], [], []
    sums: dict[str, tuple[float, float]] = {}
    for number, (file, data) in enumerate(sets.items()):
        prompts = data.all(options.max_prompts)
        drawn = engine.generate(
            requests(prompts, options.samples_per_prompt, config.seed, STEP, most, **sampling), "eval"
        )
        label = data.sources[0] if len(set(data.sources)) == 1 and count[data.sources[0]] == 1 else Path(file).stem
        sums |= {f"val-aux/{label}/{name}": value for name, value in score(drawn, prompts).items()}
        source = {prompt.prompt_id: prompt.source for prompt in prompts}
        for sample in gather(drawn, group):
            name = source[sample.prompt_id]
            ids.append((number, sample.prompt_id))
            answers.append(answer(sample, name))
            names.append(f"{name}:{Path(file).stem}" if count[name] > 1 else name)
            all_samples.append(sample)
    metrics = validation_metrics(ids, names, [s.score for s in all_samples], answers)
    return metrics | means(_all_gather(sums, group)), list(zip(names, all_samples, strict=True))


def _all_gather(value: Any, group: Any) -> list[Any]:
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def means(ranks: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Name -> mean of (sum, weight) over ranks; without weight, so when nothing was scored, there is no mean."""
    total: dict[str, tuple[float, float]] = {}
    for name, (value, weight) in (item for rank in ranks for item in rank.items()):
        before = total.get(name, (0.0, 0.0))
        total[name] = before[0] + value, before[1] + weight
    return {name: value / weight for name, (value, weight) in sorted(total.items()) if weight}


def validation_metrics(
    prompt_ids: Sequence[Hashable], sources: Sequence[str], scores: Sequence[float], answers: Sequence[str | None]
) -> dict[str, float]:
    """Metrics over samples; the four sequences run in parallel. `answers` are what maj@k votes on (None: no vote)."""
    groups: dict[str, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, (source, prompt) in enumerate(zip(sources, prompt_ids, strict=True)):
        groups[source][prompt].append(i)
    metrics: dict[str, float] = {}
    for source, prompts in sorted(groups.items()):
        k = max(len(members) for members in prompts.values())
        per_prompt = [_prompt_metrics([scores[i] for i in m], [answers[i] for i in m]) for m in prompts.values()]
        for key in sorted(set().union(*per_prompt)):
            value = float(np.mean([p[key] for p in per_prompt if key in p]))
            core = f"@{k}" in key and "std" not in key
            metrics[f"val-{'core' if core else 'aux'}/{source}/reward/{key}"] = value
    return metrics


def _prompt_metrics(scores: Sequence[float], answers: Sequence[str | None]) -> dict[str, float]:
    k = len(scores)
    values = np.asarray(scores, np.float64)
    metrics = {f"mean@{k}": float(values.mean())}
    if k == 1:
        return metrics
    metrics[f"std@{k}"] = float(values.std(ddof=1))
    for n in _sizes(k):
        best, majority = _bootstrap(values, answers, n)
        metrics[f"best@{n}/mean"] = best
        if majority is not None:
            metrics[f"maj@{n}/mean"] = majority
    return metrics


def _sizes(k: int) -> list[int]:
    """Powers of two below k, and k."""
    return [n for n in (2**i for i in range(1, k.bit_length())) if n < k] + [k]


def _bootstrap(values: np.ndarray, answers: Sequence[str | None], n: int) -> tuple[float, float | None]:
    """(best, majority) of n of the samples, averaged over draws; all samples exactly once when n is their number."""
    k = len(values)
    if n == k:
        picks = np.arange(k)[None]
    else:
        picks = np.random.default_rng(SEED).integers(0, k, (DRAWS, n))
    best = float(values[picks].max(1).mean())
    if all(answer is None for answer in answers):
        return best, None
    return best, float(np.mean([_vote(values, answers, row) for row in picks]))


def _vote(values: np.ndarray, answers: Sequence[str | None], picks: np.ndarray) -> float:
    """Score of the most frequent answer; the first seen wins a tie."""
    votes = Counter(answers[i] for i in picks if answers[i] is not None)
    if not votes:
        return 0.0
    winner = votes.most_common(1)[0][0]
    return float(next(values[i] for i in picks if answers[i] == winner))
