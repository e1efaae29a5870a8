"""Layouts of a job that fit, fastest first, by memory planner and step estimate; where a measured step went.

    python -m launch.plan search RECIPE [MORE.toml] [--top 5] [the options of `plan job`] [section.key=value ...]

Searched: train.tp, pp, cp, ep, etp; rollout.tp, dp, expert_parallel; Adam on device or host; graphs. The batch,
the model and everything else stay as the recipe says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

from launch.config import Config, check, check_model, check_world
from launch.estimate import Work, micro_batches, seconds
from launch.hardware import Hardware
from launch.plan import layouts, read_shape
from launch.plan_job import Job, change, inputs, make, parser, problems_of
from parallel.family import ModelShape
from parallel.memory import RankMemory, combine, engine_memory, grids, train_memory

NEUTRAL = {
    "train.tp": 1, "train.pp": 1, "train.vpp": 1, "train.cp": 1, "train.ep": 1, "train.etp": 0,
    "train.first_stage_layers": 0, "train.last_stage_layers": 0,
    "rollout.tp": 1, "rollout.dp": 1, "rollout.expert_parallel": False, "rollout.redundant_experts": 0,
}  # fmt: skip
"""The side that is not being looked at."""
SYNC_SHARE = 0.6
"""Of the NIC's rate that a sync reaches; the winners get their real plan."""

SEED_A2 = {
    "generate": 1311.4, "weight sync": 205.5, "old log-probs": 484.4, "reference log-probs": 133.8, "update": 644.1,
    "rest of generation": 32.6, "reward and rest": 2.6,
}  # fmt: skip
"""Seconds of step 1 of the reference log (16 x 8 A2, 2,048 samples of 84 + 1,329 tokens), 2,814 in all."""
SEED_WORK = (84.3, 1329.2)
WHY = {
    "generate": "captured graphs instead of eager steps; a shared queue instead of fixed shares",
    "weight sync": "each rank gets its own shard (9 GB) instead of the whole model (466 GB)",
    "old log-probs": "skipped: with one update a rollout the update's own pass gives them",
    "reference log-probs": "sequences packed to the token budget instead of 4 a micro-batch",
    "update": "sequences packed to the token budget instead of 1 a micro-batch",
    "rest of generation": "no worker processes, no serialised batches",
    "reward and rest": "unchanged",
}


def train_patches(config: Config, shape: ModelShape, world: int) -> Iterator[dict[str, Any]]:
    """Training layouts whose degrees divide the world, Adam on the device before Adam on the host."""
    sizes = itertools.product(_powers(8), _powers(16), _powers(2), _powers(64), (1, 0))
    for tp, pp, cp, ep, whole in sizes:
        etp = 1 if whole else tp
        if (not whole and tp == 1) or world % (tp * pp * cp) or world % (ep * etp * pp) or ep > max(1, shape.experts):
            continue
        if not shape.is_moe and whole:
            continue
        first, last = stages(shape.num_layers, pp)
        budget = -(-config.train.micro_batch_tokens * config.train.cp // cp // 64) * 64
        patch = {"tp": tp, "pp": pp, "vpp": 1, "cp": cp, "ep": ep, "etp": etp if shape.is_moe else 0}
        patch |= {"first_stage_layers": first, "last_stage_layers": last, "micro_batch_tokens": budget}
        for on_host in (False, True):
            yield {f"train.{name}": value for name, value in patch.items()} | {"train.optimizer.cpu_offload": on_host}


def rollout_patches(config: Config, shape: ModelShape, world: int) -> Iterator[dict[str, Any]]:
    """Engines whose size divides the world, with captured graphs."""
    graphs = {k: v for k, v in config.rollout.vllm.items() if k != "enforce_eager"}
    for tp in _powers(16):
        for dp, split in [(1, False), *((dp, True) for dp in (1, 2, 3, 4, 8) if shape.is_moe)]:
            if world % (tp * dp) == 0:
                yield {
                    "rollout.tp": tp,
                    "rollout.dp": dp,
                    "rollout.expert_parallel": split,
                    "rollout.redundant_experts": 0
                    if shape.experts % (tp * dp) == 0
                    else config.rollout.redundant_experts,
                    "rollout.vllm": graphs,
                }


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length())]


