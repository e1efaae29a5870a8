"""The live engine's parameters under the names of vllm_layout, and the checks that both agree.

Beside the pieces of the layout vLLM holds vocabulary padding and nothing else; `check` proves it for every element.
Storage must never move: captured graphs and the resharder keep addresses (`require_stable`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from parallel.layout import Piece

PADDED = ("model.embed_tokens.weight", "lm_head.weight")
EXPERT_WEIGHT = re.compile(r"experts\.(?:routed_experts\.)?(w13|w2)_weight$")
EXPERT_GATE = re.compile(r"\.experts\.gate\.weight$")


def stores(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Layout name -> live tensor (no gradient tracking, shared storage); tied tensors appear once.

    vLLM 0.23 lacks "routed_experts." in the names, and the router is reachable through the experts as well.
    """
    return {layout_name(name): parameter.data for name, parameter in model.named_parameters()}


def layout_name(name: str) -> str:
    """Name in vllm_layout of a live parameter."""
    return EXPERT_GATE.sub(".gate.weight", EXPERT_WEIGHT.sub(r"experts.routed_experts.\1_weight", name))


def experts_transposed(tensors: Mapping[str, torch.Tensor], hidden: int, on_npu: bool) -> bool:
    """Whether experts are stored as (expert, in, out), as Ascend keeps them, instead of vLLM's (expert, out, in).

    The answer for vllm_layout's `transposed_experts`. Read off the shape; a square matrix is decided by the platform.
    """
    w13 = next((t for name, t in tensors.items() if name.endswith("w13_weight")), None)
    if w13 is None:
        return False
    _, rows, cols = w13.shape
    if hidden not in (rows, cols):
        raise ValueError(f"w13_weight of shape {tuple(w13.shape)} has no side of {hidden}: packed by a kernel?")
    return on_npu if rows == cols else rows == hidden


def sleep_level(worker: Any) -> int:
    """2 where the worker brings buffers back after it dropped them with the weights, as a sync needs; else 1."""
    return 2 if hasattr(worker, "_sleep_saved_buffers") else 1


def restore_transposed_experts(model: torch.nn.Module) -> None:
    """After a wake-up Ascend shows experts as transposed views; make them contiguous again over the same storage.

    vLLM-Ascend expects load_weights next, which would allocate outside the sleep pool; we write in place instead.
    """
    for module in model.modules():
        for name in ("w13_weight", "w2_weight"):
            weight = getattr(module, name, None)
            if isinstance(weight, torch.nn.Parameter) and not weight.is_contiguous():
                setattr(module, name, torch.nn.Parameter(weight.data.transpose(1, 2), requires_grad=False))


def check(pieces: Iterable[Piece], tensors: Mapping[str, torch.Tensor], dtype: str) -> dict[str, int]:
    """Prove that the pieces cover every element of every tensor exactly once, vocabulary padding apart.

    Returns store -> elements before the padding, for stores that have padding. ValueError names the store and counts.
    """
    by_store: dict[str, list[Piece]] = {name: [] for name in tensors}
    for piece in pieces:
        for layer in range(*piece.box[0]):
            name = piece.store_name(layer)
            if name not in by_store:
                raise ValueError(f"the layout writes {name}, which the engine does not have")
            by_store[name].append(piece)
    known: dict[tuple, int] = {}  # layers look alike: each pattern is counted once
    padding = {}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() or str(tensor.dtype) != f"torch.{dtype}":
            raise ValueError(f"{name} {tuple(tensor.shape)} is {tensor.dtype} or not contiguous; {dtype} is expected")
        patterns = tuple((p.box[1:], p.offset, p.strides) for p in by_store[name])
        signature = (tensor.numel(), name in PADDED, patterns)
        if signature not in known:
            known[signature] = _covered(name, by_store[name], tensor)
        if known[signature] < tensor.numel():
            padding[name] = known[signature]
    return padding


def _covered(name: str, pieces: list[Piece], tensor: torch.Tensor) -> int:
    """Elements covered, from the first without a gap."""
    counts = np.zeros(tensor.numel(), dtype=np.uint8)
    for piece in pieces:
        shape = tuple(hi - lo for lo, hi in piece.box[1:])
        last = piece.offset + sum((n - 1) * stride for n, stride in zip(shape, piece.strides, strict=True))
        if last >= len(counts):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: the layout's {piece.kind} reaches element {last}"
            )
        np.lib.stride_tricks.as_strided(counts[piece.offset :], shape, piece.strides)[...] += 1
    covered = int(np.count_nonzero(counts))
    if counts.max(initial=0) > 1 or not counts[:covered].all() or (covered < len(counts) and name not in PADDED):
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)}: the layout covers {covered} of {len(counts)} elements, "
            f"{int(np.count_nonzero(counts > 1))} of them more than once"
        )
    return covered


def clear_padding(tensors: Mapping[str, torch.Tensor], padding: Mapping[str, int]) -> None:
    """Zeros in the padding, as vLLM's loader leaves it; again after each wake-up, which restores no contents."""
    for name, covered in padding.items():
        tensors[name].view(-1)[covered:].zero_()


def require_stable(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    """RuntimeError when a parameter is not where it was."""
    moved = [name for name in after if name not in before or after[name].data_ptr() != before[name].data_ptr()]
    if moved or len(before) != len(after):
        raise RuntimeError(f"{len(moved)} of {len(after)} engine parameters moved in memory, the first: {moved[:1]}")
