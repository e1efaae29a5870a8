"""vLLM inside this process: build, generate, sleep, wake, close.

One engine object per rank, started by vLLM's external launcher in our process group: the world is replicas x dp x tp,
tp fastest. It starts with dummy weights; the resharder writes real ones into `stores` before each generation. TP ranks
sample independently and agree because every request has a seed of its own and all decisions are equal.
Left out: pipeline parallelism, servers, LoRA, vLLM's own weight transfer (only tests use its loaders).
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from launch.config import Config, ConfigError, check_passthrough
from parallel.family import ModelShape
from parallel.grid import RolloutGrid
from parallel.layout import Layout
from rollout import routes, vllm_cpu, vllm_packed, vllm_params
from rollout.batch import Request, Sample
from rollout.engine_options import OWNED, check_allocator, engine_arguments, environment, model_stop_ids
from rollout.expert_placement import aligned_expert_maps
from rollout.schedule import Dealt, Progress, Queue, hand_out, longest_first
from rollout.vllm_layout import vllm_layout

log = logging.getLogger(__name__)


class Engine:
    """The engine of this rank. Construction and `generate` are collective over the world; construct before training
    tensors fill the device. `stop_token_ids` are the tokenizer's end-of-text ids, added to the model's and config's.

    slots     requests that run at the same time on one worker (vLLM's max_num_seqs)
    layout    where the world keeps which weights; stores  this rank's parameters by layout name, but for
    packed    modules whose weights a kernel packs (see vllm_packed.py)
    """

    def __init__(
        self, config: Config, shape: ModelShape, grid: RolloutGrid, device: Any, stop_token_ids: Sequence[int] = ()
    ):
        if not dist.is_initialized():
            raise ValueError("the engine needs torch.distributed to be initialised: it runs in the job's own ranks")
        self.config, self.grid, self.device = config, grid, device
        self.rank = dist.get_rank()
        self.coord = grid.coord(self.rank)
        stops = {*stop_token_ids, *config.rollout.stop_token_ids, *model_stop_ids(config.model.path)}
        self.stop_token_ids = sorted(stops)
        arguments = engine_arguments(config, shape, grid, device.kind)
        check_allocator(arguments, os.environ, device.kind)
        check_fields(config, grid, device.kind)
        with _kept_environment(self.rank % grid.replica_size if grid.dp > 1 else self.rank), _kept_random_state(device):
            self._engine = _build(arguments, device.kind)
        worker = self._engine.model_executor.driver_worker.worker
        self._sleep_level = vllm_params.sleep_level(worker) if config.rollout.sync_weights else 1
        self._runner = worker.model_runner
        self.model = self._runner.get_model()
        self._capture = None
        if config.rollout.routing_replay == "R3" and device.kind == "cpu":
            sizes = (shape.num_layers, shape.experts)
            self._capture = routes.RouteCapture(self._runner, self._engine.vllm_config.parallel_config, *sizes)
        # without it (a small model, room for both sides) vLLM's sleep would still watch the free memory, and fail
        self._sleeps = device.kind == "cpu" or arguments["enable_sleep_mode"]
        self.slots = self._engine.vllm_config.scheduler_config.max_num_seqs
        self.packed = vllm_packed.packed_modules(self.model)
        self.stores = self._plain_stores()
        transposed = vllm_params.experts_transposed(self.stores, shape.hidden, device.kind == "npu")
        self._layout_rule = partial(vllm_layout, shape, grid, config.rollout.dtype, transposed_experts=transposed)
        self._expert_maps, self._expert_state = self._live_maps(), []
        self.layout = self._layout_rule(expert_maps=self._expert_maps)
        everything = self.stores | {name: meta for packed in self.packed for name, meta in packed.loaded.items()}
        padding = vllm_params.check(self.layout.pieces(self.rank), everything, config.rollout.dtype)
        self._padding = {name: count for name, count in padding.items() if name in self.stores}
        self._must_keep = config.rollout.compare_at_start
        vllm_params.clear_padding(self.stores, self._padding)
        self._store = dist.distributed_c10d._get_default_store()
        self._name = f"rollout/{self._store.add(f'rollout/engines/{self.rank}', 1)}"
        self._rounds = 0
        self._flying: dict[str, Request] = {}

    def _plain_stores(self) -> dict[str, torch.Tensor]:
        """Parameters that are written in place; the others belong to `packed`."""
        packed = {name for module in self.packed for name in module.names}
        return {name: store for name, store in vllm_params.stores(self.model).items() if name not in packed}

    def _live_maps(self) -> list[routes.ExpertMap] | None:
        """Where every replica has its experts now (a collective); None without redundant ones."""
        redundant = self.config.rollout.redundant_experts
        return routes.replica_maps(self._runner, self.grid.replica_size) if redundant else None

    def place_experts(self, shape: ModelShape, training: Layout) -> None:
        """Redundant experts start on the ranks that train them. Before the first sync: weights do not move along."""
        if redundant := self.config.rollout.redundant_experts:
            maps = aligned_expert_maps(training, shape, self.grid, redundant)
            routes.place_experts(self._runner, maps[self.coord.replica])
            self._expert_maps = self._live_maps()
            self.layout = self._layout_rule(expert_maps=self._expert_maps)

    # The loop: see rollout/schedule.py

    def generate(self, requests: Sequence[Request], label: str = "generate") -> list[Sample]:
        """Draw one sample per request. All ranks pass the same requests, in any order; collective over a replica.

        Each sample is returned by exactly one rank of the world: the ranks of a TP group, which all have it, take
        turns, so that scoring is shared too. ValueError when a request cannot fit the engine.
        """
        self._check(requests)
        self._rounds += 1
        name = f"{self._name}/{self._rounds}"
        ordered = longest_first(requests)
        progress = Progress(len(ordered), lambda n: self._store.add(f"{name}/done", n), self.rank == 0, label)
        samples: list[Sample] = []
        with progress:
            for finished in hand_out(self, ordered, self._feed(len(ordered), name)):
                samples += finished
                if finished and self.coord.tp == 0:
                    progress.count(len(finished))
        return samples[self.coord.tp :: self.grid.tp]

    def _check(self, requests: Sequence[Request]) -> None:
        limit = self._engine.vllm_config.model_config.max_model_len
        for r in requests:
            if not 0 < len(r.prompt_ids) <= limit - r.max_tokens or r.max_tokens < 1:
                raise ValueError(
                    f"prompt {r.prompt_id}: {len(r.prompt_ids)} prompt + {r.max_tokens} response tokens do not fit "
                    f"{limit} (data.max_prompt_tokens + data.max_response_tokens)"
                )
            if r.stop and not self.config.rollout.stop:
                raise ValueError("stop strings need a tokenizer in the engine: set rollout.stop")

    def _feed(self, total: int, name: str) -> Dealt | Queue:
        workers, worker = self.grid.replicas * self.grid.dp, self.coord.replica * self.grid.dp + self.coord.dp
        if self.config.rollout.schedule == "static":
            return Dealt(total, workers, worker)
        return Queue(total, workers, worker, self.slots, lambda count: self._advance(f"{name}/taken", count))

    def _advance(self, key: str, count: int) -> int:
        """Take `count` from the shared counter; TP ranks hear the leader's answer."""
        start = self._store.add(key, count) - count if self.coord.tp == 0 else 0
        if self.grid.tp == 1:
            return start
        from vllm.distributed.parallel_state import get_tp_group

        answer, group = torch.tensor([start]), get_tp_group()
        dist.broadcast(answer, src=group.ranks[0], group=group.cpu_group)
        return int(answer)

    def add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = f"{request.prompt_id}-{request.sample_id}"
        self._flying[name] = request
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=max(request.top_k, 0),
            min_p=request.min_p,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop=list(request.stop),
            stop_token_ids=self.stop_token_ids,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(request.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(name, {"prompt_token_ids": request.prompt_ids}, params)

    def busy(self) -> bool:
        return self._engine.has_unfinished_requests()

    def step(self) -> list[Sample]:
        return [self._sample(output) for output in self._engine.step() if output.finished]

    def _sample(self, output: Any) -> Sample:
        request, result = self._flying.pop(output.request_id), output.outputs[0]
        assert result.finish_reason in ("stop", "length"), f"{output.request_id} ended with {result.finish_reason}"
        routed = getattr(result, "routed_experts", None)
        if self._capture is not None:
            routed = self._capture.take(output.request_id, len(request.prompt_ids) + len(result.token_ids))
        return Sample(
            prompt_id=request.prompt_id,
            sample_id=request.sample_id,
            prompt=np.asarray(request.prompt_ids, dtype=np.int32),
            response=np.asarray(result.token_ids, dtype=np.int32),
            logprobs=np.asarray(result.logprobs.logprobs, dtype=np.float32),
            finish=result.finish_reason,
            routes=routed,
        )

    # Memory. On cpu nothing is freed, the same calls are harmless.

    def sleep(self) -> None:
        """Free the KV cache and the weights. Level 1 keeps a host copy, for runs that do not write new weights, of
        weights that are still to be compared, and for workers that cannot do more.
        """
        if not self._sleeps:
            return
        self._expert_state = routes.save_maps(self._runner)
        self._engine.sleep(level=1 if self._must_keep else self._sleep_level)
        self._must_keep = False

    def wake_weights(self) -> None:
        """Storage of the weights is back at its old addresses; its contents are not, they must be written: by `layout`,
        which is new when vLLM has moved experts since the last time.
        """
        if self._sleeps:
            self._engine.wake_up(["weights"])
        if self._expert_state:
            routes.restore_maps(self._runner, self._expert_state)
            self._expert_state = []
        if self.device.kind == "npu":
            vllm_params.restore_transposed_experts(self.model)
        current = self._plain_stores()
        vllm_params.require_stable(self.stores, current)
        self.stores = current
        if (maps := self._live_maps()) != self._expert_maps:
            self.layout, self._expert_maps = self._layout_rule(expert_maps=maps), maps
        vllm_params.clear_padding(self.stores, self._padding)

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write whole Hugging Face tensors through vLLM's own loaders: the slow oracle of the planned sync.

        ValueError with redundant experts: vLLM's loaders know only the map it started with.
        """
        if self.config.rollout.redundant_experts:
            raise ValueError("rollout.sync_plan = golden cannot write redundant experts; use sync_plan = planned")
        for packed in self.packed:
            packed.open()
        with torch.no_grad():
            self.model.load_weights(tensors)
        for packed in self.packed:
            packed.close()

    def wake_cache(self) -> None:
        """KV cache back, prefixes of older weights forgotten: ready to generate."""
        if self._sleeps:
            self._engine.wake_up(["kv_cache"])
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; after every weight change. RuntimeError when requests are still running."""
        if self._engine.reset_prefix_cache() is False:
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    def close(self) -> None:
        """Release the engine and vLLM's process groups, not ours; another layout can be built then. Collective."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        del self._engine, self.model, self._runner, self._capture
        self.stores, self.packed = {}, []
        gc.collect()
        destroy_model_parallel()


def check_fields(config: Config, grid: RolloutGrid, kind: str) -> None:
    """ConfigError for a name or type in [rollout.vllm] that the installed vLLM does not take, or that we set.

    Sets the variables that vLLM reads when it is imported, and imports it.
    """
    os.environ |= environment(kind, grid)
    import vllm
    from vllm import EngineArgs

    fields = {field.name: field.type for field in dataclasses.fields(EngineArgs)}
    check_passthrough(config.rollout.vllm, fields, OWNED, "rollout.vllm", f"vLLM {vllm.__version__} EngineArgs")


def _build(arguments: dict[str, Any], kind: str) -> Any:
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    if kind == "cpu":
        vllm_cpu.patch()
    try:
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
    except ValueError as error:
        log.debug("vLLM's refusal", exc_info=True)
        raise ConfigError(f"vLLM refuses its arguments, of which [rollout.vllm] gives any: {error}") from None
    finalizer = getattr(engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()  # it would destroy the job's default process group
    return engine


@contextmanager
def _kept_environment(rank: int) -> Iterator[None]:
    """vLLM reads its data parallel rank from RANK, which must be that inside the replica, and changes variables that
    child processes and other libraries read.
    """
    saved = {name: os.environ.get(name) for name in ("RANK", "LOCAL_WORLD_SIZE", "LD_PRELOAD")}
    os.environ["RANK"] = str(rank)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _kept_random_state(device: Any) -> Iterator[None]:
    """Construction seeds every global generator; the trainer's are put back."""
    python, arrays = random.getstate(), np.random.get_state()
    devices = {} if device.kind == "cpu" else dict(devices=[device.index], device_type=device.kind)
    with torch.random.fork_rng(**({"devices": []} | devices)):
        yield
    random.setstate(python)
    np.random.set_state(arrays)
