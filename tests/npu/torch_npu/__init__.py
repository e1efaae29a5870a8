"""A stand-in for torch_npu on machines without an NPU: device "npu" in host memory, "hccl" over gloo, and the kernels
that we call, computed in plain torch in the meaning that torch_npu's documentation gives.

Kernels are defined from the published schemas (signatures.json), so that torch's dispatcher itself refuses a wrong
name, type or order of arguments; what the documentation demands beyond types is asserted below. `calls` records every
one. As in the real package, npu_grouped_matmul has no backward pass; the others do.
"""

import contextlib
import json
import os
import types
from pathlib import Path

import torch
import torch.distributed as dist

from tests.npu.build import extension

SIGNATURES = json.loads((Path(__file__).parent.parent / "signatures.json").read_text())["torch_npu"]
__version__ = SIGNATURES["version"]
calls: list[tuple[str, tuple, dict]] = []
events: list[str] = []
_C = extension()

# The device


def _record(name, function):
    def called(*arguments, **named):
        events.append(name)
        return function(*arguments, **named)

    return called


def _synchronize(device=None):
    _C.synchronize()


class Stream(torch.Stream):
    def __new__(cls, *arguments, **named):
        return super().__new__(cls, device=torch.device("npu", _C.current_device()))

    def synchronize(self):
        npu.synchronize()

    def record_event(self, *arguments):
        return Event()

    def _nothing(self, *arguments):
        pass

    wait_event = wait_stream = _nothing


class Event:
    def __init__(self, *arguments, **named):
        pass

    def synchronize(self):
        npu.synchronize()

    record = wait = Stream._nothing


GIB, NAME = 1 << 30, "Ascend910B3"
npu = types.ModuleType("torch.npu")
RUNTIME = {
    "is_available": lambda: True,
    "device_count": lambda: 4,
    "set_device": lambda device: _C.set_device(torch.device("npu", device).index if isinstance(device, int) else 0),
    "current_device": lambda: _C.current_device(),
    "synchronize": _synchronize,
    "empty_cache": lambda: None,
    "mem_get_info": lambda device=None: (60 * GIB, 64 * GIB),
    "memory_allocated": lambda device=None: 1 * GIB,
    "memory_reserved": lambda device=None: 2 * GIB,
    "max_memory_allocated": lambda device=None: 1 * GIB,
    "max_memory_reserved": lambda device=None: 2 * GIB,
    "get_device_name": lambda device_name=None: NAME,
    "get_device_properties": lambda device_name=None: types.SimpleNamespace(name=NAME, total_memory=64 * GIB),
    "get_device_capability": lambda device=None: (8, 0) if "TORCH_NPU_DEVICE_CAPABILITY" in os.environ else None,
    "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    "get_rng_state": lambda device="npu": torch.default_generator.get_state(),
    "set_rng_state": lambda new_state, device="npu": torch.default_generator.set_state(new_state),
    "current_stream": lambda device=None: DEFAULT,
    "default_stream": lambda device=None: DEFAULT,
    "stream": lambda stream: contextlib.nullcontext(),
}
for _name, _function in RUNTIME.items():
    setattr(npu, _name, _record(_name, _function))
npu.Stream, npu.Event = Stream, Event
npu._is_in_bad_fork, npu.is_initialized = lambda: False, lambda: True
npu.random = types.SimpleNamespace(get_rng_state=npu.get_rng_state, set_rng_state=npu.set_rng_state)

torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend()
DEFAULT = Stream()


def _hccl(options, _):
    place = (options.store, options.group_rank, options.group_size, options.timeout)
    return _C.hccl(dist.ProcessGroupGloo(*place))


dist.Backend.register_backend("hccl", _hccl, extended_api=True, devices=["npu"])

# The kernels


