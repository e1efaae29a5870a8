"""Sequences -> packed micro-batches on this rank, and per-token results back. Knows nothing of Megatron.

Per-token values sit at the position that PREDICTS the token: position t predicts token t + 1, so response token j of a
prompt of P tokens sits at P - 1 + j. Each sequence is padded to 2 * cp tokens, the last one further until the total is
a multiple of cp * tp (context and sequence parallelism); padding sits behind its sequence and has weight 0. A rank
without sequences gets one such padding sequence, so that it takes part in every collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.attention import zigzag_rows

Values = Sequence[np.ndarray] | Mapping[int, np.ndarray]


@dataclass(eq=False)
class MicroBatch:
    """T tokens of this context-parallel rank; tensors are on the device."""

    tokens: Tensor
    """int64 [T]."""
    labels: Tensor
    """int64 [T], the next token; 0 at the end of a sequence."""
    positions: Tensor
    """int64 [T], within the sequence."""
    segments: Tensor
    """int64 [T], number of the sequence within the micro-batch."""
    cu_seqlens: Tensor
    """int32 [sequences + 1] over all context-parallel ranks, padding included."""
    max_seqlen: int
    num_sequences: int
    """At least 1: an empty micro-batch holds one padding sequence."""
    indices: list[int]
    """Global numbers of the sequences; empty in an empty micro-batch."""
    rows: Tensor
    """int64 [T] on the host: where the tokens are in the whole packed micro-batch."""
    spans: list[tuple[int, int]]
    """Per sequence: the positions that predict its response, in the whole packed micro-batch."""
    fields: dict[str, Tensor] = field(default_factory=dict)
    """Name -> fp32 [T]; 0 outside of response-predicting positions."""
    cp_group: dist.ProcessGroup | None = None
    routes: Tensor | None = None
    """int16 [T / tp, MoE layers of this rank, k] on the host: experts to force, -1 where the router chooses."""

    def sequence_sums(self, values: Tensor) -> Tensor:
        """[T] -> [num_sequences], summed over a sequence's tokens on all context-parallel ranks; differentiable."""
        sums = values.new_zeros(self.num_sequences).index_add(0, self.segments, values)
        return sums if self.cp_group is None else _AllReduceSum.apply(sums, self.cp_group)


def build_micro_batches(
    sequences: Sequence[np.ndarray],
    prompt_lengths: Sequence[int],
    micro_batches: Sequence[Sequence[int]],
    fields: Mapping[str, Values],
    cp_rank: int = 0,
    cp: int = 1,
    tp: int = 1,
    device: torch.device | str = "cpu",
    cp_group: dist.ProcessGroup | None = None,
) -> list[MicroBatch]:
    """Micro-batches of sequence indices -> tensors of this rank.

    `sequences`: prompt + response ids of every index used. `fields`: name -> per index float values over the response.
    """
    return [
        _build(sequences, prompt_lengths, indices, fields, cp_rank, cp, tp, torch.device(device), cp_group)
        for indices in micro_batches
    ]


def padded_lengths(lengths: Sequence[int], cp: int, tp: int) -> list[int]:
    """Tokens that sequences take in a micro-batch; an empty list becomes one padding sequence."""
    step = 2 * cp if cp > 1 else 1
    padded = [-(-n // step) * step for n in lengths] or [step]
    total = math.lcm(step, cp * tp)
    padded[-1] += -sum(padded) % total
    return padded


def _build(
    sequences: Sequence[np.ndarray],
    prompt_lengths: Sequence[int],
    indices: Sequence[int],
    fields: Mapping[str, Values],
    cp_rank: int,
    cp: int,
    tp: int,
    device: torch.device,
    cp_group: dist.ProcessGroup | None,
) -> MicroBatch:
    padded = padded_lengths([len(sequences[i]) for i in indices], cp, tp)
    starts = np.concatenate([[0], np.cumsum(padded)])
    total = int(starts[-1])
    tokens, labels = np.zeros(total, np.int64), np.zeros(total, np.int64)
    values = {name: np.zeros(total, np.float32) for name in fields}
    spans = []
    for start, index in zip(starts[:-1].tolist(), indices, strict=False):
        ids, prompt = sequences[index], int(prompt_lengths[index])
        tokens[start : start + len(ids)] = ids
        labels[start : start + len(ids) - 1] = ids[1:]
        first, stop = start + prompt - 1, start + len(ids) - 1
        spans.append((first, stop))
        for name, per_sequence in fields.items():
            if len(per_sequence[index]) != stop - first:
                raise ValueError(
                    f"field {name!r} of sequence {index} has {len(per_sequence[index])} values for {stop - first} "
                    f"response tokens ({len(ids)} tokens, {prompt} of them prompt)"
                )
            values[name][first:stop] = per_sequence[index]
    held = [np.asarray(zigzag_rows(n, cp_rank, cp)) + start for n, start in zip(padded, starts.tolist(), strict=False)]
    rows = np.concatenate(held)

    def local(whole: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(whole[rows])).to(device)

    return MicroBatch(
        tokens=local(tokens),
        labels=local(labels),
        positions=local(np.concatenate([np.arange(n) for n in padded])),
        segments=local(np.repeat(np.arange(len(padded)), padded)),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32, device=device),
        max_seqlen=max(padded),
        num_sequences=len(padded),
        indices=list(indices),
        rows=torch.from_numpy(rows),
        spans=spans,
        fields={name: local(whole) for name, whole in values.items()},
        cp_group=cp_group if cp > 1 else None,
    )


def unpack(micro_batches: Sequence[MicroBatch], tensors: Sequence[Tensor]) -> dict[int, np.ndarray]:
    """Per-token tensors [T] of these micro-batches -> sequence index -> fp32 values over its response.

    Gathers the parts of all context-parallel ranks (a collective when cp > 1).
    """
    starts = np.cumsum([0] + [int(mb.cu_seqlens[-1]) for mb in micro_batches])
    whole = torch.zeros(int(starts[-1]), dtype=torch.float32, device=tensors[0].device)
    for mb, values, start in zip(micro_batches, tensors, starts.tolist(), strict=False):
        whole[mb.rows.to(whole.device) + start] = values.float()
    group = micro_batches[0].cp_group
    if group is not None:
        dist.all_reduce(whole, group=group)  # each position is held by one rank, zero elsewhere
    host = whole.cpu().numpy()
    return {
        index: host[start + a : start + b].copy()
        for mb, start in zip(micro_batches, starts.tolist(), strict=False)
        for index, (a, b) in zip(mb.indices, mb.spans, strict=True)
    }


def spread(
    mine: Mapping[int, np.ndarray], lengths: np.ndarray, tells: bool, group: dist.ProcessGroup
) -> list[np.ndarray]:
    """Values over the responses of this rank's sequences -> those of all sequences, on every rank of a host group.

    `lengths`: response tokens of all sequences. `tells`: this rank speaks for its model replica, whose ranks all have
    the same values.
    """
    ends = np.cumsum(lengths)
    flat = torch.zeros(int(ends[-1]), dtype=torch.float32)
    for index, values in mine.items() if tells else ():
        flat[ends[index] - len(values) : ends[index]] = torch.from_numpy(values)
    dist.all_reduce(flat, group=group)
    return np.split(flat.numpy(), ends[:-1])


class _AllReduceSum(torch.autograd.Function):
    """Sum over the ranks of a group. Each rank's loss is its own tokens' share of the whole, and all of them depend on
    the sum: the gradient is summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
