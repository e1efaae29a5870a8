"""Named phases with deadlines and times; when one is silent for too long, the stacks of all ranks go to disk.

    with watchdog.phase("gen"):                  times: watchdog.timings() -> {"gen": seconds, ...} of the step
        ... watchdog.heartbeat() ...             every sign of progress starts the deadline anew

A daemon thread per rank looks a few times per deadline. The first rank whose phase is silent beyond it creates
`logs/attempt_K/hang.json`; every rank that sees this file writes `stacks_rank_NNN.txt`, waits for the others' and ends
with Exit.HANG. A rank that cannot run Python at all (a C call that keeps the interpreter lock) is ended by
faulthandler's own thread, which needs no lock. Files, not collectives: those are what hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from launch.beacon import Beacon
from launch.processes import parse_table, read_text, unlink_own_segments
from launch.runtime import Exit, RunDir

log = logging.getLogger(__name__)

LEAVE_AFTER_S = 0.5
ROOT = Path(__file__).resolve().parent.parent


class Phase(NamedTuple):
    name: str
    since: float
    """Monotonic time of the last sign of life."""
    deadline_s: float
    """Longest silence; 0 is none."""


class Watchdog:
    def __init__(
        self,
        run: RunDir,
        deadline_s: float = 1800.0,
        grace_s: float = 10.0,
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        """`grace_s`: how long a rank waits for the stacks of the others before it ends."""
        self.run, self.deadline_s, self.grace_s, self.leave = run, deadline_s, grace_s, leave
        self.poll_s = min(5.0, max(0.05, deadline_s / 20)) if deadline_s > 0 else 5.0
        self.beacon = Beacon(run)
        self._main = threading.get_ident()
        self._phase = Phase("outside of phases", time.monotonic(), deadline_s)
        self._seconds: dict[str, float] = {}
        self._stop = threading.Event()
        self._stacks = open(run.log_dir / f"stacks_rank_{run.rank:03d}.part", "w")  # ends with the job
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def phase(self, name: str, deadline_s: float | None = None) -> Iterator[None]:
        """Watch and time a block; phases nest, and the inner one counts. `deadline_s` None: the watchdog's own."""
        outer, begin = self._phase, time.monotonic()
        self._phase = Phase(name, begin, self.deadline_s if deadline_s is None else deadline_s)
        log.debug("phase %s begins", name)
        try:
            yield
        finally:
            now = time.monotonic()
            self._seconds[name] = self._seconds.get(name, 0.0) + now - begin
            self._phase = outer._replace(since=now)
            log.debug("phase %s ends after %.3f s", name, now - begin)

    def heartbeat(self) -> None:
        """The current phase makes progress."""
        self._phase = self._phase._replace(since=time.monotonic())

    def timings(self) -> dict[str, float]:
        """Seconds of each phase since the last call, in order of first use."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()
        with contextlib.suppress(OSError):
            Path(self._stacks.name).unlink()

    def _watch(self) -> None:
        told = self.run.log_dir / "hang.json"
        while not self._stop.wait(self.poll_s):
            name, since, deadline_s = self._phase
            silent_s = time.monotonic() - since
            late = 0 < deadline_s < silent_s
            if deadline_s > 0:
                # Fires only if this thread gets no turn to push it back.
                rest_s = max(0.0, deadline_s - silent_s) + 2 * (self.poll_s + self.grace_s + LEAVE_AFTER_S)
                faulthandler.dump_traceback_later(rest_s, file=self._stacks, exit=True)
            else:
                faulthandler.cancel_dump_traceback_later()
            if late or told.exists():
                try:
                    self._report(told, name, silent_s, late)
                finally:
                    self._leave_together()
                return

    def _report(self, told: Path, name: str, silent_s: float, late: bool) -> None:
        """Tell the other ranks, dump, wait for their stacks, say it in one line."""
        mine = {"rank": self.run.rank, "phase": name, "silent_s": round(silent_s, 1), **whereabouts(self._main)}
        first = late and _create(told, json.dumps(mine))
        if first:
            self.run.fail(f"hang: phase {name} was silent for {silent_s:.1f} s")
        mine["unreachable"] = self.beacon.unreachable()
        print(json.dumps(mine), file=self._stacks, flush=True)
        faulthandler.dump_traceback(file=self._stacks, all_threads=True)
        os.replace(self._stacks.name, self.run.log_dir / f"stacks_rank_{self.run.rank:03d}.txt")
        reports = self._wait_for_others()
        hung = parse_table(read_text(told)) or mine
        log.log(
            logging.CRITICAL if first else logging.INFO,
            f"hang: rank {hung['rank']} was silent for {hung['silent_s']} s in phase {hung['phase']}; "
            f"{describe(reports, self.run.world)}; stacks of all threads: {self.run.log_dir}/stacks_rank_*.txt",
        )
        self.run.release()

    def _wait_for_others(self) -> list[dict[str, Any]]:
        """First lines of the stack files that ranks wrote within the grace time."""
        until = time.monotonic() + self.grace_s + self.poll_s
        while len(files := sorted(self.run.log_dir.glob("stacks_rank_*.txt"))) < self.run.world:
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        return [r for r in (parse_table(read_text(file).partition("\n")[0]) for file in files) if r]

    def _leave_together(self) -> None:
        """Leave at one time by the files' clock: a rank that sees the others vanish first would raise that instead."""
        files = list(self.run.log_dir.glob("stacks_rank_*.txt"))
        if len(files) == self.run.world:
            newest = max(file.stat().st_mtime for file in files)
            time.sleep(min(max(0.0, newest + LEAVE_AFTER_S - time.time()), LEAVE_AFTER_S))
        unlink_own_segments()
        self.leave(Exit.HANG)


