"""What vLLM's CPU build (0.32) needs changed so that it behaves as the GPU builds do in this program.

Each patch names what it replaces; on another version, or when a name is missing, `patch` fails instead of guessing.
    weights   0.32 packs weights after loading (oneDNN, MoE kernels): writing new ones in place is then impossible or
              silently ignored. Plain kernels read every parameter in load layout, for ever.
    experts   the CPU expert kernel ignores the expert map and crashes with expert parallelism; ours honours it.
    gatherv   the CPU communicator has neither all_gatherv nor reduce_scatterv, which MoE with data parallelism needs.
    copies    redundant experts (EPLB) are offered on GPUs only: the check of the platform, the mapping kernel, the
              state that the CPU runner does not attach, and two stubs of device streams.
    segments  shared memory names are equal for all jobs of a host; they get the job's run id.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

VERSION = "0.32."


def patch() -> None:
    """Apply all patches, before the first engine; later calls do nothing. RuntimeError on an unknown vLLM."""
    import vllm
    from vllm.model_executor.layers import utils

    if utils.dispatch_cpu_unquantized_gemm.__module__ == __name__:
        return
    if not vllm.__version__.startswith(VERSION):
        raise RuntimeError(f"rollout on cpu supports vLLM {VERSION}x only, this is {vllm.__version__}")
    _plain_linears()
    _plain_experts()
    _gatherv()
    _redundant_experts()
    _unique_segments()
    torch._dynamo.config.disable = True  # compiling the samplers costs 2-15 s; the variable is read at import only


def _replace(owner: object, name: str, value: object) -> None:
    if not hasattr(owner, name):
        raise RuntimeError(f"vLLM changed: {owner} has no {name}; rollout/vllm_cpu.py needs an update")
    setattr(owner, name, value)


def _plain_linears() -> None:
    from vllm.model_executor.layers import utils

    def keep_load_layout(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = F.linear

    _replace(utils, "dispatch_cpu_unquantized_gemm", keep_load_layout)


def _plain_experts() -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    class PlainExperts(cpu_moe.CPUUnquantizedExperts):
        @classmethod
        def _supports_grouped_gemm(cls, moe_config):  # any size: there is no kernel to please
            return True, None

        def process_weights_after_loading(self, layer):
            """Nothing is packed: `apply` reads w13 and w2 as they were loaded."""

        def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts,
                  expert_map, *args, **kwargs):  # fmt: skip
            ids = topk_ids if expert_map is None else expert_map[topk_ids.long()]
            output.copy_(experts_forward(hidden_states, w1, w2, topk_weights, ids.long()))

    for name in ("CPUUnquantizedExperts", "X86CPUUnquantizedExperts", "ArmCPUUnquantizedExperts",
                 "PowerCPUUnquantizedExperts"):  # fmt: skip
        _replace(cpu_moe, name, PlainExperts)


def experts_forward(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor):
    """Weighted sum of SwiGLU experts, fp32 [tokens, hidden].

    x [tokens, hidden], w13 [experts, 2 * ffn, hidden], w2 [experts, hidden, ffn], weights and ids [tokens, k]; id -1 is
    an expert of another rank. Experts are added in ascending order.
    """
    out = torch.zeros(x.shape, dtype=torch.float32)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=len(w13) + 1).tolist()
    for expert, places in enumerate(order.split(counts)[1:]):
        if not len(places):
            continue
        rows = places // ids.shape[1]
        gate, up = F.linear(x[rows], w13[expert]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, w2[expert])
        out.index_add_(0, rows, y.float() * weights.flatten()[places, None].float())
    return out


def _gatherv() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self, tensors, dim=0, sizes=None):
        if not isinstance(tensors, torch.Tensor):
            return [all_gatherv(self, tensor, dim, sizes) for tensor in tensors]
        sizes = sizes or [len(tensors)] * self.world_size
        padded = tensors.new_zeros((max(sizes), *tensors.shape[1:]))
        padded[: len(tensors)] = tensors
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(self, tensor, dim=0, sizes=None):
        sizes = sizes or [len(tensor) // self.world_size] * self.world_size
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=self.device_group)
        return total.split(sizes)[self.rank_in_group].contiguous()

    _replace(CpuCommunicator, "all_gatherv", all_gatherv)
    _replace(CpuCommunicator, "reduce_scatterv", reduce_scatterv)


def _redundant_experts() -> None:
    import vllm.config.parallel as config
    import vllm.model_executor.layers.fused_moe.router.base_router as router
    import vllm.v1.worker.cpu.shm as shm
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    platform = config.current_platform

    class Platform:
        """Of the checks in that module only EPLB's asks for something like CUDA."""

        def __getattr__(self, name: str) -> Any:
            return getattr(platform, name)

        def is_cuda_alike(self) -> bool:
            return True

    load_model = CPUModelRunner.load_model

    def load_with_state(self: Any, *args: Any, **kwargs: Any) -> None:
        load_model(self, *args, **kwargs)
        if self.parallel_config.enable_eplb:
            self.eplb_state = EplbState(self.parallel_config, self.device)
            self._moe_model = self.model
            self.eplb_state.add_model(self.model, self.vllm_config.model_config)

    _replace(config, "current_platform", Platform())
    _replace(router, "eplb_map_to_physical_and_record", map_to_physical)
    _replace(CPUModelRunner, "load_model", load_with_state)
    shm._EventPlaceholder.elapsed_time = lambda self, other: 0.0
    if not torch.accelerator.is_available():
        torch.accelerator.current_stream = lambda *args: SimpleNamespace(synchronize=lambda: None)


def map_to_physical(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: Any,
    num_unpadded_tokens: Any = None,
) -> torch.Tensor:
    """vLLM's kernel in plain torch: expert -> slot, copies in turn; counts the load of slots."""
    ids = topk_ids.long().flatten()
    turn = torch.arange(len(ids)) % logical_replica_count[ids]
    physical = logical_to_physical_map[ids, turn]
    if bool(record_enabled):
        expert_load_view.index_add_(0, physical, torch.ones_like(physical, dtype=expert_load_view.dtype))
    return physical.view_as(topk_ids).to(topk_ids.dtype)


def _unique_segments() -> None:
    from vllm.distributed.device_communicators import cpu_communicator

    owner = cpu_communicator._CPUSHMDistributed
    original = owner.make_group_name
    tag = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}-{os.environ.get('MASTER_PORT', '0')}"
    _replace(owner, "make_group_name", staticmethod(lambda communicator: f"{tag}-{original(communicator).lstrip('/')}"))
