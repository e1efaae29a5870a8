"""Megatron's own GPTModel, filled from Hugging Face tensors, written by Megatron's dist_checkpointing on gloo ranks.

Independent of parallel/: the fill follows Megatron's parameter names and its rules of fusing and cutting.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

TE_DENSE = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""What TransformerEngine's layers call the two norms that they fuse; of MoE layers the first only."""


def write(rank: int, out: str, config: dict, tensors: dict[str, torch.Tensor], layout: dict, names: str, extra: dict):
    """Save the model, an optimizer's tensor and objects of every rank; `names` "local" or "te", `extra` as metadata."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    with _world(layout) as tp:
        model = _model(config, layout, names)
        fill(model, config, tensors, layout, tp)
        state = model.sharded_state_dict(metadata=dict(extra) or None)
        moment = ShardedTensor.from_rank_offsets("decoder.final_layernorm.weight", torch.ones(3), replica_id=rank)
        other = {"moment": moment}
        add_prefix_for_sharding(other, "optimizer.state.exp_avg.")
        state |= other | {
            "rng": ShardedObject("rng_state", {"rank": rank}, (dist.get_world_size(),), (rank,)),
            "args": {"tp": layout.get("tp", 1)},
        }
        if rank == 0:
            os.makedirs(out)
        dist.barrier()
        dist_checkpointing.save(state, out, ("torch_dist", 1))
        return sorted(model.state_dict())


@contextlib.contextmanager
def _world(layout: dict) -> Iterator[int]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from parallel.device import Device
    from parallel.megatron_cpu import on_device, repair

    dist.init_process_group("gloo")
    repair(Device("cpu"))
    with on_device(Device("cpu")):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.get("tp", 1),
            pipeline_model_parallel_size=layout.get("pp", 1),
            expert_model_parallel_size=layout.get("ep", 1),
            expert_tensor_parallel_size=layout.get("etp", 1),
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(1)
        yield parallel_state.get_tensor_model_parallel_rank()
        dist.barrier()
    parallel_state.destroy_model_parallel()


def _model(config: dict, layout: dict, names: str) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    experts = config.get("num_experts")
    moe = dict(
        num_moe_experts=experts,
        moe_router_topk=config.get("num_experts_per_tok"),
        moe_ffn_hidden_size=config.get("moe_intermediate_size"),
        moe_token_dispatcher_type="alltoall",
    )
    has_norm = "Qwen3" in config["architectures"][0]
    tconfig = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]),
        ffn_hidden_size=config["intermediate_size"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias="Qwen2F" in config["architectures"][0],
        qk_layernorm=has_norm,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        tensor_model_parallel_size=layout.get("tp", 1),
        pipeline_model_parallel_size=layout.get("pp", 1),
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp", 1),
        num_layers_in_first_pipeline_stage=layout.get("first"),
        use_cpu_initialization=True,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **(moe if experts else {}),
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=has_norm, normalization="RMSNorm"
    )
    wanted = dict(list(TE_DENSE.items())[: 1 if experts else 2])
    spec.submodules.sharded_state_dict_keys_map = wanted if names == "te" else {}
    padded = -(-config["vocab_size"] // (8 * layout.get("tp", 1))) * 8 * layout.get("tp", 1)
    return GPTModel(
        tconfig,
        spec,
        vocab_size=padded,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        position_embedding_type="rope",
    ).bfloat16()


def fill(model: Any, config: dict, tensors: dict[str, torch.Tensor], layout: dict, tp: int) -> None:
    """Every parameter from the Hugging Face tensors, by name."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    stage = parallel_state.get_pipeline_model_parallel_rank()
    first_layer = get_transformer_layer_offset(model.config, None, stage)
    local_experts = config.get("num_experts", 0) // layout.get("ep", 1)
    first_expert = parallel_state.get_expert_model_parallel_rank() * local_experts
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(_value(name, config, tensors, layout.get("tp", 1), tp, first_layer, first_expert))


def _value(name: str, config: dict, tensors: dict, size: int, tp: int, first_layer: int, first_expert: int) -> Any:
    words = name.split(".")
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tied = name.startswith("emb") or config["tie_word_embeddings"]
        whole = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
        rows = -(-len(whole) // (8 * size)) * 8 * size
        return torch.cat([whole, whole.new_zeros(rows - len(whole), whole.shape[1])]).chunk(size)[tp]
    if name == "decoder.final_layernorm.weight":
        return tensors["model.norm.weight"]
    layer, rest = f"model.layers.{int(words[2]) + first_layer}.", ".".join(words[3:])
    simple = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "mlp.router.weight": "mlp.gate.weight",
    }
    if rest in simple:
        return tensors[layer + simple[rest]]
    if rest.startswith("self_attention.linear_qkv."):
        parts = [tensors[f"{layer}self_attn.{x}_proj.{words[-1]}"] for x in "qkv"]
        groups = [part.chunk(config["num_key_value_heads"]) for part in parts]
        return torch.cat([t for group in zip(*groups, strict=True) for t in group]).chunk(size)[tp]
    if rest == "self_attention.linear_proj.weight":
        return tensors[layer + "self_attn.o_proj.weight"].chunk(size, 1)[tp]
    mlp = layer + "mlp."
    if "experts" in words:
        mlp += f"experts.{int(words[words.index('local_experts') + 1]) + first_expert}."
        size, tp = 1, 0
    if rest.endswith("linear_fc1.weight"):
        return torch.cat([tensors[f"{mlp}{half}_proj.weight"].chunk(size)[tp] for half in ("gate", "up")])
    assert rest.endswith("linear_fc2.weight"), name
    return tensors[mlp + "down_proj.weight"].chunk(size, 1)[tp]