def describe(reports: list[dict[str, Any]], world: int) -> str:
    """Who hangs, where, and who waits for it in which collective; ranks at one place are told together.

    Ranks that are in no collective come first: the others wait for them. When all are in collectives, the smallest
    group comes first: the odd one out is the likeliest culprit. Hosts that do not answer are named before all.

    >>> describe([{"rank": r, "phase": "gen", "at": "gather (rollout/batch.py:88)", "waits": "all_gather"}
    ...           for r in (0, 2)] + [{"rank": 1, "phase": "reward", "at": "run (reward/pool.py:9)", "waits": ""}], 4)
    'reward: ranks [1] at run (reward/pool.py:9), gen: ranks [0, 2] wait in all_gather of gather (rollout/batch.py:88),\
 no stacks: ranks [3]'
    """
    places: dict[tuple[bool, str, str], list[int]] = {}
    for report in sorted(reports, key=lambda r: r["rank"]):
        waits, at = report.get("waits", ""), report.get("at", "")
        where = f" wait in {waits} of {at}" if waits else f" at {at}" if at else ""
        places.setdefault((bool(waits), report["phase"], where), []).append(report["rank"])
    missing = sorted(set(range(world)) - {report["rank"] for report in reports})
    ordered = sorted(places.items(), key=lambda item: (item[0][0], len(item[1])))
    told = list(dict.fromkeys(text for report in reports for text in report.get("unreachable", ())))
    told += [f"{phase}: ranks {ranks}{where}" for (_, phase, where), ranks in ordered]
    return ", ".join(told + ([f"no stacks: ranks {missing}"] if missing else []))


def whereabouts(thread: int) -> dict[str, str]:
    """Where a thread is: "at", the innermost line of ours, and "waits", the collective it waits in ("" for none)."""
    at, waits, frame = "", "", sys._current_frames().get(thread)
    while frame is not None and not at:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(str(ROOT)) and "site-packages" not in file:
            at = f"{name} ({Path(file).relative_to(ROOT)}:{frame.f_lineno})"
        elif f"torch{os.sep}distributed" in file and name != "wrapper":
            waits = name
        frame = frame.f_back
    return {"at": at, "waits": waits}


def _create(path: Path, text: str) -> bool:
    """Whether this process was the first to create the file."""
    try:
        with open(path, "x") as file:
            file.write(text)
        return True
    except OSError:
        return False
