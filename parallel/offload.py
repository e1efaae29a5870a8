"""Training state to host memory and back, while the engine generates: one copy for each flat arena, at the copy rate.

    params       DDP's flat parameter buffers; every parameter and shard is a view of them
    optimizer    fp32 masters and Adam's moments, moved at construction into one flat tensor each
    gradients    dropped whenever something is moved, zeros afterwards

A freed arena keeps its tensors: only its storage shrinks to nothing, so views, addresses of Python objects and
optimizer state stay as they are. The host twins are allocated once. State that is on the host for good (CPU Adam)
stays there. Megatron's own offload_to_cpu moves tensor by tensor through pageable memory: 10 s instead of half a second
for 23 GiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from parallel.megatron_model import TrainModel

MOMENTS = ("exp_avg", "exp_avg_sq")
SMALLEST_PIECE = 1 << 24
"""Elements. Page-locked allocations are rounded up to powers of two, so twins are made of such pieces."""


class Arena:
    """One flat device tensor that owns its storage, and its host twin."""

    def __init__(self, flat: Tensor, pinned: bool):
        assert flat.untyped_storage().nbytes() == flat.nbytes, "an arena owns its storage"
        self.flat, self.nbytes = flat, flat.nbytes
        self.sizes = twin_sizes(flat.numel())
        self.host = [torch.empty(size, dtype=flat.dtype, pin_memory=pinned) for size in self.sizes]

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(piece on the device, its place on the host)."""
        yield from zip(self.flat.view(-1).split(self.sizes), self.host, strict=True)

    def release(self) -> None:
        self.flat.untyped_storage().resize_(0)

    def load(self) -> None:
        self.flat.untyped_storage().resize_(self.nbytes)
        for here, there in self.pairs():
            here.copy_(there, non_blocking=True)


def twin_sizes(numel: int) -> list[int]:
    """Powers of two, largest first, that sum to `numel` but for one small last piece."""
    sizes = []
    while numel > SMALLEST_PIECE:
        sizes.append(1 << (numel.bit_length() - 1))
        numel -= sizes[-1]
    return [*sizes, numel] if numel else sizes


class TrainOffload:
    """What of `model` leaves the device while the engine generates, by config.train.offload; nothing by default.

    Two moves out, so that the peak stays low: gradients and optimizer go before the engine's weights come, parameters
    after they have been read. Construct when the model's state fits the device twice, before the first update.
    """

    def __init__(self, model: TrainModel):
        parts, pinned = model.config.train.offload, model.device.kind != "cpu"
        self.device = model.device
        self.gradients = [buffer.grad_data for buffer in model.buffers] if parts else []
        self.sizes = [grad.untyped_storage().nbytes() for grad in self.gradients]
        flats = [buffer.param_data for buffer in model.buffers] if "params" in parts else []
        self.params = [Arena(flat, pinned) for flat in flats if flat.numel()]
        state = rehome_optimizer(model) if "optimizer" in parts else []
        self.optimizer = [Arena(flat, pinned) for flat in state]
        self.away: list[Arena] = []

    @property
    def nbytes(self) -> int:
        """Bytes that move each way."""
        return sum(arena.nbytes for arena in (*self.params, *self.optimizer))

    def free_optimizer(self) -> None:
        """Gradients are dropped, optimizer state is on the host; unused memory goes back to the device."""
        for gradient in self.gradients:
            gradient.untyped_storage().resize_(0)
        parallel_state.get_global_memory_buffer().buffer.clear()
        self._move(self.optimizer)

    def free_params(self) -> None:
        self._move(self.params)

    def restore(self) -> None:
        """Everything is back as it was; gradients are zero."""
        for arena in self.away:
            arena.load()
        for gradient, size in zip(self.gradients, self.sizes, strict=True):
            if not gradient.untyped_storage().nbytes():
                gradient.untyped_storage().resize_(size)
                gradient.zero_()
        self.device.synchronize()
        self.away = []

    def _move(self, arenas: Sequence[Arena]) -> None:
        self.device.to_host(pair for arena in arenas for pair in arena.pairs())
        for arena in arenas:
            arena.release()
        self.away += arenas
        self.device.empty_cache()


def rehome_optimizer(model: TrainModel) -> list[Tensor]:
    """Masters and moments of this rank in flat device tensors; the tensor objects that Megatron holds become views."""
    flats = []
    for part in model.optimizer.chained_optimizers:
        if part.optimizer is None:
            continue
        masters = [master for group in part.shard_fp32_from_float16_groups for master in group]
        flats += _flatten([master for master in masters if master.device.type == model.device.kind])
        for adam in _device_adams(part.optimizer):
            tensors = [tensor for group in adam.param_groups for tensor in group["params"]]
            states = [_adam_state(adam, tensor) for tensor in tensors]
            for moment in MOMENTS:
                flats += _flatten([state[moment] for state in states])
    return flats


def _device_adams(optimizer: Any) -> Iterator[Any]:
    """Adam itself, or the device's share of Megatron's hybrid optimizer; nothing for SGD, which has no state."""
    if hasattr(optimizer, "sub_optimizers"):
        optimizer = optimizer.gpu_optimizer
    if optimizer is not None and not isinstance(optimizer, torch.optim.SGD):
        yield optimizer


def _adam_state(adam: Any, tensor: Tensor) -> dict[str, Tensor]:
    """State of one tensor, made as the first step would make it (FusedAdam counts steps in the group)."""
    state = adam.state[tensor]
    if not state:
        if isinstance(adam, torch.optim.Adam):
            on_device = any(g.get("fused") or g.get("capturable") for g in adam.param_groups)
            state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device if on_device else "cpu")
        state.update({name: torch.zeros_like(tensor) for name in MOMENTS})
    return state


@torch.no_grad()
def _flatten(tensors: Iterable[Tensor]) -> list[Tensor]:
    """[one flat tensor] with the values of `tensors`, which become views of it; [] without any."""
    tensors = list(tensors)
    if not tensors:
        return []
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    for tensor, place in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        place.copy_(tensor.view(-1))
        tensor.data = place.view_as(tensor)
    return [flat]
