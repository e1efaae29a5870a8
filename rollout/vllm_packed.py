"""Modules of the live engine whose weights are not stored as a checkpoint has them, written one at a time.

A kernel may shuffle, swap, pad or transpose a weight after loading, keep its shape or not, or work on a packed copy.
Writing such a parameter in place is wrong, silently where the shape is kept. Here a module is opened (its parameters in
the form in which vLLM's loader met them), written, and closed: vLLM's own post-load step runs on them again, and its
result is copied into the storage that captured graphs know.

    plain     Triton experts, our CPU kernels, linears and norms of GPUs: no part of this file, written in place
    packed    shape changed (oneDNN linears of vLLM's CPU build), or an expert kernel other than Triton
    derived   the parameter is plain and read by a packed copy (the head of the CPU build): closed after it was written
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from rollout import vllm_cpu
from rollout.vllm_params import layout_name

PLAIN_EXPERTS = ("TRITON", "BATCHED_TRITON", "OOT")
"""Expert kernels that read weights as they were loaded; OOT is Ascend, whose transposed storage the layout knows."""


@dataclass
class PackedModule:
    """parallel.weight_sync.Packed of one module of vLLM."""

    module: torch.nn.Module
    loaded: dict[str, torch.Tensor]
    """Layout name -> parameter in loading form, on the meta device; empty when the module is only derived."""
    _live: dict[str, torch.nn.Parameter] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.loaded)

    def open(self) -> dict[str, torch.Tensor]:
        """Fresh parameters in loading form, zeros so that padding is. The engine cannot run until `close`."""
        from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

        stores = {}
        for name, meta in self.loaded.items():
            own = name.rpartition(".")[2]
            self._live[own] = live = getattr(self.module, own)
            with live.device:
                fresh = materialize_meta_tensor(restore_layer_refs(meta, self.module))
            _replace(self.module, own, fresh)
            stores[name] = fresh.data.zero_()
        return stores

    def close(self) -> None:
        """Pack again, into the old storage. RuntimeError when vLLM's step gives another shape than at start-up."""
        method: Any = self.module.quant_method
        if hasattr(self.module, "_already_called_process_weights_after_loading"):
            del self.module._already_called_process_weights_after_loading
        if getattr(method, "moe_kernel", None) is not None and _first(self.module).device.type == "cpu":
            method.moe_kernel = None  # vLLM's CPU experts are packed only when their kernel is made
        method.process_weights_after_loading(self.module)
        for own, live in self._live.items():
            packed = getattr(self.module, own)
            if packed.shape != live.shape:
                raise RuntimeError(f"{own} was packed to {tuple(packed.shape)}, at start-up to {tuple(live.shape)}")
            live.data.copy_(packed.data)
            _replace(self.module, own, live)
        self._live = {}


def _replace(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    delattr(module, name)
    module.register_parameter(name, parameter)


def _first(module: torch.nn.Module) -> torch.Tensor:
    return next(module.parameters(recurse=False))


def packed_modules(model: torch.nn.Module) -> list[PackedModule]:
    """In the order of the model, equal on all ranks of a replica; empty where every parameter is plain."""
    return list(_find(model))


def _find(model: torch.nn.Module) -> Iterator[PackedModule]:
    try:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError:  # older than layer-wise reloading: only plain kernels are supported there
        return
    for prefix, module in model.named_modules():
        if not hasattr(getattr(module, "quant_method", None), "process_weights_after_loading"):
            continue
        recorded = get_layerwise_info(module).restore_metadata[0]
        live = dict(module.named_parameters(recurse=False))
        changed = any(live[name].shape != meta.shape for name, meta in recorded.items() if name in live)
        if changed or _has_packing_experts(module):
            yield PackedModule(module, {layout_name(f"{prefix}.{name}"): meta for name, meta in recorded.items()})
        elif getattr(module, "cpu_linear", F.linear) is not F.linear:
            yield PackedModule(module, {})


def _has_packing_experts(module: torch.nn.Module) -> bool:
    backend = getattr(module.quant_method, "unquantized_backend", None)
    if backend is None or backend.name in PLAIN_EXPERTS:
        return False
    kernel = getattr(module.quant_method, "moe_kernel", None)
    return type(getattr(kernel, "fused_experts", None)).__module__ != vllm_cpu.__name__
