"""From scores to advantages and loss weights: numpy only, float64 inside, no torch, no groups of ranks.

Shapes: B sequences of the batch; R_i response tokens of sequence i. `scores` [B], `prompt_ids` [B], `lengths` [B].
Groups (the samples of one prompt) are found by prompt id, never by position. Sums over a group or a batch are correctly
rounded (math.fsum), so the order in which samples arrive cannot change a single bit of the result.

Left out on purpose: anything with a critic (GAE), and greedy baselines (ReMax) that need further generation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from launch.config import AlgorithmConfig

Floats = npt.NDArray[np.float64]
EPSILON = 1e-6
LOG_CLAMP = 20.0
K3_CLAMP = 10.0


# Groups


def groups(prompt_ids: npt.ArrayLike) -> Iterator[npt.NDArray[np.int64]]:
    """Indices of the samples of each prompt."""
    _, inverse, counts = np.unique(np.asarray(prompt_ids), return_inverse=True, return_counts=True)
    yield from np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])


def _per_group(scores: npt.ArrayLike, prompt_ids: npt.ArrayLike, estimate: Callable[[Any], Floats]) -> Floats:
    """Advantages [B]: `estimate` maps the member indices of one group to their advantages."""
    result = np.array(scores, dtype=np.float64)
    single = 0
    for members in groups(prompt_ids) if result.size else ():
        if len(members) == 1:
            single += 1  # nothing to compare with: the raw score stays
        else:
            result[members] = estimate(members)
    if single:
        # Python shows a text once per place, so a run says this once: no number in it.
        warnings.warn("a prompt with one sample: the advantage is the raw score", stacklevel=3)
    return result


def _sum(values: Floats) -> float:
    return math.fsum(values.tolist())


def _mean(values: Floats, weights: Floats | None = None) -> float:
    """Weighted mean that is exact for equal values: a group without differences gets advantages of exactly 0."""
    weights = np.ones_like(values) if weights is None else weights
    total = _sum(weights)
    mean = _sum(values * weights) / total if total else 0.0
    return min(max(mean, float(values.min())), float(values.max()))


def _std(values: Floats, mean: float) -> float:
    """Unbiased standard deviation (ddof = 1)."""
    return math.sqrt(_sum((values - mean) ** 2) / (len(values) - 1))


# Estimators


def grpo(scores: npt.ArrayLike, prompt_ids: npt.ArrayLike, norm_by_std: bool = True) -> Floats:
    """(r - mean) / (std + 1e-6) within the group, std unbiased [B]; without the std: Dr.GRPO.

    GRPO: arXiv 2402.03300. Dr.GRPO: arXiv 2503.20783. A group of one keeps its raw score (as in verl).
    """
    values = np.asarray(scores, dtype=np.float64)

    def estimate(members: Any) -> Floats:
        mean = _mean(values[members])
        scale = _std(values[members], mean) + EPSILON if norm_by_std else 1.0
        return (values[members] - mean) / scale

    return _per_group(values, prompt_ids, estimate)


def rloo(scores: npt.ArrayLike, prompt_ids: npt.ArrayLike) -> Floats:
    """r minus the mean of the group's other samples = n / (n - 1) * (r - mean) [B]. RLOO: arXiv 2402.14740."""
    values = np.asarray(scores, dtype=np.float64)

    def estimate(members: Any) -> Floats:
        return (values[members] - _mean(values[members])) * (len(members) / (len(members) - 1))

    return _per_group(values, prompt_ids, estimate)


