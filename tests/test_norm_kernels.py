"""The Triton kernels of the layers against torch, in Triton's interpreter; on a CUDA device if there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KERNELS = """
import os
import random
import torch
import torch.nn.functional as F
from parallel.norm_kernels import add_to_main_grad, rms_norm

torch.set_default_device("cpu" if os.environ.get("TRITON_INTERPRET") else "cuda")
seed = random.randrange(1 << 30)
print("seed", seed)
torch.manual_seed(seed)
shapes = (((700, 1, 128), None), ((37, 2, 5, 128), 3), ((1, 2560), None), ((600, 96), None), ((5, 5000), None))
for shape, cut in shapes:
    base = torch.randn(*shape, dtype=torch.float64) * 3
    weight = torch.randn(shape[-1], dtype=torch.float64)
    view = lambda t: t if cut is None else t[:, :, cut]  # rows with gaps, as keys in a projection of q, k and v
    outer = torch.randn_like(view(base))
    exact = [base.clone().requires_grad_(), weight.clone().requires_grad_()]
    want = F.rms_norm(view(exact[0]), shape[-1:], exact[1], 1e-5)
    want.backward(outer)
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        own = [base.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        got = rms_norm(view(own[0]), own[1], 1e-5)
        assert got.dtype == dtype and got.shape == want.shape
        got.backward(outer.to(dtype))
        for a, b in ((got, want), *((o.grad, e.grad) for o, e in zip(own, exact))):
            assert (a.double() - b).norm() <= near * b.norm(), (shape, dtype, (a.double() - b).norm() / b.norm())
        assert own[1].grad.dtype == dtype

for num in (1, 4096, 10001):
    parameter = torch.nn.Parameter(torch.randn(num).bfloat16())
    parameter.main_grad = torch.randn(num)
    parameter.grad = torch.randn(num).bfloat16()
    want = parameter.main_grad + parameter.grad.float()
    add_to_main_grad(parameter)
    assert torch.equal(parameter.main_grad, want) and parameter.grad_added_to_main_grad
crooked = torch.nn.Parameter(torch.randn(4, 6).bfloat16())
crooked.main_grad, crooked.grad_added_to_main_grad = torch.zeros(4, 6), False
crooked.grad = torch.randn(6, 4).bfloat16().t()
add_to_main_grad(crooked)
assert not crooked.grad_added_to_main_grad and not crooked.main_grad.any()  # left to Megatron
tied = torch.nn.Parameter(torch.randn(8).bfloat16())
tied.main_grad, tied.grad, tied.zero_out_wgrad = torch.zeros(8), torch.ones(8).bfloat16(), True
add_to_main_grad(tied)
assert not tied.main_grad.any()  # Megatron's hook would add it once more
"""


def _run(**environment: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment}
    done = subprocess.run([sys.executable, "-c", KERNELS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_equal_torch_in_float64() -> None:
    pytest.importorskip("triton")
    _run(TRITON_INTERPRET="1")


@pytest.mark.full  # the default tier has no accelerator anywhere
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_on_the_device() -> None:
    _run()


COMPILE = """
import glob, os, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from parallel import log_prob_kernels, norm_kernels

[tool] = [p for p in glob.glob(os.path.dirname(triton.__file__) + "/backends/nvidia/bin/*") if "cuobjdump" in p]
FP32 = "scale parts top total weighted chosen lse mean of_logp of_entropy".split()
BF16 = "x weight out outer dx logits part".split()


def resources(kernel, **constants):
    names = kernel.arg_names
    kinds = {}
    for name in names:
        if name in constants:
            kinds[name] = "constexpr"
        elif name in FP32 + BF16 + ["labels"]:
            kinds[name] = "*fp32" if name in FP32 else "*bf16" if name in BF16 else "*i64"
        else:
            kinds[name] = "fp32" if name in ("eps", "temperature") else "i32"
    even = [i for i, name in enumerate(names) if kinds[name] not in ("constexpr", "fp32")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in even}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    registers, stack = map(int, re.search(r"REG:(\\d+) STACK:(\\d+)", told).groups())
    wide = len(re.findall(r"ld\\.global[^;]*v4", made.asm["ptx"]))
    print(kernel.__name__, constants, registers, stack, wide)
    assert stack == 0 and wide, "spills, or narrow loads"


for n in (128, 2048, 4096, 8192):
    m, block = norm_kernels._blocks(n)
    for kernel in (norm_kernels._forward, norm_kernels._backward):
        resources(kernel, block_m=m, block_n=block)
resources(norm_kernels._add, block=norm_kernels.ADD)
resources(log_prob_kernels._statistics, block=log_prob_kernels.BLOCK)
resources(log_prob_kernels._gradient, block=log_prob_kernels.BLOCK)
"""


def test_kernels_compile_for_hopper_without_spills_and_with_wide_loads() -> None:
    """Triton's compiler needs no device."""
    pytest.importorskip("triton")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
