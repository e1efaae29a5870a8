"""One rank, one step or one half of a job looked at alone: the debugging options of [runtime] around the loop.

    --debug-rank R    pdb in rank R before the first step; the others wait at a named barrier without deadline
    --record DIR      keep the samples of every step (or of runtime.record_steps); rollout/recorded.py
    --replay DIR      train on them without an engine, under any layout
    --rollout-only    generate and score, train nothing

Left out on purpose: restarting or patching ranks from here. docs/debugging.md shows all of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pdb
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.config import Config, ConfigError
from launch.profiler import profile_flags

log = logging.getLogger(__name__)

FLAGS = {"--debug-rank": "runtime.debug_rank", "--record": "runtime.record", "--replay": "runtime.replay"}
PATIENCE_S = 86400.0
"""Deadline of everything while a person looks at one rank."""
EVENTS = 2000
"""Collectives that the flight recorder of a rank remembers."""


def flags(argv: list[str]) -> list[str]:
    """`--debug-rank 1`, `--record DIR`, `--rollout-only`, the profiler's flags: as the options that they stand for."""
    words, found = iter(profile_flags(argv)), []
    for word in words:
        if word in FLAGS:
            value = next(words, "")
            if not value or value.startswith("--"):
                raise ConfigError(f"{word} needs a {'rank' if word == '--debug-rank' else 'directory'} after it")
            found.append(f"{FLAGS[word]}={value}")
        else:
            found.append("runtime.rollout_only=true" if word == "--rollout-only" else word)
    return found


def prepared(config: Config) -> Config:
    """`config` with what its debugging options imply. ConfigError for those that exclude each other."""
    runtime = config.runtime
    chosen = [name for name in ("record", "replay") if getattr(runtime, name)]
    if runtime.replay and (len(chosen) > 1 or runtime.rollout_only):
        other = "runtime.record" if len(chosen) > 1 else "runtime.rollout_only"
        raise ConfigError(f"runtime.replay reads samples, {other} makes them: leave one out")
    if runtime.record_steps and not runtime.record:
        raise ConfigError("runtime.record_steps chooses steps of runtime.record, which is empty")
    if runtime.replay and not list(Path(runtime.replay).glob("step_*/rank_*.npz")):
        raise ConfigError(f"runtime.replay = {runtime.replay}: no step_NNNNNN/rank_NNN.npz there; --record writes them")
    if runtime.debug_rank >= 0:
        runtime = replace(runtime, deadline_s=PATIENCE_S)
    if runtime.rollout_only:
        runtime = replace(runtime, self_check=False)
        algorithm, checkpoint = replace(config.algorithm, kl_loss=0.0, kl_reward=0.0), config.checkpoint
        config = replace(config, algorithm=algorithm, checkpoint=replace(checkpoint, every_steps=0, at_end=False))
    if runtime.replay:
        config = replace(config, eval=replace(config.eval, every_steps=0, before_training=False))
    return replace(config, runtime=runtime)


def pause(rank: int, wanted: int, group: Any, phase: Callable[[str], AbstractContextManager]) -> None:
    """Collective over `group`: pdb in rank `wanted`, while the others wait for it. Nothing when `wanted` is -1.

    RuntimeError when the rank has no terminal. In pdb `up` is the step; c lets all ranks go on, n and s go on line by
    line in this rank, while the others wait for it in their next collective.
    """
    if wanted < 0:
        return
    import torch.distributed as dist

    name = f"debug_rank_{wanted}"
    with phase(name):
        if rank == wanted:
            if not sys.stdin or not sys.stdin.isatty():
                remedy = "start torchrun from one, without --redirects; under Slurm with srun --pty"
                raise RuntimeError(f"--debug-rank {wanted}: this rank has no terminal; {remedy}")
            print(f"rank {rank} stops here; the others wait at barrier {name}. up: the step, c: go on", flush=True)
            pdb.Pdb(nosigint=True).set_trace()
        else:
            log.info("waiting at barrier %s until rank %d goes on", name, wanted)
        dist.barrier(group=group)


def flight_recorder(run_dir: str, kind: str, environment: dict[str, str] | os._Environ = os.environ) -> None:
    """Before process groups are made: the last collectives of every rank go to run_dir/logs/flight when one hangs.

    `kind`: of the device. What is set already stays. Read the files with torchfrtrace (NCCL).
    """
    if kind == "cpu":
        return
    directory = Path(run_dir).absolute() / "logs" / "flight"
    with contextlib.suppress(OSError):  # a bad run_dir has its own message
        directory.mkdir(parents=True, exist_ok=True)
    prefix = {"cuda": "NCCL", "npu": "HCCL"}[kind]
    settings = {
        f"TORCH_{prefix}_TRACE_BUFFER_SIZE": str(EVENTS),
        f"TORCH_{prefix}_DUMP_ON_TIMEOUT": "1",
        f"TORCH_{prefix}_DEBUG_INFO_TEMP_FILE": f"{directory}/rank_",
        f"TORCH_{prefix}_ENABLE_MONITORING": "1",
    }
    if kind == "cuda":  # torch 2.9 and later read these names
        settings |= {"TORCH_FR_BUFFER_SIZE": str(EVENTS), "TORCH_FR_DUMP_TEMP_FILE": f"{directory}/rank_"}
    for name, value in settings.items():
        environment.setdefault(name, value)
