"""torch profiler traces of chosen steps and ranks, the phases as ranges: log.profile_steps, log.profile_ranks.

run_dir/profile/step_NNNNNN_rank_NNN.json opens in ui.perfetto.dev or chrome://tracing; a step is long, so it needs no
warm-up. On npu torch_npu's own profiler writes a directory instead, for MindStudio Insight. On the command line the
options may be written --profile-steps 5,6 --profile-ranks 0,3.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from launch.config import LogConfig

log = logging.getLogger(__name__)


class Profiler:
    """start(step) and stop() around every step; they do nothing but for the chosen steps and ranks."""

    def __init__(self, config: LogConfig, run_dir: Path, rank: int, kind: str):
        """`kind`: of the device: cpu, cuda or npu."""
        self.steps = frozenset(config.profile_steps) if rank in config.profile_ranks else frozenset()
        self.directory, self.rank, self.kind = run_dir / "profile", rank, kind
        self.running: Any = None
        self.target = self.directory

    def start(self, step: int) -> None:
        if step not in self.steps:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self.target = self.directory / f"step_{step:06d}_rank_{self.rank:03d}"
        self.running = _npu(self.target) if self.kind == "npu" else _torch(self.kind)
        self.running.start()

    def stop(self) -> None:
        """End and write the trace."""
        if self.running is None:
            return
        self.running.stop()
        if self.kind != "npu":  # there the trace handler wrote it
            self.running.export_chrome_trace(f"{self.target}.json")
        log.info("profile of rank %d: %s", self.rank, self.target)
        self.running = None


def _torch(kind: str) -> Any:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if kind == "cuda" else [])
    return profile(activities=activities)


def _npu(target: Path) -> Any:
    profiler = importlib.import_module("torch_npu.profiler")
    activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]
    return profiler.profile(activities=activities, on_trace_ready=profiler.tensorboard_trace_handler(str(target)))


def profile_flags(argv: list[str]) -> list[str]:
    """`--profile-steps 5,6 --profile-ranks 0,3` as the options that they stand for."""
    flags = {f"--profile-{kind}": f"log.profile_{kind}" for kind in ("steps", "ranks")}
    words = iter(argv)
    return [f"{flags[w]}=[{next(words, '')}]" if w in flags else w for w in words]


def with_ranges(phase: Callable[[str], AbstractContextManager[None]]) -> Callable[[str], AbstractContextManager[None]]:
    """`phase` that also shows as a range in traces."""
    from torch.profiler import record_function

    @contextmanager
    def both(name: str) -> Iterator[None]:
        with phase(name), record_function(f"phase {name}"):
            yield

    return both
