"""Dry runs of an N-rank job on one machine, from the recipe and the model's config.json alone.

    python -m launch.plan job|search RECIPE ...      (plan_job.py, plan_search.py)
    python -m launch.plan reshard RECIPE [--world N] [--node-size 8] [--ranks] [--json] [section.key=value ...]

Needs numpy only: no torch, no engine, no accelerator. `model.path` may name a model of launch/models.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from launch.checks import check_ranges
from launch.config import Config, check_model, check_world, load
from parallel.family import ModelShape, model_shape, read_config
from parallel.grid import RolloutGrid, TrainGrid
from parallel.layout import Layout
from parallel.megatron_layout import megatron_layout
from parallel.reshard_plan import Plan, plan
from parallel.reshard_traffic import CHANNELS, Traffic, traffic
from rollout.expert_placement import aligned_expert_maps
from rollout.vllm_layout import vllm_layout

MODELS = Path(__file__).parent / "models"
BYTES = ("need", "received", "sent", "local", "nic_received", "nic_sent")


def main(argv: list[str]) -> int:
    """Exit code: 0, 1 when the job cannot run, 2 after one message on bad input."""
    if argv[:1] in (["job"], ["search"]):
        from launch import plan_job, plan_search

        return {"job": plan_job, "search": plan_search}[argv[0]].main(argv[1:])
    options, rest = _parser().parse_known_intermixed_args(argv)
    try:
        config = load([*options.recipe, *rest])
        world = options.world or config.world
        if not world:
            raise ValueError("how many ranks? set `world` in the recipe or give --world N")
        check_ranges(config)
        for name in ("world", "node_size", "nic_gb_s", "link_gb_s"):
            value = world if name == "world" else getattr(options, name)
            if not 0 < value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be greater than 0 and finite, got {value}")
        result = reshard(config, world, options.node_size)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result.json(options.ranks)) if options.json else result.text(options))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch.plan", description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["job", "reshard", "search"])
    parser.add_argument("recipe", nargs="*", help="recipes and section.key=value")
    parser.add_argument("--world", type=int, default=0, help="ranks; the recipe's `world` unless given")
    parser.add_argument("--node-size", type=int, default=8, help="devices of a node")
    parser.add_argument("--ranks", action="store_true", help="one line a rank")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--nic-gb-s", type=float, default=50.0, help="GB/s a device, one way, between nodes")
    parser.add_argument("--link-gb-s", type=float, default=450.0, help="GB/s a device, one way, within a node")
    return parser


def read_shape(path: str) -> ModelShape:
    """Shape of a model directory, or of the reference model of launch/models with that name."""
    directory = Path(path)
    if not (directory / "config.json").exists():
        named = MODELS / directory.name.lower()
        directory = named if path and named.exists() else directory
    return model_shape(read_config(directory), f"{directory}/config.json")


def layouts(config: Config, shape: ModelShape, world: int) -> tuple[Layout, Layout]:
    """Training and rollout layout of the job on `world` ranks."""
    train, rollout = config.train, config.rollout
    grid = TrainGrid(world, train.tp, train.pp, train.vpp, train.cp, train.ep, train.etp or train.tp, train.order)
    stages = (train.first_stage_layers, train.last_stage_layers)
    engine = RolloutGrid(world, rollout.tp, rollout.dp, rollout.expert_parallel)
    training, redundant = megatron_layout(shape, grid, *stages, dtype=train.dtype), rollout.redundant_experts
    experts = aligned_expert_maps(training, shape, engine, redundant) if redundant else None
    return training, vllm_layout(shape, engine, rollout.dtype, expert_maps=experts)


@dataclass(frozen=True)
class Resharding:
    """What the weight sync of a job moves."""

    source: Layout
    target: Layout
    plan: Plan
    traffic: Traffic
    plan_s: float
    """Seconds from the configuration to the plan."""

    def json(self, ranks: bool) -> dict[str, Any]:
        traffic = self.traffic
        found: dict[str, Any] = {"world": self.plan.world, "node_size": self.plan.node_size}
        found |= {f"{name}_bytes": _spread(getattr(traffic, name)) for name in BYTES}
        found |= {
            "naive_received_bytes": float(traffic.naive_received.mean()),
            "peers_max": int(traffic.peers.max()),
            "rounds": traffic.rounds,
            "buffer_bytes": traffic.buffer_bytes,
            "communicator_bytes": traffic.communicator_bytes,
            "plan_s": round(self.plan_s, 4),
            "digest": self.plan.digest,
        }
        if ranks:
            columns = {**{f"{name}_bytes": getattr(traffic, name) for name in BYTES}, "peers": traffic.peers}
            table = zip(*(column.tolist() for column in columns.values()), strict=True)
            found["ranks"] = [{"rank": i, **dict(zip(columns, row, strict=True))} for i, row in enumerate(table)]
        return found

    def text(self, options: argparse.Namespace) -> str:
        traffic, nic, link = self.traffic, options.nic_gb_s, options.link_gb_s
        lines = [
            f"{self.source.name}  ->  {self.target.name}",
            "",
            f"{'GB a rank':14}{'min':>10}{'mean':>10}{'max':>10}",
        ]
        for name in BYTES:
            spread = _spread(getattr(traffic, name))
            lines.append(f"{name.replace('_', ' '):14}" + "".join(f"{spread[k] / 1e9:10.3f}" for k in spread))
        naive = traffic.naive_received.mean() / 1e9
        seconds, gathered = traffic.seconds(nic, link), traffic.naive_seconds(nic, options.node_size)
        lines += [
            f"{'naive gather':14}{'':10}{naive:10.3f}",
            "",
            f"rounds {traffic.rounds}, peers of a rank at most {traffic.peers.max()}, mean {traffic.peers.mean():.1f}",
            f"buffers {traffic.buffer_bytes / 2**20:.0f} MiB, communicator about "
            f"{traffic.communicator_bytes / 2**20:.0f} MiB (NCCL, {CHANNELS} channels a pair)",
            f"time {seconds:.3f} s at {nic:g} GB/s between and {link:g} GB/s within nodes; "
            f"naive gather at least {gathered:.3f} s",
            f"planned in {self.plan_s:.3f} s, digest {self.plan.digest}",
        ]
        if options.ranks:
            lines += ["", "".join(f"{name:>14}" for name in ("rank", *BYTES, "peers"))]
            columns = [getattr(traffic, name) / 1e9 for name in BYTES]
            for rank in range(self.plan.world):
                row = "".join(f"{column[rank]:14.3f}" for column in columns)
                lines.append(f"{rank:14}{row}{int(traffic.peers[rank]):14}")
        return "\n".join(lines)


def reshard(config: Config, world: int, node_size: int) -> Resharding:
    """Plan the weight sync of a job. ValueError where the model, the world or the layouts do not fit."""
    shape = read_shape(config.model.path)
    check_world(replace(config, world=world), world)
    check_model(config, shape)
    start = time.perf_counter()
    source, target = layouts(config, shape, world)
    moves = plan(source, target, node_size, config.rollout.sync_staging_mib << 20)
    seconds = time.perf_counter() - start
    return Resharding(source, target, moves, traffic(moves, source), seconds)


def _spread(values: np.ndarray) -> dict[str, float]:
    return {"min": int(values.min()), "mean": float(values.mean()), "max": int(values.max())}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
