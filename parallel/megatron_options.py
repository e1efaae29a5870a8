"""Our options -> Megatron's three configurations, and the check of [train.megatron].

Fields that we set ourselves are refused in [train.megatron], with the name of our option where there is one.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import megatron.core
import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from launch.config import Config, ConfigError, check_passthrough
from parallel.device import Device
from parallel.family import ModelShape
from parallel.grid import TrainGrid

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

OURS = {
    "tensor_model_parallel_size": "train.tp",
    "sequence_parallel": "train.tp",
    "pipeline_model_parallel_size": "train.pp",
    "virtual_pipeline_model_parallel_size": "train.vpp",
    "context_parallel_size": "train.cp",
    "expert_model_parallel_size": "train.ep",
    "expert_tensor_parallel_size": "train.etp",
    "num_layers_in_first_pipeline_stage": "train.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "train.last_stage_layers",
    "bf16": "train.dtype",
    "fp16": "train.dtype",
    "params_dtype": "train.dtype",
    "pipeline_dtype": "train.dtype",
    "recompute_granularity": "train.recompute",
    "lr": "train.lr",
    "min_lr": "train.optimizer.min_lr",
    "weight_decay": "train.optimizer.weight_decay",
    "adam_beta1": "train.optimizer.beta1",
    "adam_beta2": "train.optimizer.beta2",
    "adam_eps": "train.optimizer.eps",
    "clip_grad": "train.optimizer.clip_grad",
    "optimizer": "train.optimizer.kind",
    "optimizer_cpu_offload": "train.optimizer.cpu_offload",
    "optimizer_offload_fraction": "train.optimizer.cpu_offload_fraction",
    "moe_enable_routing_replay": "rollout.routing_replay",
}
FIXED = {
    "use_distributed_optimizer": "always on",
    "grad_reduce_in_fp32": "always on",
    "overlap_param_gather": "not supported: parameters must be complete when a step ends",
    "overlap_param_gather_with_optimizer_step": "not supported: parameters must be complete when a step ends",
    "calculate_per_token_loss": "always on: losses are weighted before they reach Megatron",
    "variable_seq_lengths": "always on: micro-batches are packed",
    "attention_dropout": "always 0",
    "hidden_dropout": "always 0",
    "perform_initialization": "always off: weights are loaded",
    "deallocate_pipeline_outputs": "depends on the device: releasing them under gloo corrupts what is still being sent",
    "overlap_p2p_comm": "depends on train.vpp",
    "batch_p2p_comm": "depends on train.vpp",
    "num_distributed_optimizer_instances": "always 1",
    "use_megatron_fsdp": "not supported",
    "mtp_num_layers": "not supported",
    "moe_router_enable_expert_bias": "the engine's models have no router bias: it would route differently",
    "moe_shared_expert_intermediate_size": "the supported families have no shared expert",
    "check_for_nan_in_grad": "always checked: the update is skipped and the parameter named",
    "use_precision_aware_optimizer": "needs TransformerEngine's Adam, which is not used",
    "moe_grouped_gemm": "always on, whatever train.spec is",
}
WITH_TE = {
    "moe_token_dispatcher_type": "is alltoall unless DeepEP's flex is at hand",
    "gradient_accumulation_fusion": "needs Apex or TransformerEngine",
    "masked_softmax_fusion": "needs Apex or TransformerEngine",
    "apply_rope_fusion": "needs TransformerEngine",
    "moe_permute_fusion": "needs TransformerEngine",
    "moe_router_fusion": "needs TransformerEngine",
}
"""Free only with train.spec = te."""
SHAPE_FIELDS = (
    "num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size layernorm_epsilon "
    "normalization gated_linear_unit add_bias_linear add_qkv_bias qk_layernorm num_moe_experts moe_router_topk "
    "moe_ffn_hidden_size moe_router_pre_softmax"
).split()
FIXED |= {name: "comes from the model's config.json" for name in SHAPE_FIELDS}


def split_passthrough(
    options: dict[str, Any], spec: str = "torch"
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """[train.megatron] -> fields of (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig).

    A name that several of them have goes to all. ConfigError (a ValueError) for unknown, owned and fixed names.
    """
    for name in options:
        if name in FIXED:
            raise ConfigError(f"train.megatron.{name} is not free: {FIXED[name]}")
        if name in WITH_TE and spec != "te":
            raise ConfigError(f"train.megatron.{name} is free with train.spec = te only: it {WITH_TE[name]}")
    classes = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    fields = [{f.name: f.type for f in dataclasses.fields(c)} for c in classes]
    merged = {**fields[2], **fields[1], **fields[0]}
    upstream = f"megatron-core {megatron.core.__version__} {', '.join(c.__name__ for c in classes)}"
    check_passthrough(options, merged, OURS, "train.megatron", upstream)
    transformer, optimizer, ddp = ({k: v for k, v in options.items() if k in known} for known in fields)
    return transformer, optimizer, ddp


def check(config: Config, shape: ModelShape, grid: TrainGrid, device: Device) -> None:
    """ValueError for layouts and options that Megatron would refuse late, or not at all."""
    train = config.train
    if train.spec == "te" and (device.kind != "cuda" or not importlib.util.find_spec("transformer_engine")):
        why = "is not installed" if device.kind == "cuda" else f"does not run on {device.kind}"
        raise ValueError(f"train.spec = te, but transformer_engine {why}; use train.spec = torch")
    divisions = [
        ("attention heads", shape.heads, "train.tp", grid.tp),
        ("intermediate size", shape.ffn, "train.tp", grid.tp),
        ("experts", shape.experts, "train.ep", grid.ep),
        ("expert intermediate size", shape.expert_ffn, "train.etp", grid.etp),
    ]
    for what, size, option, degree in divisions:
        if size % degree:
            raise ValueError(f"{size} {what} do not divide by {option} = {degree}")
    if max(shape.kv_heads, grid.tp) % min(shape.kv_heads, grid.tp):
        raise ValueError(f"{shape.kv_heads} KV heads and train.tp = {grid.tp}: one must be a multiple of the other")
    if not shape.is_moe and grid.ep > 1:
        raise ValueError(f"train.ep = {grid.ep}, but the model has no experts; set train.ep = 1")


def transformer_fields(config: Config, shape: ModelShape, grid: TrainGrid, device: Device) -> dict[str, Any]:
    """Arguments of TransformerConfig, without [train.megatron]."""
    train, dtype = config.train, DTYPES[config.train.dtype]
    fields: dict[str, Any] = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=grid.tp,
        sequence_parallel=grid.tp > 1,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.vpp if grid.vpp > 1 else None,
        context_parallel_size=grid.cp,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.etp,
        num_layers_in_first_pipeline_stage=train.first_stage_layers or None,
        num_layers_in_last_pipeline_stage=train.last_stage_layers or None,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        perform_initialization=False,
        use_cpu_initialization=device.kind == "cpu",
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        # gloo still sends from a released output: silent corruption under the interleaved schedule
        deallocate_pipeline_outputs=device.kind != "cpu",
        # one batched send/receive mixes up the neighbours when the previous and the next stage are the same rank
        overlap_p2p_comm=grid.vpp > 1,
        batch_p2p_comm=grid.vpp == 1,
        bias_activation_fusion=device.kind != "cpu",
        bias_dropout_fusion=device.kind == "cuda",
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        moe_token_dispatcher_type="alltoall",  # also for dense models: the default refuses variable lengths
    )
    if shape.is_moe:
        fields |= dict(
            num_moe_experts=shape.experts,
            moe_router_topk=shape.experts_per_token,
            moe_ffn_hidden_size=shape.expert_ffn,
            moe_router_pre_softmax=not shape.norm_topk_prob,
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            moe_router_dtype="fp32",
            moe_grouped_gemm=train.spec == "te",
        )
    return fields | _recompute(train.recompute, shape.is_moe)


def _recompute(mode: str, is_moe: bool) -> dict[str, Any]:
    if mode == "full":
        return dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    if mode == "selective":  # the largest activations of a layer; attention keeps none of its scores anyway
        return dict(recompute_granularity="selective", recompute_modules=["moe" if is_moe else "mlp"])
    return {}


def optimizer_fields(config: Config, device: Device) -> dict[str, Any]:
    """Arguments of Megatron's OptimizerConfig, without [train.megatron]."""
    train, options = config.train, config.train.optimizer
    offload = options.cpu_offload and device.kind != "cpu"
    return dict(
        optimizer="adam",  # SGD is put in its place afterwards
        lr=train.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.beta1,
        adam_beta2=options.beta2,
        adam_eps=options.eps,
        clip_grad=options.clip_grad,
        bf16=train.dtype == "bfloat16",
        params_dtype=DTYPES[train.dtype],
        use_distributed_optimizer=True,
        optimizer_cpu_offload=offload,
        optimizer_offload_fraction=options.cpu_offload_fraction if offload else 0.0,
        overlap_cpu_optimizer_d2h_h2d=offload,
    )


def set_yarn(transformer: TransformerConfig, scaling: dict[str, Any], max_positions: int) -> None:
    """YaRN as Hugging Face reads it. Megatron takes these as attributes that its dataclass does not declare."""
    both = "mscale" in scaling and "mscale_all_dim" in scaling
    values = dict(
        yarn_rotary_scaling_factor=float(scaling["factor"]),
        yarn_original_max_position_embeddings=int(scaling.get("original_max_position_embeddings") or max_positions),
        yarn_beta_fast=float(scaling.get("beta_fast") or 32.0),
        yarn_beta_slow=float(scaling.get("beta_slow") or 1.0),
        yarn_mscale=float(scaling["mscale"]) if both else None,
        yarn_mscale_all_dim=float(scaling["mscale_all_dim"]) if both else None,
        yarn_correction_range_round_to_int=bool(scaling.get("truncate", True)),
    )
    if scaling.get("attention_factor") is not None:
        raise ValueError(f"rope_scaling.attention_factor = {scaling['attention_factor']} is not supported; remove it")
    for name, value in values.items():
        setattr(transformer, name, value)
