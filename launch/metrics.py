"""What a step measured: the metric algebra, one exchange a step, and the formulas of every logged key.

A metric is (sum, weight, op); nothing is reduced by the look of its name. Per-rank values are added to `Metrics`;
`reduce` gathers them in one all-gather and folds them in rank order on every rank, so that the result does not depend
on the network's order of additions and the slowest rank is known. Everything that follows from the whole batch (which
every rank holds) is computed by pure functions from arrays: sequences are axis [N], response tokens in order are [T].

Names and formulas are verl's where the meaning is the same, so that dashboards keep working. Files: launch/writers.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from resource import RUSAGE_SELF, getrusage
from typing import Any, Literal

import numpy as np

Op = Literal["mean", "sum", "min", "max", "std", "argmax"]
GIB = 1024**3

PEAK_FLOPS = {
    "910B": 354e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "H20": 148e12,
}
"""Promised dense bf16 FLOP/s by a part of the device's name; the longest match counts."""

SELF_CHECK = "self_check/"
"""Prefix of numbers that only the first-step check looks at; they are written nowhere."""
VERL_ORDER = ("global_seqlen", "actor", "perf", "training", "critic", "response_length", "prompt_length", "timing_s")


@dataclass
class Metric:
    """A sum over `weight` units. min, max and argmax keep their value in `sum`; std also needs the squares."""

    op: Op = "mean"
    sum: float = 0.0
    weight: float = 0.0
    squares: float = 0.0

    def add(self, total: float, weight: float, squares: float = 0.0) -> None:
        if weight == 0:
            return
        combine = {"max": np.maximum, "argmax": np.maximum, "min": np.minimum}.get(self.op, np.add)
        self.sum = total if self.weight == 0 else float(combine(self.sum, total))
        self.weight, self.squares = self.weight + weight, self.squares + squares


@dataclass
class Metrics:
    """Metrics of one rank and one step, by name. All ranks must end up with the same names: `declare` absent ones."""

    table: dict[str, Metric] = field(default_factory=dict)

    def add(self, name: str, value: float, weight: float = 1.0, op: Op = "mean") -> None:
        """`value` per unit, of `weight` units: add("actor/entropy", mean_of_100_tokens, 100)."""
        value = float(value)
        total = value * weight if op in ("mean", "std") else value
        self._metric(name, op).add(total, float(weight), value * value * weight)

    def add_sum(self, name: str, total: float, weight: float, op: Op = "mean") -> None:
        """A sum that is already over `weight` units, as loss statistics come; mean is total / weight over all ranks."""
        self._metric(name, op).add(float(total), float(weight))

    def add_array(self, name: str, values: np.ndarray, op: Op) -> None:
        """Every element is one unit; an empty array only declares the name."""
        values, metric = np.asarray(values, np.float64), self._metric(name, op)
        if values.size:
            fold = {"min": np.min, "max": np.max, "argmax": np.max}.get(op, np.sum)
            metric.add(float(fold(values)), values.size, float(np.square(values).sum()))

    def declare(self, name: str, op: Op = "mean") -> None:
        """Zero weight: this rank has nothing to say about a metric that others have."""
        self._metric(name, op)

    def _metric(self, name: str, op: Op) -> Metric:
        metric = self.table.setdefault(name, Metric(op))
        assert metric.op == op, f"metric {name} was added as {metric.op} and as {op}"
        return metric

    def reduce(self, group: Any = None) -> dict[str, float]:
        """Collective over `group` (host backend). Metrics whose weight is zero on all ranks are left out.

        AssertionError on every rank, with the names, when the ranks differ in names, order or op.
        """
        rows = np.array([[m.sum, m.weight, m.squares] for m in self.table.values()], np.float64).reshape(-1, 3)
        every = _gather(rows, [f"{name}|{m.op}" for name, m in self.table.items()], group)  # [ranks, metrics, 3]
        folded = {name: fold(m.op, every[:, i]) for i, (name, m) in enumerate(self.table.items())}
        return {name: value for name, value in folded.items() if value is not None}


