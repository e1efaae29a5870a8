"""The first-step self-check: numbers that must be (nearly) zero in step 1, their bounds, likely causes. Pure.

Before any update the current, old and reference policies are one, and the engine holds the same weights, so kl, ppo_kl
and the clip fraction are 0 (exactly on cpu) and the engine's probabilities agree with the trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping

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
        "the trainer's log-probs use another temperature than the engine, or top-p, top-k or min-p cut the engine's",
        "the response mask is shifted by one token, or prompts are tokenised twice",
    ),
}
CAUSES["actor/pg_clipfrac"] = CAUSES["actor/ppo_kl"]


def bounds(dtype: str, exact: bool, updates_per_rollout: int, probs_diff: float) -> dict[str, float]:
    """Metric -> largest allowed magnitude in step 1. `exact`: the device repeats results bit for bit (cpu)."""
    table = {"training/rollout_probs_diff_mean": probs_diff or (1e-4 if dtype == "float32" else 2e-2)}
    if updates_per_rollout == 1:
        identity = 0.0 if exact else 1e-3
        table |= {"actor/kl_loss": identity, "actor/ppo_kl": identity, "actor/pg_clipfrac": identity}
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
