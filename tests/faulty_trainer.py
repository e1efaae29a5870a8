"""trainer.py, except that one rank fails in the middle of a phase; started by torchrun in its place.

FAULT="PHASE RANK COUNT HOW": the phase, the rank, the how many-th time that the phase begins; kill (SIGKILL),
raise (an exception) or hang.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.watchdog import Watchdog

DELAY_S = {"generate_sequences": 0.15, "update_actor": 0.1, "reward": 0.01, "reshard": 0.002}


def arm(phase: str, rank: int, count: int, how: str) -> None:
    original = Watchdog.phase
    left = [count]

    @contextmanager
    def watched(self: Watchdog, name: str, deadline_s: float | None = None) -> Iterator[None]:
        with original(self, name, deadline_s):
            if name == phase and self.run.rank == rank:
                left[0] -= 1
                if left[0] == 0:
                    strike(phase, how)
            yield

    Watchdog.phase = watched  # type: ignore[method-assign]


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def strike(phase: str, how: str) -> None:
    if how == "raise":
        raise RuntimeError(f"injected in {phase}")
    if how == "hang":
        threading.Event().wait()
    if phase == "save_checkpoint":  # between two of this rank's files
        sys.addaudithook(lambda event, args: die() if event == "open" and "exp_avg-" in str(args[0]) else None)
    else:
        threading.Timer(DELAY_S[phase], die).start()


if __name__ == "__main__":
    if fault := os.environ.get("FAULT"):
        name, rank, count, how = fault.split()
        arm(name, int(rank), int(count), how)
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "trainer.py"), run_name="__main__")
