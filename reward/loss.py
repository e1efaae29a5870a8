"""Policy objectives, KL, entropy and rollout correction: pure torch functions on flat tensors of one micro-batch.

Shapes: T positions (packed sequences, prompts included), S sequences. Position t predicts token t + 1. `weight` [T] is
nonzero exactly on positions that predict response tokens and already holds the global denominator
(reward.advantage.token_weights), so

    loss = sum_t weight_t * loss_t          and micro-batches, data and context parallel ranks only add up.

A sequence may be spread over context parallel ranks: functions that need its total get `seq_sum(values [T]) -> [S]`
from the caller. It is only called on detached tensors (GSPO and GMPO use a straight-through form with the exact
gradient), so a plain all-reduce will do. Nothing here waits for the device: no .item(), no branch on a tensor's value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from launch.config import AlgorithmConfig

SeqSum = Callable[[Tensor], Tensor]
Stats = dict[str, tuple[Tensor, Tensor]]
"""Metric name -> (sum, weight): the metric is the sum of sums over the sum of weights, whatever the split."""

LOG_CLAMP = 20.0
K3_CLAMP = 10.0


def local_seq_sum(segments: Tensor, num_sequences: int) -> SeqSum:
    """`seq_sum` for sequences that lie on one rank; `segments` [T] numbers the sequence of each position."""
    return lambda values: values.new_zeros(num_sequences).index_add(0, segments, values)


# Policy objectives: loss of each token and, where there is one, where it was clipped; all [T]


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return torch.exp(torch.clamp(logprobs - old_logprobs, -LOG_CLAMP, LOG_CLAMP))


def clip_loss(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped loss with ranges 1 - low and 1 + high (clip-higher), and dual clip: for A < 0 at most -A * dual.

    PPO: arXiv 1707.06347. Dual clip: arXiv 1912.09729. Clip-higher: DAPO, arXiv 2503.14476.
    """
    plain = -advantage * ratio
    clipped = -advantage * torch.clamp(ratio, 1.0 - low, 1.0 + high)
    loss = torch.maximum(plain, clipped)
    if not dual:
        return loss, clipped > plain, torch.zeros_like(clipped > plain)
    bound = -advantage * dual
    lower = (loss > bound) & (advantage < 0)
    return torch.where(advantage < 0, torch.minimum(loss, bound), loss), clipped > plain, lower


def gspo_ratio(log_ratio: Tensor, mask: Tensor, segments: Tensor, seq_sum: SeqSum) -> Tensor:
    """Sequence ratio exp(mean log ratio) at each token, with the gradient of the token's own log-prob [T].

    s * pi / sg(pi) with a stopped s. With weights constant in a sequence its gradient equals the sequence ratio's.
    GSPO: arXiv 2507.18071, section 4.3.
    """
    mean = seq_mean(log_ratio.detach(), mask, segments, seq_sum)
    return torch.exp(torch.clamp(log_ratio - log_ratio.detach() + mean, -LOG_CLAMP, LOG_CLAMP))


def gmpo_loss(
    log_ratio: Tensor, advantage: Tensor, low: float, high: float, mask: Tensor, segments: Tensor, seq_sum: SeqSum
) -> tuple[Tensor, Tensor]:
    """-A times the geometric mean of the sequence's clipped token ratios; (loss, clipped). GMPO: arXiv 2507.20673.

    Clipping is per token and in log space, [-low, high], on the side that the sign of A makes harmful.
    """
    bounded = torch.clamp(log_ratio, -low, high)
    sign = torch.sign(advantage)
    kept = sign * torch.minimum(sign * log_ratio, sign * bounded)
    mean = seq_mean(kept.detach(), mask, segments, seq_sum)
    ratio = torch.exp(torch.clamp(kept - kept.detach() + mean, -LOG_CLAMP, LOG_CLAMP))
    return -advantage * ratio, (log_ratio != kept) & (advantage != 0)


