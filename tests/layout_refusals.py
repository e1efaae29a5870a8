"""Random layouts, refused by us and by upstream: `python -m tests.layout_refusals MODEL N`, a process of its own.

Megatron refuses when its groups, its configuration or its model (meta device, fake process groups) cannot be built;
vLLM when its model configuration or its layers' divisions do. Prints JSON: [[layout, our reason, upstream's reason]].
"""

from __future__ import annotations

import json
import os
import random
import sys

WORLD = 16
os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": str(WORLD),
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "8",
    "OMP_NUM_THREADS": "1",
}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from launch.config import Config, DataConfig, ModelConfig, RolloutConfig, TrainConfig  # noqa: E402
from launch.plan_search import refused  # noqa: E402
from parallel import megatron_model  # noqa: E402
from parallel.device import Device  # noqa: E402
from parallel.family import model_shape, read_config  # noqa: E402
from parallel.megatron_cpu import on_device, repair  # noqa: E402
from parallel.megatron_options import transformer_fields  # noqa: E402
from parallel.memory import grids  # noqa: E402


class Meta(Device):
    @property
    def torch(self) -> torch.device:
        return torch.device("meta")


def layout(rng: random.Random) -> dict[str, int]:
    degrees = {axis: rng.choice([1, 1, 2, 2, 4, 8, 3]) for axis in ("tp", "pp", "ep")}
    pick = {"cp": rng.choice([1, 1, 2]), "etp": rng.choice([1, 1, 2, 4]), "vpp": rng.choice([1, 1, 1, 2])}
    ends = {f"{end}_stage_layers": rng.choice([0, 0, 0, 1, 2, 4]) for end in ("first", "last")}
    return degrees | pick | ends


def engine(rng: random.Random) -> dict[str, int | bool]:
    split = rng.random() < 0.6
    return {
        "tp": rng.choice([1, 2, 2, 4, 8, 16, 3]),
        "dp": rng.choice([1, 2, 4]) if split else 1,
        "expert_parallel": split,
    }


def megatron_refuses(config: Config, shape) -> str:
    try:
        train, _ = grids(config, WORLD)
        device = Meta("cpu")
        with on_device(device):
            megatron_model._initialize(train, config)
            tconfig = TransformerConfig(**transformer_fields(config, shape, train, device))
            with torch.device("meta"):
                list(megatron_model._build_chunks(shape, config, train, tconfig, TopKRouter, device))
    except Exception as error:  # whatever upstream raises is a refusal
        return f"{type(error).__name__}: {error}"[:200] or "refused"
    return ""


def vllm_refuses(config: Config, shape, model) -> str:
    from vllm.config import ParallelConfig
    from vllm.distributed.utils import divide
    from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size

    r = config.rollout
    size = r.tp * r.dp
    if WORLD % size:
        return "initialize_model_parallel reshapes the world to (-1, dp, tp)"
    try:
        parallel = ParallelConfig(tensor_parallel_size=r.tp, enable_expert_parallel=r.expert_parallel)
        model.verify_with_parallel_config(parallel)
        divide(shape.heads, r.tp)
        divide(max(shape.kv_heads, r.tp), min(shape.kv_heads, r.tp))
        divide(pad_vocab_size(shape.vocab), r.tp)
        if not r.expert_parallel:
            divide(shape.expert_ffn, size)
        elif size > shape.experts:
            return "ranks without experts"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def main(path: str, count: int) -> list:
    from vllm.config import ModelConfig as EngineModel

    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    shape, rng, found = model_shape(read_config(path)), random.Random(0), []
    model = EngineModel(model=path, tokenizer=path, dtype="float32")
    repair(Meta("cpu"))
    for number in range(count):
        train, rollout = layout(rng), engine(rng)
        if number % 2:  # look at one side at a time as well, else most fail twice
            train = {}
        elif number % 4 == 2:
            rollout = {"tp": 1}
        config = Config(
            model=ModelConfig(path=path),
            data=DataConfig(train_files=["x"], max_prompt_tokens=8, max_response_tokens=8),
            train=TrainConfig(**train),
            rollout=RolloutConfig(**rollout),
        )
        ours = refused(config, shape, WORLD)
        theirs = megatron_refuses(config, shape) or vllm_refuses(config, shape, model)
        found.append([{"train": train, "rollout": rollout}, ours, theirs])
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
