"""What is checked on the device "npu", one function each; `run` does all of them in one process and says what it ran.

Each compares with the same computation on cpu, in float32. Values are of about 1.
"""

from __future__ import annotations

import os
import sys
import traceback
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

CLOSE = 2e-5


def both(compute: Any, *tensors: torch.Tensor) -> float:
    """Largest difference between npu and cpu of compute(*tensors) and of the gradients of all of them, relative to the
    largest element of each where that is above 1.
    """
    results = []
    for device in ("cpu", "npu"):
        leaves = [t.detach().to(device).requires_grad_(t.is_floating_point()) for t in tensors]
        out = compute(*leaves)
        torch.manual_seed(1)
        (out * torch.randn(out.shape).to(device, out.dtype)).sum().backward()
        results.append([out.detach().cpu(), *(t.grad.cpu() for t in leaves if t.is_floating_point())])
    assert len(results[0]) == len(results[1])
    pairs = [(a.float(), b.float()) for a, b in zip(*results, strict=True)]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1.0)) for a, b in pairs)


def kernel_names(since: int = 0) -> list[str]:
    import torch_npu

    return [name for name, _, _ in torch_npu.calls[since:]]


def packed(cu: list[int], width: int = 16) -> Any:
    from parallel.attention import CoreAttention

    single = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    core = CoreAttention(SimpleNamespace(kv_channels=width), 1, None, "self", pg_collection=SimpleNamespace(cp=single))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        longest = max(b - a for a, b in zip(cu, cu[1:], strict=False))
        lengths = SimpleNamespace(
            cu_seqlens_q=torch.tensor(cu, dtype=torch.int32, device=q.device), max_seqlen_q=longest
        )
        return core(q, k, v, packed_seq_params=lengths)

    return run


def check_attention(directory: Path) -> None:
    """CoreAttention: packed, causal, 8 query heads on 2 key heads, a sequence of one token and one of none."""
    import torch_npu

    first = len(torch_npu.calls)
    q, k, v = torch.randn(29, 8, 16), torch.randn(29, 2, 16), torch.randn(29, 2, 16)
    assert both(packed([0, 5, 6, 6, 29]), q, k, v) < CLOSE
    (_, arguments, named), *others = torch_npu.calls[first:]
    assert not others and arguments[3:] == (8, "TND") and named["scale"] == 0.25 and named["sparse_mode"] == 3
    assert named["actual_seq_qlen"] == named["actual_seq_kvlen"] == [5, 6, 6, 29] and named["keep_prob"] == 1.0


def check_attention_of_a_context_parallel_rank(directory: Path) -> None:
    """Queries are the last rows of longer key segments: 3 of 7, and 4 of 4."""
    from parallel.attention import packed_attention

    cu_q, cu_k = torch.tensor([0, 3, 7]), torch.tensor([0, 7, 11])  # on the host, as context_segments gives them
    q, k, v = torch.randn(7, 4, 16), torch.randn(11, 2, 16), torch.randn(11, 2, 16)
    assert both(lambda q, k, v: packed_attention(q, k, v, cu_q, cu_k, 4, 7, 0.3), q, k, v) < CLOSE


def check_attention_of_more_sequences_than_one_call_takes(directory: Path) -> None:
    import torch_npu

    from parallel import npu

    first, cu = len(torch_npu.calls), [*range(0, 2 * 1100 + 1, 2)]
    q, k, v = torch.randn(2200, 2, 16), torch.randn(2200, 1, 16), torch.randn(2200, 1, 16)
    assert both(packed(cu), q, k, v) < CLOSE
    counts = [len(named["actual_seq_qlen"]) for _, _, named in torch_npu.calls[first:]]
    assert counts == [npu.MOST_SEGMENTS, 1100 - npu.MOST_SEGMENTS]


def check_rms_norm(directory: Path) -> None:
    from parallel.megatron_spec import RMSNorm

    config = SimpleNamespace(params_dtype=torch.float32, use_cpu_initialization=True, sequence_parallel=False)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        norm = RMSNorm(config, 24, 1e-5)
        del norm.weight
        norm.weight = weight
        return norm(x)

    first = len(kernel_names())
    assert both(run, torch.randn(6, 1, 24), torch.randn(24)) < CLOSE
    assert kernel_names(first) == ["npu_rms_norm"]