def fold(op: Op, rows: np.ndarray) -> float | None:
    """One metric's [ranks, (sum, weight, squares)] -> its value; None without weight. NaN anywhere stays NaN.

    std is the unbiased one of the units (0 of a single unit); argmax is the rank that holds the maximum.
    """
    ranks = np.flatnonzero(rows[:, 1])
    if not len(ranks):
        return None
    sums, (total, weight, squares) = rows[ranks, 0], rows.sum(0)
    if op == "std":
        return float(np.sqrt(np.maximum(0.0, squares - total * total / weight) / (weight - 1))) if weight > 1 else 0.0
    if op == "argmax":
        return int(ranks[int(np.argmax(sums))])
    return float({"mean": lambda: total / weight, "sum": lambda: total, "min": sums.min, "max": sums.max}[op]())


def _gather(rows: np.ndarray, names: list[str], group: Any) -> np.ndarray:
    if group is None:
        return rows[None]
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size(group)
    hashed = hashlib.blake2b("\n".join(names).encode(), digest_size=8).digest()
    digest = torch.frombuffer(bytearray(hashed), dtype=torch.int64)
    digests = [torch.empty_like(digest) for _ in range(ranks)]
    dist.all_gather(digests, digest, group=group)
    if any(int(d) != int(digests[0]) for d in digests):
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, names, group=group)
        other = next(i for i, theirs in enumerate(everyone) if theirs != everyone[0])
        differ = sorted(set(everyone[0]) ^ set(everyone[other])) or "their order"
        raise AssertionError(f"metrics of ranks 0 and {other} differ: {differ}; declare() what a rank does not have")
    mine = torch.from_numpy(rows)
    parts = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(parts, mine, group=group)
    return torch.stack(parts).numpy()


def add_timings(metrics: Metrics, timings: Mapping[str, float]) -> None:
    """timing_s/X: mean over ranks, seconds; timing_max_s/X and slowest_rank/X: the straggler."""
    for name, seconds in timings.items():
        metrics.add(f"timing_s/{name}", seconds)
        metrics.add(f"timing_max_s/{name}", seconds, op="max")
        metrics.add(f"slowest_rank/{name}", seconds, op="argmax")


def add_memory(
    metrics: Metrics,
    memory: Mapping[str, int],
    ledger: Mapping[str, Mapping[str, int]],
    highest: Mapping[str, Mapping[str, int]],
    planned: Mapping[str, int],
) -> None:
    """Peaks of the last cycle, and what was held after each move of the hand-over; GiB, the largest of the ranks.

    `memory`, and by move `ledger`: bytes as Device.memory tells them; by state and move `highest`: Device.peaks, and
    `planned` the most by phase of launch.plan. A device is in use by whatever is not free on it, so vLLM's pools and
    the libraries' buffers count; there are no such keys on cpu, where only the host has memory.
    """
    for name in ("allocated", "reserved"):
        most = max(memory[f"peak_{name}"], *(peak[name] for peak in highest.values()), 0)
        metrics.add(f"perf/max_memory_{name}_gb", most / GIB, op="max")
    for phase, most in planned.items() if memory["total"] else ():
        metrics.add(f"memory_peak_gb/{phase}", most / GIB, op="max")
    metrics.add("perf/cpu_memory_used_gb", memory["host_used"] / GIB, op="max")
    metrics.add("perf/rank_memory_gb", getrusage(RUSAGE_SELF).ru_maxrss * 1024 / GIB, op="max")
    for move, after in ledger.items():
        if after["total"]:
            metrics.add(f"memory_device_gb/{move}", (after["total"] - after["free"]) / GIB, op="max")
            metrics.add(f"memory_allocated_gb/{move}", after["allocated"] / GIB, op="max")
        metrics.add(f"memory_host_gb/{move}", after["host"] / GIB, op="max")


def add_losses(metrics: Metrics, stats: Mapping[str, tuple[Any, Any]], first: bool) -> None:
    """Statistics of an update, (sum, weight) by name; `first`, of a step's first one, also for the self-check.

    Left out are the gaps between engine and trainer, which add_agreement knows of the whole step, with their maximum.
    """
    for name, (total, weight) in stats.items():
        if not name.startswith(("training/rollout", "rollout_corr/k")):
            name = name if "/" in name else f"actor/{name}"
            metrics.add_sum(name, total, weight)
            if first:
                metrics.add_sum(f"{SELF_CHECK}{name}", total, weight)


