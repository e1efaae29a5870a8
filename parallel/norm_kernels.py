"""Triton kernels of the layers on cuda: RMSNorm with both gradients in one pass, and a gradient added to its fp32 sum.

Torch's own take about five times and twice the bytes' time at the shapes of a training step (docs/performance.md).
Formulas: y = w x / sqrt(mean x^2 + eps); with r = 1 / sqrt(...) and z = x r,  dx = r (w dy - z mean(w dy z)),
dw = sum over rows of dy z. All sums in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 8192
"""Columns that one program holds."""
ADD = 4096
PROGRAMS = 528
"""Of the gradient; each keeps its own part of dw. Four a multiprocessor of an H100 or H200."""


class RMSNormFunction(torch.autograd.Function):
    """(x [..., n], weight [n], eps) -> [..., n] in x's type; n <= LARGEST."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = _rows(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        scale = torch.empty(rows.size(0), dtype=torch.float32, device=x.device)
        block_m, block_n = _blocks(rows.size(1))
        grid = (max(1, triton.cdiv(rows.size(0), block_m)),)
        _forward[grid](rows, weight, out, scale, *rows.shape, rows.stride(0), eps, block_m, block_n, num_warps=8)
        ctx.save_for_backward(rows, weight, scale)
        ctx.shape = x.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, scale = ctx.saved_tensors
        outer = _rows(grad)
        block_m, block_n = _blocks(rows.size(1))
        num = max(1, min(PROGRAMS, triton.cdiv(rows.size(0), block_m)))
        dx = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        parts = torch.empty(num, rows.size(1), dtype=torch.float32, device=rows.device)
        strides = rows.stride(0), outer.stride(0)
        _backward[(num,)](rows, weight, scale, outer, dx, parts, *rows.shape, *strides, block_m, block_n, num_warps=8)
        return dx.view(ctx.shape), parts.sum(0).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return RMSNormFunction.apply(x, weight, eps)


def add_to_main_grad(parameter: Tensor) -> None:
    """A hook after a gradient is complete: adds it to `main_grad` and says so with Megatron's own flag.

    Megatron's hook comes next. What that adds in any case (`zero_out_wgrad`, on tied embeddings) is left to it.
    """
    total, part = parameter.main_grad, parameter.grad
    if getattr(parameter, "zero_out_wgrad", False) or not (part.is_contiguous() and total.is_contiguous()):
        return
    _add[(triton.cdiv(part.numel(), ADD),)](total, part, part.numel(), ADD, num_warps=8)
    parameter.grad_added_to_main_grad = True


def _rows(x: Tensor) -> Tensor:
    """[rows, n], a view where the strides allow one: keys and values are slices of one projection."""
    rows = x.reshape(-1, x.size(-1))
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _blocks(n: int) -> tuple[int, int]:
    block_n = triton.next_power_of_2(n)
    return max(1, 4096 // block_n), block_n


@triton.jit
def _forward(x, weight, out, scale, num, n, stride, eps, block_m: tl.constexpr, block_n: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * block_m + tl.arange(0, block_m)
    column = tl.arange(0, block_n)
    inside = (row < num)[:, None] & (column < n)[None, :]
    at = row.to(tl.int64)[:, None]
    value = tl.load(x + at * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(value * value, 1) / n + eps)
    tl.store(scale + row, r, mask=row < num)
    w = tl.load(weight + column, mask=column < n, other=0.0).to(tl.float32)
    y = value * r[:, None] * w[None, :]
    tl.store(out + at * n + column[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x, weight, scale, outer, dx, parts, num, n, stride_x, stride_outer, block_m: tl.constexpr, block_n: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, block_n)
    w = tl.load(weight + column, mask=column < n, other=0.0).to(tl.float32)
    total = tl.zeros((block_n,), tl.float32)
    for first in range(tl.program_id(0) * block_m, num, tl.num_programs(0) * block_m):
        row = first + tl.arange(0, block_m)
        inside = (row < num)[:, None] & (column < n)[None, :]
        at = row.to(tl.int64)[:, None]
        r = tl.load(scale + row, mask=row < num, other=0.0)[:, None]
        z = tl.load(x + at * stride_x + column[None, :], mask=inside, other=0.0).to(tl.float32) * r
        dy = tl.load(outer + at * stride_outer + column[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(dy * z, 0)
        inner = dy * w[None, :]
        mean = tl.sum(inner * z, 1) / n
        grad = r * (inner - z * mean[:, None])
        tl.store(dx + at * n + column[None, :], grad.to(dx.dtype.element_ty), mask=inside)
    tl.store(parts + tl.program_id(0) * n + column, total, mask=column < n)


@triton.jit
def _add(total, part, num, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < num
    value = tl.load(total + at, mask=inside) + tl.load(part + at, mask=inside).to(tl.float32)
    tl.store(total + at, value, mask=inside)
