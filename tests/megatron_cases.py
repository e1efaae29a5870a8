"""Tiny models, one RL batch, its float64 reference by transformers, and the same batch through Megatron in any layout.

The reference is computed once in the test's process and read by the ranks from a file.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parallel.device import Device
from parallel.family import kinds, model_shape, read_config
from parallel.grid import TrainGrid
from parallel.layout import Layout, Piece
from parallel.packing import pack

TEMPERATURE = 0.7
SGD_LR = 0.1
CLIP = 0.05
ADAM = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
BASE = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=300,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, decoder_sparse_step=1)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "qwen3_yarn": ("Qwen3", {"rope_parameters": YARN}),
    "moe": ("Qwen3Moe", MOE),
}


def make_model(name: str, directory: Path) -> Any:
    """Random transformers model in float64, its config.json in `directory`."""
    import transformers

    family, extra = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**BASE, **extra})
    config._experts_implementation = "eager"  # the grouped kernel has no float64
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than the default, norms too, so that nothing is nearly linear
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.08))
            if parameter.dim() == 1:
                parameter += 1.0
    saved = {**config.to_dict(), **extra, "architectures": [f"{family}ForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(saved, default=str))
    return model.double().eval()


def make_batch(vocab: int, num: int = 11, seed: int = 3, multiple: int = 1) -> dict[str, Any]:
    """Sequences of unequal length with per-response-token fields; weights are those of a global token mean.

    Lengths are multiples of `multiple`.
    """
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, 9, num).tolist()
    responses = rng.integers(1, 34, num)
    if num > 5:
        responses[2], responses[5] = 1, 40
    responses += -(np.array(prompts) + responses) % multiple
    sequences = [rng.integers(0, vocab, p + r) for p, r in zip(prompts, responses, strict=True)]
    total = int(responses.sum())
    fields = {
        "weight": [np.full(r, 1.0 / total, np.float32) for r in responses],
        "advantage": [rng.standard_normal(r).astype(np.float32) for r in responses],
        "old": [(-5.5 + 0.3 * rng.standard_normal(r)).astype(np.float32) for r in responses],
    }
    return dict(sequences=sequences, prompts=prompts, fields=fields)


def objective(logp: torch.Tensor, entropy: torch.Tensor, old: Any, advantage: Any, weight: Any) -> torch.Tensor:
    """Clipped ratio + k3 KL - entropy bonus, weighted sum: every term of a real loss, smooth enough to compare."""
    ratio = (0.1 * (logp - old)).exp()
    policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    difference = 0.1 * (old - logp)
    return ((policy + 0.1 * (difference.exp() - difference - 1) - 0.05 * entropy) * weight).sum()


def reference(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """float64 log-probs and entropies per sequence, loss, gradients by Hugging Face name, gradient norm."""
    logps, entropies, loss = [], [], 0.0
    model.zero_grad()
    for i, (ids, prompt) in enumerate(zip(batch["sequences"], batch["prompts"], strict=True)):
        logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0, prompt - 1 : -1] / TEMPERATURE
        log_p = logits.log_softmax(-1)
        logp = log_p.gather(-1, torch.from_numpy(ids[prompt:])[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        old, advantage, weight = (
            torch.from_numpy(batch["fields"][k][i]).double() for k in ("old", "advantage", "weight")
        )
        part = objective(logp, entropy, old, advantage, weight)
        part.backward()
        loss += float(part)
        logps.append(logp.detach().numpy())
        entropies.append(entropy.detach().numpy())
    grads = hf_tensors({name: p.grad for name, p in model.named_parameters()})
    norm = float(sum(g.square().sum() for g in grads.values()).sqrt())
    return dict(logps=logps, entropies=entropies, loss=loss, grads=grads, norm=norm)


def train_reference(model: Any, batch: dict[str, Any], steps: int, make: Any, clip: float) -> tuple[list[float], Any]:
    """(losses, tensors afterwards) of `steps` updates in float64."""
    model = copy.deepcopy(model)
    plain = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    optimizer = make([{"params": matrices}, {"params": plain, "weight_decay": 0.0}])
    losses = []
    for _ in range(steps):
        losses.append(reference(model, batch)["loss"])
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return losses, hf_tensors({k: v.detach() for k, v in model.named_parameters()})


def hf_tensors(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers 5 fuses experts in memory; checkpoints hold one tensor per expert and projection."""
    out = {}
    for name, tensor in named.items():
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                out[f"{name[:-12]}{e}.gate_proj.weight"], out[f"{name[:-12]}{e}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(tensor):
                out[f"{name[:-9]}{e}.down_proj.weight"] = down
        else:
            out[name] = tensor
    return out


def prepare(name: str, directory: Path, num: int = 11, training: bool = False) -> Path:
    """Write config.json and case.pt (weights, batch, reference) for `run_case`.

    With `training` also what two steps of SGD and five of AdamW give.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model = make_model(name, directory)
    batch = make_batch(BASE["vocab_size"], num)
    weights = hf_tensors({k: v.detach().float() for k, v in model.named_parameters()})
    case = dict(weights=weights, batch=batch, reference=reference(model, batch))
    if training:
        _, case["sgd"] = train_reference(model, batch, 2, lambda groups: torch.optim.SGD(groups, SGD_LR), 0.0)
        case["adam"], _ = train_reference(model, batch, 5, lambda groups: torch.optim.AdamW(groups, **ADAM), CLIP)
    torch.save(case, directory / "case.pt")
    return directory


def pieces_with_tensors(layout: Layout, rank: int, tensors: dict[str, torch.Tensor]) -> Any:
    """(piece, layer, the Hugging Face values of its box [units, rows, cols], largest element of the whole tensor)."""
    for piece in layout.pieces(rank):
        kind = layout.kinds[piece.kind]
        _, units, rows, cols = kind.shape
        (l0, l1), (u0, u1), (r0, r1), (c0, c1) = piece.box
        for layer in range(l0, l1):
            if kind.unit_is_tensor:
                whole = torch.stack([tensors[kind.tensor_name(layer, u)] for u in range(u0, u1)])
                yield piece, layer, whole[:, r0:r1, c0:c1], whole.abs().max()
            else:
                whole = tensors[kind.tensor_name(layer)].reshape(units, rows, cols)
                yield piece, layer, whole[u0:u1, r0:r1, c0:c1], whole.abs().max()


def view(store: torch.Tensor, piece: Piece) -> torch.Tensor:
    """[units, rows, cols] of a piece in its store."""
    sizes = [b - a for a, b in piece.box[1:]]
    return store.as_strided(sizes, piece.strides, store.storage_offset() + piece.offset)


def fill(stores: dict[str, torch.Tensor], layout: Layout, rank: int, tensors: dict[str, torch.Tensor]) -> None:
    for store in stores.values():
        store.zero_()
    for piece, layer, values, _ in pieces_with_tensors(layout, rank, tensors):
        view(stores[piece.store_name(layer)], piece).copy_(values)


def make_config(layout: dict[str, Any], **train: Any) -> Any:
    from launch.config import Config, OptimizerConfig, TrainConfig

    keys = {f.name for f in dataclasses.fields(TrainConfig)}
    options = {"dtype": "float32", "log_prob_chunk_tokens": 13} | {k: v for k, v in layout.items() if k in keys}
    optimizer = OptimizerConfig(**{"kind": "sgd", "clip_grad": 0.0, "weight_decay": 0.0, **train.pop("optimizer", {})})
    return Config(train=TrainConfig(**{**options, "lr": SGD_LR, "optimizer": optimizer, **train}))


def build_case(directory: Path, layout: dict[str, Any], total_steps: int = 10, kind: str = "cpu", **train: Any) -> Any:
    """(model with the case's weights, layout object, case) on this rank, in fp32 unless told."""
    from parallel.megatron_layout import megatron_layout
    from parallel.megatron_model import build

    world, rank = dist.get_world_size(), dist.get_rank()
    case = torch.load(directory / "case.pt", weights_only=False)
    shape = model_shape(read_config(directory))
    axes = {k: layout.get(k, 1) for k in ("tp", "pp", "vpp", "cp", "ep", "etp")}
    grid = TrainGrid(world, **axes, order=layout.get("order", "tp-cp-ep-dp-pp"))
    config = make_config(layout, **train)
    model = build(shape, config, grid, Device(kind), total_steps)
    _built.append(model)
    first, last = config.train.first_stage_layers, config.train.last_stage_layers
    table = megatron_layout(shape, grid, first, last, "float32")
    assert set(kinds(shape)) == set(table.kinds)
    fill(model.stores(), table, rank, case["weights"])
    model.after_load()
    return model, table, case


def make_micro_batches(model: Any, case: dict[str, Any], budget: int, minimum: int = 1) -> list[Any]:
    from parallel import megatron_step as step
    from parallel.micro_batches import padded_lengths

    batch, grid = case["batch"], model.grid
    lengths = [padded_lengths([len(s)], grid.cp, 1)[0] for s in batch["sequences"]]
    plan = pack(lengths, grid.dp, budget, grid.pp if grid.vpp > 1 else 1, minimum)
    mine = plan.micro_batches[grid.coord(dist.get_rank()).dp]
    return step.micro_batches(model, batch["sequences"], batch["prompts"], mine, batch["fields"])


def loss_fn(logp: torch.Tensor, entropy: torch.Tensor, mb: Any) -> Any:
    f = mb.fields
    loss = objective(logp, entropy, f["old"], f["advantage"], f["weight"])
    return loss, {"entropy": ((entropy * f["weight"]).sum(), f["weight"].sum())}


def gather_grads(model: Any) -> None:
    """The distributed optimizer leaves each rank its shard of the reduced gradients; put the others beside it."""
    for buffer in model.buffers:
        for bucket in buffer.buckets:
            size, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
            own = bucket.grad_data.chunk(size)[rank].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=buffer.data_parallel_group)


def grad_error(model: Any, table: Layout, grads: dict[str, torch.Tensor]) -> float:
    """Largest |difference| / largest |reference| of the tensor, over all parameters of this rank."""
    stores = {name: p.main_grad for name, p in model.named_parameters()}
    worst = 0.0
    for piece, layer, want, largest in pieces_with_tensors(table, dist.get_rank(), grads):
        got = view(stores[piece.store_name(layer)], piece).cpu()
        worst = max(worst, float((got - want).abs().max() / largest.clamp(min=1e-8)))
    return worst


def run_case(directory: Path, layout: dict[str, Any], budget: int = 128, minimum: int = 1, **train: Any) -> Any:
    """Errors of one layout against the reference: logp, entropy, loss, grad, norm, ppo (score - update), sgd
    (parameters after two plain steps, where the case has them)."""
    from parallel import megatron_step as step
    from parallel.micro_batches import unpack

    model, table, case = build_case(directory, layout, **train)
    ref = case["reference"]
    batches = make_micro_batches(model, case, budget, minimum)
    scored = step.score(model, batches, TEMPERATURE, True)
    logps, entropies = (unpack(batches, [s[k] for s in scored]) for k in (0, 1))
    errors = {"num_mb": float(len(batches))}
    errors["logp"] = max([float(np.abs(v - ref["logps"][i]).max()) for i, v in logps.items()], default=0.0)
    errors["entropy"] = max([float(np.abs(v - ref["entropies"][i]).max()) for i, v in entropies.items()], default=0.0)
    drift = []

    def checked(logp: torch.Tensor, entropy: torch.Tensor, mb: Any) -> Any:
        drift.append((logp.detach() - scored[batches.index(mb)][0]).abs().max())
        return loss_fn(logp, entropy, mb)

    stats = step.update(model, batches, checked, TEMPERATURE, True)
    gather_grads(model)
    errors["ppo"] = float(max(drift)) if drift else 0.0
    errors["loss"] = abs(stats["loss"][0] - ref["loss"])
    errors["grad"] = grad_error(model, table, ref["grads"])
    errors["norm"] = abs(stats["grad_norm"][0] - ref["norm"]) / ref["norm"]
    if "sgd" in case:
        step.update(model, make_micro_batches(model, case, budget, minimum), loss_fn, TEMPERATURE, True)
        errors["sgd"] = store_error(model, table, case["sgd"])
    return errors


def store_error(model: Any, table: Layout, tensors: dict[str, torch.Tensor]) -> float:
    """Largest |difference| of any parameter element of this rank."""
    stores, worst = model.stores(), 0.0
    for piece, layer, want, _ in pieces_with_tensors(table, dist.get_rank(), tensors):
        worst = max(worst, float((view(stores[piece.store_name(layer)], piece).cpu() - want).abs().max()))
    return worst


def run_adam(directory: Path, layout: dict[str, Any], budget: int = 128, minimum: int = 1) -> dict[str, float]:
    """Error of the losses of 5 clipped steps of AdamW."""
    from parallel import megatron_step as step

    adam = dict(kind="adam", clip_grad=CLIP, weight_decay=ADAM["weight_decay"], beta1=0.9, beta2=0.95)
    model, _, case = build_case(directory, layout, lr=ADAM["lr"], optimizer=adam)
    batches = make_micro_batches(model, case, budget, minimum)
    losses = [step.update(model, batches, loss_fn, TEMPERATURE, True)["loss"][0] for _ in case["adam"]]
    return {"adam": max(abs(a - b) for a, b in zip(losses, case["adam"], strict=True))}


def run_layouts(
    rank: int, cases: list[tuple[str, dict[str, Any], dict[str, Any]]], kind: str = "cpu"
) -> list[dict[str, float]]:
    """For run_ranks: each (case directory, layout, options of run_case) in one launch; errors are maxima over ranks."""
    results = []
    for directory, layout, options in cases:
        with world(kind):
            options = dict(options)
            adam = options.pop("adam", False)
            errors = run_case(Path(directory), layout, kind=kind, **options)
            if adam:
                errors |= run_adam(Path(directory), layout, options.get("budget", 128), options.get("minimum", 1))
            worst = torch.tensor(
                list(errors.values()), dtype=torch.float32, device=Device(kind).torch
            )  # hccl has no float64
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        results.append(dict(zip(errors, worst.tolist(), strict=True)))
    return results


@functools.cache
def _store() -> dist.Store:
    return next(dist.rendezvous("env://"))[0]


_numbers = itertools.count()
_built: list[Any] = []


@contextlib.contextmanager
def world(kind: str = "cpu") -> Iterator[None]:
    """All process groups of one case. They have threads, which end only when nothing refers to them: models are
    cycles, Megatron's rotary embedding is cached together with its context-parallel group, and its token dispatchers
    keep tensors whose autograd graph leads back to the model, which the garbage collector cannot see."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings import RotaryEmbedding

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(f"case{next(_numbers)}", _store())
    dist.init_process_group(Device(kind).backend, store=store, rank=rank, world_size=size)
    yield
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    _release()
    RotaryEmbedding.forward.cache_clear()
    gc.collect()


def _release() -> None:
    for module in (m for model in _built for chunk in model.chunks for m in chunk.modules()):
        if hasattr(module, "token_dispatcher"):
            module.token_dispatcher = None
    _built.clear()