def cispo_loss(ratio: Tensor, logprobs: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """REINFORCE with a clipped, stopped importance weight: no token loses its gradient. CISPO: arXiv 2506.13585."""
    weight = torch.clamp(ratio, 1.0 - low, 1.0 + high).detach()
    return -weight * advantage * logprobs, weight != ratio


def sapo_loss(ratio: Tensor, advantage: Tensor, tau_positive: float, tau_negative: float) -> Tensor:
    """A soft gate, 4 / tau * sigmoid(tau (r - 1)), in place of the clip; slope 1 at r = 1. SAPO: arXiv 2511.20347."""
    tau = torch.where(advantage > 0, tau_positive, tau_negative).to(ratio.dtype)
    return -advantage * torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)


def seq_mean(values: Tensor, mask: Tensor, segments: Tensor, seq_sum: SeqSum) -> Tensor:
    """Mean over the sequence's masked positions, at each position [T]."""
    count = seq_sum(mask.to(values.dtype)).clamp(min=1.0)
    return (seq_sum(torch.where(mask, values, 0.0)) / count)[segments]


# KL


def kl_estimate(estimator: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) at each token [T]; exactly 0 for equal inputs.

    k1, k2, k3, abs: http://joschu.net/blog/kl-approx.html, k3 with the clamps of verl. k3+ has the value of k3 and the
    gradient of k2, which is the unbiased gradient of the reverse KL (k3's is not: arXiv 2506.09477).
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    log_ratio = torch.clamp(-difference, -LOG_CLAMP, LOG_CLAMP)
    k3 = torch.clamp(torch.exp(log_ratio) - log_ratio - 1.0, -K3_CLAMP, K3_CLAMP)
    if estimator == "k3":
        return k3
    if estimator == "k3+":
        k2 = 0.5 * difference.square()
        return k2 - k2.detach() + k3.detach()
    raise ValueError(f"unknown algorithm.kl_estimator {estimator!r}; known: k1, k2, k3, abs, k3+")


# Rollout correction


def correction_weights(
    algorithm: AlgorithmConfig,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    segments: Tensor,
    seq_sum: SeqSum,
) -> Tensor:
    """Factor of each token's policy loss for the gap between the engine's and the trainer's log-probs [T].

    token, sequence: importance weight pi_old / pi_rollout of the token or the whole sequence, truncated at
    correction_high (TIS, https://fengyao.notion.site/off-policy-rl). icepop: the token's weight, 0 outside
    [low, high] (https://ringtech.notion.site/icepop). sequence_mask: 1 where the sequence's weight lies within
    [low, high], else 0 (masked importance sampling). Only sequence_mask rejects samples: where old log-probs are known
    before the update, reward.advantage.keep_tokens is its mask for token_weights, and they leave the denominators.
    """
    low, high = algorithm.correction_low, algorithm.correction_high
    log_ratio = torch.where(mask, old_logprobs - rollout_logprobs, 0.0).detach()
    if algorithm.correction in ("sequence", "sequence_mask"):
        log_ratio = seq_sum(log_ratio)[segments]
    ratio = torch.exp(torch.clamp(log_ratio, -LOG_CLAMP, LOG_CLAMP))
    inside = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
    if algorithm.correction in ("token", "sequence"):
        return torch.clamp(ratio, max=high)
    if algorithm.correction == "icepop":
        return ratio * inside
    if algorithm.correction == "sequence_mask":
        return inside
    raise ValueError(f"unknown algorithm.correction {algorithm.correction!r}")


# The whole loss


def policy_loss(
    algorithm: AlgorithmConfig,
    logprobs: Tensor,
    entropy: Tensor | None,
    fields: dict[str, Tensor],
    segments: Tensor,
    num_sequences: int,
    seq_sum: SeqSum | None = None,
) -> tuple[Tensor, Stats]:
    """Loss of one micro-batch (a scalar: the sum of weighted token losses) and its metrics.

    `logprobs`, `entropy` (nats, or None) and `fields` are [T]: weight and advantage always; old_logprobs (absent: the
    current ones, stopped, so that the ratio is exactly 1); ref_logprobs when algorithm.kl_loss is on; rollout_logprobs
    for correction and mismatch metrics; correction, the factors when they were computed before the update; share, the
    token-mean weights, when algorithm.aggregation is a seq-mean-token-sum (weights that do not add up to 1).
    The values of any field at positions of weight 0 are never looked at: NaN is harmless there.
    """
    weight = fields["weight"]
    mask = weight != 0
    share = fields.get("share", weight)
    seq_sum = seq_sum or local_seq_sum(segments, num_sequences)
    values = {name: torch.where(mask, field, 0.0) for name, field in fields.items() if name not in ("weight", "share")}
    logprobs = torch.where(mask, logprobs, 0.0)
    old = values.get("old_logprobs", logprobs.detach())

    stats: Stats = {}
    losses, clipped, lower = _policy_tokens(algorithm, logprobs, old, values["advantage"], mask, segments, seq_sum)
    if "rollout_logprobs" in values:
        stats |= mismatch_stats(old, values["rollout_logprobs"], share)
    factor = values.get("correction")
    if factor is None and algorithm.correction != "none":
        factor = correction_weights(algorithm, old, values["rollout_logprobs"], mask, segments, seq_sum)
    if factor is not None:
        losses = losses * factor
        stats["rollout_corr/weight_mean"] = _average(factor, share)
        stats["rollout_corr/zero_fraction"] = _average(mask & (factor == 0), share)
    loss = (weight * losses).sum()
    total = share.sum().detach()
    stats["actor/pg_loss"] = (loss.detach(), total)
    stats["actor/pg_clipfrac"] = _average(clipped, share)
    stats["actor/pg_clipfrac_lower"] = _average(lower, share)
    stats["actor/ppo_kl"] = _average(old - logprobs, share)
    if algorithm.kl_loss:
        kl = (weight * kl_estimate(algorithm.kl_estimator, logprobs, values["ref_logprobs"])).sum()
        loss = loss + algorithm.kl_loss * kl
        stats["actor/kl_loss"] = (kl.detach(), total)
    if entropy is not None:
        total_entropy = (weight * torch.where(mask, entropy, 0.0)).sum()
        if algorithm.entropy_bonus:
            loss = loss - algorithm.entropy_bonus * total_entropy
        stats["actor/entropy"] = (total_entropy.detach(), total)
    return loss, stats


def _policy_tokens(
    algorithm: AlgorithmConfig,
    logprobs: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    segments: Tensor,
    seq_sum: SeqSum,
) -> tuple[Tensor, Tensor, Tensor]:
    """The chosen objective: loss of each token, where it was clipped, where dual clip acted; all [T]."""
    low, high = algorithm.clip_low, algorithm.clip_high
    never = torch.zeros_like(mask)
    if algorithm.policy_loss == "clip":
        return clip_loss(_ratio(logprobs, old), advantage, low, high, algorithm.dual_clip)
    if algorithm.policy_loss == "gspo":
        ratio = gspo_ratio(logprobs - old, mask, segments, seq_sum)
        return clip_loss(ratio, advantage, low, high, dual=0.0)
    if algorithm.policy_loss == "gmpo":
        return *gmpo_loss(logprobs - old, advantage, low, high, mask, segments, seq_sum), never
    if algorithm.policy_loss == "cispo":
        return *cispo_loss(_ratio(logprobs, old), logprobs, advantage, low, high), never
    if algorithm.policy_loss == "sapo":
        tau_positive, tau_negative = algorithm.sapo_tau_positive, algorithm.sapo_tau_negative
        return sapo_loss(_ratio(logprobs, old), advantage, tau_positive, tau_negative), never, never
    raise ValueError(f"unknown algorithm.policy_loss {algorithm.policy_loss!r}")


def _average(values: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, weight) of a token mean; `share` [T] is 0 where a token does not count."""
    return (share * values.detach()).sum(), share.sum().detach()


def mismatch_stats(old_logprobs: Tensor, rollout_logprobs: Tensor, share: Tensor) -> Stats:
    """How far the engine's log-probs are from the trainer's: |p - p'|, k1 and k3 of KL(rollout || trainer)."""
    old, rollout = old_logprobs.detach(), rollout_logprobs
    return {
        "training/rollout_probs_diff_mean": _average((old.exp() - rollout.exp()).abs(), share),
        "rollout_corr/kl": _average(rollout - old, share),
        "rollout_corr/k3_kl": _average(kl_estimate("k3", rollout, old), share),
    }
