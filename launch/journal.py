"""What a step leaves behind: metrics of all ranks folded into one table, the first-step check, files, console, samples.

Every rank calls `fold`, which is collective; rank 0 alone writes. Formulas: metrics.py; destinations: writers.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from launch import metrics as formulas
from launch.config import Config
from launch.metrics import Metrics
from launch.runtime import RunDir
from launch.selfcheck import bounds, check_first_step, memory_shares, sampling_cuts
from launch.writers import Writers

log = logging.getLogger(__name__)
SHOWN = 3
"""Samples of step 1 on the console: most mistakes in prompts and rewards can be seen there."""


def shortened(text: str, most: int = 600) -> str:
    """Its head and its tail, where the question and the answer are."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


class Journal:
    def __init__(
        self, config: Config, run_dir: RunDir, shape: Any, device: Any, group: Any, total_steps: int, phases: Any
    ):
        """`shape`: ModelShape; `device`: Device; `group`: the host group of all ranks; `phases`: PhaseMachine."""
        self.config, self.run_dir, self.shape, self.device, self.group = config, run_dir, shape, device, group
        self.total_steps, self.phases = total_steps, phases
        self.writers: Writers | None = None

    def open(self, done: int) -> None:
        """Open rank 0's files; earlier metrics of steps after `done`, which will be done again, are dropped."""
        log = self.config.log
        if self.run_dir.rank == 0:
            chosen = (log.tensorboard, log.samples_per_step, log.hook)
            self.writers = Writers(self.run_dir.path, self.total_steps, done, asdict(self.config), *chosen)

    def fold(
        self, step: int, batch: Any, partitions: Sequence[Sequence[int]], metrics: Metrics, timings: Mapping[str, float]
    ) -> dict[str, float]:
        """All metrics of a step. `batch`: the Experience; `partitions`: sequence numbers per data-parallel rank;
        `timings`: seconds of this rank by phase, the whole step included. RuntimeError when step 1 fails its check.
        """
        config = self.config
        formulas.add_timings(metrics, timings)
        phases = self.phases
        formulas.add_memory(metrics, self.device.memory(), phases.ledger, phases.highest, phases.planned_peaks())
        for name, share in memory_shares(phases.before, phases.ledger).items():
            metrics.add(f"{formulas.SELF_CHECK}{name}", share, op="max")
        result = metrics.reduce(self.group)
        checked = [name for name in result if name.startswith(formulas.SELF_CHECK)]
        numbers = {name.removeprefix(formulas.SELF_CHECK): result.pop(name) for name in checked}
        seconds = {name: result[f"timing_s/{name}"] for name in timings}
        result |= self._batch_metrics(batch, partitions, seconds)
        result |= {"actor/kl_coef": config.algorithm.kl_loss, **batch.stats}
        if step == 1 and config.runtime.self_check:
            exact = self.device.kind == "cpu"
            cut, most = bool(sampling_cuts(config.rollout)), config.runtime.self_check_probs_diff
            bypass = config.algorithm.old_log_probs == "rollout"
            limits = bounds(config.rollout.dtype, exact, most, cut, bypass)
            check_first_step(result | numbers, limits)
        return result

    def _batch_metrics(
        self, batch: Any, partitions: Sequence[Sequence[int]], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        data, world = self.config.data, self.run_dir.world
        table = formulas.StepBatch(
            prompt_ids=batch.prompt_ids,
            prompt_tokens=batch.prompt_tokens,
            response_tokens=batch.response_tokens,
            truncated=batch.truncated,
            scores=batch.scores,
            rewards=batch.rewards,
            advantages=batch.flat("advantage"),
        )
        result = formulas.seqlen_metrics(batch.lengths, partitions)
        result |= formulas.critic_metrics(table)
        result |= formulas.length_metrics(table, data.max_prompt_tokens, data.max_response_tokens)
        result |= formulas.speed_metrics(table, seconds, world)
        flops = formulas.train_flops(self.shape, batch.lengths) * self.config.train.epochs
        peak = formulas.peak_flops(self.device.name)
        result["perf/mfu/actor"] = formulas.mfu(flops, seconds.get("update_actor", 0.0), world, peak)
        return result

    def write(
        self, step: int, metrics: dict[str, float], batch: Any = None, decode: Callable[[Any], str] | None = None
    ) -> None:
        """Rank 0: one step to every destination, with samples as log.samples_per_step says."""
        if self.writers is None:
            return
        self.writers.write(step, metrics)
        if batch is not None and decode is not None:
            if step == 1:
                self._show(batch, decode)
            self.writers.samples(step, batch.rows(decode, self.config.log.samples_per_step))
            self.writers.histograms(step, {"response_length": batch.response_tokens, "rewards": batch.rewards})

    def _show(self, batch: Any, decode: Callable[[Any], str]) -> None:
        """Three scored samples on the console, of different prompts where there are as many."""
        firsts = list(np.unique(batch.prompt_ids, return_index=True)[1])
        order = firsts + [i for i in range(len(batch.prompt_ids)) if i not in set(firsts)]
        for row in (batch.row(i, decode) for i in order[:SHOWN]):
            prompt, response = (shortened(row[name]) for name in ("prompt", "response"))
            said = "step 1, a scored sample: score %g, reward %g, %d tokens\n  prompt   %r\n  response %r"
            log.info(said, row["score"], row["reward"], row["response_tokens"], prompt, response)

    def validation(self, step: int, samples: Sequence[tuple[str, Any]], decode: Callable[[Any], str]) -> None:
        """Rank 0: samples/val_NNNNNN.jsonl. `samples`: (data source, Sample)."""
        most = self.config.log.samples_per_step
        if self.writers is None or most < 0:
            return
        rows = [
            {
                "source": source,
                "prompt_id": s.prompt_id,
                "sample_id": s.sample_id,
                "prompt": decode(s.prompt),
                "response": decode(s.response),
                "score": s.score,
                "response_tokens": len(s.response),
                "truncated": s.finish == "length",
            }
            for source, s in samples[: most or None]
        ]
        self.writers.samples(step, rows, "val")

    def close(self) -> None:
        """Rank 0: the reward curve of the whole run on the terminal."""
        if self.writers is not None:
            print(self.writers.curve(), flush=True)
            self.writers.close()
