"""cuda | npu | cpu: the only place that names a device runtime (Megatron's own adaptor aside)."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


@dataclass(frozen=True)
class Device:
    kind: str
    """"cpu", "cuda" or "npu"."""
    index: int = 0

    @property
    def torch(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def backend(self) -> str:
        """Backend string of torch.distributed.init_process_group."""
        return BACKENDS[self.kind]

    @property
    def runtime(self) -> Any:
        """torch.cuda or torch.npu; None on cpu."""
        return None if self.kind == "cpu" else getattr(torch, self.kind)

    @property
    def name(self) -> str:
        """What the runtime calls the device, for example "NVIDIA H200"; "cpu"."""
        return self.runtime.get_device_name(self.index) if self.runtime else "cpu"

    def synchronize(self) -> None:
        if self.runtime:
            self.runtime.synchronize(self.index)

    def to_host(self, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each (device tensor, host tensor) pair, and return when the last byte has arrived.

        Copies to page-locked memory only start with copy_(non_blocking=True). Whoever reads them, or frees the source,
        without waiting gets old numbers now and then, and no error: so every such copy goes through here.
        """
        for here, there in copies:
            there.copy_(here, non_blocking=True)
        self.synchronize()

    def empty_cache(self) -> None:
        if self.runtime:
            self.runtime.empty_cache()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        if self.runtime:
            self.runtime.manual_seed_all(seed)

    def memory(self) -> dict[str, int]:
        """Bytes: allocated and reserved by torch in this process, now and at most since the last `peaks` (peak_*); free
        and total of the device; all of these zero on cpu. host: resident memory of this process; host_used and
        host_total: of the node, or of the job's cgroup when that is limited.
        """
        bytes_of = dict.fromkeys(("allocated", "reserved", "peak_allocated", "peak_reserved", "free", "total"), 0)
        if self.runtime:
            for name in ("allocated", "reserved"):
                bytes_of[name] = getattr(self.runtime, f"memory_{name}")(self.index)
                bytes_of[f"peak_{name}"] = getattr(self.runtime, f"max_memory_{name}")(self.index)
            bytes_of["free"], bytes_of["total"] = self.runtime.mem_get_info(self.index)
        used, total = host_memory()
        return bytes_of | {"host": _resident_bytes(), "host_used": used, "host_total": total}

    def peaks(self) -> dict[str, int]:
        """Most bytes since the last call: allocated and reserved by torch in this process; device: reserved, and what
        the device holds beside (contexts, libraries, other processes, as they are now). All zero on cpu.
        """
        now = self.memory()
        if self.runtime:
            self.runtime.reset_peak_memory_stats(self.index)
        beside = now["total"] - now["free"] - now["reserved"]
        return {
            "allocated": now["peak_allocated"],
            "reserved": now["peak_reserved"],
            "device": now["peak_reserved"] + beside,
        }


def _resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where there is no /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(bytes in use, bytes that there are) of the node, or of the innermost limited cgroup (v2) of this process; what
    can be reclaimed is not in use. (0, 0) where there is no /proc.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        found = (kib["MemTotal"] - kib["MemAvailable"]) * 1024, kib["MemTotal"] * 1024
        own = [line[3:] for line in (root / "proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    except OSError:
        return 0, 0
    for group in [root / "sys/fs/cgroup" / own[0].lstrip("/")] if own else []:
        for path in (group, *group.parents):
            with suppress(OSError, ValueError):  # the root has no such file, and "max" is no number
                limit, current = (int((path / f"memory.{name}").read_text()) for name in ("max", "current"))
                cache = re.search(r"^inactive_file (\d+)", (path / "memory.stat").read_text(), re.M)
                return (current - int(cache[1] if cache else 0), limit) if limit < found[1] else found
    return found


def present() -> list[str]:
    """Accelerators with at least one usable device; imports torch_npu where it is installed."""
    return [kind for kind in ("cuda", "npu") if _usable(kind)]


def _usable(kind: str) -> bool:
    """torch.version says what torch was built for: on an Ascend host torch.cuda.is_available() may be True, once
    something has put torch.npu in the place of torch.cuda (transfer_to_npu does).

    ValueError when torch_npu is installed but cannot be loaded.
    """
    if kind == "cuda":
        return torch.version.cuda is not None and torch.cuda.is_available()
    if not importlib.util.find_spec("torch_npu"):
        return False
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise ValueError(
            f"torch_npu is installed but cannot be loaded: {error}. Source CANN's set_env.sh, or set runtime.device"
        ) from error
    return bool(torch.npu.is_available())


def pick(kind: str = "auto", local_rank: int = 0) -> Device:
    """Device of this process, made current. "auto" takes the only accelerator that is present, or cpu without one.

    ValueError names runtime.device when two kinds are present, or when the wanted one is not.
    """
    if kind == "auto":
        kinds = present()
        if len(kinds) > 1:
            raise ValueError(f"runtime.device = auto finds {' and '.join(kinds)}; set runtime.device to one of them")
        kind = kinds[0] if kinds else "cpu"
    elif kind != "cpu" and not _usable(kind):
        raise ValueError(f"runtime.device = {kind}, but torch finds {' and '.join(present()) or 'only a cpu'}")
    device = Device(kind, 0 if kind == "cpu" else local_rank)
    if device.runtime:
        count = device.runtime.device_count()
        if local_rank >= count:
            raise ValueError(f"local rank {local_rank} has no {kind} device: this host shows {count}")
        device.runtime.set_device(local_rank)
    return device
