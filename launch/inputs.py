"""Everything that a job reads before an engine starts, and refuses with one message: model files, tokenizer, prompts.

Used by trainer.py and by tools that check a recipe. Imports of other folders are inside, so that the message comes fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launch.config import Config

if TYPE_CHECKING:
    from parallel.family import ModelShape
    from reward import Scorer
    from rollout.prompts import PromptSet


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
    from launch.checks import check, check_model, check_world
    from parallel.family import model_shape, read_config
    from parallel.hf import read_index
    from reward import build
    from rollout.prompts import PromptSet, load_tokenizer

    check(config)
    check_world(config, world)
    shape = model_shape(read_config(config.model.path), f"{config.model.path}/config.json")
    check_model(config, shape)
    read_index(config.model.path, shape)
    tokenizer = load_tokenizer(config.model.path)
    prompts = PromptSet(config.data.train_files, tokenizer, config.data, config.seed)
    validation = {f: PromptSet([f], tokenizer, config.data, config.seed) for f in config.data.val_files}
    sources = sorted({s for data in (prompts, *validation.values()) for s in data.sources})
    steps = prompts.steps_per_epoch(config.data.prompts_per_step) * config.total_epochs
    return Inputs(
        shape,
        tokenizer,
        prompts,
        validation,
        build(config.reward, sources),
        [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
        config.total_steps or steps,
    )