def experts(num: int, ffn: int, hidden: int, fused: bool = True) -> Any:
    from parallel.megatron_spec import StackedExperts

    config = SimpleNamespace(
        moe_ffn_hidden_size=ffn,
        hidden_size=hidden,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_activation_fusion=fused,
    )
    return StackedExperts(num, config, SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: 1)))


def check_experts(directory: Path) -> None:
    """StackedExperts: grouped matmul and SwiGLU forward, and every gradient; an expert in the middle has no token."""
    import torch_npu

    counts, first = torch.tensor([5, 0, 7, 1]), len(torch_npu.calls)

    def run(x: torch.Tensor, probs: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        module = experts(4, 8, 16, fused=x.device.type == "npu")
        del module.weight1, module.weight2
        module.weight1, module.weight2 = w1, w2
        return module(x, counts, probs)[0]

    assert both(run, torch.randn(13, 16), torch.rand(13), torch.randn(4, 16, 16) / 4, torch.randn(4, 16, 8) / 3) < CLOSE
    matmul = "npu_grouped_matmul"
    assert kernel_names(first) == [matmul, "npu_swiglu", matmul, matmul, matmul, matmul, matmul]
    types_of = [named["group_type"] for name, _, named in torch_npu.calls[first:] if name == matmul]
    assert types_of == [0, 0, 0, 2, 0, 2], "forward twice, then for each layer the input's and the weight's gradient"
    for _, (left, right), named in (call for call in torch_npu.calls[first:] if call[0] == matmul):
        assert len(left) == len(right) == 1 and named["split_item"] == 3 and named["group_list_type"] == 0
        assert named["group_list"].tolist() == [5, 5, 12, 13] and named["group_list"].dtype == torch.int64


def check_experts_without_tokens(directory: Path) -> None:
    module = experts(2, 8, 16).to("npu")
    out, _ = module(torch.zeros(0, 16, device="npu"), torch.tensor([0, 0]), torch.zeros(0, device="npu"))
    out.sum().backward()
    assert out.shape == (0, 16) and not module.weight1.grad.any()


def check_swiglu_of_dense_layers(directory: Path) -> None:
    """What stands in Megatron's MLP after `repair`."""
    from megatron.core.transformer import mlp

    def run(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if x.device.type == "npu":
            return mlp.bias_swiglu_impl(x, bias, False, False)
        gate, up = (x + bias).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    assert both(run, torch.randn(3, 2, 12), torch.randn(12)) < CLOSE
    assert mlp.bias_swiglu_impl(torch.ones(2, 4, device="npu"), None).shape == (2, 2)


def check_log_probs_take_no_triton(directory: Path) -> None:
    """is_cuda is True on npu after transfer_to_npu."""
    from parallel.log_prob import log_probs

    labels = torch.tensor([1, 4, 0])
    assert torch.zeros(1, device="npu").is_cuda
    head = lambda hidden, weight: log_probs(hidden, weight, labels.to(hidden.device), 0.7, None, 5, 2)[0]  # noqa: E731
    assert both(head, torch.randn(3, 6), torch.randn(5, 6)) < CLOSE


def check_host_copies_wait(directory: Path) -> None:
    """The stand-in copies at synchronize(), as hardware may; without it the host reads what was there before."""
    from parallel.device import Device

    source, early, late = torch.ones(4, device="npu"), torch.zeros(4), torch.zeros(4)
    early.copy_(source, non_blocking=True)
    assert not early.any()
    Device("npu").to_host([(source, late)])
    assert late.all() and early.all()


def check_device(directory: Path) -> None:
    """pick() makes the device current before it is used; auto is unambiguous, also after transfer_to_npu."""
    import torch_npu

    from parallel.device import Device, pick, present

    assert present() == ["npu"] and torch.cuda.is_available(), "torch.cuda is torch.npu by now"
    torch_npu.events.clear()
    device = pick("auto", 3)
    assert torch_npu.events == ["is_available", "device_count", "set_device"] and device == Device("npu", 3)
    assert torch.npu.current_device() == 3 and pick("npu", 0).torch == torch.device("npu", 0)
    assert device.name == "Ascend910B3" and device.backend == "cpu:gloo,npu:hccl"
    memory = device.memory()
    assert memory["free"] < memory["total"] and memory["allocated"] < memory["reserved"]
    device.seed(5), device.empty_cache(), device.synchronize()
    assert raised(pick, "npu", 4) == "local rank 4 has no npu device: this host shows 4"
    assert raised(pick, "cuda") == "runtime.device = cuda, but torch finds npu"
    assert pick("cpu").kind == "cpu"


def raised(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{function} took {arguments}")


def check_broken_torch_npu(directory: Path) -> None:
    import torch_npu

    from parallel.device import pick

    sys.modules["torch_npu"] = None  # type: ignore[assignment]
    finder = SimpleNamespace(find_spec=lambda name: True)
    import importlib.util as util

    original, util.find_spec = util.find_spec, finder.find_spec
    try:
        util.find_spec = lambda name: None  # type: ignore[assignment,misc]
        assert raised(pick, "npu") == "runtime.device = npu, but torch finds only a cpu"
        util.find_spec = finder.find_spec
        assert "cannot be loaded" in raised(pick, "auto") and "set_env.sh" in raised(pick, "npu")
    finally:
        sys.modules["torch_npu"], util.find_spec = torch_npu, original


def check_repair_is_harmless_twice(directory: Path) -> None:
    """Names of tensor types, random state, the router's counter; megatron's version where MindSpeed is wanted."""
    import megatron.core
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.router import TopKRouter

    from parallel.device import Device
    from parallel.megatron_cpu import MINDSPEED, TESTED, on_device, repair

    device = Device("npu")
    repair(device), repair(device)
    x = torch.zeros(1, device="npu")
    with on_device(device):
        assert x.type() == "torch.cuda.FloatTensor" and torch.nn.Parameter(x).type() == "torch.cuda.FloatTensor"
    assert x.type() == "torch.npu.FloatTensor" and torch.cuda.get_device_capability() == (8, 0)
    state = random._get_cuda_rng_state()
    drawn = torch.rand(3)
    random._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), drawn), "set at once, not queued"
    assert not hasattr(TopKRouter._apply_expert_bias, "_torchdynamo_orig_callable")
    try:
        repair(device, "mindspeed")
        raise AssertionError("0.16.1 was taken for MindSpeed")
    except RuntimeError as error:
        assert f"was written for {MINDSPEED}" in str(error)
    megatron.core.__version__ = MINDSPEED
    try:
        assert f"core_r{MINDSPEED}" in raised(repair, device, "mindspeed")
        _with_mindspeed(lambda: repair(device, "mindspeed"))
    finally:
        megatron.core.__version__ = TESTED


def _with_mindspeed(function: Any) -> None:
    """MindSpeed's adaptor reads sys.argv when it is imported, and takes whatever is there for its own."""
    arguments, seen = list(sys.argv), []

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            import importlib.machinery

            if name.split(".")[0] != "mindspeed":
                return None
            return importlib.machinery.ModuleSpec(name, Finder, is_package=True)  # type: ignore[arg-type]

        create_module = staticmethod(lambda spec: types.ModuleType(spec.name))
        exec_module = staticmethod(lambda module: seen.append((module.__name__, list(sys.argv))))

    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    try:
        function()
    finally:
        sys.meta_path.remove(Finder)  # type: ignore[arg-type]
    assert seen == [(name, arguments[:1]) for name in ("mindspeed", "mindspeed.megatron_adaptor")]
    assert sys.argv == arguments


def check_groups(directory: Path) -> None:
    from parallel.device import Device
    from parallel.grid import RolloutGrid, TrainGrid
    from parallel.groups import make_groups

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "0")}
    groups = make_groups(TrainGrid(1), RolloutGrid(1, 1), Device("npu"), 60.0)
    assert dist.get_backend_config(groups.world) == "cpu:gloo,npu:hccl" and dist.get_backend(groups.host) == "gloo"
    for device in ("cpu", "npu"):
        one = torch.ones(1, device=device)
        dist.all_reduce(one, group=groups.world)
        assert one.item() == 1.0
    dist.destroy_process_group()


