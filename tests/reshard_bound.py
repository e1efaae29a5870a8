"""Lower bounds of a weight sync by interval sets, one tensor and one rank at a time: the oracle of the planner's tests.

Shares no code with the planner or the layouts: every rule (who holds which rows or columns of which Hugging Face
tensor) is written down once more, from Megatron's and vLLM's documentation, in the terms of one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

BYTES = 2


@dataclass
class Job:
    """A model and the two ways it is spread over `world` ranks."""

    world: int
    layers: int
    hidden: int
    heads: int
    kv: int
    head_dim: int
    vocab: int
    ffn: int = 0
    experts: int = 0
    expert_ffn: int = 0
    tied: bool = False
    bias: bool = False
    norms: bool = True
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    stages: list[int] = field(default_factory=list)
    pp_before_dp: bool = False
    rollout_tp: int = 1
    rollout_dp: int = 1
    expert_parallel: bool = False
    slots: list[list[int]] | None = None
    """[layer][slot] -> expert, without repetition on one rank."""
    node: int = 8


def bounds(job: Job) -> dict[str, np.ndarray]:
    """Bytes of each rank: need, local, nic, naive, and egress when every byte's remote demand is split evenly."""
    total = {name: np.zeros(job.world) for name in ("need", "local", "nic", "naive", "egress")}
    known: dict[tuple, dict[str, np.ndarray]] = {}
    for width, source, target in tensors(job):
        key = (width, source.tobytes(), target.tobytes())
        if key not in known:
            known[key] = _tensor_bounds(job, source, target)
        for name, rows in known[key].items():
            total[name] += rows * width * BYTES
    return total


def _tensor_bounds(job: Job, source: np.ndarray, target: np.ndarray) -> dict[str, np.ndarray]:
    """All in rows (or columns) of the tensor; source and target are [world, 2] half-open intervals."""
    world, node = job.world, job.node
    length = int(source[:, 1].max())
    edges = np.unique(np.concatenate([source.ravel(), target.ravel()]))
    atoms = np.stack([edges[:-1], edges[1:]], axis=1)
    size = atoms[:, 1] - atoms[:, 0]
    holds = (source[:, None, 0] <= atoms[:, 0]) & (atoms[:, 1] <= source[:, None, 1])
    needs = (target[:, None, 0] <= atoms[:, 0]) & (atoms[:, 1] <= target[:, None, 1])
    assert holds.any(axis=0)[needs.any(axis=0)].all()
    near = np.zeros_like(holds)
    for first in range(0, world, node):
        near[first : first + node] = holds[first : first + node].any(axis=0)
    far = needs & ~near
    share = far.sum(axis=0) / np.maximum(holds.sum(axis=0), 1)
    return {
        "need": needs @ size,
        "local": (needs & holds) @ size,
        "nic": far @ size,
        "naive": length - holds @ size,
        "egress": holds @ (share * size),
    }


def tensors(job: Job):
    """(elements of a row, source [world, 2], target [world, 2]) of every tensor of the checkpoint."""
    ranks = np.arange(job.world)
    tp, stage = ranks % job.tp, _stage(job)
    etp, ep = ranks % job.etp, ranks // job.etp % job.ep
    inside = ranks % (job.rollout_tp * job.rollout_dp)
    rtp = inside % job.rollout_tp

    everyone = np.ones(job.world, dtype=bool)
    first, last = stage == 0, stage == job.pp - 1
    yield from _vocabulary(job, tp, first | last if job.tied else first, rtp)
    if not job.tied:
        yield from _vocabulary(job, tp, last, rtp)
    yield job.hidden, _span(last, 0, 1), _span(everyone, 0, 1)
    for layer in range(job.layers):
        here = stage == _layer_stage(job)[layer]
        for width in (job.hidden, job.hidden, *((job.head_dim,) * 2 if job.norms else ())):
            yield width, _span(here, 0, 1), _span(everyone, 0, 1)
        yield from _attention(job, here, tp, rtp)
        if job.experts:
            yield job.experts * job.hidden, _span(here, 0, 1), _span(everyone, 0, 1)
            yield from _experts(job, here, ep, etp, inside, layer)
        else:
            for _ in range(3):  # gate and up by rows, down by columns
                part, rpart = job.ffn // job.tp, job.ffn // job.rollout_tp
                yield (
                    job.hidden,
                    _span(here, tp * part, tp * part + part),
                    _span(everyone, rtp * rpart, (rtp + 1) * rpart),
                )


