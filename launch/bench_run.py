"""Row `step` of launch.bench: where the seconds of a finished run went, and what launch.plan had said about it.

Peaks are those of memory_peak_gb (docs/metrics.md), which a run on cpu does not have; the prediction is made anew from
the run's own configuration, with the lengths that it met.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch import plan_job
from launch.bench_rows import GIB, Figure
from launch.config import load
from launch.estimate import Work
from launch.hardware import find

Row = Mapping[str, float]
TERMS = {
    "generate": ("generate_sequences",),
    "old log-probs": ("old_log_prob",),
    "reference log-probs": ("ref",),
    "update": ("update_actor",),
    "weight sync": ("reshard",),
    "offload and restore": ("free_training", "restore_training"),
}
"""Term of the step estimate -> phases of timing_s."""


def read(run: str) -> list[Row]:
    """Rows of the steps after the first, which warms up. ValueError where there are none."""
    path = Path(run, "metrics.jsonl")
    if not path.is_file():
        raise ValueError(f"--run {run}: it has no metrics.jsonl")
    steps = [row for row in map(json.loads, path.read_text().splitlines()) if "timing_s/step" in row]
    if not steps:
        raise ValueError(f"--run {run}: no step is finished")
    return steps[len(steps) > 1 :]


def median(steps: Sequence[Row], name: str) -> float:
    return statistics.median(row.get(name, 0.0) for row in steps)


def step(run: str, hardware: str) -> Iterator[Figure]:
    steps = read(run)
    whole = median(steps, "timing_s/step")
    for name in sorted({name for row in steps for name in row if name.startswith("timing_s/")}):
        yield Figure(name.removeprefix("timing_s/"), median(steps, name), whole, "s")
    if any("memory_peak_gb/update" in row for row in steps):
        yield from against_plan(steps, run, hardware)


def against_plan(steps: Sequence[Row], run: str, hardware: str) -> Iterator[Figure]:
    config = load([str(Path(run, "config.toml"))])
    lengths = ("prompt_length/mean", "response_length/mean", "response_length/max")
    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
    work = Work(*(median(steps, name) for name in lengths), samples)
    job = plan_job.make(config, config.world, find(hardware, config.runtime.device), work)
    peak = predicted_peaks([memory.phases for memory in job.stages])
    for phase, planned in peak.items():
        found = max(row.get(f"memory_peak_gb/{phase}", 0.0) for row in steps)
        yield Figure(f"peak while {phase}, against the plan", found, planned / GIB, "GiB")
    for term, phases in TERMS.items():
        if job.terms[term]:
            found = sum(median(steps, f"timing_s/{phase}") for phase in phases)
            yield Figure(f"{term}, against the plan", found, job.terms[term], "s")
    yield Figure("step, against the plan", median(steps, "timing_s/step"), job.step_s, "s")


def predicted_peaks(stages: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes by phase of memory_peak_gb, of the fullest stage; log-probs belong to the update there."""
    most = {name: max(stage[name] for stage in stages) for name in stages[0]}
    most["update"] = max(most["update"], most.pop("log_probs"))
    return most
