"""The samples of a step on disk, and back: training can run again without the engine that made them.

    DIR/step_000003/rank_000.npz ...     each rank its own samples: `encode`'s bytes, and routed experts by sample

Read under any number of ranks and any layout: every rank reads all files, and routes are dealt anew to owners.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from launch.config import RuntimeConfig
from rollout.batch import Sample, canonical, decode, encode


class NoEngine:
    """In the engine's place when samples are read: has no weights, sleeps and wakes at no cost."""

    layout, packed = None, ()

    def place_experts(self, *layouts: object) -> None:
        pass

    def sleep(self) -> None:
        pass

    wake_weights = wake_cache = close = sleep


def step_directory(directory: str | Path, step: int) -> Path:
    return Path(directory) / f"step_{step:06d}"


def keep(options: RuntimeConfig, step: int, rank: int, world: int, samples: Sequence[Sample]) -> None:
    """`write`, when the options ask for this step."""
    if options.record and (not options.record_steps or step in options.record_steps):
        write(options.record, step, rank, world, samples)


def write(directory: str | Path, step: int, rank: int, world: int, samples: Sequence[Sample]) -> None:
    """Keep this rank's own samples of a step's batch."""
    target = step_directory(directory, step)
    target.mkdir(parents=True, exist_ok=True)
    mine = [sample for sample in samples if sample.owner == rank]
    routes = {f"routes_{i}": sample.routes for i, sample in enumerate(mine) if sample.routes is not None}
    part = target / f".rank_{rank:03d}.npz"
    with open(part, "wb") as file:
        np.savez(file, samples=encode(mine), world=np.array(world), **routes)
    os.replace(part, target / f"rank_{rank:03d}.npz")


def read(directory: str | Path, step: int, rank: int, world: int) -> list[Sample]:
    """All samples of a recorded step in canonical order; sample i belongs to rank i % `world`, which has its routes.

    ValueError when the step, or a rank's part of it, is not there.
    """
    source = step_directory(directory, step)
    files = sorted(source.glob("rank_*.npz"))
    if not files:
        steps = [int(d.name[5:]) for d in sorted(Path(directory).glob("step_*"))]
        raise ValueError(
            f"{source} does not exist: {directory} holds steps {steps}; for a later step than 1 start from the "
            "checkpoint before it (checkpoint.resume), and end with total_steps"
        )
    found: list[Sample] = []
    for file in files:
        try:
            with np.load(file) as table:
                world_then, samples = int(table["world"]), decode(table["samples"])
                for i, sample in enumerate(samples):
                    sample.routes = table[f"routes_{i}"] if f"routes_{i}" in table else None
        except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
            raise ValueError(f"{file}: not a recording, or damaged: {error}") from None
        if len(files) != world_then:
            raise ValueError(f"{source} holds the samples of {len(files)} of {world_then} ranks")
        found += samples
    ordered = [replace(sample, owner=i % world) for i, sample in enumerate(canonical(found))]
    return [replace(s, routes=s.routes if s.owner == rank else None) for s in ordered]
