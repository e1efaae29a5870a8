"""Routing replay: experts chosen elsewhere are forced in Megatron's routers, and taken back exactly once.

    R3   the engine's choices, recorded per sequence while it sampled, are replayed in the scoring and update passes
    R2   the scoring pass records its own choices, the update replays them

Only the choice is replayed: weights are the live logits' softmax over the chosen experts, so the router still learns.
Rows without a recorded choice (a sequence's last token, padding) route natively. Megatron 0.16.1's own RouterReplay is
not used: with pipeline stages and recomputation its gradients are silently wrong, and it mixes models.

    whole sequences [P + R - 1, layers of this rank's chunks (PP, VPP), k]  ->  packed micro-batch
      ->  this rank's zigzag of each sequence (CP)  ->  this rank's run of the tokens (SP)  ->  one queue per router

Left out: the load-balancing loss, which Megatron computes from the native choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from parallel.grid import stage_layers
from parallel.micro_batches import MicroBatch

NATIVE = -1
"""In place of an expert: this row was not recorded. Rows are either whole or native."""

MOST_DIFFERING = 0.5
"""Largest believable share of choices that differ from the live router's; rounding and a few updates give percents."""


class RouteQueue:
    """Recorded choices of one layer, what Megatron calls a router_replay. Forward passes pop `forward`; activation
    recomputation pops `again`, into which only forwards under checkpointing put: backward passes of a layer come in
    the order of its forwards, in every schedule."""

    def __init__(self) -> None:
        self.column = 0
        """Position of this layer in MicroBatch.routes."""
        self.forward: deque[Tensor] = deque()
        self.again: deque[Tensor] = deque()
        self.recorded: list[Tensor] | None = None
        """A list while a pass records: int16 [tokens, k] per forward."""
        self.recomputes = True
        """Off in scoring passes: Megatron checkpoints MoE layers there too, but nothing is ever recomputed."""
        self.used = 0
        """Forward passes that replayed."""
        self.tally: Tensor | None = None
        """int64 [2]: replayed rows, and those that the router itself would have sent to other experts."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, native: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """scores [tokens, experts] -> (scores, indices) [tokens, topk]; Megatron calls it in place of torch.topk."""
        if is_checkpointing() and torch.is_grad_enabled():
            indices = self.again.popleft()
            return scores.gather(1, indices), indices
        values, indices = native(scores, topk, num_groups, group_topk)
        if self.forward:
            indices = self._replay(indices)
            values = scores.gather(1, indices)
        if self.recorded is not None:
            self.recorded.append(indices.to(torch.int16))
        if is_checkpointing() and self.recomputes:
            self.again.append(indices)
        return values, indices

    def _replay(self, native: Tensor) -> Tensor:
        wanted = self.forward.popleft()
        if wanted.shape != native.shape:
            raise RuntimeError(f"routes of {tuple(wanted.shape)} (tokens, experts) for a pass of {tuple(native.shape)}")
        self.used += 1
        valid = wanted[:, 0] != NATIVE
        differs = (wanted.sort(-1).values != native.sort(-1).values).any(-1) & valid
        counts = torch.stack([valid.sum(), differs.sum()])
        self.tally = counts if self.tally is None else self.tally + counts
        return torch.where(valid[:, None], wanted, native)


class ReplayRouter(TopKRouter):
    """Goes into the layer spec in place of TopKRouter; without routes it is one."""

    def __init__(self, config: Any, pg_collection: Any = None):
        super().__init__(config=config, pg_collection=pg_collection)
        if config.moe_router_fusion:
            raise ValueError("rollout.routing_replay needs train.megatron.moe_router_fusion = false")
        self.router_replay = RouteQueue()

    def train(self, mode: bool = True) -> ReplayRouter:
        self.router_replay.recomputes = mode
        return super().train(mode)


def queues(chunk: Any) -> Iterator[tuple[int, RouteQueue]]:
    """(global layer, queue) of a model chunk, in order."""
    for layer in chunk.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            yield layer.layer_number - 1, router.router_replay


def feed(chunk: Any, routes: Tensor) -> None:
    """Queue one micro-batch's routes [tokens, layers of the rank, k] for the forward pass of `chunk` that is next."""
    of_chunk = [queue for _, queue in queues(chunk)]
    device = next(chunk.parameters()).device
    first, last = of_chunk[0].column, of_chunk[-1].column
    moved = routes[:, first : last + 1].to(device, non_blocking=device.type == "cuda").long()
    for queue in of_chunk:
        queue.forward.append(moved[:, queue.column - first])


def local_routes(
    routes: Mapping[int, np.ndarray], batch: MicroBatch, columns: Sequence[int], topk: int, tp_rank: int, tp: int
) -> Tensor:
    """Routes of whole sequences [tokens - 1, layers, k] -> int16 [T / tp, columns, k] of this rank, on the host.

    `routes`: by sequence number, every one that the micro-batch holds; `columns` of their layers are taken. ValueError
    when one is missing or has another length, layer count or k.
    """
    whole = np.full((int(batch.cu_seqlens[-1]), len(columns), topk), NATIVE, np.int16)
    for start, index, (_, stop) in zip(batch.cu_seqlens.tolist(), batch.indices, batch.spans, strict=False):
        if index not in routes:
            raise ValueError(f"sequence {index} has no recorded routes")
        rows, expected = routes[index], stop - start
        if rows.shape[0] != expected or rows.shape[2] != topk or rows.shape[1] <= max(columns):
            raise ValueError(
                f"sequence {index}: routes {rows.shape} for {expected} tokens, layer {max(columns)}, k {topk}"
            )
        whole[start:stop] = rows[:, list(columns)]
    return torch.from_numpy(whole[batch.rows.numpy()]).chunk(tp)[tp_rank].contiguous()


