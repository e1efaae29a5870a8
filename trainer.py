"""The whole job on one screen: build, loop, step(). Trainer.step() reads as the algorithm.

    generate -> score -> advantages -> [old log-probs] -> [reference log-probs] -> update -> reshard -> log

One program text runs on every rank. After generation every rank holds the whole batch, so everything up to the packing
plan is a pure function computed alike; rank 0 alone decides what depends on the clock or the disk. This is the only
file that imports every folder. --help, --show and bad input are answered before torch and the engines are imported.
"""

from __future__ import annotations

import sys

from launch.inputs import Inputs, connect, end, refuse, start

if __name__ == "__main__":
    STARTED = start(sys.argv[1:])

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

import reward
from launch import debug
from launch.config import Config, ConfigError
from launch.journal import Journal
from launch.metrics import Metrics, add_agreement, add_losses
from launch.profiler import Profiler, with_ranges
from launch.runtime import Exit, RunDir, StopRequest
from launch.watchdog import Watchdog
from parallel import hf, megatron_step
from parallel.device import Device
from parallel.groups import Groups
from parallel.keeper import Keeper
from parallel.megatron_layout import megatron_layout
from parallel.megatron_model import build, snapshot, swapped
from parallel.micro_batches import MicroBatch, spread, unpack
from parallel.offload import TrainOffload
from parallel.packing import Update, plan_updates
from parallel.phases import PhaseMachine
from parallel.replay import ReplayRouter, RoutingReplay, layers_of_ranks
from parallel.weight_sync import WeightSync
from reward.advantage import KLController, keep_groups
from reward.experience import Experience
from reward.loss import policy_loss
from rollout import recorded
from rollout.batch import Sample, gather, requests
from rollout.collect import Collector
from rollout.engine import Engine
from rollout.evaluate import evaluate
from rollout.prompts import Prompt
from rollout.routes import deliver

logger = logging.getLogger(__name__)


