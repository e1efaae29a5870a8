"""Tiny random Hugging Face directories of every family, and helpers on stores, for tests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from parallel.family import model_shape
from parallel.hf import tensor_table
from parallel.layout import Layout, elements

BASE = dict(
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=37,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)
CONFIGS = {
    "llama": {**BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {**BASE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {**BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {
        **BASE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
}


@contextlib.contextmanager
def gloo(world: int) -> Iterator[None]:
    """The default process group of a rank function; nothing for one rank."""
    if world > 1:
        torch.distributed.init_process_group("gloo")
    yield
    if world > 1:
        torch.distributed.destroy_process_group()


def random_tensors(config: dict, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = tensor_table(model_shape(config))
    return {n: torch.randn(p.kind.tensor_shape, generator=generator).to(dtype) for n, p in table.items()}


def write_model(path: Path, config: dict, num_shards: int = 1, seed: int = 0, dtype=torch.bfloat16) -> dict:
    """Write a directory with the safetensors package; returns its tensors."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config, seed, dtype)
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text('{"eos_token_id": 0}')
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text("{}")
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return tensors
    names = list(tensors)
    weight_map = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::num_shards]}
        save_file(part, path / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def empty_stores(layout: Layout, rank: int, fill: float = 0.0) -> dict[str, torch.Tensor]:
    """Flat stores that reach as far as the pieces of `rank` do."""
    sizes: dict[str, int] = {}
    for piece in layout.pieces(rank):
        assert elements(piece.box)
        last = [hi - 1 for _, hi in piece.box[1:]]
        for layer in range(*piece.box[0]):
            name = piece.store_name(layer)
            sizes[name] = max(sizes.get(name, 0), piece.offset_of(*last) + 1)
    return {name: torch.full((size,), fill, dtype=getattr(torch, layout.dtype)) for name, size in sizes.items()}


def gathered(layout: Layout, stores_of: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """kind -> full logical tensor (layers, units, rows, cols) from the stores of all ranks; an independent reader."""
    dtype = getattr(torch, layout.dtype)
    full = {name: torch.full(kind.shape, float("nan"), dtype=dtype) for name, kind in layout.kinds.items()}
    for rank, stores in enumerate(stores_of):
        for piece in layout.pieces(rank):
            (_, units, rows, cols) = piece.box
            size = tuple(hi - lo for lo, hi in (units, rows, cols))
            for layer in range(*piece.box[0]):
                view = stores[piece.store_name(layer)].reshape(-1).as_strided(size, piece.strides, piece.offset)
                full[piece.kind][layer, slice(*units), slice(*rows), slice(*cols)] = view
    return full


def logical(config: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """kind -> full logical tensor from Hugging Face tensors."""
    parts: dict[str, list] = {}
    kinds = {}
    for name, place in tensor_table(model_shape(config)).items():
        kinds[place.kind.name] = place.kind
        parts.setdefault(place.kind.name, []).append(((place.layer, place.unit), tensors[name]))
    ordered = {k: [t for _, t in sorted(p, key=lambda row: row[0])] for k, p in parts.items()}
    return {k: torch.stack(p).reshape(kinds[k].shape) for k, p in ordered.items()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
    )
