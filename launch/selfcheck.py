"""The first-step self-check: numbers that must be (nearly) zero in step 1, their bounds, likely causes. Pure.

Before any update the current, old and reference policies are one, and the engine holds the same weights, so in the
first update kl, ppo_kl and the clip fraction are 0 (exactly on cpu) and the engine's probabilities agree with the
trainer's. Where the update's own pass gives the old log-probs, ppo_kl and the clip fraction are 0 by construction.
Generation gives back the device memory that it took, and the host's memory is not nearly full: later steps are not
smaller. Weight hashes are compared by the sync itself (parallel/reshard_check.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEPT_SHARE = 0.05
HOST_SHARE = 0.95
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
CAUSES["memory/kept_share"] = (
    "the engine does not sleep deeply enough (rollout.vllm settings that keep weights or cache on the device)",
    "another process took device memory meanwhile",
    "training tensors that should wait on the host came back to the device twice (train.offload)",
)
CAUSES["memory/host_share"] = (
    "what is offloaded does not fit into the host's memory (launch.plan shows it per rank)",
    "reward workers or other jobs take the host's memory",
    "checkpoint.background holds a second copy of the training state",
)


def sampling_cuts(rollout: Any) -> list[str]:
    """Sampling options below full, as "rollout.top_p = 0.9": they renormalise the engine's log-probs."""
    full = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
    return [f"rollout.{name} = {getattr(rollout, name)}" for name in full if getattr(rollout, name) != full[name]]


def bounds(
    dtype: str,
    exact: bool,
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
    identity = 0.0 if exact else 1e-3
    table |= {"actor/kl_loss": identity, "memory/kept_share": KEPT_SHARE, "memory/host_share": HOST_SHARE}
    return table | ({} if bypass else {"actor/ppo_kl": identity, "actor/pg_clipfrac": identity})


def memory_shares(before: Mapping[str, int], ledger: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Of Device.memory before the first hand-over and after each move: kept_share, what a whole cycle did not give back
    of the device (not on cpu); host_share, the most of the host's memory that was in use.
    """
    shares = {}
    if before.get("total") and "restore_training" in ledger:
        shares["memory/kept_share"] = (before["free"] - ledger["restore_training"]["free"]) / before["total"]
    if before.get("host_total"):
        most = max(after["host_used"] for after in (before, *ledger.values()))
        shares["memory/host_share"] = most / before["host_total"]
    return shares


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
