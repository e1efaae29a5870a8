"""Core attention on packed sequences, causal within each: varlen kernels on cuda, TND on npu, SDPA on cpu.

Context parallelism: rank r of c holds chunks r and 2c-1-r of each sequence (zig-zag: equal work). Keys and values of
all ranks are gathered; the backward pass reduce-scatters. Each local chunk is then one query segment whose keys are the
sequence up to the chunk's end, so that one kernel with a bottom-right causal mask serves both cases.
"""

from __future__ import annotations

import inspect
import math
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel import npu


class CoreAttention(nn.Module):
    """Megatron's `core_attention` contract for packed sequences ("thd"); q [t, heads, d], k and v [t, groups, d]."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **kwargs: Any):
        super().__init__()
        self.scale = kwargs.get("softmax_scale") or 1.0 / math.sqrt(config.kv_channels)
        self.cp = kwargs["pg_collection"].cp

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        packed = kwargs.get("packed_seq_params")
        assert packed is not None and attention_mask is None, "only packed causal sequences"
        cu_q = cu_k = packed.cu_seqlens_q
        max_q = max_k = packed.max_seqlen_q
        if self.cp.size() > 1:
            rank, size = self.cp.rank(), self.cp.size()
            rows, cu_q, cu_k = context_segments(tuple(cu_q.tolist()), rank, size)
            rows = rows.to(k.device)
            max_q = max_k // (2 * size)
            k = _AllGatherTokens.apply(k, self.cp)[rows]
            v = _AllGatherTokens.apply(v, self.cp)[rows]
        return packed_attention(q, k, v, cu_q, cu_k, max_q, max_k, self.scale).flatten(1)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float
) -> Tensor:
    """[t, heads, d]. Segment i attends from q[cu_q[i]:cu_q[i+1]] to k[cu_k[i]:cu_k[i+1]], ends aligned."""
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16):
        return _varlen(q, k, v, cu_q, cu_k, max_q, max_k, scale)
    if q.device.type == "npu":
        return npu.attention(q, k, v, cu_q, cu_k, scale)
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    parts = []
    for i in range(len(starts_q) - 1):
        (a, b), (c, d) = starts_q[i : i + 2], starts_k[i : i + 2]
        if b > a:
            parts.append(_sdpa(q[a:b], k[c:d], v[c:d], scale))
    return torch.cat(parts)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    shift = k.size(0) - q.size(0)
    mask = torch.ones(q.size(0), k.size(0), dtype=torch.bool, device=q.device).tril(shift) if shift else None
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, heads, t, d]
    grouped = q.size(1) != k.size(1)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)


@lru_cache(maxsize=1)
def _varlen_signature() -> tuple[Any, dict[str, Any], bool]:
    """(kernel, causal arguments, whether it takes fewer key heads): they changed between torch 2.10 and 2.13."""
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    return varlen_attn, causal, "enable_gqa" in names


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float
) -> Tensor:
    kernel, arguments, takes_groups = _varlen_signature()
    repeat = q.size(1) // k.size(1)
    if takes_groups:
        arguments = {**arguments, "enable_gqa": repeat > 1}
    elif repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    return kernel(q, k, v, cu_q.to(q.device), cu_k.to(q.device), max_q, max_k, scale=scale, **arguments)


def zigzag_rows(length: int, rank: int, size: int) -> list[int]:
    """Positions of a sequence that a context-parallel rank holds, in its order; `length` is a multiple of 2 * size."""
    if size == 1:
        return list(range(length))
    chunk, mirror = length // (2 * size), 2 * size - 1 - rank
    return [*range(rank * chunk, (rank + 1) * chunk), *range(mirror * chunk, (mirror + 1) * chunk)]


@lru_cache(maxsize=64)
def context_segments(cu_seqlens: tuple[int, ...], rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, cu_q, cu_k) for one rank; cached because all layers of a micro-batch ask for the same.

    `cu_seqlens` counts global tokens. Two segments per sequence; `rows` picks each segment's keys, in sequence order,
    from the gathered [size * local tokens] keys.
    """
    total = cu_seqlens[-1]
    place = torch.empty(total, dtype=torch.int64)  # global token -> row of the gathered keys
    for r in range(size):
        held = [a + i for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False) for i in zigzag_rows(b - a, r, size)]
        place[torch.tensor(held)] = torch.arange(len(held)) + r * len(held)
    rows, cu_q, cu_k = [], [0], [0]
    for start, stop in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        chunk = (stop - start) // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            rows.append(place[start : start + (index + 1) * chunk])
            cu_q.append(cu_q[-1] + chunk)
            cu_k.append(cu_k[-1] + (index + 1) * chunk)
    return torch.cat(rows), torch.tensor(cu_q, dtype=torch.int32), torch.tensor(cu_k, dtype=torch.int32)


class _AllGatherTokens(torch.autograd.Function):
    """[t, ...] -> [size * t, ...] over a group; the backward pass sums and scatters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.size(0), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty((grad.size(0) // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None
