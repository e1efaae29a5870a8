"""Run in a process of its own: one rank of a large world on fake process groups, parameters on the meta device.

    python -m tests.fake_world RANK WORLD RECIPE [section.key=value ...]

Prints JSON: Megatron's parameters (store -> shape and bytes of an element), and how many groups its initialiser and
vLLM's create.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

RANK, WORLD = int(sys.argv[1]), int(sys.argv[2])
os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from launch.config import load  # noqa: E402
from launch.plan import read_shape  # noqa: E402
from parallel import megatron_model  # noqa: E402
from parallel.device import Device  # noqa: E402
from parallel.megatron_cpu import on_device, repair  # noqa: E402
from parallel.megatron_options import transformer_fields  # noqa: E402
from parallel.memory import grids  # noqa: E402


class Meta(Device):
    @property
    def torch(self) -> torch.device:
        return torch.device("meta")


class Count:
    """Stands in for dist.new_group: counts groups, all and those of this rank."""

    def __init__(self) -> None:
        self.all, self.mine, self.real = 0, 0, dist.new_group

    def __call__(self, ranks=None, *args, **kwargs):
        self.all += 1
        self.mine += ranks is None or RANK in ranks
        kwargs["backend"] = "fake"
        return self.real(ranks, *args, **kwargs)


def main() -> dict:
    config = load(sys.argv[3:])
    shape = read_shape(config.model.path)
    train, rollout = grids(config, WORLD)
    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    found: dict = {}
    dist.new_group = dist.distributed_c10d.new_group = count = Count()
    device = Meta("cpu")
    repair(device)
    with on_device(device):
        megatron_model._initialize(train, config)
        found["megatron"] = [count.all, count.mine]
        tconfig = TransformerConfig(**transformer_fields(config, shape, train, device))
        with torch.device("meta"):
            chunks = list(megatron_model._build_chunks(shape, config, train, tconfig, TopKRouter, device))
    found["parameters"] = {
        f"{i}:{name}": [list(parameter.shape), parameter.element_size()]
        for i, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    found["vllm"] = vllm_groups(config, shape, rollout)
    return found


def vllm_groups(config, shape, rollout) -> list[int]:
    """[groups, groups of this rank] of vLLM's initialiser."""
    import vllm.distributed.parallel_state as state
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config

    dist.new_group = dist.distributed_c10d.new_group = torch.distributed.new_group = count = Count()
    os.environ["RANK"] = str(RANK % rollout.replica_size if rollout.dp > 1 else RANK)  # as rollout/engine.py does
    parallel = ParallelConfig(
        tensor_parallel_size=rollout.tp,
        data_parallel_size=rollout.dp,
        distributed_executor_backend="external_launcher",
        enable_expert_parallel=rollout.expert_parallel,
    )
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    # Its shared memory queues talk when they are made, which no fake group does.
    MessageQueue.create_from_process_group = staticmethod(lambda *args, **kwargs: None)
    settings = VllmConfig(parallel_config=parallel)
    object.__setattr__(settings, "model_config", SimpleNamespace(is_moe=shape.is_moe))
    with set_current_vllm_config(settings):
        state.init_distributed_environment(WORLD, RANK, "env://", 0, "fake")
        state.initialize_model_parallel(rollout.tp, backend="fake")
    return [count.all, count.mine]


if __name__ == "__main__":
    print(json.dumps(main()))
