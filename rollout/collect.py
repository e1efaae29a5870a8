"""From prompts to the samples of a step, with DAPO's dynamic sampling: draw until enough groups teach something.

The state (batches drawn, surplus groups, lengths seen) is small and alike on all ranks; it is saved with every
checkpoint. Surplus groups are the next step's first ones; they are then one step old, for which algorithm.correction
accounts, or algorithm.old_log_probs = rollout. Optimizer steps count steps here, however many batches of
prompts they draw.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from launch.config import Config
from rollout.batch import Sample, decode, encode
from rollout.lengths import LengthHistory
from rollout.prompts import Prompt, PromptSet

logger = logging.getLogger(__name__)
Useful = Callable[[Sequence[float], Sequence[int]], np.ndarray]
"""(scores [N], prompt ids [N]) -> bool [N]: samples of groups that teach something."""


class Collector:
    def __init__(self, prompts: PromptSet, config: Config, useful: Useful):
        self.prompts, self.config, self.useful = prompts, config, useful
        self.draws = 0
        """Batches of prompts drawn so far; more than steps with dynamic sampling."""
        self.surplus: list[Sample] = []
        self.lengths = LengthHistory(len(prompts))

    @property
    def epoch(self) -> int:
        return self.prompts.epoch_of(max(0, self.draws - 1))

    def collect(self, sample: Callable[[list[Prompt]], list[Sample]]) -> tuple[list[Sample], dict[str, float]]:
        """Scored samples of a step in canonical order, and metrics. `sample` is collective: prompts -> scored samples.

        RuntimeError when the limit of rounds is reached and algorithm.dynamic_sampling_at_limit is "stop", or when no
        group at all is useful.
        """
        if not self.config.algorithm.dynamic_sampling:
            return self._sampled(sample)[1], {}
        wanted, limit = self.config.data.prompts_per_step, self.config.algorithm.dynamic_sampling_max_rounds
        kept, rounds, dropped = self.surplus, 0, 0
        while len(groups := sorted({s.prompt_id for s in kept})) < wanted and (not limit or rounds < limit):
            (prompts, samples), rounds = self._sampled(sample), rounds + 1
            keep = self.useful([s.score for s in samples], [s.prompt_id for s in samples])
            found = [s for s, useful in zip(samples, keep, strict=True) if useful]
            kept, dropped = kept + found, dropped + len(prompts) - len({s.prompt_id for s in found})
        if len(groups) < wanted:
            self._at_limit(len(groups), wanted, rounds)
        used = set(groups[:wanted])
        self.surplus = [s for s in kept if s.prompt_id not in used]
        metrics = {
            "sampling/rounds": rounds,
            "sampling/dropped_groups": dropped,
            "sampling/surplus_groups": len(groups) - len(used),
        }
        return [s for s in kept if s.prompt_id in used], metrics

    def _sampled(self, sample: Callable[[list[Prompt]], list[Sample]]) -> tuple[list[Prompt], list[Sample]]:
        """The next batch of prompts, with expected lengths, and its samples, from which the next ones are learned."""
        prompts = self.prompts.batch(self.draws, self.config.data.prompts_per_step)
        self.draws += 1
        expected = self.lengths.expected([prompt.row for prompt in prompts])
        prompts = [replace(p, expected_tokens=float(tokens)) for p, tokens in zip(prompts, expected, strict=True)]
        samples, rows = sample(prompts), {prompt.prompt_id: prompt.row for prompt in prompts}
        self.lengths.observe([rows[s.prompt_id] for s in samples], [len(s.response) for s in samples])
        return prompts, samples

    def _at_limit(self, groups: int, wanted: int, rounds: int) -> None:
        message = f"dynamic sampling: {groups} of {wanted} prompts with differing scores after {rounds} rounds"
        if not groups or self.config.algorithm.dynamic_sampling_at_limit == "stop":
            raise RuntimeError(
                f"{message}; raise algorithm.dynamic_sampling_max_rounds, choose other prompts, or let "
                'algorithm.dynamic_sampling_at_limit = "train" use what exists'
            )
        logger.warning("%s: training with what exists", message)

    def state(self) -> dict[str, Any]:
        step = self.config.data.prompts_per_step
        return {"draws": self.draws, "of": step, "surplus": encode(self.surplus), "lengths": self.lengths.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on behind the last prompt drawn, also when a step now has another number of prompts."""
        step = self.config.data.prompts_per_step
        self.draws = -(-state["draws"] * state.get("of", step) // step)  # prompt ids stay above those of the surplus
        self.surplus = decode(np.asarray(state["surplus"]))
        self.lengths.load(state.get("lengths", self.lengths.state()))  # absent from older checkpoints
