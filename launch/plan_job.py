"""Dry run of a job: does it fit, how long is a step, and where does the time go. No torch, no weights, no accelerator.

    python -m launch.plan job RECIPE [MORE.toml] [--world N] [--node-size 8] [--hardware a2|h100|h200] [--json]
                              [--prompt-tokens MEAN] [--response-tokens MEAN] [section.key=value ...]

Exit code 0 when the job can run, 1 when memory refuses it (with the nearest change that fits), 2 on bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from launch import hardware as table
from launch.config import Config, check, check_model, check_world, load
from launch.estimate import Work, bubble, expected_work, micro_batches, seconds
from launch.hardware import Hardware
from launch.plan import layouts, read_shape
from parallel.family import ModelShape
from parallel.memory import GIB, RankMemory, grids, rank_memory, refusals
from parallel.reshard_plan import plan
from parallel.reshard_traffic import traffic

MANY_RANKS = 2048
"""Above it the creation of process groups, all collective on the world, deserves a warning."""
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("train.offload", {"train.offload": ["params", "optimizer"]}),
    ("train.recompute", {"train.recompute": "full"}),
    ("train.optimizer.cpu_offload", {"train.optimizer.cpu_offload": True}),
)


@dataclass(frozen=True)
class Job:
    config: Config
    shape: ModelShape
    world: int
    hardware: Hardware
    work: Work
    stages: list[RankMemory]
    """The first rank of each pipeline stage."""
    problems: list[str]
    nearest: str
    """A change with which the job fits, or empty."""
    terms: dict[str, float]
    sync: dict[str, float]
    groups: dict[str, tuple[int, int]]
    """Whose -> (process groups made by the world, of which a rank is a member)."""
    host_bytes: int
    """Of a node."""

    @property
    def step_s(self) -> float:
        return sum(self.terms.values())

    def json(self) -> dict[str, Any]:
        train, rollout = grids(self.config, self.world)
        return {
            "world": self.world,
            "hardware": self.hardware.name,
            "fits": not self.problems,
            "problems": self.problems,
            "nearest": self.nearest,
            "train": {axis: getattr(train, axis) for axis in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp", "edp")},
            "rollout": {"replicas": rollout.replicas, "tp": rollout.tp, "dp": rollout.dp, "ep": rollout.ep_size},
            "stages": [asdict(memory) for memory in self.stages],
            "host_bytes": self.host_bytes,
            "micro_batches": micro_batches(self.config, self.work, train.dp),
            "bubble": bubble(self.config, micro_batches(self.config, self.work, train.dp)),
            "groups": {name: {"world": made, "rank": mine} for name, (made, mine) in self.groups.items()},
            "sync": self.sync,
            "work": asdict(self.work),
            "step_s": self.step_s,
            "terms_s": self.terms,
        }


def make(config: Config, world: int, device: Hardware, work: Work, node_size: int = 8, sync: bool = True) -> Job:
    """The dry run. ValueError where the options, the world or the model refuse; memory refusals are `problems`."""
    shape = _checked(config, world)
    train, _ = grids(config, world)
    stages, problems, host = fit(config, shape, world, device, work, node_size)
    worst = max(stages, key=lambda memory: max(memory.phases.values()))
    moved = _sync(config, shape, world, device, node_size) if sync else {"seconds": stages[0].engine / device.nic}
    terms = seconds(config, shape, world, device, work, worst, moved["seconds"])
    near = nearest(config, shape, world, device, work, node_size) if problems else ""
    groups = process_groups(config, shape, world)
    return Job(config, shape, world, device, work, stages, problems, near, terms, moved, groups, host)


def _checked(config: Config, world: int) -> ModelShape:
    check(replace(config, world=world))
    check_world(replace(config, world=world), world)
    shape = read_shape(config.model.path)
    check_model(config, shape)
    return shape


def fit(
    config: Config, shape: ModelShape, world: int, device: Hardware, work: Work, node_size: int
) -> tuple[list[RankMemory], list[str], int]:
    """(memory of one rank per stage, what does not fit, host bytes of the fullest node)."""
    train, _ = grids(config, world)
    firsts = {train.coord(rank).pp: rank for rank in reversed(range(world))}
    count = micro_batches(config, work, train.dp)
    both = layouts(config, shape, world)
    size, overhead = device.memory_bytes, device.overhead_bytes
    stages = [rank_memory(config, shape, both, firsts[s], size, overhead, count) for s in range(train.pp)]
    return stages, *problems_of(config, stages, device, node_size)


def problems_of(config: Config, stages: list[RankMemory], device: Hardware, node_size: int) -> tuple[list[str], int]:
    """(what does not fit, host bytes of the fullest node)."""
    longest = config.data.max_prompt_tokens + config.data.max_response_tokens
    problems = [text for memory in stages for text in refusals(memory, device.memory_bytes, longest)]
    host = node_size * max(memory.host for memory in stages)
    if host > device.host_bytes:
        problems.append(f"host: a node needs {host / GIB:.0f} GiB of {device.host_bytes / GIB:.0f}")
    return problems, host


def _sync(config: Config, shape: ModelShape, world: int, device: Hardware, node_size: int) -> dict[str, float]:
    source, target = layouts(config, shape, world)
    found = traffic(plan(source, target, node_size, config.rollout.sync_staging_mib << 20), source)
    return {
        "need_bytes": float(found.need.mean()),
        "received_bytes": float(found.received.mean()),
        "naive_received_bytes": float(found.naive_received.mean()),
        "rounds": found.rounds,
        "seconds": found.seconds(device.nic / 1e9, device.link / 1e9),
    }


def process_groups(config: Config, shape: ModelShape, world: int) -> dict[str, tuple[int, int]]:
    """Groups that ours, Megatron 0.16.1 and vLLM 0.32 create: (by the world, those of one rank).

    vLLM makes a device and a gloo group for each list of world, tp, dcp, pcp, pp, dp, ep and eplb; its dcp, pcp and pp
    lists have one rank each. Megatron makes three per pipeline (pp, embedding, position embedding).
    """
    t, r = grids(config, world)
    dense = (t.dp * t.cp, t.dp, t.cp, t.tp * t.pp, t.tp, t.pp, t.pp, t.pp, t.tp * t.dp * t.cp, t.tp * t.dp, t.tp * t.cp)
    expert = (t.ep, t.etp, t.etp * t.ep, t.etp * t.ep * t.pp, t.edp)
    megatron = [*dense, *expert]
    engine = [world, r.tp, 1, 1, 1, r.dp]
    if shape.is_moe:
        engine += [r.replica_size] * (2 if config.rollout.redundant_experts else 1)
    # The one more is of the whole world. Embedding groups hold the ends of a pipeline: ranks between have fewer.
    return {
        "ours": (2, 2),
        "Megatron": (sum(world // size for size in megatron) + 1, len(megatron) + 1),
        "vLLM": (2 * sum(world // size for size in engine), 2 * len(engine)),
    }


def nearest(config: Config, shape: ModelShape, world: int, device: Hardware, work: Work, node_size: int) -> str:
    """The smallest change that fits: options first, then one degree, then one degree with all of them."""
    for changes in _changes(config):
        changed = change(config, changes)
        try:
            check(changed)
            check_world(changed, world)
            check_model(changed, shape)
        except ValueError:
            continue
        if not fit(changed, shape, world, device, work, node_size)[1]:
            return " ".join(f"{name}={_text(value)}" for name, value in changes.items())
    return ""


def _changes(config: Config) -> Iterator[dict[str, Any]]:
    train, rollout = config.train, config.rollout
    options = [patch for _, patch in CHANGES if change(config, patch) != config]
    utilization = rollout.vllm.get("gpu_memory_utilization", 0.9)
    options += [{"rollout.vllm": {**rollout.vllm, "gpu_memory_utilization": u}} for u in (0.85, 0.7) if u < utilization]
    degrees: list[dict[str, Any]] = [{"rollout.tp": rollout.tp * 2}, {"rollout.tp": rollout.tp * 4}]
    degrees += [{"train.ep": train.ep * n} for n in (2, 4)] + [{"train.tp": train.tp * 2, "train.etp": train.etp or 1}]
    ends = {"train.first_stage_layers": 0, "train.last_stage_layers": 0}
    degrees += [{"train.etp": train.tp}, *({"train.pp": train.pp * n, **ends} for n in (2, 4, 8))]
    together = {name: value for patch in options for name, value in patch.items()}
    yield from options
    yield from degrees
    yield from ({**together, **patch} for patch in ({}, *degrees))


def change(config: Config, patch: dict[str, Any]) -> Config:
    """`config` with options of sections (at most one below another) replaced."""
    for name, value in patch.items():
        *path, last = name.split(".")
        owners = [config]
        for part in path:
            owners.append(getattr(owners[-1], part))
        for owner, part in zip(reversed(owners), [last, *reversed(path)], strict=True):
            value = replace(owner, **{part: value})
        config = value
    return config


def _text(value: Any) -> str:
    return json.dumps(value).replace('": ', '" = ') if not isinstance(value, (int, float)) else json.dumps(value)


def text(job: Job) -> str:
    """The dry run on one screen."""
    c, hw = job.config, job.hardware
    train, rollout = grids(c, job.world)
    count = micro_batches(c, job.work, train.dp)
    axes = " ".join(f"{axis} {getattr(train, axis)}" for axis in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp", "edp"))
    lines = [
        f"{c.model.path} on {job.world} x {hw.name}",
        f"train    {axes}, order {train.order}",
        f"rollout  {rollout.replicas} replicas of tp {rollout.tp} dp {rollout.dp}, experts over {rollout.ep_size}",
        "",
        f"{'GiB a rank':12}" + "".join(f"{name:>10}" for name in COLUMNS),
    ]
    lines += [_row(stage, memory) for stage, memory in enumerate(job.stages)]
    limit = f"{hw.memory_bytes / GIB:.0f} GiB of device"
    lines += [
        f"limit {limit}, libraries {hw.overhead_bytes / GIB:.0f} (assumed); node's host {job.host_bytes / GIB:.0f} of "
        f"{hw.host_bytes / GIB:.0f} GiB; KV cache {min(m.cache_tokens for m in job.stages):,} tokens a replica worker",
        "",
        *_groups(job),
        f"pipeline: {count} micro-batches, bubble {100 * bubble(c, count):.0f} %",
        _sync_text(job),
        "",
        f"step {job.step_s:.0f} s for {job.work.samples} samples of {job.work.prompt_tokens:.0f} + "
        f"{job.work.response_tokens:.0f} tokens (estimate, good to a factor of two)",
    ]
    lines += [f"  {name:22}{value:9.1f} s" for name, value in job.terms.items()]
    if job.problems:
        lines += ["", "CANNOT RUN", *(f"  {problem}" for problem in job.problems[:6])]
        lines += [f"  nearest that can: {job.nearest}" if job.nearest else "  no single change fits; see `plan search`"]
    return "\n".join(lines)


COLUMNS = ("layers", "params", "grads", "optim", "activ", "engine", "KV", "generate", "sync", "logprob", "update")


def _row(stage: int, m: RankMemory) -> str:
    sizes = [m.params, m.grads, m.optimizer, m.activations, m.engine, m.cache, *m.phases.values()]
    return f"stage {stage:<6}{m.layers:10}" + "".join(f"{size / GIB:10.1f}" for size in sizes)


def _groups(job: Job) -> list[str]:
    parts = [f"{name} {made} ({mine} a rank)" for name, (made, mine) in job.groups.items()]
    lines = [f"process groups: {', '.join(parts)}"]
    if job.world > MANY_RANKS:
        lines.append(
            f"warning: vLLM's groups of one rank (3 x 2 x {job.world}) are most of it; start with "
            "TORCH_NCCL_RANKS_PER_ROOT=64 and runtime.deadline_s of at least 3600, or use fewer, wider replicas"
        )
    return lines


def _sync_text(job: Job) -> str:
    s = job.sync
    if "rounds" not in s:
        return "weight sync: not planned"
    return (
        f"weight sync: {s['received_bytes'] / 1e9:.2f} GB a rank in {s['rounds']:.0f} rounds, {s['seconds']:.2f} s "
        f"(gathering whole tensors: {s['naive_received_bytes'] / 1e9:.0f} GB a rank)"
    )


def parser(command: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog=f"python -m launch.plan {command}", description=(__doc__ or "").split("\n")[0])
    found.add_argument("recipe", nargs="*", help="recipes and section.key=value")
    found.add_argument("--world", type=int, default=0, help="ranks; the recipe's `world` unless given")
    found.add_argument("--node-size", type=int, default=8, help="devices of a node")
    found.add_argument("--hardware", default="", help="a2, h100 or h200; the recipe's device decides unless given")
    found.add_argument("--prompt-tokens", type=float, default=0, help="mean; a quarter of the longest unless given")
    found.add_argument("--response-tokens", type=float, default=0, help="mean; a third of the longest unless given")
    found.add_argument("--json", action="store_true", help="one JSON object")
    return found


def inputs(options: argparse.Namespace) -> tuple[Config, int, Hardware, Work]:
    config = load(options.recipe)
    world = options.world or config.world
    if not world:
        raise ValueError("how many ranks? set `world` in the recipe or give --world N")
    device = table.find(options.hardware, config.runtime.device)
    return (
        replace(config, world=world),
        world,
        device,
        expected_work(config, options.prompt_tokens, options.response_tokens),
    )


def main(argv: list[str]) -> int:
    options, rest = parser("job").parse_known_intermixed_args(argv)
    options.recipe += rest
    try:
        config, world, device, work = inputs(options)
        job = make(config, world, device, work, options.node_size)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(job.json()) if options.json else text(job))
    return 1 if job.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
