"""Scoring and updates through Megatron's pipeline schedules.

The loss is a plain sum of token losses that carry their global weights already. Nothing here or below divides by a
number of tokens, sequences, micro-batches or ranks: gradients are sums over micro-batches, data- and context-parallel
ranks, hence the same in every layout and packing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from parallel.log_prob import log_probs
from parallel.megatron_cpu import on_device
from parallel.megatron_experts import RouterWatch
from parallel.megatron_model import TrainModel
from parallel.micro_batches import MicroBatch, Values, build_micro_batches
from parallel.replay import feed

logger = logging.getLogger(__name__)

Stats = dict[str, tuple[Any, Any]]
LossFunction = Callable[[Tensor, "Tensor | None", MicroBatch], tuple[Tensor, Stats]]


def micro_batches(
    model: TrainModel,
    sequences: Sequence[np.ndarray],
    prompt_lengths: Sequence[int],
    indices: Sequence[Sequence[int]],
    fields: Mapping[str, Values],
) -> list[MicroBatch]:
    """This rank's part of `indices` (the pack plan's micro-batches of its data-parallel rank)."""
    grid = model.grid
    cp_rank = parallel_state.get_context_parallel_rank()
    return build_micro_batches(
        sequences, prompt_lengths, indices, fields, cp_rank, grid.cp, grid.tp, model.device.torch, model.cp_group
    )


def score(
    model: TrainModel, batches: Sequence[MicroBatch], temperature: float, entropy: bool = False
) -> list[tuple[Tensor, Tensor | None]]:
    """Per micro-batch (log-probs [T], entropy [T] or None), fp32, on every rank of the pipeline."""
    for chunk in model.chunks:
        chunk.eval()  # nothing is recomputed or queued for a backward pass; there is no dropout

    def head(chunk: Any, hidden: Tensor, batch: MicroBatch) -> Tensor:
        logp, ent = _head(model, chunk, hidden, batch, temperature, entropy)
        return torch.stack([logp, ent] if entropy else [logp])

    with on_device(model.device), torch.no_grad():
        results = _run(model, batches, head, forward_only=True)
        total = sum(batch.tokens.numel() for batch in batches)
        if model.is_last_stage:
            whole = torch.cat(results, -1)
        else:
            whole = torch.empty(2 if entropy else 1, total, dtype=torch.float32, device=model.device.torch)
        _broadcast_over_stages(model, whole)
    parts = whole.split([batch.tokens.numel() for batch in batches], -1)
    return [(part[0], part[1] if entropy else None) for part in parts]


def update(
    model: TrainModel,
    batches: Sequence[MicroBatch],
    loss_fn: LossFunction,
    temperature: float = 1.0,
    entropy: bool = False,
) -> dict[str, tuple[float, float]]:
    """One optimizer step; skipped when a gradient is not finite.

    Returns the loss function's stats, (sum, weight) over micro-batches, data- and context-parallel ranks, and
    loss, grad_norm (before clipping), lr, skipped (0 or 1), and of MoE models those of RouterWatch. The same on all
    ranks.
    """
    for chunk in model.chunks:
        chunk.train()
        chunk.zero_grad_buffer()

    def head(chunk: Any, hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, Stats]:
        logp, ent = _head(model, chunk, hidden, batch, temperature, entropy)
        loss, stats = loss_fn(logp, ent, batch)
        return loss, torch.zeros((), dtype=torch.int), {"loss": (loss.detach(), 1.0), **stats}

    with on_device(model.device):
        model.optimizer.zero_grad()
        _scale_auxiliary_losses(model, batches)
        watch = RouterWatch(model)
        with watch.during():
            results = _run(model, batches, head, forward_only=False)
        stats = _reduce_stats(model, results) | watch.stats(len(batches))
        lr = model.learning_rate()
        grad_norm, skipped = _step(model)
    stats["loss"] = (stats["loss"][0], 1.0)
    return stats | {"grad_norm": (grad_norm, 1.0), "lr": (lr, 1.0), "skipped": (float(skipped), 1.0)}


def _run(model: TrainModel, batches: Sequence[MicroBatch], head: Callable[..., Any], forward_only: bool) -> list[Any]:
    """All micro-batches through the pipeline; results of `head` in their order on the last stage, else []."""

    def forward_step(iterator: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(iterator)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_kv=batch.cu_seqlens,
            max_seqlen_q=batch.max_seqlen,
            max_seqlen_kv=batch.max_seqlen,
        )
        if batch.routes is not None:
            feed(chunk.module, batch.routes)
        hidden = chunk(batch.tokens[None], batch.positions[None], None, packed_seq_params=packed)
        return hidden, lambda output, non_loss_data=False: head(chunk, output, batch)

    several = len(model.chunks) > 1
    _check_count(model, len(batches))
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in model.chunks] if several else iter(batches),
        model=model.chunks if several else model.chunks[0],
        num_microbatches=len(batches),
        seq_length=1,  # every message says its own length
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _check_count(model: TrainModel, count: int) -> None:
    """Ranks with unequal numbers of micro-batches would wait for each other without end."""
    extremes = torch.tensor([count, -count], device=model.device.torch)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    most, least = int(extremes[0]), -int(extremes[1])
    if most != least or not count:
        raise RuntimeError(f"between {least} and {most} micro-batches on the ranks; all need the same, at least 1")
    if len(model.chunks) > 1 and count % model.grid.pp:
        raise ValueError(f"{count} micro-batches; train.vpp > 1 needs a multiple of train.pp = {model.grid.pp}")


def _head(
    model: TrainModel, chunk: Any, hidden: Tensor, batch: MicroBatch, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """hidden [T / tp, 1, h] of the last stage -> log-probs and entropy [T]."""
    if model.grid.tp > 1:  # the backward pass sums the vocabulary shards' shares and scatters the tokens
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    return log_probs(
        hidden[:, 0],
        chunk.module.head_weight(),
        batch.labels,
        temperature,
        model.tp_group,
        model.shape.vocab,
        model.config.train.log_prob_chunk_tokens,
        entropy,
    )


def _broadcast_over_stages(model: TrainModel, tensor: Tensor) -> None:
    if model.grid.pp > 1:
        dist.broadcast(tensor, dist.get_process_group_ranks(model.pp_group)[-1], group=model.pp_group)


def _scale_auxiliary_losses(model: TrainModel, batches: Sequence[MicroBatch]) -> None:
    """Makes load-balancing and z losses of the mini-batch the token-weighted mean of those of its micro-batches.

    Megatron multiplies a micro-batch's loss by its tokens on this rank, 1 / (tp * cp) of them, and expects a division
    by all tokens of the mini-batch at the end. Ours never comes, so the coefficients are divided beforehand. The shares
    that data-parallel ranks have of the global loss make it up, but would be averaged: they are multiplied by dp.
    """
    tconfig = model.tconfig
    if not model.shape.is_moe or not (model.aux_loss_coeff or model.z_loss_coeff):
        return
    tokens = torch.tensor([sum(batch.tokens.numel() for batch in batches)], device=model.device.torch)
    dist.all_reduce(tokens, group=model.dp_cp_group)
    total, coeff = int(tokens) / (model.grid.tp * model.grid.cp), model.aux_loss_coeff

    def scaled(kind: str, coefficient: float) -> float:
        return coefficient * (model.grid.dp if kind == "global_aux_loss" else 1) / total

    kind = tconfig.moe_router_load_balancing_type
    several = isinstance(kind, list)
    tconfig.moe_aux_loss_coeff = list(map(scaled, kind, coeff)) if several else scaled(kind, coeff)
    tconfig.moe_z_loss_coeff = None if model.z_loss_coeff is None else model.z_loss_coeff / total


def _reduce_stats(model: TrainModel, results: Sequence[Stats]) -> dict[str, tuple[float, float]]:
    """Sums over micro-batches, then over data- and context-parallel ranks of the last stage, then sent to all."""
    names: list[Any] = [list(results[0]) if results else None]
    if model.grid.pp > 1:
        last = dist.get_process_group_ranks(model.pp_group)[-1]
        dist.broadcast_object_list(names, src=last, group=model.pp_group, device=model.device.torch)
    sums = torch.zeros(len(names[0]), 2, dtype=torch.float32, device=model.device.torch)
    if model.is_last_stage:
        for result in results:
            pairs = [torch.as_tensor(x, dtype=torch.float32) for name in names[0] for x in result[name]]
            sums += torch.stack([pair.detach().to(sums.device) for pair in pairs]).view(-1, 2)
        dist.all_reduce(sums, group=model.dp_cp_group)
    _broadcast_over_stages(model, sums)
    return {name: (total, weight) for name, (total, weight) in zip(names[0], sums.tolist(), strict=True)}


def _step(model: TrainModel) -> tuple[float, bool]:
    """(gradient norm over all ranks before clipping, whether the step was skipped)."""
    optimizer = model.optimizer
    optimizer.prepare_grads()
    grad_norm = _grad_norm(model)
    if not np.isfinite(grad_norm):
        model.skipped_steps += 1
        where = _culprit(model)
        logger.warning("step skipped (%d so far): gradient norm %s, %s", model.skipped_steps, grad_norm, where)
        return grad_norm, True
    limit = model.config.train.optimizer.clip_grad
    coefficient = limit / (grad_norm + 1e-6)
    if limit > 0 and coefficient < 1:
        grads = [p.grad for part in optimizer.chained_optimizers for p in part.get_parameters() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, coefficient)
    optimizer.step_with_ready_grads()
    model.scheduler.step(1)
    return grad_norm, False


def _grad_norm(model: TrainModel) -> float:
    """Each element counted once: shared parameters and copies over tp are left out by Megatron's own selection."""
    parts = model.optimizer.chained_optimizers
    grads = [grad for part in parts for grad in part.get_main_grads_for_grad_norm()]
    square = torch.zeros((), dtype=torch.float32, device=model.device.torch)
    if grads:
        square = torch.stack(torch._foreach_norm(grads)).square().sum()
    dist.all_reduce(square)  # the distributed optimizer shards over all ranks
    return float(square.sqrt())


def _culprit(model: TrainModel) -> str:
    """Names the first parameter with a non-finite gradient on each rank that has one (a collective)."""
    bad = (name for name, p in model.named_parameters() if not bool(torch.isfinite(p.main_grad).all()))
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, next(bad, None))
    named = [f"rank {rank}: {name}" for rank, name in enumerate(found) if name]
    return "not finite: " + "; ".join(named[:8]) + (f" and on {len(named) - 8} more ranks" if len(named) > 8 else "")