def stages(layers: int, pp: int) -> tuple[int, int]:
    """(first, last) layers that make the stages as equal as Megatron allows, the ends not longer than the others."""
    if pp == 1 or layers % pp == 0:
        return 0, 0
    middle = -(-layers // pp)
    rest = layers - middle * (pp - 2)
    return (rest - rest // 2, rest // 2) if pp > 2 else (rest - rest // 2, rest // 2)


def search(config: Config, world: int, device: Hardware, work: Work, node_size: int, top: int) -> list[Job]:
    """The `top` fastest that fit, with their real sync plans. ValueError when none fits.

    Each training layout and each engine is weighed once; pairs only add up.
    """
    shape = read_shape(config.model.path)
    if why := refused(config, shape, world):
        raise ValueError(why)
    engines = [
        (patch, engine_memory(changed, shape, layouts(changed, shape, world)[1], 0, device.memory_bytes))
        for patch in rollout_patches(config, shape, world)
        if not refused(changed := change(config, {**NEUTRAL, **patch}), shape, world)
    ]
    found: list[tuple[float, dict[str, Any]]] = []
    for patch in train_patches(config, shape, world):
        changed = change(config, {**patch, **{k: v for k, v in NEUTRAL.items() if k.startswith("rollout")}})
        if refused(changed, shape, world):
            continue
        grid, _ = grids(changed, world)
        source, _ = layouts(changed, shape, world)
        ranks = sorted({grid.coord(r).pp: r for r in reversed(range(world))}.values())
        count = micro_batches(changed, work, grid.dp)
        sides = [
            train_memory(changed, shape, source, rank, count) for rank in {ranks[0], ranks[len(ranks) // 2], ranks[-1]}
        ]
        for engine_patch, engine in engines:
            both = change(config, {**patch, **engine_patch})
            memory = [combine(both, side, engine, device.overhead_bytes) for side in sides]
            if not problems_of(both, memory, device, node_size)[0]:
                step_s = _rough_s(both, shape, world, device, work, memory, node_size)
                found.append((step_s, {**patch, **engine_patch}))
    if not found:
        raise ValueError(f"no layout of {config.model.path} fits {world} x {device.name}; use more ranks")
    best = sorted(found, key=lambda one: one[0])[:top]
    jobs = [make(change(config, patch), world, device, work, node_size) for _, patch in best]
    return sorted((job for job in jobs if not job.problems), key=lambda job: job.step_s)


def refused(config: Config, shape: ModelShape, world: int) -> str:
    """Why options, world or model refuse this layout; empty when they do not."""
    try:
        check(config)
        check_world(config, world)
        check_model(config, shape)
        grids(config, world)
    except ValueError as error:
        return str(error)
    return ""


def _rough_s(
    config: Config,
    shape: ModelShape,
    world: int,
    device: Hardware,
    work: Work,
    memory: list[RankMemory],
    node_size: int,
) -> float:
    worst = max(memory, key=lambda m: max(m.phases.values()))
    rate = device.nic if world > node_size else device.link
    sync = worst.engine / (rate * SYNC_SHARE)
    return sum(seconds(config, shape, world, device, work, worst, sync).values())


def text(config: Config, jobs: list[Job], seed: Job | None) -> str:
    first = jobs[0]
    names = list(first.terms)
    lines = [
        f"{config.model.path} on {first.world} x {first.hardware.name}: {first.work.samples} samples of "
        f"{first.work.prompt_tokens:.0f} + {first.work.response_tokens:.0f} tokens (good to a factor of two)",
        "",
        f"{'step s':>8} {'layout':58}" + "".join(f"{name.split()[0]:>11}" for name in names),
    ]
    for job in jobs:
        lines.append(f"{job.step_s:8.0f} {layout(job.config):58}" + "".join(f"{job.terms[n]:11.1f}" for n in names))
    lines += ["", "as options of the fastest:", f"  {arguments(first.config)}"]
    return "\n".join(lines + (_where(seed, first) if seed else []))


def layout(config: Config) -> str:
    t, r = config.train, config.rollout
    ends = f" {t.first_stage_layers}..{t.last_stage_layers}" if t.first_stage_layers or t.last_stage_layers else ""
    adam = " host-adam" if t.optimizer.cpu_offload else ""
    experts = " ep" if r.expert_parallel else ""
    return f"tp{t.tp} pp{t.pp}{ends} cp{t.cp} ep{t.ep} etp{t.etp}{adam} | vllm tp{r.tp} dp{r.dp}{experts}"


def arguments(config: Config) -> str:
    """The layout as section.key=value."""
    names = "tp pp cp ep etp first_stage_layers last_stage_layers micro_batch_tokens".split()
    words = [f"train.{name}={getattr(config.train, name)}" for name in names]
    words += [
        f"rollout.{name}={str(getattr(config.rollout, name)).lower()}" for name in ("tp", "dp", "expert_parallel")
    ]
    words += [f"train.optimizer.cpu_offload={str(config.train.optimizer.cpu_offload).lower()}"]
    return " ".join([*words, "rollout.vllm.enforce_eager=false"])


def _where(seed: Job, best: Job) -> list[str]:
    """The measured terms of the reference job, beside the estimates for this recipe and for the fastest layout."""
    total = sum(SEED_A2.values())
    lines = ["", f"where the reference job's {total:.0f} s went, and what each change saves:", ""]
    lines.append(f"{'':22}{'measured':>10}{'recipe':>9}{'fastest':>9}  why")
    for name, measured in SEED_A2.items():
        mine, fastest = (job.terms.get(name, 2.6 if name == "reward and rest" else 0.0) for job in (seed, best))
        lines.append(f"{name:22}{measured:10.1f}{mine:9.1f}{fastest:9.1f}  {WHY[name]}")
    extra = ("host Adam", "offload and restore")
    lines += [
        f"{name:22}{'':10}{seed.terms[name]:9.1f}{best.terms[name]:9.1f}  beside the measured terms" for name in extra
    ]
    return [*lines, f"{'step':22}{total:10.1f}{seed.step_s + 2.6:9.1f}{best.step_s + 2.6:9.1f}"]


def main(argv: list[str]) -> int:
    arguments_ = _parser()
    options, rest = arguments_.parse_known_intermixed_args(argv)
    options.recipe += rest
    try:
        config, world, device, work = inputs(options)
        is_seed = device.name.startswith("Ascend A2") and "235B" in config.model.path and world == 128
        if is_seed and not (options.prompt_tokens or options.response_tokens):
            options.prompt_tokens, options.response_tokens = SEED_WORK
            _, _, _, work = inputs(options)
        jobs = search(config, world, device, work, options.node_size, options.top)
        seed = make(config, world, device, work, options.node_size) if is_seed else None
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = [{"arguments": arguments(job.config), **job.json()} for job in jobs]
    print(json.dumps(found) if options.json else text(config, jobs, seed))
    return 0


def _parser() -> argparse.ArgumentParser:
    found = parser("search")
    found.add_argument("--top", type=int, default=5, help="layouts to print")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
