"""Bytes per rank and per host of a configuration, before anything is allocated. Pure; sums the pieces of the layouts.

    parameters   exact: what Megatron and vLLM allocate, padding of the vocabulary included
    gradients    fp32, whole on every rank          optimizer  fp32 masters and moments, cut over (expert) data parallel
    activations  arithmetic with stated constants: what a layer keeps, layers, micro-batches in flight, and the head
    KV cache     what is left of gpu_memory_utilization, in tokens

Phases follow the hand-over of device memory: generate, sync, log_probs, update. Left out on purpose: fragmentation and
what libraries allocate, which is one constant of the hardware table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launch.config import Config
from parallel.family import ModelShape
from parallel.grid import RolloutGrid, TrainGrid, stage_layers
from parallel.layout import Layout, elements
from parallel.megatron_layout import padded_vocab

GIB = 1 << 30
ITEM = {"bfloat16": 2, "float32": 4}
WORKING_SETS = 2.0
"""Of the layer that is being differentiated: its activations, and their gradients."""
HEAD_COPIES = 3
"""fp32 logits, their softmax and their gradient, of one chunk of tokens."""
ENGINE_VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to it."""
ENGINE_WORK_BYTES = 2 * GIB
"""Activations and graphs of the engine beside weights and cache."""


def grids(config: Config, world: int) -> tuple[TrainGrid, RolloutGrid]:
    t, r = config.train, config.rollout
    train = TrainGrid(world, t.tp, t.pp, t.vpp, t.cp, t.ep, t.etp or t.tp, t.order)
    return train, RolloutGrid(world, r.tp, r.dp, r.expert_parallel)


def store_elements(layout: Layout, rank: int) -> dict[str, int]:
    """Store -> elements that its boxes cover; padding is not counted."""
    found: dict[str, int] = {}
    for piece in layout.pieces_of(layout.coordinates[rank]):  # of this rank alone: a search asks thousands of layouts
        start, stop = piece.box[0]
        for layer in range(start, stop):
            name = piece.store_name(layer)
            found[name] = found.get(name, 0) + elements(piece.box) // (stop - start)
    return found


def train_parameters(layout: Layout, shape: ModelShape, grid: TrainGrid, rank: int) -> dict[str, int]:
    """Megatron's parameters of a rank by store name -> elements, with the padded rows of the vocabulary."""
    found, coord = store_elements(layout, rank), grid.coord(rank)
    rows = padded_vocab(shape.vocab, grid.tp) // grid.tp * shape.hidden
    if coord.pp == 0:
        found["0:embedding.word_embeddings.weight"] = rows
    if coord.pp == grid.pp - 1 and not (shape.tied and grid.pp == 1):
        found[f"{grid.vpp - 1}:output_layer.weight"] = rows
    return found


