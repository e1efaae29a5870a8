"""vLLM's own CPU kernels, which pack weights: the planned sync goes layer by layer through vLLM's packing.

Everywhere else in the tests rollout/vllm_cpu.py keeps weights plain. Here its two patches are left out, so that linears
become empty parameters with a oneDNN copy, the head is read from a copy, and experts are shuffled in place.
"""

from __future__ import annotations

from typing import Any

import pytest

from launch.tiny_models import write_model
from tests.ranks import run_ranks
from tests.test_engine import VLLM, World, requests_of, tokens
from tests.test_reshard_real import megatron

SIZES = dict(hidden_size=128, initializer_range=0.2, vocab=300)


def stock(rank: int, path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Tokens and log-probs of an engine that vLLM loads itself, and of one that is written by the planned sync."""
    import torch.distributed as dist
    from vllm.distributed.parallel_state import destroy_model_parallel

    from parallel.device import Device
    from parallel.weight_sync import WeightSync
    from rollout import vllm_cpu

    vllm_cpu._plain_linears = vllm_cpu._plain_experts = lambda: None
    world, device, seen = World(), Device("cpu"), {}
    layout, stores = megatron(path, world, dict(pp=2))
    other = {name: store * 1.5 for name, store in stores.items()}
    for name in ("loaded", "written"):
        engine = world.engine(path, **options, compare_at_start=name == "loaded")
        seen["packed"] = [len(packed.names) for packed in engine.packed]
        if name == "written":
            where = (rank, dist.group.WORLD, device)
            before = {n: p.data_ptr() for n, p in engine.model.named_parameters()}
            weights = WeightSync(layout, engine.layout, engine.config.rollout, *where, engine.packed)
            for trained in (stores, other, stores):
                weights.run(trained, engine.stores)
                engine.reset_prefix_cache()
                seen.setdefault("runs", []).append(world.sampled(engine, requests_of(24, 0.0)))
            seen["stable"] = before == {n: p.data_ptr() for n, p in engine.model.named_parameters()}
            buffers = {tuple(b.data_ptr() for b in slot) for p in weights.parts for slot in p.resharder.slots}
            seen["buffers"] = len(buffers)
        else:
            seen[name] = world.sampled(engine, requests_of(24, 0.0))
        engine.close()
        destroy_model_parallel()
    return seen


@pytest.mark.parametrize(
    "family", [pytest.param("qwen3-moe", marks=pytest.mark.slow), pytest.param("qwen2-tied", marks=pytest.mark.full)]
)
def test_packed_layers_are_written_through_vllms_own_packing(tmp_path, family):
    path = write_model(tmp_path / "model", family, **SIZES)
    for seen in run_ranks(2, stock, str(path), dict(tp=2, vllm=VLLM), timeout_s=240):
        first, other, again = seen["runs"]
        assert len([n for n in seen["packed"] if n]) >= 4 and seen["stable"]
        assert first == again == seen["loaded"] and tokens(other) != tokens(first)
        assert seen["buffers"] <= 2 * 2