def check_meeting(directory: Path) -> None:
    """Every group of more than one rank meets once, in order, each waited for."""
    from parallel.device import Device
    from parallel.groups import meet

    events: list[Any] = []
    groups = [SimpleNamespace(size=lambda n=n: n, name=n) for n in (2, 1, 4)]
    original, dist.all_reduce = dist.all_reduce, lambda tensor, group: events.append((tensor.device.type, group.name))
    try:
        meet(groups, Device("npu"))  # type: ignore[arg-type]
    finally:
        dist.all_reduce = original
    assert events == [("npu", 2), ("npu", 4)]


def check_offload(directory: Path) -> None:
    """Training state away and back with late copies; the stand-in refuses to free what a copy still reads."""
    import parallel.megatron_step as step
    from parallel.megatron_model import snapshot, swapped
    from parallel.offload import TrainOffload
    from tests.megatron_cases import TEMPERATURE, build_case, loss_fn, make_micro_batches, world

    adam: dict[str, Any] = dict(lr=1e-3, optimizer=dict(kind="adam", weight_decay=0.1, clip_grad=0.05))
    ends: list[dict[str, torch.Tensor]] = []
    for moved in ([], ["params", "optimizer"]):
        with world("npu"):
            model, _, case = build_case(directory, {}, kind="npu", offload=moved, **adam)
            away, kept = TrainOffload(model), snapshot(model)
            for _ in range(2):
                away.free_optimizer(), away.free_params()
                if moved:
                    assert not any(buffer.param_data.untyped_storage().nbytes() for buffer in model.buffers)
                away.restore()
                step.update(model, make_micro_batches(model, case, 128), loss_fn, TEMPERATURE, True)
            ends.append({name: tensor.cpu() for name, tensor in model.stores().items()})
            with swapped(model, kept):
                now = {name: tensor.cpu() for name, tensor in model.stores().items()}
                assert any(not torch.equal(now[name], ends[-1][name]) for name in now)
            assert all(torch.equal(tensor.cpu(), ends[-1][name]) for name, tensor in model.stores().items())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def check_profiler(directory: Path) -> None:
    from launch.config import LogConfig
    from launch.profiler import Profiler

    profiler = Profiler(LogConfig(profile_steps=[2]), directory, 0, "npu")
    for step in (1, 2):
        profiler.start(step)
        profiler.stop()
    assert (directory / "profile/step_000002_rank_000/trace_view.json").exists()