class Trainer:
    """Engine and training model on the same ranks, and the loop over them."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        device: Device,
        groups: Groups,
        run_dir: RunDir,
        stop: StopRequest,
        watchdog: Watchdog,
    ):
        self.config, self.inputs, self.device, self.groups = config, inputs, device, groups
        self.run_dir, self.stop, self.watchdog, self.phase = run_dir, stop, watchdog, with_ranges(watchdog.phase)
        self.rank, self.coord = groups.rank, groups.train.coord(groups.rank)
        train, algorithm = config.train, config.algorithm
        with self.phase("build"):
            stages = (train.first_stage_layers, train.last_stage_layers)
            self.layout = megatron_layout(inputs.shape, groups.train, *stages, dtype=train.dtype)
            engine = (config, inputs.shape, groups.rollout, device, inputs.stop_ids)
            self.engine: Any = recorded.NoEngine() if config.runtime.replay else Engine(*engine)
            self.engine.place_experts(inputs.shape, self.layout)
            run_dir.note_process()  # with the engine's shared memory, for the next start if this one is killed
            self.engine.sleep()  # the device is the training side's until the first sync
            replay, num_updates = config.rollout.routing_replay, inputs.total_steps * self.updates_per_rollout
            router = {} if replay == "none" else {"router": ReplayRouter}
            self.model = build(inputs.shape, config, groups.train, device, num_updates, **router)
            self.replay = RoutingReplay(replay, self.model, self.coord)
        with self.phase("load"):
            hf.load(config.model.path, self.layout, self.model.stores(), self.rank, groups.world, device)
            self.model.after_load()
        self.reference = snapshot(self.model) if algorithm.kl_loss or algorithm.kl_reward else None
        self.kl = KLController(algorithm.kl_reward, algorithm.kl_target, algorithm.kl_horizon)
        where = (self.rank, groups.world, device)
        self.weights = WeightSync(self.layout, self.engine.layout, config.rollout, *where, self.engine.packed)
        self.keeper = Keeper(config, self.model, self.layout, groups, inputs.total_steps)
        self.offload = TrainOffload(self.model)
        moves = {
            "wake_weights": self.wake_weights,
            "reshard": self.reshard,
            "free_training": self.offload.free_params,
            "wake_cache": self.engine.wake_cache,
            "sleep": self.engine.sleep,
            "restore_training": self.offload.restore,
        }
        self.phases = PhaseMachine(moves, device.memory, device.peaks)
        self.journal = Journal(config, run_dir, inputs.shape, device, groups.host, inputs.total_steps, self.phases)
        self.profiler = Profiler(config.log, run_dir.path, self.rank, device.kind)
        self.collector = Collector(inputs.prompts, config, keep_groups)
        self.score = partial(reward.score_samples, inputs.scorer, inputs.tokenizer)

    @property
    def updates_per_rollout(self) -> int:
        return self.config.train.mini_batches * self.config.train.epochs

    # The algorithm

    def step(self, step: int) -> None:
        """One step from prompts to metrics."""
        started, metrics = time.monotonic(), Metrics()
        with self.phase("start_profile"):
            self.profiler.start(step)
        samples, sampling = self.rollout(step, metrics)
        for name, value in sampling.items():
            metrics.add(name, value)
        batch = Experience.of(samples)
        updates = self.plan_updates(batch)
        if self.config.runtime.rollout_only:
            self.judge(batch, step)
            return self.log(step, batch, updates, metrics, time.monotonic() - started)
        self.deliver_routes(samples, updates)
        if self.needs_old_pass:
            with self.phase("old_log_prob"):
                batch.fields["old_logprobs"] = self.log_probs(batch, updates, self.replay.scoring)
        if self.reference is not None:
            with self.phase("ref"), swapped(self.model, self.reference):
                batch.fields["ref_logprobs"] = self.log_probs(batch, updates)
        with self.phase("adv"):
            self.judge(batch, step)
        with self.phase("update_actor"):
            self.update(batch, updates, metrics)
        with self.phase("stop_profile"):
            self.profiler.stop()
        seconds = time.monotonic() - started
        self.stop.observe(step_s=seconds)
        self.log(step, batch, updates, metrics, seconds)
        if self.keeper.is_due(step):
            self.save(step)

    def rollout(self, step: int, metrics: Metrics) -> tuple[list[Sample], dict[str, float]]:
        """The samples of the step on every rank, generated or read again, and how they were sampled."""
        runtime, place = self.config.runtime, (self.rank, self.groups.train.world)
        if runtime.replay:
            with self.phase("gen"):
                return recorded.read(runtime.replay, step, *place), {}
        self.sync()
        with self.phase("gen"):
            samples, sampling = self.collector.collect(partial(self.sample, step, metrics))
            self.phases.to_training()
        recorded.keep(runtime, step, *place, samples)
        return samples, sampling

    def sample(self, step: int, metrics: Metrics, prompts: list[Prompt]) -> list[Sample]:
        """Generate and score; every rank scores what its engine returned, then all ranks get all samples."""
        config, rollout = self.config, self.config.rollout
        sampling = {name: getattr(rollout, name) for name in ("temperature", "top_p", "top_k", "min_p", "stop")}
        most = config.data.max_response_tokens
        wanted = requests(prompts, rollout.samples_per_prompt, config.seed, step, most, **sampling)
        with self.phase("generate_sequences"):
            samples = self.engine.generate(wanted)
        with self.phase("reward"):
            for name, (total, weight) in self.score(samples, prompts).items():
                metrics.add_sum(name, total, weight)
        return gather(samples, self.groups.host)

    def plan_updates(self, batch: Experience) -> list[Update]:
        train, grid = self.config.train, self.groups.train
        multiple = grid.pp if grid.vpp > 1 else 1
        budget = train.micro_batch_tokens * grid.cp
        return plan_updates(batch.prompt_ids, batch.lengths, train.mini_batches, grid.dp, budget, multiple)

    @property
    def needs_old_pass(self) -> bool:
        """With one update per rollout the update's own pass gives the old log-probs and the ratio is exactly 1."""
        algorithm = self.config.algorithm
        several = self.updates_per_rollout > 1 or self.replay.mode == "R2"
        needed_first = algorithm.kl_reward or algorithm.correction != "none" or several
        return algorithm.old_log_probs == "recompute" or (algorithm.old_log_probs == "auto" and bool(needed_first))

    def deliver_routes(self, samples: Sequence[Sample], updates: Sequence[Update]) -> None:
        """R3: every rank gets the routed experts of the sequences and layers that it trains."""
        if self.replay.mode != "R3":
            return
        with self.phase("routes"):
            ranks = map(self.groups.train.coord, range(self.groups.train.world))
            wanted = [sorted(i for u in updates for micro in u.dealt[c.dp] for i in micro) for c in ranks]
            layers, shape, group = layers_of_ranks(self.model), self.inputs.shape, self.groups.host
            self.replay.sequences = deliver(samples, wanted, layers, shape, group)

    def micro_batches(self, batch: Experience, update: Update, fields: dict[str, Any]) -> list[MicroBatch]:
        """This rank's packed micro-batches of one mini-batch."""
        mine = update.dealt[self.coord.dp]
        return megatron_step.micro_batches(self.model, batch.sequences, batch.prompt_tokens, mine, fields)

    def log_probs(
        self, batch: Experience, updates: Sequence[Update], around: Callable[..., Any] = nullcontext
    ) -> list[np.ndarray]:
        """Log-probs of every response token of the batch, on every rank; packed as in the updates.

        `around(micro-batches)`: a context for each pass.
        """
        mine: dict[int, np.ndarray] = {}
        for update in updates:
            micro = self.micro_batches(batch, update, {})
            with around(micro):
                results = megatron_step.score(self.model, micro, self.config.rollout.temperature)
            mine |= unpack(micro, [logprobs for logprobs, _ in results])
        tells = self.coord.tp == self.coord.cp == self.coord.pp == 0
        return spread(mine, batch.response_tokens, tells, self.groups.host)

    def judge(self, batch: Experience, step: int) -> None:
        """Scores -> rewards -> advantages of every response token."""
        config = self.config
        if config.algorithm.old_log_probs == "rollout":
            batch.fields["old_logprobs"] = batch.fields["rollout_logprobs"]
        mean_kl = batch.judge(config.algorithm, self.kl, config.data.max_response_tokens, (config.seed, step))
        self.kl = self.kl.updated(mean_kl, len(batch.sequences))

    def update(self, batch: Experience, updates: Sequence[Update], metrics: Metrics) -> None:
        """Optimizer steps over the mini-batches; the first pass also tells how far engine and trainer agree."""
        algorithm, temperature = self.config.algorithm, self.config.rollout.temperature
        norm_tokens = algorithm.aggregation_norm_tokens or self.config.data.max_response_tokens
        current: dict[int, np.ndarray] = {}
        for epoch in range(self.config.train.epochs):
            for part in updates:
                micro = self.micro_batches(batch, part, batch.loss_fields(algorithm, part.indices, norm_tokens))
                passed: list[Tensor] = []
                loss = partial(self.loss, passed)
                with self.replay.replaying(micro):
                    stats = megatron_step.update(self.model, micro, loss, temperature, entropy=True)
                add_losses(metrics, stats, first=epoch == 0 and part is updates[0])
                if epoch == 0 and passed:
                    current |= unpack(micro, passed)
        tells = self.coord.tp == self.coord.cp == 0 and self.coord.pp == self.groups.train.pp - 1
        add_agreement(metrics, *batch.agreement(current if tells else {}, algorithm.old_log_probs == "rollout"))
        fed_back, passes = int(batch.lengths.sum()) - len(batch.lengths), self.config.train.epochs + self.needs_old_pass
        for name, (total, weight) in self.replay.finish(fed_back, passes, self.groups.host).items():
            metrics.add_sum(name, total, weight)

    def loss(self, passed: list[Tensor], logprobs: Tensor, entropy: Tensor | None, micro: MicroBatch) -> Any:
        """(loss, stats) of one micro-batch; its log-probs are kept in `passed`."""
        passed.append(logprobs.detach())
        where = (micro.segments, micro.num_sequences, micro.sequence_sums)
        return policy_loss(self.config.algorithm, logprobs, entropy, micro.fields, *where)

    # Weights, state, log

    def wake_weights(self) -> None:
        """Optimizer state makes room first; parameters leave after the engine has them."""
        self.offload.free_optimizer()
        self.engine.wake_weights()

    def reshard(self) -> None:
        if self.config.rollout.sync_weights or not self.weights.runs:
            self.weights.update(self.model.stores(), self.engine)

    def sync(self) -> None:
        """The engine has the newest weights and is ready to generate."""
        if self.phases.state == "training":
            with self.phase("reshard"):
                self.phases.to_generating()

    def train(self) -> str | None:
        """All steps; why the run stopped early, or None."""
        config, total = self.config, self.inputs.total_steps
        done = self.resume()
        if done >= total:
            logger.warning("nothing to train: step %d of total_steps = %d is done already", done, total)
        self.journal.open(done)
        debug.pause(self.rank, config.runtime.debug_rank, self.groups.host, self.phase)
        if config.eval.before_training and not done:
            self.journal.write(0, self.evaluate(0))
        for step in range(done + 1, total + 1):
            if reason := self.stop.decide(self.groups.host):
                self.save(step - 1)
                self.keeper.wait()
                self.run_dir.status("stopped", reason, step - 1, total)
                return reason
            self.run_dir.status("running", step=step - 1, total=total)
            self.step(step)
        self.finish(total)
        return None

    def evaluate(self, step: int) -> dict[str, float]:
        """Validation metrics; training goes on as if it had not happened."""

        def answer(sample: Sample, source: str) -> str | None:
            text = self.inputs.tokenizer.decode(sample.response, skip_special_tokens=True)
            return reward.answer(source, text, self.config.reward.gsm8k_mode)

        self.sync()
        with self.phase("testing"):
            sets, group = self.inputs.validation, self.groups.host
            metrics, samples = evaluate(self.engine, sets, self.config, self.score, answer, group)
        self.journal.validation(step, samples, self.inputs.tokenizer.decode)
        return metrics

    def log(self, step: int, batch: Experience, updates: Sequence[Update], metrics: Metrics, seconds: float) -> None:
        """Validate if it is time, fold the metrics of all ranks, write; before the save, so that none is lost."""
        every, total, ranks = self.config.eval.every_steps, self.inputs.total_steps, range(self.groups.train.dp)
        partitions = [[i for update in updates for micro in update.dealt[rank] for i in micro] for rank in ranks]
        validation = self.evaluate(step) if every and (step % every == 0 or step == total) else {}
        result = self.journal.fold(step, batch, partitions, metrics, self.watchdog.timings() | {"step": seconds})
        result |= {"training/epoch": self.collector.epoch, **validation}
        self.journal.write(step, result, batch, self.inputs.tokenizer.decode)

    def save(self, step: int) -> None:
        if self.phases.state == "generating":
            self.phases.to_training()
        with self.phase("save_checkpoint"):
            small = {"kl": self.kl.coefficient, "collector": self.collector.state()}
            self.stop.observe(save_s=self.keeper.save(step, small))

    def resume(self) -> int:
        """Steps that are done already."""
        with self.phase("load"):
            small = self.keeper.restore()
        if small is None:
            return 0
        self.weights.is_resumed = True
        self.collector.load(small["collector"])
        if self.replay.mode == "R3":
            self.collector.surplus = []  # routes are not saved: samples of before cannot be replayed
        self.kl = self.kl.resumed(small["kl"])
        logger.info("resumed after step %d", small["step"])
        return small["step"]

    def finish(self, total: int) -> None:
        """The last words of a run that did all its steps."""
        self.keeper.wait()
        if self.config.checkpoint.export:
            config, shape, place = self.config, self.inputs.shape, (self.rank, self.groups.world, self.device)
            out, stores = self.run_dir.path / "export", self.model.stores()
            hf.export(out, self.layout, stores, shape, config.model.path, *place, overwrite=True)
        self.inputs.scorer.close()
        self.run_dir.status("finished", step=total, total=total)
        self.journal.close()


def run(config: Config, inputs: Inputs, rank: int, world: int) -> int:
    try:
        device, groups, run_dir = connect(config, inputs, rank, world)
    except ValueError as error:
        return refuse(error, rank)
    try:
        with run_dir:
            stop = StopRequest(run_dir, config.runtime.time_limit_s, run_dir.started)
            stop.install()
            watchdog = Watchdog(run_dir, config.runtime.deadline_s)
            reason = Trainer(config, inputs, device, groups, run_dir, stop, watchdog).train()
            watchdog.close()
    except ConfigError as error:
        return refuse(error, rank)
    return int(Exit.FINISHED if reason is None else Exit.STOPPED)


if __name__ == "__main__":
    end(partial(record(run), *STARTED))