def opo(scores: npt.ArrayLike, prompt_ids: npt.ArrayLike, lengths: npt.ArrayLike) -> Floats:
    """r minus the group's length-weighted mean, the baseline of least variance [B]. OPO: arXiv 2505.23585."""
    values, weights = np.asarray(scores, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
    return _per_group(values, prompt_ids, lambda members: values[members] - _mean(values[members], weights[members]))


def grpo_passk(scores: npt.ArrayLike, prompt_ids: npt.ArrayLike, norm_by_std: bool = True) -> Floats:
    """Only the best sample of a group learns, by its lead over the second [B]. Pass@k: arXiv 2503.19595.

    Of equally good samples the first would be the best one, with a lead of 0.
    """
    values = np.asarray(scores, dtype=np.float64)

    def estimate(members: Any) -> Floats:
        second, best = np.sort(values[members])[-2:]
        scale = _std(values[members], _mean(values[members])) + EPSILON if norm_by_std else 1.0
        return np.where(values[members] == best, (best - second) / scale, 0.0)

    if np.unique(np.asarray(prompt_ids), return_counts=True)[1].min(initial=2) < 2:
        raise ValueError("algorithm.advantage = grpo_passk needs two samples of each prompt: raise samples_per_prompt")
    return _per_group(values, prompt_ids, estimate)


def reinforce_pp(token_rewards: Sequence[npt.ArrayLike], gamma: float = 1.0) -> list[Floats]:
    """Discounted returns whitened over all tokens: a list of B arrays [R_i]. REINFORCE++: arXiv 2501.03262."""
    returns = [_discounted(np.asarray(rewards, dtype=np.float64), gamma) for rewards in token_rewards]
    flat = np.concatenate([*returns, np.zeros(0)])
    return np.split(_whiten(flat, np.ones_like(flat)), np.cumsum([len(values) for values in returns]))[:-1]


def reinforce_pp_baseline(scores: npt.ArrayLike, prompt_ids: npt.ArrayLike, lengths: npt.ArrayLike) -> Floats:
    """r minus the group's mean, whitened over all tokens, hence with length weights [B]. arXiv 2501.03262."""
    centred = grpo(scores, prompt_ids, norm_by_std=False)
    return _whiten(centred, np.asarray(lengths, dtype=np.float64))


def _discounted(rewards: Floats, gamma: float) -> Floats:
    """Returns [R]: G_t = r_t + gamma * G_{t+1}."""
    if gamma == 1.0:
        return np.cumsum(rewards[::-1])[::-1]
    returns, running = np.empty_like(rewards), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        returns[t] = running = rewards[t] + gamma * running
    return returns


def _whiten(values: Floats, weights: Floats) -> Floats:
    """(x - mean) / sqrt(var + 1e-8), where each value counts `weights` times; var is unbiased, as in verl."""
    count = _sum(weights)
    if count < 2:
        return np.zeros_like(values)
    centred = values - _mean(values, weights)
    return centred / math.sqrt(_sum(centred**2 * weights) / (count - 1) + 1e-8)


def advantages(
    algorithm: AlgorithmConfig,
    scores: npt.ArrayLike,
    prompt_ids: npt.ArrayLike,
    lengths: npt.ArrayLike,
    kl: Sequence[npt.ArrayLike] | None = None,
    kl_coefficient: float = 0.0,
) -> list[npt.NDArray[np.float32]]:
    """Advantages of every response token: a list of B float32 arrays [R_i] (read-only views: concatenate them).

    `scores` are shaped (overlong punishment added). `kl` holds the penalty of each token (see kl_penalty), which
    `kl_coefficient` weighs; it enters per token in reinforce_pp and as its sum over the sequence everywhere else.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if algorithm.advantage == "reinforce_pp":
        rewards = token_rewards(scores, lengths, kl, kl_coefficient)
        return [values.astype(np.float32) for values in reinforce_pp(rewards, algorithm.gamma)]
    rewards_per_sequence = sequence_rewards(scores, kl, kl_coefficient)
    estimators: dict[str, Callable[[], Floats]] = {
        "grpo": lambda: grpo(rewards_per_sequence, prompt_ids, algorithm.norm_by_std),
        "rloo": lambda: rloo(rewards_per_sequence, prompt_ids),
        "opo": lambda: opo(rewards_per_sequence, prompt_ids, lengths),
        "grpo_passk": lambda: grpo_passk(rewards_per_sequence, prompt_ids, algorithm.norm_by_std),
        "reinforce_pp_baseline": lambda: reinforce_pp_baseline(rewards_per_sequence, prompt_ids, lengths),
    }
    return [
        np.broadcast_to(value, length)
        for value, length in zip(estimators[algorithm.advantage]().astype(np.float32), lengths, strict=True)
    ]


# Rewards: DAPO's shaping and filter, KL penalty


def overlong(lengths: npt.ArrayLike, max_response_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> Floats:
    """DAPO's soft overlong punishment [B], to be added to the scores: 0 down to -penalty at the limit.

    It falls linearly over the last `buffer_tokens` before `max_response_tokens`; 0 tokens is off. arXiv 2503.14476.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    if not 0 <= buffer_tokens <= max_response_tokens:
        raise ValueError(
            f"algorithm.overlong_buffer_tokens = {buffer_tokens} must lie between 0 and data.max_response_tokens ="
            f" {max_response_tokens}"
        )
    if buffer_tokens == 0:
        return np.zeros_like(lengths)
    exceeded = lengths - (max_response_tokens - buffer_tokens)
    return np.minimum(-exceeded / buffer_tokens * penalty, 0.0) + 0.0


def keep_groups(unshaped_scores: npt.ArrayLike, prompt_ids: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Dynamic sampling (DAPO, arXiv 2503.14476): True [B] for samples of groups whose unshaped scores differ.

    A group of one is kept. Overlong punishment would make every group differ, so pass the scores without it.
    """
    values = np.asarray(unshaped_scores, dtype=np.float64)
    keep = np.ones(values.shape, dtype=np.bool_)
    for members in groups(prompt_ids) if values.size else ():
        keep[members] = len(members) == 1 or values[members].min() != values[members].max()
    return keep


def kl_penalty(estimator: str, logprobs: npt.ArrayLike, ref_logprobs: npt.ArrayLike) -> Floats:
    """Estimate of KL(policy || reference) at each token; k1, k2, k3, abs. http://joschu.net/blog/kl-approx.html"""
    difference = np.asarray(logprobs, dtype=np.float64) - np.asarray(ref_logprobs, dtype=np.float64)
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return np.abs(difference)
    if estimator == "k2":
        return 0.5 * difference**2
    if estimator == "k3":
        log_ratio = np.clip(-difference, -LOG_CLAMP, LOG_CLAMP)
        return np.clip(np.exp(log_ratio) - log_ratio - 1.0, -K3_CLAMP, K3_CLAMP)
    raise ValueError(f"unknown KL estimator {estimator!r}; known: k1, k2, k3, abs")


def sequence_rewards(scores: npt.ArrayLike, kl: Sequence[npt.ArrayLike] | None, kl_coefficient: float) -> Floats:
    """Rewards [B]: score minus the weighted KL penalty summed over the response."""
    rewards = np.array(scores, dtype=np.float64)
    if kl is not None:
        rewards -= kl_coefficient * np.array([np.sum(values, dtype=np.float64) for values in kl])
    return rewards


def token_rewards(
    scores: npt.ArrayLike, lengths: npt.ArrayLike, kl: Sequence[npt.ArrayLike] | None, kl_coefficient: float
) -> list[Floats]:
    """Rewards of each token, B arrays [R_i]: the KL penalty everywhere, the score on the last token."""
    rewards = [np.zeros(length) for length in np.asarray(lengths, dtype=np.int64)]
    for i, score in enumerate(np.asarray(scores, dtype=np.float64)):
        if kl is not None:
            rewards[i] -= kl_coefficient * np.asarray(kl[i], dtype=np.float64)
        rewards[i][-1:] += score
    return rewards


@dataclass(frozen=True)
class KLController:
    """Weight of the KL penalty: fixed, or steered towards `target` (arXiv 1909.08593, section 2.2). Save it."""

    coefficient: float
    target: float = 0.0
    """Mean over sequences of the token mean of the KL; 0 keeps the coefficient fixed."""
    horizon: int = 10_000

    def resumed(self, coefficient: float) -> KLController:
        """Controller that goes on with the coefficient of a checkpoint; a fixed one is what the option says now."""
        return replace(self, coefficient=coefficient) if self.target else self

    def updated(self, current_kl: float, num_samples: int) -> KLController:
        """Controller of the next step, after `num_samples` sequences with a mean KL of `current_kl`."""
        if not self.target:
            return self
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coefficient=self.coefficient * (1.0 + error * num_samples / self.horizon))


# Weights of the loss


def keep_tokens(
    old_logprobs: Sequence[npt.ArrayLike], rollout_logprobs: Sequence[npt.ArrayLike], low: float, high: float
) -> list[npt.NDArray[np.bool_]]:
    """Mask of algorithm.correction = sequence_mask for token_weights: B arrays [R_i], all True or all False.

    A sequence stays when its importance weight, pi_old / pi_rollout of the whole sequence, lies within [low, high].
    """
    masks = []
    for old, rollout in zip(old_logprobs, rollout_logprobs, strict=True):
        difference = np.asarray(old, dtype=np.float64) - np.asarray(rollout, dtype=np.float64)
        weight = math.exp(min(max(float(difference.sum()), -LOG_CLAMP), LOG_CLAMP))
        masks.append(np.full(difference.shape, low <= weight <= high))
    return masks


def token_weights(
    aggregation: str, lengths: npt.ArrayLike, mask: Sequence[npt.ArrayLike] | None = None, norm_tokens: int = 0
) -> list[npt.NDArray[np.float32]]:
    """Weights that make the loss a plain sum over tokens: B float32 arrays [R_i] (read-only views: concatenate them).

    Call it once per mini-batch with ALL its sequences: the denominators are global, so that micro-batches and ranks
    only add up. N valid tokens, n_i of them in sequence i, B sequences with at least one:

        token-mean 1/N   seq-mean-token-mean 1/(B n_i)   seq-mean-token-sum 1/B   seq-mean-token-sum-norm 1/(B norm)

    `mask` [R_i] drops tokens (rollout correction); they get weight 0 and leave every denominator. Nothing left: all 0.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    masks = None if mask is None else [np.asarray(values, dtype=np.bool_) for values in mask]
    counts = lengths if masks is None else np.array([values.sum() for values in masks], dtype=np.int64)
    num_tokens, num_sequences = max(int(counts.sum()), 1), max(int((counts > 0).sum()), 1)
    if aggregation == "token-mean":
        weights = np.full(len(lengths), 1.0 / num_tokens)
    elif aggregation == "seq-mean-token-mean":
        weights = 1.0 / (num_sequences * np.maximum(counts, 1))
    elif aggregation == "seq-mean-token-sum":
        weights = np.full(len(lengths), 1.0 / num_sequences)
    elif aggregation == "seq-mean-token-sum-norm":
        if norm_tokens < 1:
            raise ValueError(f"seq-mean-token-sum-norm needs a positive constant, got {norm_tokens} tokens")
        weights = np.full(len(lengths), 1.0 / (num_sequences * norm_tokens))
    else:
        raise ValueError(f"unknown algorithm.aggregation {aggregation!r}")
    if masks is None:
        return [np.broadcast_to(w, length) for w, length in zip(weights.astype(np.float32), lengths, strict=True)]
    return [w * values for w, values in zip(weights.astype(np.float32), masks, strict=True)]
