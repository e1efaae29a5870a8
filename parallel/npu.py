"""torch_npu's fused kernels in the shapes that our layers have. The only file that calls one.

    attention        npu_fusion_attention: packed (TND), causal with the ends aligned, fewer key heads than query heads
    rms_norm         npu_rms_norm
    swiglu           npu_swiglu
    grouped_linear   npu_grouped_matmul, with a backward pass of ours: it has none

Written from the signatures of torch_npu 2.10.0.post4 (tests/npu_signatures.py); docs/platforms.md says what has run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

MASK = 2048
"""Side of the compressed causal mask that sparse modes 2 and 3 take, whatever the lengths."""
MOST_SEGMENTS = 1024
"""Packed sequences that one call takes."""
ENDS_ALIGNED = 3
"""sparse_mode: causal, the last query sees the last key."""


def attention(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> Tensor:
    """q [t, heads, d], k and v [s, groups, d] -> [t, heads, d]; segments as in parallel.attention.packed_attention."""
    ends_q, ends_k, parts = _ends(cu_q), _ends(cu_k), []
    for first in range(0, len(ends_q) - 1, MOST_SEGMENTS):
        last = min(first + MOST_SEGMENTS, len(ends_q) - 1)
        (a, b), (c, d) = (ends_q[first], ends_q[last]), (ends_k[first], ends_k[last])
        lengths = ([end - a for end in ends_q[first + 1 : last + 1]], [end - c for end in ends_k[first + 1 : last + 1]])
        parts.append(_attention(q[a:b], k[c:d], v[c:d], *lengths, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attention(q: Tensor, k: Tensor, v: Tensor, ends_q: list[int], ends_k: list[int], scale: float) -> Tensor:
    import torch_npu

    return torch_npu.npu_fusion_attention(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        q.size(1),
        "TND",
        atten_mask=_hidden(q.device),
        scale=scale,
        keep_prob=1.0,
        actual_seq_qlen=ends_q,
        actual_seq_kvlen=ends_k,
        sparse_mode=ENDS_ALIGNED,
    )[0]


def _ends(cu: Tensor) -> list[int]:
    """On the host; kept on the tensor, since all layers of a micro-batch pass the same one."""
    if not hasattr(cu, "on_host"):
        cu.on_host = cu.tolist()  # type: ignore[attr-defined]
    return cu.on_host  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _hidden(device: torch.device) -> Tensor:
    """True where a key is hidden from a query."""
    return torch.ones(MASK, MASK, dtype=torch.bool, device=device).triu(1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    import torch_npu

    return torch_npu.npu_rms_norm(x, weight, epsilon=eps)[0]


def swiglu(both: Tensor, probs: Tensor | None = None) -> Tensor:
    """both [t, gate|up] -> silu(gate) * up, times probs [t, 1] where given, in the dtype of `both`."""
    import torch_npu

    out = torch_npu.npu_swiglu(both, dim=-1)
    return out if probs is None else (out * probs).to(both.dtype)


def bias_swiglu(both: Tensor, bias: Tensor | None, *unused: Any, **also_unused: Any) -> Tensor:
    """In the place of Megatron's bias_swiglu_impl."""
    return swiglu(both if bias is None else both + bias)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [t, k] in runs of counts[e] rows, weight [e, n, k] -> [t, n]."""
    return _GroupedLinear.apply(x, weight, counts.to(x.device, torch.int64).cumsum(0))


class _GroupedLinear(torch.autograd.Function):
    """group_type 0 cuts the rows of the left matrix, 2 the axis that is summed over (the left one comes transposed)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _grouped(x.contiguous(), weight.transpose(1, 2), ends, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad, (for_x, for_weight, _) = grad.contiguous(), ctx.needs_input_grad
        of_x = _grouped(grad, weight, ends, 0) if for_x else None
        return of_x, _grouped(grad.t(), x.contiguous(), ends, 2) if for_weight else None, None


def _grouped(left: Tensor, right: Tensor, ends: Tensor, group_type: int) -> Tensor:
    import torch_npu

    return torch_npu.npu_grouped_matmul(
        [left], [right], group_list=ends, split_item=3, group_type=group_type, group_list_type=0
    )[0]
