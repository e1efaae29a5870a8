"""What vLLM's routers chose, and where vLLM keeps its experts.

The engine returns routed experts itself where it can (cuda, npu). vLLM's CPU build cannot: there a hook in every
router keeps the logical expert ids of each forward pass and cuts them by request. It needs prefix caching off (cached
prompt tokens are never routed again), the V1 model runner and no graph that swallows the hook.

Experts move while the engine runs when it has redundant copies (EPLB); `expert_map` reads where they are now.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parallel.family import ModelShape
from rollout.batch import Sample, fetch_routes

ExpertMap = tuple[tuple[int, ...], ...]
"""[layer][physical slot of the replica] -> logical expert."""

MAP_DTYPES = (torch.int32, torch.int64)
LAYER = re.compile(r"\.layers\.(\d+)\.")


def routes_dtype(num_experts: int) -> type:
    """Smallest unsigned integer that holds an expert id."""
    return np.uint8 if num_experts <= 256 else np.uint16


class RouteCapture:
    """Hook of one engine. `take` hands out a finished request's routes and forgets them."""

    def __init__(self, runner: Any, parallel_config: Any, num_layers: int, num_experts: int):
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self.runner, self.num_layers, self.dtype = runner, num_layers, routes_dtype(num_experts)
        self.split_over_tp = parallel_config.use_sequence_parallel_moe
        """Each TP rank routes its chunk of the tokens, the last one padded."""
        self.step: dict[int, torch.Tensor] = {}
        self.rows: dict[str, list[tuple[int, np.ndarray]]] = {}
        for name, module in runner.get_model().named_modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(self._keep(layer_of(name)))
        self._execute, runner.execute_model = runner.execute_model, self._run

    def _keep(self, layer: int) -> Any:
        def keep(ids: torch.Tensor) -> None:
            self.step[layer] = ids

        return keep

    def _run(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self.step.clear()  # also of what dummy batches left
        output = self._execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            self._collect(scheduled.num_scheduled_tokens, scheduled.total_num_scheduled_tokens)
        return output

    def _collect(self, scheduled: dict[str, int], total: int) -> None:
        batch, layers = self.runner.input_batch, sorted(self.step)
        ids = torch.stack([self.step[layer] for layer in layers], 1)  # [tokens, MoE layers, k]
        if self.split_over_tp:
            ids = _all_gather_tp(ids)
        if len(ids) < total:
            raise RuntimeError(f"routers saw {len(ids)} of the {total} scheduled tokens")
        rows: np.ndarray = np.zeros((total, self.num_layers, ids.shape[2]), self.dtype)
        rows[:, layers] = ids[:total].cpu().numpy()
        start = 0
        for name in batch.req_ids:  # the order of tokens in this step
            count = scheduled.get(name, 0)
            position = int(batch.num_computed_tokens_cpu[batch.req_id_to_index[name]])
            if count:
                self.rows.setdefault(name, []).append((position, rows[start : start + count]))
            start += count

    def take(self, name: str, tokens: int) -> np.ndarray:
        """Routes [tokens - 1, layers, k] of request `name`; the last token was never fed back.

        A preempted request computed positions twice; the later choice stands, its KV cache is the one in use.
        """
        parts = self.rows.pop(name)
        routes = np.zeros((tokens - 1, *parts[0][1].shape[1:]), self.dtype)
        seen = np.zeros(tokens - 1, bool)
        for position, rows in parts:
            kept = rows[: tokens - 1 - position]
            routes[position : position + len(kept)] = kept
            seen[position : position + len(kept)] = True
        if not seen.all():
            raise RuntimeError(f"request {name}: no routes of position {int(seen.argmin())} of {tokens - 1}")
        return routes


def layer_of(name: str) -> int:
    """Global decoder layer of a module name."""
    found = LAYER.search(name)
    assert found, name
    return int(found[1])


def _all_gather_tp(ids: torch.Tensor) -> torch.Tensor:
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return ids
    parts = [torch.empty_like(ids) for _ in range(group.world_size)]
    dist.all_gather(parts, ids.contiguous(), group=group.device_group)
    return torch.cat(parts)


def deliver(
    batch: Sequence[Sample],
    wanted: Sequence[Sequence[int]],
    layers: Sequence[Sequence[int]],
    shape: ModelShape,
    group: dist.ProcessGroup,
) -> dict[int, np.ndarray]:
    """Routes of the samples and layers wanted by this rank (see fetch_routes); the samples lose theirs. Collective."""
    routes = fetch_routes(batch, wanted, layers, shape.experts_per_token, routes_dtype(shape.experts), group)
    for sample in batch:
        sample.routes = None
    return routes


# Redundant experts


def model_states(runner: Any) -> Iterator[Any]:
    """vLLM's EPLB state of the model; none without redundant experts."""
    state = getattr(runner, "eplb_state", None)
    yield from state.model_states.values() if state is not None else ()


def expert_map(runner: Any) -> ExpertMap | None:
    """The map as it is now; None without redundant experts.

    RuntimeError when vLLM moves experts in a thread of its own: the map could change while weights are written.
    """
    for state in model_states(runner):
        if runner.eplb_state.is_async:
            raise RuntimeError("experts move asynchronously; leave eplb_config.use_async to the engine (false)")
        return tuple(map(tuple, state.physical_to_logical_map.tolist()))
    return None


@torch.inference_mode()
def place_experts(runner: Any, held: Sequence[Sequence[int]]) -> None:
    """Make [layer][slot] -> expert the live map of the model, in vLLM's own tensors. No weight is moved."""
    for state in model_states(runner):
        slots = np.full(tuple(state.logical_to_physical_map.shape), -1)
        count = np.zeros(tuple(state.logical_replica_count.shape), np.int64)
        for layer, row in enumerate(held):
            for slot, expert in enumerate(row):
                slots[layer, expert, count[layer, expert]] = slot
                count[layer, expert] += 1
        state.physical_to_logical_map.copy_(torch.tensor(held))
        state.logical_to_physical_map.copy_(torch.from_numpy(slots))
        state.logical_replica_count.copy_(torch.from_numpy(count))


def replica_maps(runner: Any, replica_size: int, group: Any = None) -> list[ExpertMap] | None:
    """Live map of every replica, on every rank: replicas see different tokens and move experts differently.

    Collective over the world. RuntimeError when two ranks of one replica disagree.
    """
    mine = expert_map(runner)
    if mine is None:
        return None
    maps: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(maps, mine, group=group)
    for rank, held in enumerate(maps):
        if held != maps[rank - rank % replica_size]:
            raise RuntimeError(f"rank {rank} has another expert map than the first rank of its replica")
    return maps[::replica_size]


def map_tensors(runner: Any) -> list[torch.Tensor]:
    """vLLM's EPLB state, and integers that a module holds as a plain attribute, as vLLM-Ascend does expert maps."""
    held = [value for state in model_states(runner) for value in vars(state).values()]
    loose = [value for module in runner.get_model().modules() for value in vars(module).values()]
    held += [value for value in loose if isinstance(value, torch.Tensor) and value.dtype in MAP_DTYPES]
    return [value for value in held if isinstance(value, torch.Tensor)]


def save_maps(runner: Any) -> list[torch.Tensor]:
    """Host copies of what level 2 sleep would lose: vLLM allocates these among the weights, and keeps buffers only."""
    return [tensor.cpu().clone() for tensor in map_tensors(runner)]


@torch.inference_mode()  # vLLM's own updates have made some of them inference tensors
def restore_maps(runner: Any, saved: Sequence[torch.Tensor]) -> None:
    for tensor, copy in zip(map_tensors(runner), saved, strict=True):
        tensor.copy_(copy)
