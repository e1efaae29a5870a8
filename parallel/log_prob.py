"""Log-probability of the next token and entropy from hidden states: vocabulary-parallel, fp32, without full logits.

Logits of `chunk` tokens exist at a time; the backward pass computes them again. Two reductions over the
tensor-parallel group for all tokens together: the maximum, then the sums.

    log p(y) = x_y - lse(x)        H = lse(x) - sum_j p_j x_j        x = logits / temperature
    d log p(y) / dx_j = [j = y] - p_j        dH / dx_j = -p_j (x_j - sum_i p_i x_i)
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NO_LOGIT = -1e30
"""Maximum of a rank that holds only padding rows; finite, since 0 * inf is nan."""


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
    vocab: int,
    chunk: int,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(log-probs [T], entropy [T] or None), fp32.

    `hidden` [T, h] is equal on all ranks of `group`; `weight` [rows, h] is this rank's equal part of the vocabulary,
    of which rows at `vocab` and above are padding. The gradient of `hidden` is this rank's share of a sum over `group`.
    """
    first = (group.rank() if group else 0) * weight.size(0)
    rows = min(max(vocab - first, 0), weight.size(0))
    own = weight if rows == weight.size(0) else weight[:rows]
    logp, ent = _LogProbs.apply(hidden, own, labels - first, temperature, group, chunk, entropy)
    return logp, ent if entropy else None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, group: Any, chunk: int, ent: bool
    ) -> tuple[Tensor, Tensor]:
        num = hidden.size(0)
        top = torch.full((num,), NO_LOGIT, dtype=torch.float32, device=hidden.device)
        total, weighted, chosen = (torch.zeros_like(top) for _ in range(3))
        for part in _chunks(num, chunk, weight.size(0)):
            logits = hidden[part] @ weight.t()
            statistics = _kernels().statistics if logits.device.type == "cuda" else _statistics
            statistics(logits, labels[part], temperature, top[part], total[part], weighted[part], chosen[part])
        sums = _combine(top, total, weighted, chosen, group)
        highest, total, weighted, chosen = sums
        lse, mean = highest + total.log(), highest + weighted / total  # mean: of x under p
        ctx.save_for_backward(hidden, weight, labels, lse, mean)
        ctx.temperature, ctx.chunk = temperature, chunk
        return chosen - lse, lse - mean

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, lse, mean = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for part in _chunks(hidden.size(0), ctx.chunk, weight.size(0)):
            logits = hidden[part] @ weight.t()
            gradient = _kernels().gradient if logits.device.type == "cuda" else _gradient
            rows = (lse[part], mean[part], grad_logp[part], grad_entropy[part])
            grad = gradient(logits, labels[part], ctx.temperature, *rows)
            grad_hidden[part] = grad @ weight
            grad_weight += grad.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _chunks(num: int, chunk: int, rows: int) -> list[slice]:
    return [slice(start, min(start + chunk, num)) for start in range(0, num, chunk)] if rows else []


def _kernels() -> Any:
    return importlib.import_module("parallel.log_prob_kernels")  # Triton, where there is cuda


def _statistics(
    logits: Tensor, labels: Tensor, temperature: float, top: Tensor, total: Tensor, weighted: Tensor, chosen: Tensor
) -> None:
    """x = logits [t, rows] / temperature -> max x, sum e^(x - max), sum e^(x - max) (x - max), x of the label, in fp32.

    `labels` outside of the rows choose 0. Results go into the last four arguments [t].
    """
    x = logits.float() / temperature
    torch.amax(x, -1, out=top)
    mine, column = _own(labels, x.size(-1))
    chosen.copy_(torch.where(mine, x.gather(-1, column)[:, 0], 0.0))
    x -= top[:, None]
    p = x.exp()
    total.copy_(p.sum(-1))
    weighted.copy_((p * x).sum(-1))


def _gradient(
    logits: Tensor, labels: Tensor, temperature: float, lse: Tensor, mean: Tensor, of_logp: Tensor, of_entropy: Tensor
) -> Tensor:
    """Gradient of the logits, in their dtype, from those of the two results [t]."""
    x = logits.float() / temperature
    slope = -of_logp[:, None] - of_entropy[:, None] * (x - mean[:, None])
    grad = x.sub_(lse[:, None]).exp_().mul_(slope)  # in place: x is as large as all logits of the chunk
    mine, column = _own(labels, x.size(-1))
    grad.scatter_add_(-1, column, (of_logp * mine)[:, None])
    return grad.div_(temperature).to(logits.dtype)


def _own(labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(label is in this rank's rows [t], its column or any valid one [t, 1])."""
    return (labels >= 0) & (labels < rows), labels.clamp(0, rows - 1)[:, None]


def _combine(top: Tensor, total: Tensor, weighted: Tensor, chosen: Tensor, group: Any) -> tuple[Tensor, ...]:
    """Partial sums relative to each rank's own maximum -> sums over the vocabulary relative to the global maximum."""
    if group is None or group.size() == 1:
        return top, total, weighted, chosen
    highest = top.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    shift = top - highest
    scale = shift.exp()
    sums = torch.stack([total * scale, (weighted + total * shift) * scale, chosen])
    dist.all_reduce(sums, group=group)
    return highest, *sums.unbind()
