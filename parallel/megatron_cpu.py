"""What Megatron-core needs to run on cpu and npu, and the repairs it needs everywhere. Written for 0.16.1.

    torch.cuda functions that Megatron calls as its device runtime       replaced while `on_device` is active
    literals: device="cuda", Tensor.cuda(), tensor.type() == "torch.cuda.X"    one TorchFunctionMode, likewise
    Megatron functions without a cpu branch                              replaced once, by `repair`

On cuda `te_general_gemm`, the packed rotary embedding and a needless sort are replaced. On npu, torch_npu's own
transfer_to_npu does the first two, apart from the type name; MindSpeed's adaptor (train.npu_adaptor) does them as well.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import megatron.core
import torch
from torch.overrides import TorchFunctionMode

from parallel import npu
from parallel.device import Device
from parallel.rope import packed_rope

TESTED = "0.16.1"
MINDSPEED = "0.16.0"
"""Megatron-core of MindSpeed's branch core_r0.16.0, the nearest one; it pairs with torch 2.7.1, torch_npu 26.0.0 (the
release that carries torch_npu 2.7.1) and CANN 9.0.0, and so with another vLLM-Ascend than TESTED does.
"""
CPU = torch.device("cpu")


class _Null:
    """A CUDA stream or event on a device where everything is already in order."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Null) -> float:
        return 0.0

    def record_event(self, *args: Any) -> _Null:
        return _Null()

    def wait(self, *args: Any) -> None:
        pass

    record = synchronize = wait_stream = wait_event = wait


def _null(*args: Any) -> _Null:
    return _Null()


RUNTIME = {
    "current_device": lambda: CPU,  # Megatron uses it as a device, never as a number
    "synchronize": lambda *args: None,
    "empty_cache": lambda: None,
    "Stream": _Null,
    "Event": _Null,
    "current_stream": _null,
    "default_stream": _null,
    "stream": lambda stream: contextlib.nullcontext(),
    "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
}


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        out = func(*args, **kwargs)
        return _cuda_type_name(out) if func is torch.Tensor.type and isinstance(out, str) else out


class _NpuTypeNames(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.replace("torch.npu.", "torch.cuda.") if func is torch.Tensor.type and isinstance(out, str) else out


def _cuda_type_name(name: str) -> str:
    return name.replace("torch.", "torch.cuda.", 1)


@contextlib.contextmanager
def on_device(device: Device) -> Iterator[None]:
    """Run Megatron code inside it. Re-entrant; leaves torch as it was."""
    if device.kind == "cuda":
        yield
    elif device.kind == "npu":
        with _NpuTypeNames():
            yield
    else:
        saved = {name: getattr(torch.cuda, name) for name in RUNTIME}
        try:
            for name, value in RUNTIME.items():
                setattr(torch.cuda, name, value)
            with _CudaMeansCpu():
                yield
        finally:
            for name, value in saved.items():
                setattr(torch.cuda, name, value)


def repair(device: Device, npu_adaptor: str = "torch_npu") -> None:
    """Replace what is missing in Megatron for this device; once is enough, again is harmless.

    RuntimeError on a Megatron version for which the replacements were not checked.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 without TransformerEngine: NameError in every MoE forward
    if device.kind == "cuda":
        if megatron.core.__version__ == TESTED:  # on others Megatron's own, slower
            _replace_slow_parts()
        return
    wanted = MINDSPEED if (device.kind, npu_adaptor) == ("npu", "mindspeed") else TESTED
    if megatron.core.__version__ != wanted:
        raise RuntimeError(
            f"megatron-core {megatron.core.__version__} on {device.kind}: parallel/megatron_cpu.py was written for "
            f"{wanted}; install that version, or check each replacement there and change the number"
        )
    if device.kind == "npu":
        _adapt_npu(npu_adaptor)
    else:
        _adapt_cpu()


def _adapt_cpu() -> None:
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    if not hasattr(mappings._gather_along_first_dim, "replaces"):
        mappings._gather_along_first_dim = _unequal_gather(mappings._gather_along_first_dim)
        mappings._reduce_scatter_along_first_dim = _unequal_reduce_scatter(mappings._reduce_scatter_along_first_dim)
    _replace_rng_state(torch.get_rng_state, torch.set_rng_state)
    # Its branch for cpu tensors forgets the conversion; gloo wants integers as split sizes.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


def _unequal_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """gloo gathers equal sizes only; experts that are split and spread (ep and etp above 1) have unequal ones."""

    def gather(tensor: Any, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or group.size() == 1:
            return original(tensor, group, sizes, use_global_buffer)
        padded = tensor.new_zeros((max(max(sizes), 1), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    gather.replaces = original  # type: ignore[attr-defined]
    return gather


def _unequal_reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter(tensor: Any, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or group.size() == 1:
            return original(tensor, group, sizes, use_global_buffer)
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total.split(list(sizes))[group.rank()].clone()

    return reduce_scatter


def _adapt_npu(adaptor: str) -> None:
    """torch.cuda becomes torch.npu for the rest of the process; the engine is there by then and keeps its imports."""
    from megatron.core.transformer import mlp
    from megatron.core.transformer.moe.router import TopKRouter

    if adaptor == "mindspeed":
        _import_mindspeed()  # imports transfer_to_npu itself
    else:
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
    os.environ.setdefault("TORCH_NPU_DEVICE_CAPABILITY", "8.0")  # None otherwise, and torch's broadcast compares it
    _replace_rng_state(torch.npu.get_rng_state, torch.npu.set_rng_state)
    mlp.bias_swiglu_impl = npu.bias_swiglu
    counted = TopKRouter._apply_expert_bias  # the one compiled function that is left on our path
    TopKRouter._apply_expert_bias = getattr(counted, "_torchdynamo_orig_callable", counted)


def _import_mindspeed() -> None:
    """Its adaptor reads sys.argv at import, where ours stands. ValueError says what to install."""
    arguments = sys.argv
    try:
        sys.argv = arguments[:1]
        importlib.import_module("mindspeed.megatron_adaptor")
    except ImportError as error:
        raise ValueError(
            f"train.npu_adaptor = mindspeed, but MindSpeed cannot be imported ({error}). Install its branch "
            f"core_r{MINDSPEED} with megatron-core {MINDSPEED}, or set train.npu_adaptor = torch_npu"
        ) from error
    finally:
        sys.argv = arguments


def _replace_rng_state(get: Callable[[], torch.Tensor], put: Callable[[torch.Tensor], None]) -> None:
    """Megatron binds torch.cuda's at import: on another device its setter would only queue, for ever."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: get()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: put(state)


def _replace_slow_parts() -> None:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import token_dispatcher

    for module, name, make in (
        (rope_utils, "_apply_rotary_pos_emb_thd", packed_rope),
        (token_dispatcher, "sort_chunks_by_idxs", _unless_sorted),
    ):
        original = getattr(module, name)
        if not hasattr(original, "replaces"):
            replacement = make(original)
            replacement.replaces = original  # type: ignore[attr-defined]
            setattr(module, name, replacement)


def _unless_sorted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Chunks of tokens by expert; with ep = etp = 1 they come in order, and Megatron copies all of them for nothing."""

    def sort(tokens: Any, sizes: Any, order: Any, probs: Any = None, fused: bool = False) -> tuple[Any, Any]:
        if not hasattr(order, "is_sorted"):
            order.is_sorted = order.tolist() == list(range(order.numel()))  # waits for the device, once a layer
        return (tokens, probs) if order.is_sorted else original(tokens, sizes, order, probs=probs, fused=fused)

    return sort
