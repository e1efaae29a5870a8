"""Rotary embedding of packed sequences for cuda, in one compiled pass and without waiting for the device.

Megatron's own cuts the tokens into sequences by lengths read back from the device, and rotates with five passes, twice
a layer. `megatron_cpu.repair` puts `apply` in its place; context parallel ranks keep Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def packed_rope(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function with Megatron's arguments for `thd` tensors; what it does not handle goes to `original`."""
    fused = torch.compile(rotate, dynamic=True)

    def apply(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, mscale: float = 1.0, **kwargs: Any) -> Tensor:
        special = args or kwargs.get("rotary_interleaved") or kwargs.get("multi_latent_attention")
        if special or kwargs["cp_group"].size() > 1 or freqs.size(-1) != t.size(-1):
            return original(t, cu_seqlens, freqs, *args, mscale=mscale, **kwargs)
        return fused(t, *_angles(freqs, cu_seqlens, t, mscale))

    return apply


def _angles(freqs: Tensor, cu_seqlens: Tensor, t: Tensor, mscale: float) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, 1, d]; kept on `freqs`, since all layers of a micro-batch ask for the same."""
    held = getattr(freqs, "packed_angles", None)
    if held is None or held[0] is not cu_seqlens or held[1:3] != (t.dtype, mscale):
        angles = freqs[positions(cu_seqlens, t.size(0)), 0]
        cos, sin = (angles.cos() * mscale).to(t.dtype), (angles.sin() * mscale).to(t.dtype)
        freqs.packed_angles = held = (cu_seqlens, t.dtype, mscale, cos, sin)
    return held[3], held[4]


def positions(cu_seqlens: Tensor, num: int) -> Tensor:
    """Place of each of `num` tokens in its sequence."""
    token = torch.arange(num, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return token - cu_seqlens[torch.searchsorted(cu_seqlens, token, right=True) - 1]


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """t [tokens, heads, d]; the two halves of cos and sin [tokens, 1, d] are equal."""
    first, second = t.chunk(2, -1)
    return t * cos + torch.cat((-second, first), -1) * sin