def check_fake_is_strict(directory: Path) -> None:
    """The checks above can fail: a wrong name, type, mask, layout or order of arguments is refused."""
    import torch_npu

    x, weight = torch.randn(4, 8, device="npu"), torch.randn(2, 8, 6, device="npu")
    ends = torch.tensor([1, 4], device="npu")
    wrong = [
        lambda: torch_npu.npu_rms_norm(x, weight[0, 0], eps=1e-5),
        lambda: torch_npu.npu_rms_norm(x, torch.ones(8, device="npu", dtype=torch.bfloat16)),
        lambda: torch_npu.npu_grouped_matmul(x, weight, group_list=ends, split_item=3, group_type=0),
        lambda: torch_npu.npu_grouped_matmul([x], [weight], ends, 3, 0),
        lambda: torch_npu.npu_grouped_matmul([x], [weight], group_list=ends.int(), split_item=3, group_type=0),
        lambda: torch_npu.npu_grouped_matmul([x], [weight], group_list=ends - 1, split_item=3, group_type=0),
        lambda: torch_npu.npu_grouped_matmul([x], [weight], group_list=ends, split_item=0, group_type=0),
        lambda: torch_npu.npu_grouped_matmul([x], [x], group_list=ends, split_item=3, group_type=2),
    ]
    for call in wrong:
        try:
            call()
        except (RuntimeError, TypeError, AssertionError):
            continue
        raise AssertionError("an argument that the published signature does not have was taken")


def run(rank: int, directory: Path) -> tuple[dict[str, str], dict[str, set[int]]]:
    """({check: "" or a traceback}, {file: lines that ran}) of all checks on the stand-in, in this process."""
    from tests.npu.build import use
    from tests.npu.lines import Tracer

    use()
    from tests.npu import engine_checks

    found = {**globals(), **vars(engine_checks)}
    torch.autograd.set_multithreading_enabled(False)  # else the backward pass of npu tensors leaves this thread
    results = {}
    with Tracer() as tracer:
        from parallel.device import Device
        from parallel.megatron_cpu import repair

        repair(Device("npu"))
        for name in [name for name in found if name.startswith("check_")]:
            torch.manual_seed(0)
            try:
                found[name](directory)
                results[name] = ""
            except Exception:
                results[name] = traceback.format_exc()
    return results, tracer.seen