def layers_of_ranks(model: Any) -> list[list[int]]:
    """Global layers of every rank of the world, in the order of its chunks."""
    train, grid = model.config.train, model.grid
    ends = train.first_stage_layers, train.last_stage_layers
    stages = stage_layers(model.shape.num_layers, grid.pp, grid.vpp, *ends)
    return [[layer for chunk in stages[grid.coord(rank).pp] for layer in chunk] for rank in range(grid.world)]


class RoutingReplay:
    """Routes of the step's sequences, and their way into every micro-batch that is made of them.

    mode "none" does nothing; then any router may be in the model.
    """

    def __init__(self, mode: str, model: Any, coord: Any):
        assert mode in ("none", "R2", "R3"), mode
        self.mode, self.model, self.coord = mode, model, coord
        found = [pair for chunk in model.chunks for pair in queues(chunk.module)] if mode != "none" else []
        self.layers, self.queues = [layer for layer, _ in found], [queue for _, queue in found]
        held = [layer.layer_number - 1 for chunk in model.chunks for layer in chunk.module.decoder.layers]
        self.columns = [held.index(layer) for layer in self.layers]
        """Where `sequences` hold these layers."""
        for column, queue in enumerate(self.queues):
            queue.column = column
        self.sequences: Mapping[int, np.ndarray] = {}
        """R3: sequence number -> [tokens - 1, all layers of this rank, k]."""
        self.recorded: dict[tuple[int, ...], Tensor] = {}
        """R2: sequences of a micro-batch -> its routes on this rank."""
        self.consumed = 0
        """(token, layer) choices replayed on this rank in this step."""

    @contextmanager
    def scoring(self, batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Around the scoring pass over `batches`: R3 replays, R2 records."""
        if self.mode == "R2":
            with self.recording(batches):
                yield
        else:
            with self.replaying(batches):
                yield

    @contextmanager
    def replaying(self, batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Around one pass over `batches`, which take their routes. RuntimeError unless each was used exactly once."""
        if self.mode != "none":
            self.attach(batches)
        yield
        self.consumed += self.require_consumed(batches)

    def attach(self, batches: Iterable[MicroBatch]) -> None:
        """Give the micro-batches their routes; those without sequences route natively."""
        tp, topk = self.model.grid.tp, self.model.shape.experts_per_token
        for batch in batches:
            if not batch.indices:
                continue
            if self.mode == "R3":
                batch.routes = local_routes(self.sequences, batch, self.columns, topk, self.coord.tp, tp)
            else:
                batch.routes = self.recorded[tuple(batch.indices)]

    @contextmanager
    def recording(self, batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Keep the choices of the scoring pass over `batches` that runs inside, for `attach` (R2)."""
        for queue in self.queues:
            queue.recorded = []
        yield
        for number, batch in enumerate(batches):
            rows = [queue.recorded[number].cpu() for queue in self.queues if queue.recorded is not None]
            if batch.indices:
                self.recorded[tuple(batch.indices)] = torch.stack(rows, 1)
        for queue in self.queues:
            queue.recorded = None

    def require_consumed(self, batches: Sequence[MicroBatch]) -> int:
        """After a pass: every route of every micro-batch was used exactly once by every layer, and nothing is left.

        Returns the number of (token, layer) choices replayed on this rank. RuntimeError otherwise.
        """
        given = [batch.routes for batch in batches if batch.routes is not None]
        for layer, queue in zip(self.layers, self.queues, strict=True):
            left = len(queue.forward), len(queue.again)
            if queue.used != len(given) or any(left):
                raise RuntimeError(
                    f"layer {layer}: {queue.used} of {len(given)} recorded routes replayed, {left[0]} left for a "
                    f"forward pass and {left[1]} for recomputation"
                )
            queue.used = 0
        return sum(int((routes[:, :, 0] != NATIVE).sum()) for routes in given)

    def finish(self, tokens: int, passes: int, group: Any) -> dict[str, tuple[float, float]]:
        """End of a step: (sum, weight) of this rank's metrics. Forgets the step's routes. Collective over `group`.

        `tokens`: fed-back tokens of all sequences, which every layer replayed `passes` times in R3: RuntimeError when
        the ranks together replayed another number of choices.
        """
        if self.mode == "none":
            return {}
        replayed, differing = self.take_tally()
        sums = torch.tensor([self.consumed, replayed, differing])
        dist.all_reduce(sums, group=group)
        total, expected = int(sums[0]), tokens * self.model.shape.num_layers * passes
        if self.mode == "R3" and total != expected:
            raise RuntimeError(f"{total} recorded (token, layer) choices replayed by all ranks, not {expected}")
        if int(sums[2]) > MOST_DIFFERING * int(sums[1]):
            raise RuntimeError(
                f"{int(sums[2])} of {int(sums[1])} replayed choices are not what the routers would choose: routes of "
                "other tokens or layers, or an engine with other weights; rollout.routing_replay = none goes on without"
            )
        self.sequences, self.recorded, self.consumed = {}, {}, 0
        return {"training/routes_differ": (float(differing), float(replayed))}

    def take_tally(self) -> tuple[int, int]:
        """(choices replayed, those that differ from what the router itself would choose) on this rank since last."""
        tallies = [queue.tally for queue in self.queues if queue.tally is not None]
        for queue in self.queues:
            queue.tally = None
        total = torch.stack(tallies).sum(0).tolist() if tallies else [0, 0]
        return total[0], total[1]