def _span(who: np.ndarray, start, stop) -> np.ndarray:
    lo, hi = np.broadcast_to(start, who.shape), np.broadcast_to(stop, who.shape)
    return np.stack([np.where(who & (lo < hi), lo, 0), np.where(who & (lo < hi), hi, 0)], axis=1)


def _stage(job: Job) -> np.ndarray:
    ranks = np.arange(job.world)
    if job.pp_before_dp:
        return ranks // (job.tp * job.cp) % job.pp
    return ranks // (job.world // job.pp)


def _layer_stage(job: Job) -> list[int]:
    sizes = job.stages or [job.layers // job.pp] * job.pp
    return [s for _ in range(job.vpp) for s, size in enumerate(sizes) for _ in range(size // job.vpp)]


def _vocabulary(job: Job, tp: np.ndarray, who: np.ndarray, rtp: np.ndarray):
    block = -(-job.vocab // (128 * job.tp)) * 128
    rblock = -(-job.vocab // 64) * 64 // job.rollout_tp
    v = job.vocab
    source = _span(who, np.minimum(v, tp * block), np.minimum(v, tp * block + block))
    yield job.hidden, source, _span(who | True, np.minimum(v, rtp * rblock), np.minimum(v, rtp * rblock + rblock))


def _attention(job: Job, here: np.ndarray, tp: np.ndarray, rtp: np.ndarray):
    """Megatron cuts [q heads of a group; k; v] of all groups into equal blocks; q, k, v rows of a block are one run."""
    d, per = job.head_dim, job.heads // job.kv
    group = (per + 2) * d
    block = job.kv * group // job.tp
    everyone = np.ones(job.world, dtype=bool)
    wide = max(1, job.kv // job.rollout_tp)
    head = rtp * wide if job.rollout_tp <= job.kv else rtp // (job.rollout_tp // job.kv)
    for begin, length, copies in ((0, per * d, 1), (per * d, d, 0), (per * d + d, d, 0)):

        def before(at, begin=begin, length=length):
            """Rows of this part among the first `at` rows of the fused matrix."""
            return at // group * length + np.clip(at % group - begin, 0, length)

        source = _span(here, before(tp * block), before((tp + 1) * block))
        if copies:
            rows = job.heads * d // job.rollout_tp
            target = _span(everyone, rtp * rows, (rtp + 1) * rows)
        else:
            target = _span(everyone, head * d, (head + wide) * d)
        yield job.hidden, source, target
        if job.bias:
            yield 1, source, target
    columns, rcolumns = job.heads * d // job.tp, job.heads * d // job.rollout_tp
    yield (
        job.hidden,
        _span(here, tp * columns, (tp + 1) * columns),
        _span(everyone, rtp * rcolumns, (rtp + 1) * rcolumns),
    )


def _experts(job: Job, here: np.ndarray, ep: np.ndarray, etp: np.ndarray, inside: np.ndarray, layer: int):
    local, part = job.experts // job.ep, job.expert_ffn // job.etp
    size = job.rollout_tp * job.rollout_dp
    row = job.slots[layer] if job.slots else None
    for expert in range(job.experts):
        source = _span(here & (ep == expert // local), etp * part, (etp + 1) * part)
        if not job.expert_parallel:
            rpart = job.expert_ffn // size
            target = _span(here | True, inside * rpart, (inside + 1) * rpart)
        else:
            owners = [slot // (len(row) // size) for slot, e in enumerate(row) if e == expert] if row else []
            if not row:
                base, extra = divmod(job.experts, size)
                first = [r * base + min(r, extra) for r in range(size + 1)]
                owners = [r for r in range(size) if first[r] <= expert < first[r + 1]]
            target = _span(np.isin(inside, owners), 0, job.expert_ffn)
        for _ in range(3):
            yield job.hidden, source, target