def npu_fusion_attention(
    query,
    key,
    value,
    head_num,
    input_layout,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    scale=1.0,
    keep_prob=1.0,
    pre_tockens=2147483647,
    next_tockens=2147483647,
    inner_precise=0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    **rest,
):
    """TND: [tokens, heads, d]. Lengths are running sums; mode 3 hides key j from query i if j - i > keys - queries."""
    assert input_layout == "TND" and query.dim() == 3 and head_num == query.size(1) <= 256
    assert query.dtype == key.dtype == value.dtype and key.shape == value.shape and query.size(2) <= 768
    assert head_num % key.size(1) == 0 and keep_prob == 1.0 and pse is None and padding_mask is None
    assert sparse_mode == 3 and atten_mask.dtype in (torch.bool, torch.uint8) and atten_mask.shape == (2048, 2048)
    assert bool((atten_mask == torch.ones_like(atten_mask).triu(1)).all()), "True hides: the upper triangle"
    assert 1 <= len(actual_seq_qlen) == len(actual_seq_kvlen) <= 1024, "at most 1 K sequences"
    for ends, tokens in ((actual_seq_qlen, query.size(0)), (actual_seq_kvlen, key.size(0))):
        assert sorted(ends) == ends and ends[-1] == tokens > 0
    repeat, parts = head_num // key.size(1), []
    for a, b, c, d in zip(
        [0, *actual_seq_qlen], actual_seq_qlen, [0, *actual_seq_kvlen], actual_seq_kvlen, strict=False
    ):
        q, k, v = query[a:b].float(), key[c:d].float(), value[c:d].float()
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        hidden = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).triu(1 + (d - c) - (b - a))
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    statistics = query.new_zeros(query.size(0), head_num, 8, dtype=torch.float32)
    return torch.cat(parts).to(query.dtype), statistics, statistics, query.new_zeros(0), 0, 0, 0


def npu_rms_norm(input, gamma, epsilon=1e-6):
    assert gamma.dtype == input.dtype and gamma.shape == input.shape[-gamma.dim() :] and 2 <= input.dim() <= 8
    x = input.float()
    rstd = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x * rstd * gamma.float()).to(input.dtype), rstd


def npu_swiglu(input, dim=-1):
    assert input.dtype in (torch.float32, torch.float16, torch.bfloat16) and input.size(dim) % 2 == 0
    gate, up = input.float().chunk(2, dim)
    return (gate * gate.sigmoid() * up).to(input.dtype)


def npu_grouped_matmul(x, weight, *, group_list=None, split_item=0, group_type=None, group_list_type=0, **rest):
    """One x, one weight, one result. Type 0: rows of x [m, k] by weight [g, k, n]. Type 2: columns by weight [k, n]."""
    assert not any(rest.values()) and split_item in (2, 3) and group_list_type == 0 and group_type in (0, 2)
    (left,), (right,) = x, weight
    assert left.dtype == right.dtype and left.dim() == 2
    assert group_list.dtype == torch.int64 and group_list.dim() == 1 and group_list.device == left.device
    ends = group_list.tolist()
    assert sorted(ends) == ends and ends[-1] == left.size(group_type // 2), "running sums up to the cut axis"
    assert max(left.size(-1), right.size(-1)) < 65536 and len(ends) <= 1024
    starts = [0, *ends]
    if group_type == 0:
        assert left.is_contiguous(), "x is not transposed"
        assert right.dim() == 3 and right.size(0) == len(ends)
        assert right.is_contiguous() or right.transpose(1, 2).is_contiguous(), "weight as it is, or transposed"
        return [torch.cat([left[a:b] @ w for a, b, w in zip(starts, ends, right, strict=False)])]
    assert left.t().is_contiguous() and right.is_contiguous() and right.dim() == 2, "x is transposed"
    return [torch.stack([left[:, a:b] @ right[a:b] for a, b in zip(starts, ends, strict=False)])]


_LIBRARY = torch.library.Library("npu", "DEF")
_OWN = {f.__name__: f for f in (npu_fusion_attention, npu_rms_norm, npu_swiglu, npu_grouped_matmul)}
for _schema in SIGNATURES["schemas"].values():
    _LIBRARY.define(_schema)
for _name, _function in _OWN.items():
    _key = "PrivateUse1" if _name == "npu_grouped_matmul" else "CompositeImplicitAutograd"
    _LIBRARY.impl(_name, _function, _key)


def _recorded(name):
    operator = getattr(torch.ops.npu, name)

    def call(*arguments, **named):
        calls.append((name, arguments, named))
        return operator(*arguments, **named)

    return call


for _name in _OWN:
    globals()[_name] = _recorded(_name)