def add_agreement(metrics: Metrics, rollout: np.ndarray, train: np.ndarray) -> None:
    """Engine against trainer, from log-probs [T] of the same tokens, this rank's part of the batch.

    |p_rollout - p_train| as mean, max, std; KL(rollout || train) by k1 and by k3 (http://joschu.net/blog/kl-approx.html),
    whose samples come from the rollout: x = log p_train - log p_rollout, k3 = e^x - x - 1 >= 0.
    """
    rollout, train = np.asarray(rollout, np.float64), np.asarray(train, np.float64)
    x = np.clip(train - rollout, -20, 20)
    difference = np.abs(np.exp(rollout) - np.exp(train))
    metrics.add_array("training/rollout_probs_diff_mean", difference, "mean")
    metrics.add_array("training/rollout_probs_diff_max", difference, "max")
    metrics.add_array("training/rollout_probs_diff_std", difference, "std")
    metrics.add_array("rollout_corr/kl", -x, "mean")
    metrics.add_array("rollout_corr/k3_kl", np.expm1(x) - x, "mean")


@dataclass(frozen=True)
class StepBatch:
    """The whole batch of a step as arrays; every rank holds the same."""

    prompt_ids: np.ndarray
    """[N] group of each sequence."""
    prompt_tokens: np.ndarray
    """[N]"""
    response_tokens: np.ndarray
    """[N] end-of-text included."""
    truncated: np.ndarray
    """[N] bool: the response ended by length."""
    scores: np.ndarray
    """[N] what the reward function said."""
    rewards: np.ndarray
    """[N] after shaping and KL in the reward."""
    advantages: np.ndarray
    """[N], or [T] per response token in order."""
    returns: np.ndarray | None = None
    """As advantages; None: equal to them."""
    reward_parts: dict[str, np.ndarray] = field(default_factory=dict)
    """[N] each; NaN where a sample has no such part."""

    @property
    def total_tokens(self) -> int:
        return int(self.prompt_tokens.sum() + self.response_tokens.sum())

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """[N] or [T] -> [T]."""
        return np.repeat(values, self.response_tokens) if len(values) == len(self.prompt_ids) else np.asarray(values)


def summary(prefix: str, values: np.ndarray) -> dict[str, float]:
    """prefix/mean, /max, /min; nothing of nothing."""
    if not len(values):
        return {}
    return {f"{prefix}/{op}": float(getattr(np, op)(np.asarray(values, np.float64))) for op in ("mean", "max", "min")}


def critic_metrics(batch: StepBatch) -> dict[str, float]:
    """Scores and rewards over sequences, advantages and returns over response tokens (so weighted by length).

    critic/zero_advantage_groups: share of groups whose advantages are all zero, which teach nothing.
    """
    advantages = batch.per_token(batch.advantages)
    returns = advantages if batch.returns is None else batch.per_token(batch.returns)
    table = summary("critic/score", batch.scores) | summary("critic/rewards", batch.rewards)
    table |= summary("critic/advantages", advantages) | summary("critic/returns", returns)
    groups, of = np.unique(batch.prompt_ids, return_inverse=True)
    taught = np.zeros(len(groups), bool)
    np.logical_or.at(taught, np.repeat(of, batch.response_tokens), advantages != 0)
    table["critic/zero_advantage_groups"] = float(1 - taught.mean())
    parts = {f"reward/{name}/mean": values[~np.isnan(values)] for name, values in sorted(batch.reward_parts.items())}
    return table | {name: float(values.mean()) for name, values in parts.items() if len(values)}


def length_metrics(batch: StepBatch, max_prompt_tokens: int, max_response_tokens: int) -> dict[str, float]:
    """clip_ratio: share of sequences as long as the limit (an end-of-text exactly there counts, as in verl);
    truncated_ratio: share that the limit really cut.
    """
    table = summary("response_length", batch.response_tokens)
    table["response_length/clip_ratio"] = float(np.mean(batch.response_tokens == max_response_tokens))
    table["response_length/truncated_ratio"] = float(np.mean(batch.truncated))
    table |= summary("prompt_length", batch.prompt_tokens)
    return table | {"prompt_length/clip_ratio": float(np.mean(batch.prompt_tokens == max_prompt_tokens))}


