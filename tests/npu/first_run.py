"""The first minutes on a machine with an NPU: python -m tests.npu.first_run [FOLDER]

Prints versions, each kernel that we call against the same computation on cpu, and two updates of a tiny model by
Megatron against float64. Exit code 1 when a number is beyond its bound. docs/platforms.md says what comes next.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from parallel.device import pick

PACKAGES = ("torch", "torch_npu", "vllm", "vllm-ascend", "triton-ascend", "megatron-core", "transformers")
BOUNDS = {torch.float32: 2e-3, torch.bfloat16: 4e-2}
"""Largest difference relative to the largest element; fp32 products may run in a shorter format on the device."""
TRAINED = 2e-3


def kernels(dtype: torch.dtype) -> Iterator[tuple[str, Callable[..., torch.Tensor], list[torch.Tensor]]]:
    """(name, computation, its arguments) in the shapes of Qwen3-4B's layers, shortened."""
    from parallel.megatron_spec import RMSNorm
    from tests.npu.checks import experts, packed

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return RMSNorm.forward(type("Norm", (), {"weight": weight, "eps": 1e-6})(), x)  # type: ignore[arg-type]

    def moe(x: torch.Tensor, probs: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        module = experts(4, 128, 256, fused=x.device.type == "npu")
        del module.weight1, module.weight2
        module.weight1, module.weight2 = w1, w2
        return module(x, torch.tensor([200, 0, 300, 12]), probs)[0]

    def draw(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*sizes) * scale).to(dtype)

    lengths = [0, 1, 300, 300, 1024]
    yield "attention", packed(lengths, width=128), [draw(1024, 8, 128), draw(1024, 2, 128), draw(1024, 2, 128)]
    yield "rms_norm", norm, [draw(64, 1, 256), draw(256)]
    yield (
        "experts",
        moe,
        [draw(512, 256), draw(512).abs(), draw(4, 256, 256, scale=0.06), draw(4, 256, 128, scale=0.09)],
    )


def versions() -> Iterator[str]:
    yield f"python {platform.python_version()} on {platform.machine()}"
    for name in PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} is not installed"
    version = Path(os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest"), "version.cfg")
    yield f"CANN: {version.read_text().strip()}" if version.exists() else f"CANN: no {version}"


def megatron(folder: Path) -> dict[str, float]:
    """Errors of one update of a tiny Qwen3-MoE in fp32."""
    from tests.megatron_cases import prepare, run_layouts

    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    os.environ |= {name: value for name, value in alone.items() if name not in os.environ}
    return run_layouts(0, [(str(prepare("moe", folder, training=True)), {}, {})], "npu")[0]


def report(folder: Path, say: Callable[[str], None] = print) -> bool:
    """Whether every number is within its bound."""
    from parallel.megatron_cpu import repair
    from tests.npu.checks import both

    for line in versions():
        say(line)
    device = pick("npu")
    memory = device.memory()
    say(f"device {device.name}, {memory['free'] >> 30} of {memory['total'] >> 30} GiB free")
    repair(device)
    good = True
    for dtype, bound in BOUNDS.items():
        for name, compute, arguments in kernels(dtype):
            torch.manual_seed(0)
            error = both(compute, *arguments)
            good &= error < bound
            say(f"{'ok  ' if error < bound else 'FAIL'} {name:10} {str(dtype)[6:]:9} {error:.1e} of {bound:.0e}")
    errors = megatron(folder)
    worst = max(errors[name] for name in ("logp", "entropy", "loss", "grad", "norm", "sgd"))
    good &= worst < TRAINED
    say(
        f"{'ok  ' if worst < TRAINED else 'FAIL'} megatron   float32   "
        + ", ".join(f"{k} {v:.1e}" for k, v in errors.items())
    )
    return good


def rehearse(rank: int, folder: Path) -> tuple[bool, list[str]]:
    """The report on the stand-in."""
    from tests.npu.build import use

    use()
    lines: list[str] = []
    return report(folder, lines.append), lines


if __name__ == "__main__":
    sys.exit(0 if report(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())) else 1)
