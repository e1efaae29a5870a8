"""Collective smoke test of every process group of a job, with a deadline that names who is missing.

Ranks sign in at the store before a group is made; whoever decides first, by a compare-and-set, whether the group goes
ahead, decides for all, so that nobody waits inside a collective for a rank that sleeps. After a miss the members
wait for the late one before the next test, which is then a test of that group alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

PAYLOAD_BYTES = 16 << 20
PATIENCE = 4
"""Deadlines that a late rank is waited for before the next group."""
POLL_S = 0.02


def named_groups(train: Any, rollout: Any) -> dict[str, list[list[int]]]:
    """Axes -> rank lists of more than one rank. Each list is there once, under the names of all axes that have it."""
    axes = {f"train {axis}": train.groups(axis) for axis in ("tp", "cp", "pp", "dp-cp", "ep", "etp", "edp")}
    axes |= {f"rollout {axis}": rollout.groups(axis) for axis in ("tp", "dp", "replica")}
    world = max(max(group) for group in axes["train tp"]) + 1
    axes = {"world": [list(range(world))], **axes}
    names: dict[tuple[int, ...], list[str]] = {}
    for axis, groups in axes.items():
        for group in groups:
            if len(group) > 1:
                names.setdefault(tuple(sorted(group)), []).append(axis)
    found: dict[str, list[list[int]]] = {}
    for ranks, together in names.items():
        found.setdefault(", ".join(together), []).append(list(ranks))
    return found


def check_groups(
    store: Any, rank: int, axes: Mapping[str, list[list[int]]], device: Any, deadline_s: float, absent: list[int]
) -> list[dict[str, Any]]:
    """One row for each group of this rank: axis, ranks, and gb_s, or `missing` ranks, or `problem`.

    Groups with `absent` ranks are not tried.
    """
    rows = []
    for axis, groups in axes.items():
        for ranks in [ranks for ranks in groups if rank in ranks]:
            missing = [r for r in ranks if r in absent]
            name = f"{axis}/{ranks[0]}"
            found = {"missing": missing} if missing else _test(store, rank, name, ranks, device, deadline_s)
            rows.append({"axis": axis, "ranks": ranks, **found})
    return rows


def _test(store: Any, rank: int, name: str, ranks: list[int], device: Any, deadline_s: float) -> dict[str, Any]:
    missing = sign_in(store, name, rank, ranks, deadline_s)
    if missing:
        return {"missing": missing}
    try:
        return {"gb_s": _measure(ranks, device, deadline_s)}
    except (RuntimeError, ValueError, TimeoutError) as error:
        return {"problem": str(error).splitlines()[0][:200]}


def sign_in(store: Any, key: str, rank: int, ranks: list[int], deadline_s: float) -> list[int]:
    """Ranks that were not there at the deadline, the same answer on all; empty when the group goes ahead."""
    store.set(f"{key}/{rank}", "")
    here = arrived(store, key, ranks, deadline_s, f"{key}/verdict")
    verdict = json.loads(store.compare_set(f"{key}/verdict", "", json.dumps([r for r in ranks if r not in here])))
    arrived(store, key, verdict, PATIENCE * deadline_s)
    return verdict


def arrived(store: Any, key: str, ranks: list[int], deadline_s: float, unless: str = "") -> list[int]:
    """Those of `ranks` that have set KEY/RANK, waiting for all of them until the deadline or until `unless` is set."""
    until, here = time.monotonic() + deadline_s, []
    while True:
        here = [r for r in ranks if r in here or store.check([f"{key}/{r}"])]
        if len(here) == len(ranks) or time.monotonic() > until or (unless and store.check([unless])):
            return here
        time.sleep(POLL_S)


def _measure(ranks: list[int], device: Any, deadline_s: float, rounds: int = 3) -> float:
    """GB/s of an all-reduce (2 (n - 1) / n of the payload crosses every link). TimeoutError at the deadline."""
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=deadline_s)
    group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    payload = torch.ones(PAYLOAD_BYTES // 4 if device.kind != "cpu" else PAYLOAD_BYTES // 64, device=device.torch)
    started = 0.0
    for number in range(rounds + 1):
        work = dist.all_reduce(payload, group=group, async_op=True)
        until = time.monotonic() + deadline_s
        while not work.is_completed():
            if time.monotonic() > until:
                raise TimeoutError(f"all-reduce over ranks {ranks} did not end within {deadline_s:g} s")
            time.sleep(0)
        work.wait()
        device.synchronize()
        started = time.monotonic() if number == 0 else started
    if float(payload[0]) != float(len(ranks)) ** (rounds + 1):
        raise RuntimeError(f"all-reduce over ranks {ranks} gave {float(payload[0])}")
    moved = rounds * payload.numel() * 4 * 2 * (len(ranks) - 1) / len(ranks)
    dist.destroy_process_group(group)  # the name of the next one counts those that exist, alike on all its ranks
    return moved / max(time.monotonic() - started, 1e-6) / 1e9
