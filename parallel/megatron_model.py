"""Model shape + configuration -> Megatron model chunks, DDP, optimizer and learning-rate schedule on this rank."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.distributed import ProcessGroup

from launch.config import Config
from parallel.device import Device
from parallel.family import ModelShape
from parallel.grid import TrainGrid, stage_layers
from parallel.groups import check_members, meet
from parallel.megatron_cpu import on_device, repair
from parallel.megatron_layout import padded_vocab
from parallel.megatron_options import (
    check,
    optimizer_fields,
    set_yarn,
    split_passthrough,
    transformer_fields,
)
from parallel.megatron_spec import HiddenModel, block_spec, mark_parameters, store_name, te_block_spec

logger = logging.getLogger(__name__)


@dataclass
class TrainModel:
    chunks: list[DistributedDataParallel]
    """One per virtual pipeline stage; `.module` is the HiddenModel."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    tconfig: TransformerConfig
    shape: ModelShape
    grid: TrainGrid
    config: Config
    device: Device
    aux_loss_coeff: float | list[float]
    """moe_aux_loss_coeff as configured; the update divides it by the mini-batch's tokens."""
    z_loss_coeff: float | None
    skipped_steps: int = 0

    @property
    def tp_group(self) -> ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def pp_group(self) -> ProcessGroup:
        return parallel_state.get_pipeline_model_parallel_group()

    @property
    def cp_group(self) -> ProcessGroup:
        return parallel_state.get_context_parallel_group()

    @property
    def dp_cp_group(self) -> ProcessGroup:
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    @property
    def is_last_stage(self) -> bool:
        return parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    @property
    def buffers(self) -> list[Any]:
        """DDP's flat buffers (`.param_data`, `.grad_data`), dense ones before the experts' of each chunk."""
        return [b for chunk in self.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Store name "CHUNK:PARAMETER" -> parameter, in a fixed order."""
        for index, chunk in enumerate(self.chunks):
            for name, parameter in chunk.module.named_parameters():
                yield f"{index}:{store_name(name)}", parameter

    def stores(self) -> dict[str, Tensor]:
        """Live parameter storage by the names of megatron_layout; writing to it must be followed by after_load()."""
        return {name: parameter.data for name, parameter in self.named_parameters()}

    def after_load(self) -> None:
        """Make the optimizer's fp32 masters equal to the parameters that were written from outside."""
        with on_device(self.device):
            self.optimizer.reload_model_params()

    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer.param_groups else 0.0


def build(
    shape: ModelShape,
    config: Config,
    grid: TrainGrid,
    device: Device,
    total_steps: int,
    router: type[TopKRouter] = TopKRouter,
) -> TrainModel:
    """The training side on this rank; weights are uninitialised until stores() are written and after_load() called.

    torch.distributed must be initialised. `total_steps`: optimizer steps of the whole run, for the lr schedule.
    ValueError, with the numbers and the option, for what this layout, model and device cannot do together.
    """
    transformer, optimizer, ddp = split_passthrough(config.train.megatron, config.train.spec)
    check(config, shape, grid, device)
    repair(device, config.train.npu_adaptor)
    with on_device(device):
        groups = _initialize(grid, config)
        if device.kind == "npu":
            meet(groups, device)
        tconfig = TransformerConfig(**{**transformer_fields(config, shape, grid, device), **transformer})
        if shape.rope_scaling:
            set_yarn(tconfig, shape.rope_scaling, shape.max_positions)
        oconfig = OptimizerConfig(**{**optimizer_fields(config, device), **optimizer})
        dconfig = DistributedDataParallelConfig(
            **{"grad_reduce_in_fp32": True, "use_distributed_optimizer": True, **ddp}
        )
        chunks = [
            DistributedDataParallel(tconfig, dconfig, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(_build_chunks(shape, config, grid, tconfig, router, device))
        ]
        for buffer in (b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)):
            buffer.param_data.zero_()  # vocabulary padding is never loaded, and must not be what memory held before
        _connect(tconfig, dconfig, chunks)
        if device.kind == "cuda" and config.train.spec == "torch":
            _add_gradients_in_one_pass(chunks)
        megatron_optimizer = get_megatron_optimizer(oconfig, chunks, use_gloo_process_groups=False)
        if config.train.optimizer.kind == "sgd":
            _use_sgd(megatron_optimizer)
        elif device.kind == "cuda":
            _use_fused_adam(megatron_optimizer)
        scheduler = _scheduler(megatron_optimizer, config, total_steps)
    return TrainModel(
        chunks=chunks,
        optimizer=megatron_optimizer,
        scheduler=scheduler,
        tconfig=tconfig,
        shape=shape,
        grid=grid,
        config=config,
        device=device,
        aux_loss_coeff=tconfig.moe_aux_loss_coeff,
        z_loss_coeff=tconfig.moe_z_loss_coeff,
    )


def _initialize(grid: TrainGrid, config: Config) -> list[ProcessGroup]:
    """Megatron's process groups, checked against the grid, and its random number generators."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.vpp if grid.vpp > 1 else None,
        context_parallel_size=grid.cp,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.etp,
        order=grid.order,
        distributed_timeout_minutes=max(1, int(config.runtime.deadline_s // 60)),
        create_gloo_process_groups=False,
    )
    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp-cp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "etp": parallel_state.get_expert_tensor_parallel_group(),
        "edp": parallel_state.get_expert_data_parallel_group(),
    }
    members = {name: torch.distributed.get_process_group_ranks(group) for name, group in groups.items()}
    check_members(torch.distributed.get_rank(), grid, members)
    model_parallel_cuda_manual_seed(config.seed + 1)
    return list(groups.values())


def _build_chunks(
    shape: ModelShape, config: Config, grid: TrainGrid, tconfig: TransformerConfig, router: type, device: Device
) -> Iterator[HiddenModel]:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    train = config.train
    layers = stage_layers(shape.num_layers, grid.pp, grid.vpp, train.first_stage_layers, train.last_stage_layers)
    layers_of = te_block_spec if train.spec == "te" else block_spec
    for index, held in enumerate(layers[stage]):
        vp_stage = index if grid.vpp > 1 else None
        model = HiddenModel(
            tconfig,
            layers_of(tconfig, len(held), router),
            vocab_size=padded_vocab(shape.vocab, grid.tp),
            max_sequence_length=shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="yarn" if shape.rope_scaling else "rope",
            rotary_base=shape.rope_theta,
            vp_stage=vp_stage,
        )
        _move(model, device)
        mark_parameters(model)
        yield model


def _move(model: HiddenModel, device: Device) -> None:
    """Module.to makes new parameters where torch cannot change a tensor's device in place, as on npu; Megatron's marks
    on them, such as router.weight.sequence_parallel, would be lost without a word.
    """
    marks = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    model.to(device.torch)
    for name, parameter in model.named_parameters():
        vars(parameter).update(marks[name])


def _connect(
    tconfig: TransformerConfig, dconfig: DistributedDataParallelConfig, chunks: list[DistributedDataParallel]
) -> None:
    """Hooks through which Megatron's schedules reach DDP."""
    several = len(chunks) > 1
    tconfig.no_sync_func = [chunk.no_sync for chunk in chunks] if several else chunks[0].no_sync
    if dconfig.overlap_grad_reduce:
        starts = [chunk.start_grad_sync for chunk in chunks]
        tconfig.grad_sync_func = starts if several else starts[0]
    # Losses arrive weighted, so nothing is divided by a number of tokens.
    tconfig.finalize_model_grads_func = lambda models, num_tokens=None, **kwargs: finalize_model_grads(models, **kwargs)


def _add_gradients_in_one_pass(chunks: list[DistributedDataParallel]) -> None:
    """Bf16 gradients into fp32 sums at the memory's rate, before DDP's own hook sees `grad_added_to_main_grad`."""
    from parallel.norm_kernels import add_to_main_grad

    for parameter in (p for chunk in chunks for p in chunk.parameters() if p.requires_grad):
        if parameter.dtype != torch.float32 and parameter.main_grad.dtype == torch.float32:
            parameter.register_post_accumulate_grad_hook(add_to_main_grad)


def _use_sgd(optimizer: MegatronOptimizer) -> None:
    """Plain SGD on the same fp32 masters; Megatron's distributed optimizer itself accepts only Adam."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:
            sgd = torch.optim.SGD([torch.zeros(1)], lr=0.0)  # its constructor refuses masters, which are views
            sgd.param_groups = [{**sgd.defaults, **group} for group in part.optimizer.param_groups]
            part.optimizer = sgd


def _use_fused_adam(optimizer: MegatronOptimizer) -> None:
    """One kernel over all tensors; torch's default takes a dozen passes, and temporaries as large as the state."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"] = True


def _scheduler(optimizer: MegatronOptimizer, config: Config, total_steps: int) -> OptimizerParamScheduler:
    """A run of fewer steps than the warm-up, such as total_steps=2 to try a job, sees the beginning of the warm-up."""
    options = config.train.optimizer
    warmup = options.lr_warmup_steps
    if warmup >= max(total_steps, 1):
        text = "the run ends within its warm-up: %d optimizer steps, train.optimizer.lr_warmup_steps = %d"
        logger.info(text, total_steps, warmup)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.train.lr,
        min_lr=options.min_lr if options.lr_schedule != "constant" else 0.0,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(total_steps, warmup + 1),
        lr_decay_style=options.lr_schedule,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def snapshot(model: TrainModel) -> list[Tensor]:
    """Host copy of all parameters of this rank, for `swapped`."""
    pinned = model.device.kind != "cpu"
    hosts = [torch.empty(b.param_data.shape, dtype=b.param_data.dtype, pin_memory=pinned) for b in model.buffers]
    model.device.to_host((buffer.param_data, host) for host, buffer in zip(hosts, model.buffers, strict=True))
    return hosts


@contextlib.contextmanager
def swapped(model: TrainModel, state: list[Tensor]) -> Iterator[None]:
    """Parameters are `state` inside, and bit for bit what they were afterwards. The optimizer is not touched.

    They change places: inside, `state` holds the live parameters, so that no third copy is needed.
    """
    _exchange(model, state)
    try:
        yield
    finally:
        _exchange(model, state)


def _exchange(model: TrainModel, state: list[Tensor], block: int = 1 << 26) -> None:
    for buffer, host in zip(model.buffers, state, strict=True):
        for here, there in zip(buffer.param_data.split(block), host.split(block), strict=True):
            held = here.clone()
            here.copy_(there)
            there.copy_(held)