def engine_parameters(layout: Layout, shape: ModelShape, grid: RolloutGrid, rank: int) -> dict[str, int]:
    """vLLM's parameters of a rank by name -> elements, with the padded rows of the vocabulary."""
    found = store_elements(layout, rank)
    rows = -(-shape.vocab // ENGINE_VOCAB_MULTIPLE) * ENGINE_VOCAB_MULTIPLE // grid.tp * shape.hidden
    return found | {"model.embed_tokens.weight": rows} | ({} if shape.tied else {"lm_head.weight": rows})


@dataclass(frozen=True)
class TrainMemory:
    """Bytes of one rank's training side."""

    rank: int
    layers: int
    params: int
    grads: int
    optimizer: int
    optimizer_host: int
    """Of Adam on the host: masters, moments and gradients of its share."""
    activations: int
    forward: int
    """Activations of a pass without gradients."""
    stays: int
    """On the device while the engine generates."""
    stays_optimizer: int
    """On the device during a sync, beside the parameters."""
    host: int
    """What this rank keeps on its host: offloaded state, host optimizer, reference copy."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one rank's engine."""

    engine: int
    """Weights."""
    cache: int
    """Negative when not even the weights fit."""
    cache_tokens: int
    """Tokens of the KV cache of this rank's replica (of its data parallel part)."""


@dataclass(frozen=True)
class RankMemory(TrainMemory, EngineMemory):
    """Both, and the device bytes at the peak of each phase."""

    phases: dict[str, int] = field(default_factory=dict)


def optimizer_bytes(config: Config, dense: int, expert: int, grid: TrainGrid) -> tuple[int, int]:
    """(device, host) bytes of masters and moments of a rank that holds so many parameters; masters of fp32 parameters
    are the parameters themselves, and Megatron's host Adam keeps device masters beside its own.
    """
    options = config.train.optimizer
    share = -(-dense // (grid.dp * grid.cp)) + -(-expert // grid.edp)
    master = 0 if config.train.dtype == "float32" else 4
    moments = 8 if options.kind == "adam" else 0
    if not options.cpu_offload or config.runtime.device == "cpu":
        return share * (master + moments), 0
    on_host = options.cpu_offload_fraction
    device = share * (master + moments * (1 - on_host))
    return int(device), int(share * on_host * 16)


def layer_bytes(shape: ModelShape, grid: TrainGrid, item: int) -> dict[str, float]:
    """Activation bytes per token and layer, already cut over tp: `input`, `attention`, `ffn`.

    Sequence parallelism cuts tokens over tp outside of the matrix products, heads and columns inside of them. A rank of
    balanced experts sees as many routed tokens as it sends; with etp those of etp ranks, a column share each.
    """
    h, heads = shape.hidden, (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    attention = 3 * h + heads
    if shape.is_moe:
        routed = shape.experts_per_token * (2 * h * grid.etp + 3 * shape.expert_ffn)
        ffn = routed + 2 * h + shape.experts * 4 // item
    else:
        ffn = 2 * h + 3 * shape.ffn
    return {name: item * size / grid.tp for name, size in (("input", h), ("attention", attention), ("ffn", ffn))}


def activation_bytes(
    config: Config, shape: ModelShape, grid: TrainGrid, stage: int, layers: int, micro_batches: int
) -> tuple[int, int]:
    """(update, forward only) of a pipeline stage with that many layers; at most pp - stage micro-batches in flight."""
    tokens, item = config.train.micro_batch_tokens, ITEM[config.train.dtype]
    part = layer_bytes(shape, grid, item)
    kept = {
        "full": part["input"],
        "selective": part["attention"] + part["input"],
        "none": part["attention"] + part["ffn"],
    }[config.train.recompute]
    flying = min(micro_batches, grid.pp - stage)
    if grid.vpp > 1:
        flying = flying + (grid.vpp - 1) / grid.vpp * grid.pp
    one = part["attention"] + part["ffn"]
    head = 0
    if stage == grid.pp - 1:
        chunk = min(tokens, config.train.log_prob_chunk_tokens)
        head = HEAD_COPIES * 4 * chunk * padded_vocab(shape.vocab, grid.tp) // grid.tp
    update = tokens * (kept * layers * flying + WORKING_SETS * one) + head
    return int(update), int(tokens * one + head)


def cache_token_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of one token in the KV cache of one rank; heads are repeated when tp exceeds them."""
    heads = max(1, shape.kv_heads // config.rollout.tp)
    return 2 * shape.num_layers * heads * shape.head_dim * ITEM[config.rollout.dtype]


def rank_memory(
    config: Config,
    shape: ModelShape,
    layouts: tuple[Layout, Layout],
    rank: int,
    device_bytes: int,
    overhead: int,
    micro_batches: int = 1 << 30,
) -> RankMemory:
    """Memory of one rank on a device of `device_bytes`, of which libraries take `overhead`.

    layouts: Megatron's and vLLM's, on as many ranks as the job has. micro_batches: of one update.
    """
    train = train_memory(config, shape, layouts[0], rank, micro_batches)
    return combine(config, train, engine_memory(config, shape, layouts[1], rank, device_bytes), overhead)


def train_memory(config: Config, shape: ModelShape, layout: Layout, rank: int, micro_batches: int) -> TrainMemory:
    t, (grid, _) = config.train, grids(config, layout.world)
    stage, held = grid.coord(rank).pp, train_parameters(layout, shape, grid, rank)
    expert = sum(size for name, size in held.items() if ".experts." in name)
    dense = sum(held.values()) - expert
    params, grads = (dense + expert) * ITEM[t.dtype], (dense + expert) * 4
    optimizer, optimizer_host = optimizer_bytes(config, dense, expert, grid)
    split = stage_layers(shape.num_layers, grid.pp, grid.vpp, t.first_stage_layers, t.last_stage_layers)
    layers = sum(map(len, split[stage]))
    activations, forward = activation_bytes(config, shape, grid, stage, layers, micro_batches)
    away_params, away_optimizer = params * ("params" in t.offload), optimizer * ("optimizer" in t.offload)
    has_reference = bool(config.algorithm.kl_loss or config.algorithm.kl_reward)
    return TrainMemory(
        rank=rank,
        layers=layers,
        params=params,
        grads=grads,
        optimizer=optimizer,
        optimizer_host=optimizer_host,
        activations=activations,
        forward=forward,
        stays=params - away_params + optimizer - away_optimizer + (0 if t.offload else grads),
        stays_optimizer=optimizer - away_optimizer,
        host=away_params + away_optimizer + optimizer_host + params * has_reference,
    )


def engine_memory(config: Config, shape: ModelShape, layout: Layout, rank: int, device_bytes: int) -> EngineMemory:
    _, grid = grids(config, layout.world)
    engine = sum(engine_parameters(layout, shape, grid, rank).values()) * ITEM[config.rollout.dtype]
    cache = cache_bytes(config.rollout.vllm, device_bytes, engine)
    return EngineMemory(engine, cache, max(0, cache) // cache_token_bytes(config, shape))


def combine(config: Config, train: TrainMemory, engine: EngineMemory, overhead: int) -> RankMemory:
    """Peaks of the phases: training state leaves before the cache comes, gradients leave before the sync."""
    staging = 2 * 2 * (config.rollout.sync_staging_mib << 20)
    state = train.params + train.grads + train.optimizer + overhead
    phases = {
        "generate": engine.engine + max(0, engine.cache) + ENGINE_WORK_BYTES + train.stays + overhead,
        "sync": train.params + train.stays_optimizer + engine.engine + staging + overhead,
        "log_probs": state + train.forward,
        "update": state + train.activations,
    }
    return RankMemory(**vars(train), **vars(engine), phases=phases)


def cache_bytes(options: Mapping[str, Any], device_bytes: int, engine: int) -> int:
    """KV cache of one rank: as told, or what gpu_memory_utilization leaves; negative when not even the weights fit."""
    told = options.get("kv_cache_memory_bytes")
    if told:
        return int(told)
    return int(options.get("gpu_memory_utilization", 0.9) * device_bytes) - engine - ENGINE_WORK_BYTES


def refusals(memory: RankMemory, device_bytes: int, longest: int) -> list[str]:
    """Why this rank cannot run, each with the numbers; `longest`: tokens of the longest sequence."""
    found = [
        f"{phase}: rank {memory.rank} needs {used / GIB:.1f} GiB of {device_bytes / GIB:.1f}"
        for phase, used in memory.phases.items()
        if used > device_bytes
    ]
    if memory.cache_tokens < longest:
        found.append(
            f"generate: rank {memory.rank} has a KV cache of {memory.cache_tokens} tokens ({memory.cache / GIB:.1f} "
            f"GiB beside {memory.engine / GIB:.1f} GiB of weights), one sequence may need {longest}"
        )
    return found
