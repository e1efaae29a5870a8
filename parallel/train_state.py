"""What a checkpoint holds of the training side, as pieces of this rank, and how to make it live again.

    parameters      this rank's ranges of the parameters (Megatron's distributed optimizer cuts them over data parallel
                    ranks), so that no element is written twice; the all-gather of a step spreads them after a restore
    master          fp32 copies of 16-bit parameters; absent when the parameters are fp32 themselves
    exp_avg, exp_avg_sq    Adam's moments

Written for megatron-core 0.16.1: DistributedOptimizer around torch's AdamW, FusedAdam or SGD.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from parallel.boxes import range_boxes, single_layers
from parallel.checkpoint import State
from parallel.layout import Layout, Piece
from parallel.megatron_cpu import on_device

if TYPE_CHECKING:
    from parallel.megatron_model import TrainModel

MOMENTS = ("exp_avg", "exp_avg_sq")


def training_state(model: TrainModel, layout: Layout, rank: int) -> dict[str, State]:
    """State name -> (pieces, live stores) of this rank, to save and to restore into. Makes Adam's state if need be.

    Every rank has every state, maybe without a store. Collective operations: none.
    """
    by_store = _pieces_by_store(layout, rank)
    names = {parameter: name for name, parameter in model.named_parameters()}
    moments = MOMENTS if any(_has_moments(part) for part in _parts(model)) else ()
    states: dict[str, tuple[list[Piece], dict[str, torch.Tensor]]] = {
        state: ([], {}) for state in ("parameters", *(["master"] if layout.dtype != "float32" else []), *moments)
    }
    for part, parameter, start, stop in _ranges(model):
        name = names[parameter]
        pieces = [found for piece in by_store.get(name, []) for found in range_boxes(piece, start, stop)]
        for state, tensor in _tensors(part, parameter, start, stop).items():
            if state in states:
                states[state][0].extend(pieces)
                states[state][1][name] = tensor.detach().view(-1)
    return {state: (tuple(pieces), stores) for state, (pieces, stores) in states.items()}


def after_restore(model: TrainModel) -> None:
    """Spread the restored ranges of the parameters over the data parallel ranks. Collective."""
    with on_device(model.device), torch.no_grad():
        for chunk in model.chunks:
            chunk.start_param_sync(force_sync=True)


def optimizer_steps(model: TrainModel) -> int:
    """Optimizer steps taken, as Adam counts them; 0 without Adam."""
    counts = [
        int(state["step"]) for part in _parts(model) for state in part.optimizer.state.values() if "step" in state
    ]
    counts += [int(group["step"]) for part in _parts(model) for group in part.optimizer.param_groups if "step" in group]
    return max(counts, default=0)


def set_optimizer_steps(model: TrainModel, steps: int) -> None:
    """Set Adam's count everywhere; each parameter keeps a tensor of its own (a shared one would count too fast)."""
    for part in _parts(model):
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = steps
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.full_like(state["step"], float(steps))


def _parts(model: TrainModel) -> list[Any]:
    """The distributed optimizers inside the chained one that have parameters on this rank."""
    return [part for part in model.optimizer.chained_optimizers if part.optimizer is not None]


def _has_moments(part: Any) -> bool:
    return not isinstance(part.optimizer, torch.optim.SGD)


def _ranges(model: TrainModel) -> Iterator[tuple[Any, torch.nn.Parameter, int, int]]:
    """(optimizer, parameter, start, stop) of every flattened parameter that this rank updates, in a fixed order."""
    for part in _parts(model):
        for group in (*part.model_float16_groups, *part.model_fp32_groups):
            for parameter in group:
                held = part._get_model_param_range_map(parameter)["param"]
                yield part, parameter, held.start, held.end


def _tensors(part: Any, parameter: torch.nn.Parameter, start: int, stop: int) -> dict[str, torch.Tensor]:
    """State -> live tensor of `stop - start` elements."""
    group, position = part.model_param_group_index_map[parameter]
    main = part.optimizer.param_groups[group]["params"][position]
    found = {"parameters": parameter.data.view(-1)[start:stop]}
    if parameter.dtype != torch.float32:
        found["master"] = main
    if _has_moments(part):
        found.update({name: _adam_state(part.optimizer, main, group)[name] for name in MOMENTS})
    return found


def _adam_state(adam: Any, main: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """Adam's state of one tensor, made as its first step would make it (FusedAdam counts steps in the group)."""
    state = adam.state[main]
    if not state:
        if isinstance(adam, torch.optim.Adam):
            on_host = not (adam.param_groups[group].get("fused") or adam.param_groups[group].get("capturable"))
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu" if on_host else main.device)
        for name in MOMENTS:
            state[name] = torch.zeros_like(main, memory_format=torch.preserve_format)
    return state


def _pieces_by_store(layout: Layout, rank: int) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for piece in layout.pieces(rank):
        for single in single_layers(piece):
            found.setdefault(single.store, []).append(single)
    return found
