"""Preflight of a job: what can be known to be wrong before it waits in a queue or an engine starts.

    python -m launch.doctor RECIPE [MORE.toml] [section.key=value ...]       on a login node: options, files, memory
    torchrun ... -m launch.doctor RECIPE ... [--deadline 30]                 on the job's nodes: all of it

One line a check, green with what was found or red with who, what and the remedy. Exit code 0 when all are green, 1 when
any is red, 2 for bad arguments. probe.py gathers the facts, doctor_groups.py tests the groups, doctor_checks.py judges.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import timedelta

from launch.config import Config, load
from launch.doctor_checks import Exam, Facts, Red, judge
from launch.probe import probe


def table(exam: Exam, found: dict[str, list[Red]]) -> str:
    """Green and red lines, coloured on a terminal."""
    colour = sys.stdout.isatty()
    green, red = ("\x1b[32mok\x1b[0m ", "\x1b[31mRED\x1b[0m") if colour else ("ok ", "RED")
    lines = []
    for name, reds in found.items():
        detail = _detail(exam, name)
        lines += [f"{green} {name:22} {detail}".rstrip()] if not reds else []
        lines += [f"{red} {name:22} {r.where}: {r.problem}\n    fix: {r.fix}" for r in reds[:8]]
        lines += [f"{red} {name:22} and {len(reds) - 8} more"] if len(reds) > 8 else []
    return "\n".join(lines)


def _detail(e: Exam, name: str) -> str:
    if name == "groups" and e.groups:
        slowest = {
            row["axis"]: row["gb_s"] for row in sorted(e.groups, key=lambda r: -r.get("gb_s", 0)) if "gb_s" in row
        }
        return "; ".join(f"{axis} {rate:.2f} GB/s" for axis, rate in slowest.items()) + " (slowest of each)"
    if name == "ranks and hosts":
        return f"{len(e.facts)} ranks on {len(e.hosts)} hosts" if e.in_job else "not asked: no launch"
    needs_job = ("devices", "clocks", "groups", "host names")
    return "not asked: no launch" if name in needs_job and not e.in_job else ""


def login_exam(config: Config, facts: Facts) -> Exam:
    return Exam(config, config.world, [facts], False, [], [])


def job_exam(config: Config, facts: Facts, deadline_s: float, name: str = "doctor") -> Exam:
    """Collective over the launch. Everything travels through the store, so that a rank that hangs is only missing."""
    import torch.distributed as dist

    from launch.doctor_groups import arrived, check_groups, named_groups, sign_in
    from parallel.device import Device, pick
    from parallel.grid import RolloutGrid, TrainGrid

    rank, world = facts["rank"], int(os.environ["WORLD_SIZE"])
    device = (
        Device("cpu") if "problem" in facts["device"] else pick(config.runtime.device, int(os.environ["LOCAL_RANK"]))
    )
    if not dist.is_initialized():
        dist.init_process_group(device.backend, timeout=timedelta(seconds=max(60.0, 4 * deadline_s)))
    store, everyone = dist.PrefixStore(name, dist.distributed_c10d._get_default_store()), list(range(world))
    late = sign_in(store, "start", rank, everyone, deadline_s)
    still = [r for r in late if r not in arrived(store, "start", late, 0.0)]
    absent = json.loads(store.compare_set("absent", "", json.dumps(still)))
    facts = {"clock": time.time(), **facts}
    t, r = config.train, config.rollout
    try:
        train = TrainGrid(world, t.tp, t.pp, t.vpp, t.cp, t.ep, t.etp or t.tp, t.order)
        axes = named_groups(train, RolloutGrid(world, r.tp, r.dp, r.expert_parallel))
    except ValueError:  # reported as options
        axes = {"world": [everyone]} if world > 1 else {}
    rows = check_groups(store, rank, axes, device, deadline_s, absent)
    store.set(f"facts/{rank}", json.dumps([facts, rows]))
    reports = {r: json.loads(store.get(f"facts/{r}")) for r in arrived(store, "facts", everyone, deadline_s)}
    store.set(f"read/{rank}", "")
    if rank == 0:  # it may hold the store, which the others still read
        arrived(store, "read", list(reports), deadline_s)
    ranks, rows = sorted(reports), [row for _, each in sorted(reports.items()) for row in each[1]]
    silent = [other for other in everyone if other not in reports]
    return Exam(config, world, [reports[r][0] for r in ranks], True, rows, silent)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.doctor", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", nargs="+", help="recipes and section.key=value")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds that a rank is waited for")
    options, rest = parser.parse_known_intermixed_args(argv)
    in_job, rank = "RANK" in os.environ, int(os.environ.get("RANK", "0"))
    try:
        config = load([*options.recipe, *rest])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    facts = probe(config, rank, int(os.environ.get("LOCAL_RANK", "0")))
    exam = job_exam(config, facts, options.deadline) if in_job else login_exam(config, facts)
    found = judge(exam)
    if rank == 0:
        print(table(exam, found))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
