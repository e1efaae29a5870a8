"""The device "npu" for tests: `use()` makes `import torch_npu` find the stand-in, compiled once for each source."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def extension() -> Any:
    """backend.cpp as a module; half a minute of compilation the first time. Ranks that start together wait for one."""
    import torch
    from torch.utils.cpp_extension import load

    source = HERE / "backend.cpp"
    digest = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"alternator_npu_{digest}"
    folder.mkdir(exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja is installed beside Python
    return load("alternator_npu", [str(source)], extra_cflags=["-O0"], build_directory=str(folder))


def use() -> Any:
    """The stand-in, imported as torch_npu. For good: call it in a process of its own. Refuses where a real one is."""
    if str(HERE) not in sys.path:
        assert importlib.util.find_spec("torch_npu") is None, "torch_npu is installed: see tests/npu/first_run.py"
        sys.path.insert(0, str(HERE))
    import torch_npu

    return torch_npu
