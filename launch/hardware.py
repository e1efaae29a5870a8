"""Devices of the reference jobs: published rates, and the shares of them that the step estimate counts on.

Sources: vendors' data sheets; for A2 links, published HIXL figures; efficiencies, seconds per layer: calibrated on
the reference log (A2: 4,096 decoding steps of 94 layers in 1,311 s, update at MFU 0.016 with one sequence a
micro-batch) and on its A2 : H100 ratios, or assumed where marked. Estimates from them are good to a factor of two.
"""

from __future__ import annotations

from dataclasses import dataclass

GB, GIB = 10**9, 1 << 30


@dataclass(frozen=True)
class Hardware:
    name: str
    memory_bytes: int
    """That a process can allocate."""
    overhead_bytes: int
    """Assumed: context, communicators, kernels' workspaces."""
    flops: float
    """Dense bf16 FLOP/s."""
    hbm: float
    """Bytes/s of device memory."""
    link: float
    """Bytes/s a device, one way, within a node."""
    nic: float
    """Bytes/s a device, one way, between nodes."""
    host: float
    """Bytes/s a device, between pinned host memory and device."""
    host_bytes: int
    """Memory of a node."""
    train_share: float
    """Of `flops` that matrix products of an update reach; assumed."""
    hbm_share: float
    """Of `hbm` that decoding reaches; assumed."""
    eager_layer_s: float
    """Seconds a decoding step spends in one layer beyond reading memory, without graphs; calibrated."""
    graph_layer_s: float
    """The same with captured graphs; assumed."""


HARDWARE = {
    "a2": Hardware(
        "Ascend A2 (64 GB)", 61 * GIB, 3 * GIB, 313e12, 1.6e12, 196 * GB, 25 * GB, 20 * GB, 1850 * GIB,
        0.15, 0.6, 3.3e-3, 0.5e-3,
    ),
    "h100": Hardware(
        "H100 (80 GB)", 79 * GIB, 3 * GIB, 989e12, 3.35e12, 450 * GB, 50 * GB, 50 * GB, 2000 * GIB,
        0.30, 0.7, 1.2e-3, 0.20e-3,
    ),
    "h200": Hardware(
        "H200 (141 GB)", 139 * GIB, 3 * GIB, 989e12, 4.8e12, 450 * GB, 50 * GB, 50 * GB, 2000 * GIB,
        0.30, 0.7, 1.2e-3, 0.20e-3,
    ),
}  # fmt: skip


def find(name: str, device: str) -> Hardware:
    """By name, or what a recipe's runtime.device suggests. ValueError lists the names."""
    key = (name or {"npu": "a2"}.get(device, "h100")).lower()
    if key not in HARDWARE:
        raise ValueError(f"--hardware {name}: unknown; one of {', '.join(HARDWARE)}")
    return HARDWARE[key]
