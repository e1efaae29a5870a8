"""Triton kernels of the log-prob head on cuda: statistics of a row of logits in one read, their gradient in one pass.

Plain torch takes 110 bytes a logit in fp32 temporaries, these 6; the formulas are those of log_prob.py. A third of an
update's time was there when vocabulary is large against the layers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def statistics(
    logits: Tensor, labels: Tensor, temperature: float, top: Tensor, total: Tensor, weighted: Tensor, chosen: Tensor
) -> None:
    """x = logits [t, rows] / temperature -> max x, sum e^(x - max), sum e^(x - max) (x - max), x of the label, in fp32.

    `labels` outside of the rows choose 0. Results go into the last four arguments [t].
    """
    _statistics[(logits.size(0),)](
        logits, labels, top, total, weighted, chosen, logits.size(1), logits.stride(0), temperature, BLOCK, num_warps=8
    )


def gradient(
    logits: Tensor, labels: Tensor, temperature: float, lse: Tensor, mean: Tensor, of_logp: Tensor, of_entropy: Tensor
) -> Tensor:
    """Logits become their gradient, in place; `of_logp` and `of_entropy` [t] are the gradients of the two results."""
    grid = (logits.size(0), triton.cdiv(logits.size(1), BLOCK))
    _gradient[grid](
        logits,
        labels,
        lse,
        mean,
        of_logp,
        of_entropy,
        logits.size(1),
        logits.stride(0),
        temperature,
        BLOCK,
        num_warps=8,
    )
    return logits


@triton.jit
def _statistics(
    logits, labels, top, total, weighted, chosen, num, stride, temperature, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full((), -1e30, tl.float32)
    mass = tl.zeros((), tl.float32)
    moment = tl.zeros((), tl.float32)
    for start in range(0, num, block):
        columns = start + tl.arange(0, block)
        inside = columns < num
        x = tl.load(logits + row * stride + columns, mask=inside, other=0.0).to(tl.float32) / temperature
        above = tl.maximum(highest, tl.max(tl.where(inside, x, -1e30), 0))
        shift = highest - above
        scale = tl.exp(shift)
        difference = x - above
        p = tl.where(inside, tl.exp(difference), 0.0)
        moment = (moment + mass * shift) * scale + tl.sum(p * difference, 0)
        mass = mass * scale + tl.sum(p, 0)
        highest = above
    label = tl.load(labels + row)
    mine = (label >= 0) & (label < num)
    own = tl.load(logits + row * stride + label, mask=mine, other=0.0).to(tl.float32) / temperature
    tl.store(top + row, highest)
    tl.store(total + row, mass)
    tl.store(weighted + row, moment)
    tl.store(chosen + row, own)


@triton.jit
def _gradient(
    logits, labels, lse, mean, of_logp, of_entropy, num, stride, temperature, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < num
    place = logits + row * stride + columns
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32) / temperature
    p = tl.exp(x - tl.load(lse + row))
    outer = tl.load(of_logp + row)
    slope = -outer - tl.load(of_entropy + row) * (x - tl.load(mean + row))
    grad = p * slope + tl.where(columns == tl.load(labels + row), outer, 0.0)
    tl.store(place, (grad / temperature).to(logits.dtype.element_ty), mask=inside)
