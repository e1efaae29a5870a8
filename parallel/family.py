"""Hugging Face config.json -> the shape of a model and its kinds. One row per kind; a new family adds rows here.

Supported: Llama, Qwen2/2.5 (QKV bias), Qwen3 (QK norm), Qwen3-MoE. Pure; reads only a parsed config.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.layout import Kind

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


@dataclass(frozen=True)
class ModelShape:
    """What layouts, memory and the training model need to know; sizes in elements."""

    family: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Intermediate size of dense layers."""
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    max_positions: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    norm_topk_prob: bool = True

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.kv_heads


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a model directory. ValueError names the file when it is missing or not a JSON table."""
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"model.path: {file} does not exist; give a Hugging Face directory") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(config).__name__}")
    return config


def model_shape(config: dict[str, Any], where: str = "config.json") -> ModelShape:
    """ModelShape of a parsed config.json. ValueError names the field that is missing, malformed or unsupported."""
    read = _Reader(config, where)
    family = read.family()
    name = "num_experts" if "num_experts" in config else "num_local_experts"  # transformers 5 writes the latter
    experts = read.integer(name) if family == "qwen3_moe" else 0
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(f"{where}: mlp_only_layers / decoder_sparse_step mix dense and MoE layers: not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{where}: hidden_act {config['hidden_act']!r} is not supported; only silu")
    if config.get("mlp_bias"):
        raise ValueError(f"{where}: mlp_bias = true is not supported")
    if family != "qwen2" and config.get("attention_bias"):
        raise ValueError(f"{where}: attention_bias = true is supported for Qwen2 only (its output projection has none)")
    if config.get("use_sliding_window"):
        raise ValueError(f"{where}: use_sliding_window = true is not supported")
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    kv_heads = read.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = read.integer("head_dim", hidden // heads)
    if family == "qwen2" and head_dim * heads != hidden:
        raise ValueError(
            f"{where}: head_dim {head_dim} x num_attention_heads {heads} is not hidden_size {hidden}, which vLLM's "
            "Qwen2 takes for granted: it would build another model; Qwen3 and Llama may have any head_dim"
        )
    experts_per_token = read.integer("num_experts_per_tok") if experts else 0
    if experts_per_token > experts:
        raise ValueError(f"{where}: num_experts_per_tok {experts_per_token} exceeds num_experts {experts}")
    theta, scaling = read.rope()
    return ModelShape(
        family=family,
        num_layers=read.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=read.integer("intermediate_size"),
        vocab=read.integer("vocab_size"),
        tied=read.boolean("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        max_positions=read.integer("max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        experts=experts,
        experts_per_token=experts_per_token,
        expert_ffn=read.integer("moe_intermediate_size") if experts else 0,
        norm_topk_prob=read.boolean("norm_topk_prob", False) if experts else True,
    )


class _Reader:
    def __init__(self, config: dict[str, Any], where: str):
        self.config, self.where = config, where

    def family(self) -> str:
        names = self.config.get("architectures")
        name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
        if name not in FAMILIES:
            raise ValueError(f"{self.where}: architectures {names!r} is not supported; one of {sorted(FAMILIES)}")
        return FAMILIES[name]

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**31:
            raise ValueError(f"{self.where}: {key} must be an integer of at least {minimum}, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ValueError(f"{self.where}: {key} must be a positive number, got {value!r}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} must be true or false, got {value!r}")
        return value

    def rope(self) -> tuple[float, dict[str, Any] | None]:
        """(theta, scaling): newer configs keep both in rope_parameters, older ones in rope_theta and rope_scaling."""
        parameters = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if not isinstance(parameters, dict):
            raise ValueError(f"{self.where}: rope_parameters must be a table, got {parameters!r}")
        holder = _Reader({**{"rope_theta": self.config.get("rope_theta", 10000.0)}, **parameters}, self.where)
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in ("default", "yarn"):
            raise ValueError(f"{self.where}: rope_type {kind!r} is not supported; default or yarn")
        return holder.number("rope_theta", 10000.0), (dict(parameters) if kind == "yarn" else None)


def kinds(shape: ModelShape) -> dict[str, Kind]:
    """All kinds of the family, in a fixed order. A tied head is no kind: its holders hold "embed"."""
    n, h, d, groups = shape.num_layers, shape.hidden, shape.head_dim, shape.kv_heads
    q_rows, layer = shape.heads_per_group * d, "model.layers.{layer}."
    rows = [
        Kind("embed", "model.embed_tokens.weight", (1, 1, shape.vocab, h)),
        Kind("final_norm", "model.norm.weight", (1, 1, 1, h), 1),
        Kind("input_norm", layer + "input_layernorm.weight", (n, 1, 1, h), 1),
        Kind("post_norm", layer + "post_attention_layernorm.weight", (n, 1, 1, h), 1),
        Kind("q", layer + "self_attn.q_proj.weight", (n, groups, q_rows, h)),
        Kind("k", layer + "self_attn.k_proj.weight", (n, groups, d, h)),
        Kind("v", layer + "self_attn.v_proj.weight", (n, groups, d, h)),
        Kind("o", layer + "self_attn.o_proj.weight", (n, 1, h, groups * q_rows)),
    ]
    if not shape.tied:
        rows.insert(1, Kind("head", "lm_head.weight", (1, 1, shape.vocab, h)))
    if shape.qkv_bias:
        rows += [
            Kind("q_bias", layer + "self_attn.q_proj.bias", (n, groups, q_rows, 1), 1),
            Kind("k_bias", layer + "self_attn.k_proj.bias", (n, groups, d, 1), 1),
            Kind("v_bias", layer + "self_attn.v_proj.bias", (n, groups, d, 1), 1),
        ]
    if shape.qk_norm:
        rows += [
            Kind("q_norm", layer + "self_attn.q_norm.weight", (n, 1, 1, d), 1),
            Kind("k_norm", layer + "self_attn.k_norm.weight", (n, 1, 1, d), 1),
        ]
    if shape.is_moe:
        expert, e, f = layer + "mlp.experts.{unit}.", shape.experts, shape.expert_ffn
        rows += [
            Kind("router", layer + "mlp.gate.weight", (n, 1, e, h)),
            Kind("expert_gate", expert + "gate_proj.weight", (n, e, f, h)),
            Kind("expert_up", expert + "up_proj.weight", (n, e, f, h)),
            Kind("expert_down", expert + "down_proj.weight", (n, e, h, f)),
        ]
    else:
        rows += [
            Kind("gate", layer + "mlp.gate_proj.weight", (n, 1, shape.ffn, h)),
            Kind("up", layer + "mlp.up_proj.weight", (n, 1, shape.ffn, h)),
            Kind("down", layer + "mlp.down_proj.weight", (n, 1, h, shape.ffn)),
        ]
    return {kind.name: kind for kind in rows}
