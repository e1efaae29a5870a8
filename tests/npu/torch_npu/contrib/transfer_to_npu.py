"""What the real module of this name does to torch, as far as Megatron's path reaches it: for good, from its import on.

    torch.cuda.X                                  is torch.npu.X
    device="cuda", .to("cuda"), .to(0), .cuda()   mean npu
    Tensor.is_cuda                                is Tensor.is_npu
Not replaced, there as here: what another module imported from torch.cuda before, and Tensor.type().
"""

import torch
import torch_npu

FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "empty_like", "zeros_like")
METHODS = ("new_empty", "new_zeros", "new_full", "new_tensor", "to")


def _npu(value, integers):
    if isinstance(value, int) and not isinstance(value, bool) and integers:
        return f"npu:{value}"
    if isinstance(value, str) and "cuda" in value:
        return value.replace("cuda", "npu")
    return torch.device("npu", value.index) if isinstance(value, torch.device) and value.type == "cuda" else value


def _wrap(owner, name):
    function = getattr(owner, name)

    def wrapped(*arguments, **named):
        if "device" in named:
            named["device"] = _npu(named["device"], True)
        return function(*(_npu(value, name == "to") for value in arguments), **named)

    setattr(owner, name, wrapped)


for _name in (*torch_npu.RUNTIME, "Stream", "Event", "random"):
    setattr(torch.cuda, _name, getattr(torch_npu.npu, _name))
for _name in FACTORIES:
    _wrap(torch, _name)
for _name in METHODS:
    _wrap(torch.Tensor, _name)
_wrap(torch.nn.Module, "to")
torch.Tensor.cuda, torch.nn.Module.cuda = torch.Tensor.npu, torch.nn.Module.npu
torch.Tensor.is_cuda = torch.Tensor.is_npu
