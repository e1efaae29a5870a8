"""The layers that Megatron assembles, in plain torch on every device: RMSNorm, packed attention, stacked experts.

TransformerEngine is optional: torch's own kernels (rms_norm, varlen attention, grouped_mm) nearly match what it fuses.
Its spec (train.spec = "te") is written from Megatron's sources and has not been run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from parallel import npu
from parallel.attention import CoreAttention


class HiddenModel(GPTModel):
    """A GPTModel whose last stage ends before the output layer: [tokens / tp, 1, hidden] after the final norm.

    Logits are made chunk by chunk in the loss instead (log_prob.py); `head_weight` is their matrix.
    """

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def head_weight(self) -> Tensor:
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class RMSNorm(nn.Module):
    """Megatron's own refuses sequence parallelism; the flag on the weight makes its gradient summed over tp."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any):
        super().__init__()
        self.weight = _parameter(config, hidden_size)
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "npu":
            return npu.rms_norm(x, self.weight, self.eps)
        if x.device.type == "cuda":
            from parallel.norm_kernels import LARGEST, rms_norm

            if x.size(-1) <= LARGEST:
                return rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class StackedExperts(nn.Module):
    """All local experts in two parameters: weight1 [experts, gate|up, hidden], weight2 [experts, hidden, ffn]."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None, **kwargs: Any):
        super().__init__()
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        self.weight1 = _parameter(config, num_local_experts, 2 * width, config.hidden_size)
        self.weight2 = _parameter(config, num_local_experts, config.hidden_size, width)
        self.activation = _fused_swiglu if config.bias_activation_fusion else _swiglu
        for weight in (self.weight1, self.weight2):
            weight.tensor_model_parallel = True  # counted by every rank in the gradient norm

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """x [t, hidden] sorted by expert, probs [t]."""
        inner = self.activation(grouped_linear(x, self.weight1, tokens_per_expert), probs.unsqueeze(-1))
        return grouped_linear(inner, self.weight2, tokens_per_expert), None


def _swiglu(both: Tensor, probs: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return (F.silu(gate) * up * probs).to(both.dtype)


def _fused_swiglu(both: Tensor, probs: Tensor) -> Tensor:
    return npu.swiglu(both, probs) if both.device.type == "npu" else weighted_bias_swiglu_impl(both, None, probs)


def _parameter(config: TransformerConfig, *sizes: int) -> nn.Parameter:
    device = (
        None if config.use_cpu_initialization else "cuda"
    )  # torch's default; the current one, adaptors map the name
    return nn.Parameter(torch.ones(*sizes, dtype=config.params_dtype, device=device))


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [t, k] in runs of counts[e] rows, weight [e, n, k] -> [t, n]."""
    kind = x.device.type
    if x.size(0) == 0 or (kind == "cuda" and x.dtype != torch.bfloat16):  # no tokens at all, or no kernel
        return torch.cat([part @ w.t() for part, w in zip(x.split(counts.tolist()), weight, strict=True)])
    if kind == "npu":
        return npu.grouped_linear(x, weight, counts)
    ends = counts.to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
    kernel = getattr(F, "grouped_mm", None) or torch._grouped_mm  # private until torch 2.12
    return kernel(x, weight.transpose(1, 2), offs=ends)


def block_spec(config: TransformerConfig, num_layers: int, router: type = TopKRouter) -> TransformerBlockSubmodules:
    """Spec of one model chunk. `router` may be a subclass of TopKRouter (routing replay)."""
    return TransformerBlockSubmodules(layer_specs=[_layer_spec(config, router)] * num_layers, layer_norm=RMSNorm)


TE_NAMES = {
    ".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
    ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight",
}
"""TransformerEngine fuses two norms into the linear layer behind them; stores keep the plain names."""


def store_name(name: str) -> str:
    return next((name.replace(te, plain) for te, plain in TE_NAMES.items() if name.endswith(te)), name)


def te_block_spec(config: TransformerConfig, num_layers: int, router: type = TopKRouter) -> TransformerBlockSubmodules:
    """The same layers from TransformerEngine; each expert is a parameter (megatron_layout's stacked_experts off)."""
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=True, qk_layernorm=config.qk_layernorm
    )
    if config.num_moe_experts:
        layer.submodules.mlp.submodules.router = router
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)


def _layer_spec(config: TransformerConfig, router: type) -> ModuleSpec:
    if config.num_moe_experts:
        experts = MoESubmodules(experts=ModuleSpec(module=StackedExperts), router=router)
        mlp = ModuleSpec(module=MoELayer, submodules=experts, metainfo={"fuse_pre_mlp_layernorm": False})
    else:
        mlp = ModuleSpec(
            module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        )
    head_norm = RMSNorm if config.qk_layernorm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=CoreAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def mark_parameters(model: nn.Module) -> None:
    """Attributes that Megatron 0.16.1 sets only where it initialises weights itself, or only for ep > 1.

    Without the first, the gradient norm skips the shards of tp ranks above 0; without the second, expert gradients
    miss their sum over tp when ep = 1 and etp = 1 < tp (and checkpoints of ep = 1 and ep > 1 differ in structure).
    """
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
            dim = int(isinstance(module, RowParallelLinear))
            for parameter in (module.weight, getattr(module, "bias", None)):
                if parameter is not None and (dim == 0 or parameter is module.weight):
                    parameter.tensor_model_parallel = True
                    parameter.partition_dim, parameter.partition_stride = dim, 1
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False
