"""The first-step self-check: numbers that must be (nearly) zero in step 1, their bounds, likely causes. Pure.

Before any update the current, old and reference policies are one, and the engine holds the same weights, so kl, ppo_kl
and the clip fraction are 0 (exactly on cpu) and the engine's probabilities agree with the trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CAUSES = {
    "actor/kl_loss": (
        "the reference policy is not the start policy (resume, or weights written after the snapshot)",
        "reference and current passes use different packing or kernels",
        "dropout or routing differs between the passes",
    ),
    "actor/ppo_kl": (
        "old log-probs come from another packing plan or another kernel",
        "the loss mask is shifted against the log-probs",
        "weights changed between the old and the current pass",
    ),
    "training/rollout_probs_diff_mean": (
        "the engine's weights differ from the trainer's (stale sync, swapped experts or tensors)",
        "the trainer's log-probs use another temperature than the engine",
        "the response mask is shifted by one token, or prompts are tokenised twice",
    ),
}
CAUSES["actor/pg_clipfrac"] = CAUSES["actor/ppo_kl"]


def sampling_cuts(rollout: Any) -> list[str]:
    """Sampling options below full, as "rollout.top_p = 0.9": they renormalise the engine's log-probs."""
    full = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
    return [f"rollout.{name} = {getattr(rollout, name)}" for name in full if getattr(rollout, name) != full[name]]


def bounds(
    dtype: str,
    exact: bool,
    updates_per_rollout: int,
    probs_diff: float,
    renormalised: bool = False,
    bypass: bool = False,
) -> dict[str, float]:
    """Metric -> largest allowed magnitude in step 1. `exact`: the device repeats results bit for bit (cpu).

    `renormalised`: sampling cuts the engine's distribution, so its log-probs are another thing than the trainer's.
    `bypass`: the old policy's log-probs are the engine's, so their difference is bounded by the agreement alone.
    """
    agreement = probs_diff or (1e-4 if dtype == "float32" else 2e-2)
    table = {} if renormalised else {"training/rollout_probs_diff_mean": agreement}
    if updates_per_rollout == 1:
        identity = 0.0 if exact else 1e-3
        table |= {"actor/kl_loss": identity}
        table |= {} if bypass else {"actor/ppo_kl": identity, "actor/pg_clipfrac": identity}
    return table


def check_first_step(metrics: Mapping[str, float], limits: Mapping[str, float]) -> None:
    """RuntimeError with the number, its bound and the three likeliest causes, for the first metric out of bounds."""
    for name, limit in limits.items():
        value = metrics.get(name)
        if value is not None and not abs(value) <= limit:
            causes = "\n".join(f"  {i}. {cause}" for i, cause in enumerate(CAUSES[name], 1))
            raise RuntimeError(
                f"first-step self-check: {name} = {value:.3g}, must be within {limit:.3g}; likely causes:\n{causes}\n"
                "  (runtime.self_check = false skips the check, runtime.self_check_probs_diff moves the last bound)"
            )
