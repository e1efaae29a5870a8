"""Everything that a job reads before an engine starts, and refuses with one message: model files, tokenizer, prompts.

Used by trainer.py and by tools that check a recipe. Other folders are imported inside: the message comes fast.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from launch import config as options
from launch.config import Config
from launch.debug import flags, flight_recorder, prepared
from launch.nodes import bind_cpus
from launch.selfcheck import sampling_cuts

if TYPE_CHECKING:
    from launch.runtime import RunDir
    from parallel.device import Device
    from parallel.family import ModelShape
    from parallel.groups import Groups
    from reward import Scorer
    from rollout.prompts import PromptSet

log = logging.getLogger(__name__)
AFTER_WATCHDOG_S = 60.0
"""Collectives give up this long after the watchdog, which knows who is silent."""


@dataclass(frozen=True)
class Inputs:
    """Everything that can be read and refused before an engine starts."""

    shape: ModelShape
    tokenizer: Any
    prompts: PromptSet
    validation: dict[str, PromptSet]
    scorer: Scorer
    stop_ids: list[int]
    total_steps: int


def read_inputs(config: Config, world: int) -> Inputs:
    """ValueError with one message that names the file, row or option."""
    from launch.checks import check
    from launch.layout_checks import check_model, check_world
    from parallel.family import model_shape, read_config

    check(config)
    check_world(config, world)
    shape = model_shape(read_config(config.model.path), f"{config.model.path}/config.json")
    check_model(config, shape)

    from parallel.checkpoint import read_marker  # what follows takes seconds to import
    from parallel.hf import read_index
    from reward import build
    from rollout.prompts import PromptSet, load_tokenizer

    read_index(config.model.path, shape)
    if config.checkpoint.resume not in ("auto", "none"):
        read_marker(Path(config.checkpoint.resume))
    tokenizer = load_tokenizer(config.model.path)
    prompts = PromptSet(config.data.train_files, tokenizer, config.data, config.seed)
    validation = {f: PromptSet([f], tokenizer, config.data, config.seed) for f in config.data.val_files}
    sets = {", ".join(map(str, config.data.train_files)): prompts, **validation}
    for files, data in sets.items():
        _check_sources(config, files, data)
    steps = prompts.steps_per_epoch(config.data.prompts_per_step) * config.total_epochs
    return Inputs(
        shape,
        tokenizer,
        prompts,
        validation,
        build(config.reward, {source for data in sets.values() for source in data.sources}),
        [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
        config.total_steps or steps,
    )


def _check_sources(config: Config, files: str, data: PromptSet) -> None:
    """Every data source needs a reward rule. ValueError names the files."""
    from reward.rules import check_sources

    if config.reward.url or config.reward.function:
        return
    if data.first_table:
        raise ValueError(f"{data.first_table}: the ground truth is a table, which only reward.function or url can read")
    try:
        check_sources(data.sources)
    except ValueError as error:
        raise ValueError(f"{files}: column {config.data.source_key!r}: {error}") from None


def start(argv: list[str]) -> tuple[Config, Inputs, int, int]:
    """(config, inputs, rank, world) of a command line; ends the process for --help, --show and bad input.

    Without torchrun the job is one rank.
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in (alone if "RANK" not in os.environ else {}).items():
        os.environ[name] = value
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    bind_cpus(int(os.environ["LOCAL_RANK"]), os.environ.get("RANK_CPUS", ""))
    warnings.filterwarnings("ignore", module=r"(megatron|torch|vllm|transformers)\b")  # nothing that users can act on
    try:
        argv = flags(argv)
        if (text := options.answer(argv)) is not None:
            print(text)
            sys.exit(0)
        config = prepared(options.load(argv))
        return config, read_inputs(config, world), rank, world
    except ValueError as error:
        sys.exit(refuse(error, rank))


def connect(config: Config, inputs: Inputs, rank: int, world: int) -> tuple[Device, Groups, RunDir]:
    """Join the job: device, process groups, this attempt's run directory with logging, which begins with what is to be
    known about the data and the sampling. ValueError for bad input.
    """
    from launch.runtime import RunDir, setup_logging
    from parallel.device import pick
    from parallel.grid import RolloutGrid, TrainGrid
    from parallel.groups import make_groups
    from parallel.megatron_options import split_passthrough
    from rollout.engine import check_fields

    train, rollout = config.train, config.rollout
    degrees = (train.tp, train.pp, train.vpp, train.cp, train.ep, train.etp or train.tp)
    device = pick(config.runtime.device, int(os.environ["LOCAL_RANK"]))
    grids = TrainGrid(world, *degrees, train.order), RolloutGrid(world, rollout.tp, rollout.dp, rollout.expert_parallel)
    split_passthrough(train.megatron, train.spec)
    if not config.runtime.replay:
        check_fields(config, grids[1], device.kind)
    flight_recorder(config.run_dir, device.kind)
    groups = make_groups(*grids, device, (config.runtime.deadline_s or 1800.0) + AFTER_WATCHDOG_S)
    run_dir = RunDir.open(config.run_dir, options.to_toml(config), rank, world, groups.host)
    setup_logging(run_dir, run_dir.started)
    log.info(groups.describe())
    if not rank:
        _say(config, inputs)
    return device, groups, run_dir


def _say(config: Config, inputs: Inputs) -> None:
    log.info("training data: %s", inputs.prompts.describe(config.data.prompts_per_step))
    for file, data in inputs.validation.items():
        log.info("validation data %s: %s", file, data.describe())
    if cuts := sampling_cuts(config.rollout):
        log.warning(
            "%s: the engine's log-probs are renormalised over what is kept, the trainer's are not: they differ by the "
            "log of the kept mass, and training/rollout_probs_diff tells nothing about the weights",
            " and ".join(cuts),
        )


def end(main: Callable[[], int]) -> NoReturn:
    """End the process with main's exit code, or with 1 after its traceback. At once: the engines' libraries would print
    pages about leaks when they are taken apart, below which nobody finds the error.
    """
    from launch.runtime import Exit

    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = int(Exit.FAILED)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse(error: ValueError, rank: int) -> int:
    """Exit code of bad input, after one message: rank 0's. Others speak only if rank 0 found nothing and went on."""
    if rank:
        time.sleep(5)
    print(f"error: {error}" if not rank else f"error on rank {rank}: {error}", file=sys.stderr)
    return 2
