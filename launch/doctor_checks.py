"""The doctor's checks: pure functions from facts (probe.py, doctor_groups.py) to what is red, with place and remedy."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launch.config import Config, ConfigError, check, check_model, check_world
from launch.probe import DEFAULT_PORT, port_holder

CLOCK_SKEW_S = 2.0
DEVICE_FREE_SHARE = 0.9
SHARED_MEMORY_BYTES = 32 << 20
"""Per local rank: the queue of a vLLM tensor-parallel group takes 24 MiB."""
OPEN_FILES = 1024, 24
"""At least this many, and so many more for each rank of the world."""

Facts = dict[str, Any]


@dataclass(frozen=True)
class Red:
    where: str
    problem: str
    fix: str


@dataclass(frozen=True)
class Exam:
    config: Config
    world: int
    facts: list[Facts]
    """Of every rank that reported; of this host alone on a login node."""
    in_job: bool
    groups: list[dict[str, Any]]
    """Rows of doctor_groups.check_groups of all ranks."""
    silent: list[int]
    """Ranks that did not report."""

    @property
    def hosts(self) -> list[str]:
        return sorted({fact["host"] for fact in self.facts})

    @property
    def first_of_hosts(self) -> list[Facts]:
        return list({fact["host"]: fact for fact in reversed(self.facts)}.values())


def _options(e: Exam) -> list[Red]:
    from launch.plan import read_shape

    try:
        check(e.config)
        if e.world:
            check_world(e.config, e.world)
        check_model(e.config, read_shape(e.config.model.path))
    except ConfigError as error:
        return [Red("recipe", str(error).replace("\n", " "), "change the option as it says")]
    except ValueError:
        return []  # the model's files: reported there
    return []


def _memory(e: Exam) -> list[Red]:
    from launch import hardware
    from launch.estimate import expected_work
    from launch.plan import read_shape
    from launch.plan_job import fit

    kind = e.facts[0]["device"].get("kind", "")
    if not e.world or "cpu" in (kind, e.config.runtime.device) and e.config.runtime.device in ("cpu", "auto"):
        return []
    try:
        device = hardware.find("", e.config.runtime.device)
        shape = read_shape(e.config.model.path)
        _, problems, _ = fit(e.config, shape, e.world, device, expected_work(e.config), e.facts[0]["local_world"])
    except ValueError:
        return []  # options or files: reported there
    return [
        Red("recipe", text, "python -m launch.plan job RECIPE names the nearest that fits") for text in problems[:2]
    ]


def _packages(e: Exam) -> list[Red]:
    train = e.config.train
    wanted = {"transformer_engine"} if train.spec == "te" else set()
    wanted |= {"apex"} if train.megatron.get("gradient_accumulation_fusion") else set()
    uses_deepep = train.megatron.get("moe_enable_deepep") or train.megatron.get("moe_token_dispatcher_type") == "flex"
    wanted |= {"deep_ep"} if uses_deepep else set()
    names = {"transformer_engine": "transformer-engine[pytorch]", "apex": "apex (from source)", "deep_ep": "DeepEP"}
    return [
        Red(fact["host"], f"{name} is not installed, the recipe's train.spec and train.megatron need it",
            f"install {names[name]}, or leave te.toml out")
        for fact in e.first_of_hosts for name in sorted(wanted - set(fact["packages"]))
    ]  # fmt: skip


def _files(e: Exam) -> list[Red]:
    fix = "make it readable at the same path on every host"
    return [Red(fact["host"], problem, fix) for fact in e.first_of_hosts for problem in fact["files"]]


def _disk(e: Exam) -> list[Red]:
    keep, path = e.config.checkpoint.keep, e.config.run_dir
    needed = checkpoint_bytes(e.config) * (keep + 1)
    fix = "free space, lower checkpoint.keep, or move run_dir"
    return [
        Red(
            fact["host"],
            f"{fact['disk_free'] / 1e9:.1f} GB free at {path}, {keep} + 1 checkpoints take {needed / 1e9:.1f}",
            fix,
        )
        for fact in e.first_of_hosts if fact["disk_free"] < needed
    ]  # fmt: skip


def checkpoint_bytes(config: Config) -> int:
    """Parameters, masters and two moments; 0 when the model cannot be read."""
    from launch.plan import read_shape
    from parallel.family import kinds
    from parallel.layout import elements

    try:
        shape = read_shape(config.model.path)
    except ValueError:
        return 0
    item = 2 + 12 if config.train.dtype == "bfloat16" else 4 + 8
    return item * sum(elements(kind.full_box) for kind in kinds(shape).values())


def _open_files(e: Exam) -> list[Red]:
    needed = OPEN_FILES[0] + OPEN_FILES[1] * max(e.world, 1)
    return [
        Red(_place(fact), f"at most {fact['open_files']} open files, {needed} are needed",
            "ulimit -n 32768 before torchrun")
        for fact in e.facts if 0 <= fact["open_files"] < needed
    ]  # fmt: skip


def _shared_memory(e: Exam) -> list[Red]:
    found = []
    for fact in e.first_of_hosts:
        stale, needed = fact["shared_memory_stale"], SHARED_MEMORY_BYTES * fact["local_world"]
        if stale:
            names = ", ".join(stale[:3]) + (f" and {len(stale) - 3} more" if len(stale) > 3 else "")
            found.append(
                Red(fact["host"], f"segments of a killed job: {names}", f"rm /dev/shm/{stale[0]} and the others")
            )
        if fact["shared_memory_free"] < needed:
            free = fact["shared_memory_free"] >> 20
            found.append(
                Red(fact["host"], f"{free} MiB free in /dev/shm, {needed >> 20} needed", "docker run --shm-size=16g")
            )
    return found


def _devices(e: Exam) -> list[Red]:
    found = []
    for fact in e.facts if e.in_job else []:
        device, where = fact["device"], _place(fact)
        if "problem" in device:
            found.append(Red(where, device["problem"], "check the driver and the devices given to the job"))
        elif device.get("total") and device["free"] < DEVICE_FREE_SHARE * device["total"]:
            held = "; ".join(device["holders"]) or "no process is listed: reset or drain the node"
            found.append(
                Red(
                    where,
                    f"{device['free'] / 2**30:.1f} of {device['total'] / 2**30:.1f} GiB free; held by {held}",
                    "end those processes",
                )
            )
    return found


def _world(e: Exam) -> list[Red]:
    found = [Red(f"rank {rank}", "did not report", "look at its host and its log") for rank in e.silent]
    if not e.in_job:
        return found
    sizes = Counter(fact["local_world"] for fact in e.first_of_hosts)
    usual = max(sizes, key=lambda size: (sizes[size], size))
    for fact in e.first_of_hosts:
        if fact["local_world"] != usual:
            what = f"{fact['local_world']} ranks, the other hosts have {usual}"
            found.append(Red(fact["host"], what, "use one --nproc-per-node everywhere"))
        count = fact["device"].get("count")
        if count is not None and count < fact["local_world"]:
            what = f"{count} devices for {fact['local_world']} ranks"
            found.append(Red(fact["host"], what, "lower --nproc-per-node, or repair the node"))
    return found


def _versions(e: Exam) -> list[Red]:
    return [red for name in sorted({n for f in e.facts for n in f["versions"]}) for red in _odd(e, name)]


def _place(fact: Facts) -> str:
    return f"{fact['host']} rank {fact['rank']}"


def _odd(e: Exam, name: str) -> list[Red]:
    counts = Counter(fact["versions"].get(name, "none") for fact in e.facts)
    usual = counts.most_common(1)[0][0]
    return [
        Red(_place(fact), f"{name} {found}, the other ranks have {usual}", "use one environment")
        for fact in e.facts if (found := fact["versions"].get(name, "none")) != usual
    ]  # fmt: skip


def _code(e: Exam) -> list[Red]:
    found = []
    for name, what in (("code", "this checkout's files"), ("config", "the resolved options")):
        usual = Counter(fact[name] for fact in e.facts).most_common(1)[0][0]
        found += [
            Red(_place(fact), f"{what} differ from the other ranks'", "start all from one checkout")
            for fact in e.facts if fact[name] != usual
        ]  # fmt: skip
    return found


def _host_names(e: Exam) -> list[Red]:
    found = []
    for fact in e.first_of_hosts if len(e.hosts) > 1 else []:
        reachable = [a for a in fact["addresses"] if not a.startswith("127.") and a != "::1"]
        if not reachable:
            what = f"the host name maps to {', '.join(fact['addresses']) or 'nothing'}"
            found.append(Red(fact["host"], what, "map it to the LAN address in /etc/hosts"))
    return found


def _interfaces(e: Exam) -> list[Red]:
    found = []
    for fact in e.facts:
        for name, value in fact["interface_variables"].items():
            wanted = [part.lstrip("=") for part in value.split(",") if part and not value.startswith("^")]
            known = [i for i in fact["interfaces"] if any(i.startswith(w) for w in wanted)]
            only_loopback = len(e.hosts) > 1 and known and all(i == "lo" for i in known)
            if wanted and (not known or only_loopback):
                what = f"{name}={value}, but the interfaces are {', '.join(fact['interfaces'])}"
                found.append(Red(_place(fact), what, "name one that reaches the other hosts"))
    return found


def _port(e: Exam) -> list[Red]:
    if e.in_job:
        return []  # torchrun itself holds it
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", DEFAULT_PORT))
    held = port_holder(host, port)
    return [Red(e.facts[0]["host"], held, "end its holder, or use another --master-port")] if held else []


def _clock(e: Exam) -> list[Red]:
    clocks = {fact["rank"]: fact["clock"] for fact in e.facts if "clock" in fact}
    middle = statistics.median_low(clocks.values()) if clocks else 0.0
    off: dict[str, float] = {}
    for fact in e.facts:
        if "clock" in fact and abs(fact["clock"] - middle) > CLOCK_SKEW_S:
            off.setdefault(_place(fact), fact["clock"] - middle)
    return [
        Red(where, f"clock is off by {by:+.1f} s", "start chrony or ntpd on that host") for where, by in off.items()
    ]


def _groups(e: Exam) -> list[Red]:
    host = {fact["rank"]: fact["host"] for fact in e.facts}
    found: dict[str, Red] = {}
    for row in e.groups:
        for rank in set(row.get("missing", [])) - set(e.silent):
            where = f"{host.get(rank, '?')} rank {rank}"
            what = f"was not there for the group {row['axis']} {_ranks(row['ranks'])}"
            found.setdefault(where, Red(where, what, "dump its stacks: kill -USR2 PID"))
        if "problem" in row:
            where = f"ranks {_ranks(row['ranks'])}"
            found.setdefault(
                where, Red(where, f"{row['axis']}: {row['problem']}", "check the links between their hosts")
            )
    return list(found.values())


def _ranks(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}]"


CHECKS: dict[str, Callable[[Exam], list[Red]]] = {
    "options divide": _options,
    "memory (planned)": _memory,
    "packages": _packages,
    "files": _files,
    "disk for checkpoints": _disk,
    "open-file limit": _open_files,
    "shared memory": _shared_memory,
    "port": _port,
    "ranks and hosts": _world,
    "devices": _devices,
    "versions": _versions,
    "code and options": _code,
    "host names": _host_names,
    "interfaces": _interfaces,
    "clocks": _clock,
    "groups": _groups,
}


def judge(exam: Exam) -> dict[str, list[Red]]:
    """Check -> what is red; every check is in it."""
    return {name: function(exam) for name, function in CHECKS.items()}