def seqlen_metrics(lengths: np.ndarray, partitions: Sequence[Iterable[int]]) -> dict[str, float]:
    """Tokens (prompt + response) per data-parallel rank: contiguous parts of the batch against the packed ones.

    `partitions`: sequence numbers per data-parallel rank. global_seqlen/mean is tokens / partitions, so their number
    is logged too (verl has used the world size and the data-parallel size).
    """
    lengths = np.asarray(lengths, np.int64)
    before = [int(part.sum()) for part in np.array_split(lengths, len(partitions))]
    after = [int(lengths[list(part)].sum()) for part in partitions]
    return {
        "global_seqlen/min": min(before),
        "global_seqlen/max": max(before),
        "global_seqlen/minmax_diff": max(before) - min(before),
        "global_seqlen/balanced_min": min(after),
        "global_seqlen/balanced_max": max(after),
        "global_seqlen/mean": float(lengths.sum() / len(partitions)),
        "global_seqlen/partitions": len(partitions),
    }


def speed_metrics(batch: StepBatch, seconds: Mapping[str, float], world: int) -> dict[str, float]:
    """timing_per_token_ms/* and perf/*: `seconds` by phase name (gen, update_actor, step, ...). Phases not run: no key.

    gen counts response tokens per ms, the others all tokens. Tokens are all of the batch, per device where it says tps:
    e2e_tps = perf/throughput, update_tps, vllm_tps count prompt + response; generate_tps only what was generated.
    """
    tokens, generated = batch.total_tokens, int(batch.response_tokens.sum())
    counts = {"ref": tokens, "gen": generated, "update_actor": tokens, "adv": tokens, "values": tokens}
    ran = {name: s for name, s in seconds.items() if s > 0}
    table = {f"timing_per_token_ms/{n}": 1000 * ran[n] / count for n, count in counts.items() if n in ran and count}
    rates = {
        "perf/throughput": (tokens, "step"),
        "perf/e2e_tps": (tokens, "step"),
        "perf/update_tps": (tokens, "update_actor"),
        "perf/vllm_tps": (tokens, "gen"),
        "perf/generate_tps": (generated, "generate_sequences"),
    }
    table |= {key: count / (ran[name] * world) for key, (count, name) in rates.items() if name in ran}
    table["perf/total_num_tokens"] = tokens
    return table | ({"perf/time_per_step": ran["step"]} if "step" in ran else {})


def active_parameters(shape: Any) -> int:
    """Parameters that take part in a token's matrix products: k of the experts; embedding and head both count.

    `shape`: parallel.family.ModelShape. verl's formula.
    """
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    if shape.is_moe:
        ffn = 3 * shape.hidden * shape.expert_ffn * shape.experts_per_token + shape.hidden * shape.experts
    else:
        ffn = 3 * shape.hidden * shape.ffn
    return shape.num_layers * (attention + ffn) + 2 * shape.vocab * shape.hidden


def train_flops(shape: Any, lengths: np.ndarray) -> float:
    """FLOPs of forward and backward over sequences of `lengths` [N] tokens: 6 a parameter and token, plus attention.

    Recomputation does not count. Attention is 12 L^2 per head channel and layer (PaLM, arXiv:2204.02311, appendix B).
    """
    lengths = np.asarray(lengths, np.float64)
    attention = 12 * np.square(lengths).sum() * shape.head_dim * shape.heads * shape.num_layers
    return float(6 * active_parameters(shape) * lengths.sum() + attention)


def peak_flops(device_name: str) -> float:
    """Promised FLOP/s of a device, infinite (so MFU 0) for unknown ones."""
    known = [name for name in PEAK_FLOPS if name in device_name.upper()]
    return PEAK_FLOPS[max(known, key=len)] if known else float("inf")


def mfu(flops: float, seconds: float, world: int, peak: float) -> float:
    """Share of the promised FLOP/s of all devices."""
    return flops / (seconds * peak * world) if seconds > 0 else 0.0


def in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    """The reference log line's order of sections; order within a section and unknown sections stay as they came."""
    rank = {name: i for i, name in enumerate(VERL_ORDER)}
    return dict(sorted(metrics.items(), key=lambda item: rank.get(item[0].partition("/")[0], len(rank))))
