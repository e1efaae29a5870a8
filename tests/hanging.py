"""trainer.py, with one rank that stops for ever where a phase begins: TEST_HANG="PHASE RANK"; for test_debug.py."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from launch.watchdog import Watchdog  # noqa: E402

wanted, rank = os.environ["TEST_HANG"].split()
original = Watchdog.phase


def stuck() -> None:
    while True:
        time.sleep(60)


@contextmanager
def phase(self: Watchdog, name: str, *rest: float) -> Iterator[None]:
    with original(self, name, *rest):
        if name == wanted and os.environ["RANK"] == rank:
            stuck()
        yield


Watchdog.phase = phase  # type: ignore[method-assign]
runpy.run_path(str(ROOT / "trainer.py"), run_name="__main__")
