"""Rules that a Config must keep by itself, beyond names and types: ranges and combinations; layout_checks.py has more.

Each is one ConfigError with the numbers and the remedy. A parameter of a choice that was not made (algorithm.gamma with
GRPO) is refused; one of a feature with its own switch (eval.top_p with eval.every_steps = 0) is not. Left out: files,
devices, memory.
"""

from __future__ import annotations

import math
import re
from typing import Any

from launch.layout_checks import check_world, divisors, either, multiples, require, value_of
from launch.options import Config, ConfigError, RewardConfig
from launch.selfcheck import sampling_cuts

ONE_OR_MORE = """
    total_epochs data.prompts_per_step data.max_prompt_tokens data.max_response_tokens train.tp train.pp train.vpp
    train.cp train.ep train.micro_batch_tokens train.mini_batches train.epochs train.log_prob_chunk_tokens rollout.tp
    rollout.dp rollout.samples_per_prompt rollout.sync_staging_mib algorithm.kl_horizon reward.memory_mib
    eval.samples_per_prompt checkpoint.keep"""
ZERO_OR_MORE = """
    world total_steps train.etp train.first_stage_layers train.last_stage_layers train.lr train.optimizer.weight_decay
    train.optimizer.clip_grad train.optimizer.lr_warmup_steps train.optimizer.min_lr rollout.redundant_experts
    rollout.verify_every_steps algorithm.clip_low algorithm.clip_high algorithm.aggregation_norm_tokens
    algorithm.kl_loss algorithm.kl_reward algorithm.kl_target algorithm.entropy_bonus
    algorithm.overlong_buffer_tokens algorithm.overlong_penalty algorithm.dynamic_sampling_max_rounds
    algorithm.correction_low reward.gsm8k_window_chars reward.workers eval.every_steps eval.temperature
    eval.max_prompts checkpoint.every_steps checkpoint.keep_every runtime.time_limit_s runtime.self_check_probs_diff"""
ABOVE_ZERO = """train.optimizer.eps rollout.temperature algorithm.sapo_tau_positive algorithm.sapo_tau_negative
    algorithm.correction_high reward.timeout_s runtime.deadline_s"""
SHARES = "train.optimizer.cpu_offload_fraction rollout.min_p algorithm.gamma"

RANGES: tuple[tuple[str, Any, str], ...] = (
    ("at least 1", lambda v: v >= 1, ONE_OR_MORE),
    ("at least 0", lambda v: v >= 0, ZERO_OR_MORE),
    ("greater than 0", lambda v: v > 0, ABOVE_ZERO),
    ("at least 0 and at most 1", lambda v: 0 <= v <= 1, SHARES),
    ("at least 0 and below 1", lambda v: 0 <= v < 1, "train.optimizer.beta1 train.optimizer.beta2"),
    ("greater than 0 and at most 1", lambda v: 0 < v <= 1, "rollout.top_p eval.top_p"),
    ("-1 (off) or at least 1", lambda v: v == -1 or v >= 1, "rollout.top_k eval.top_k"),
    ("at least -1", lambda v: v >= -1, "log.samples_per_step runtime.debug_rank"),
    ("0 (off) or greater than 1", lambda v: v == 0 or v > 1, "algorithm.dual_clip"),
    ("at least 0 and below 2**32", lambda v: 0 <= v < 2**32, "seed"),
    ("numbers of at least 0", lambda v: min(v, default=0) >= 0, "rollout.stop_token_ids log.profile_ranks"),
    ("numbers of at least 1", lambda v: min(v, default=1) >= 1, "log.profile_steps runtime.record_steps"),
    ("a list without empty texts", all, "data.train_files data.val_files rollout.stop"),
    ("not empty", bool, "run_dir checkpoint.resume data.prompt_key data.label_key data.source_key"),
)
"""(what is allowed, test, options). Every number of the tree is in one row."""

CHOICES: tuple[tuple[str, str, str], ...] = (
    ("algorithm.gamma", "algorithm.advantage", "reinforce_pp"),
    ("algorithm.norm_by_std", "algorithm.advantage", "grpo grpo_passk"),
    ("algorithm.sapo_tau_positive", "algorithm.policy_loss", "sapo"),
    ("algorithm.sapo_tau_negative", "algorithm.policy_loss", "sapo"),
    ("algorithm.aggregation_norm_tokens", "algorithm.aggregation", "seq-mean-token-sum-norm"),
    ("train.optimizer.min_lr", "train.optimizer.lr_schedule", "linear cosine"),
    *((f"algorithm.{name}", "algorithm.policy_loss", "clip gspo gmpo cispo") for name in ("clip_low", "clip_high")),
    ("algorithm.dual_clip", "algorithm.policy_loss", "clip"),
    ("algorithm.correction_low", "algorithm.correction", "icepop sequence_mask"),
    ("algorithm.correction_high", "algorithm.correction", "token sequence icepop sequence_mask"),
    ("rollout.compare_at_start", "rollout.sync_plan", "planned"),
    ("rollout.verify_every_steps", "rollout.sync_plan", "planned"),
    ("train.npu_adaptor", "runtime.device", "npu"),
    *((f"train.optimizer.{name}", "train.optimizer.kind", "adam") for name in ("beta1", "beta2", "eps", "cpu_offload")),
)
"""(option, the choice it belongs to, values that use it)."""


def check_ranges(config: Config) -> None:
    for allowed, accepts, names in RANGES:
        for name in names.split():
            if not accepts(value := value_of(config, name)):
                raise ConfigError(f"{name} must be {allowed}, got {value!r}")


def check(config: Config) -> None:
    """Everything that the config alone can tell. With `world` set, check_world of it too."""
    check_ranges(config)
    for name, choice, users in CHOICES:
        value, chosen = value_of(config, name), value_of(config, choice)
        if value != value_of(Config(), name) and chosen not in users.split():
            remedy = f"set {name}=none, or {choice} to {users.replace(' ', ' or ')}"
            raise ConfigError(f"{name} = {value} has no effect with {choice} = {chosen}; {remedy}")
    by_section = (_input_rules, _batch_rules, _train_rules, _rollout_rules, _algorithm_rules, _reward_rules)
    for rules in (*by_section, _sampling_rules):
        rules(config)
    if config.world:
        check_world(config, config.world)


def _input_rules(config: Config) -> None:
    require(config.model.path, "model.path is empty; give a directory in Hugging Face format")
    require(config.data.train_files, "data.train_files is empty; give parquet or jsonl files")
    for name in ("every_steps", "before_training"):
        is_fed = config.data.val_files or not getattr(config.eval, name)
        require(is_fed, f"eval.{name} is set, but data.val_files is empty; give files, or unset it")
    log = config.log
    require(log.profile_ranks or not log.profile_steps, "log.profile_steps is set, but log.profile_ranks is empty")


def _batch_rules(config: Config) -> None:
    train, data = config.train, config.data
    prompts, parts = data.prompts_per_step, train.mini_batches
    if prompts % parts:
        raise ConfigError(
            f"data.prompts_per_step = {prompts} is not a multiple of train.mini_batches = {parts}; "
            f"use {either(multiples(prompts, parts))} prompts, or {either(divisors(prompts, parts))} mini-batches"
        )
    multiple = math.lcm(train.cp * train.tp, 2 * train.cp if train.cp > 1 else 1)  # padding of a micro-batch
    longest = data.max_prompt_tokens + data.max_response_tokens
    padded, budget = -(-longest // multiple) * multiple, train.micro_batch_tokens * train.cp
    if budget < padded:
        raise ConfigError(
            f"data.max_prompt_tokens + max_response_tokens = {data.max_prompt_tokens} + {data.max_response_tokens} = "
            f"{longest} tokens ({padded} as a multiple of {multiple}) do not fit in train.micro_batch_tokens * cp = "
            f"{train.micro_batch_tokens} * {train.cp} = {budget}; "
            f"use train.micro_batch_tokens >= {-(-padded // train.cp)}, or shorter sequences"
        )


def _train_rules(config: Config) -> None:
    train, optimizer = config.train, config.train.optimizer
    require(train.vpp == 1 or train.pp > 1, f"train.vpp = {train.vpp} needs train.pp > 1; use train.vpp = 1")
    for name in ("first_stage_layers", "last_stage_layers"):
        layers = getattr(train, name)
        require(not layers or train.pp > 1, f"train.{name} = {layers} needs train.pp > 1; use 0")
    dense, etp = train.tp * train.cp, train.etp or train.tp
    if train.order == "tp-cp-ep-pp-dp" and train.pp > 1 and dense != train.ep * etp:
        raise ConfigError(
            f"train.order = {train.order} with train.pp = {train.pp} needs tp*cp = ep*etp (Megatron's rule), got "
            f"{train.tp}*{train.cp} = {dense} and {train.ep}*{etp} = {train.ep * etp}; use train.order = tp-cp-ep-dp-pp"
        )
    if optimizer.lr_schedule != "constant" and optimizer.min_lr > train.lr:
        raise ConfigError(f"train.optimizer.min_lr = {optimizer.min_lr} exceeds train.lr = {train.lr}; lower it")
    repeated = sorted({part for part in train.offload if train.offload.count(part) > 1})
    require(not repeated, f"train.offload names {either(repeated)} more than once; name each once")
    can_run = (train.spec, config.runtime.device) != ("te", "cpu")
    require(can_run, "train.spec = te cannot run on runtime.device = cpu; use train.spec = torch")


def _rollout_rules(config: Config) -> None:
    rollout, size = config.rollout, config.rollout.tp * config.rollout.dp
    if rollout.dp > 1 and not rollout.expert_parallel:
        raise ConfigError(
            f"rollout.dp = {rollout.dp} needs rollout.expert_parallel = true; else use rollout.dp = 1: "
            f"ranks that rollout.tp leaves over form further replicas by themselves"
        )
    if rollout.redundant_experts and not (rollout.expert_parallel and size > 1):
        raise ConfigError(
            f"rollout.redundant_experts = {rollout.redundant_experts} needs rollout.expert_parallel = true and "
            f"rollout.tp*dp > 1 (it is {size}); use rollout.redundant_experts = 0"
        )
    if rollout.routing_replay == "R2" and config.algorithm.old_log_probs == "rollout":
        raise ConfigError(
            "rollout.routing_replay = R2 records routes in the scoring pass, but algorithm.old_log_probs = rollout has "
            "none; use R3, or algorithm.old_log_probs = recompute"
        )


def _sampling_rules(config: Config) -> None:
    """Log-probs of a cut distribution are renormalised; the trainer's are not, so their ratio would be biased."""
    rollout, algorithm = config.rollout, config.algorithm
    cuts = sampling_cuts(rollout)
    for name, neutral in (("correction", "none"), ("old_log_probs", "auto")):
        value = getattr(algorithm, name)
        if cuts and value not in ("none", "auto", "recompute"):
            raise ConfigError(
                f"algorithm.{name} = {value} compares the engine's log-probs with the trainer's, but only the engine's "
                f"are renormalised by {' and '.join(cuts)};\n"
                f"use rollout.top_p = 1, top_k = -1 and min_p = 0, or algorithm.{name} = {neutral}"
            )


def _algorithm_rules(config: Config) -> None:
    a, samples, limit = config.algorithm, config.rollout.samples_per_prompt, config.data.max_response_tokens
    compares = a.dynamic_sampling or a.advantage in ("rloo", "reinforce_pp_baseline", "opo", "grpo_passk")
    if samples == 1 and compares:
        name = "dynamic_sampling" if a.dynamic_sampling else f"advantage = {a.advantage}"
        raise ConfigError(f"algorithm.{name} compares samples of a prompt; use rollout.samples_per_prompt >= 2, not 1")
    is_adapted = a.kl_reward or not a.kl_target
    require(is_adapted, f"algorithm.kl_target = {a.kl_target} adapts kl_reward, which is 0; give it a start value")
    tail = a.overlong_buffer_tokens
    require(tail <= limit, f"algorithm.overlong_buffer_tokens = {tail} exceeds data.max_response_tokens = {limit}")
    if a.correction in ("icepop", "sequence_mask") and a.correction_low >= a.correction_high:
        raise ConfigError(
            f"algorithm.correction_low = {a.correction_low} must be below correction_high = {a.correction_high}"
        )
    if a.old_log_probs == "rollout" and a.correction != "none":
        raise ConfigError(
            f"algorithm.correction = {a.correction} has no effect with algorithm.old_log_probs = rollout: the policy "
            f"ratio starts from the engine's log-probs already; use algorithm.correction = none"
        )


def _reward_rules(config: Config) -> None:
    reward = config.reward
    path = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
    for name, value, where in (
        ("reward.function", reward.function, rf"({path}|[^:]+\.py)"),
        ("log.hook", config.log.hook, path),
    ):
        or_file = " or file.py:function" if "py" in where else ""
        is_path = not value or re.fullmatch(rf"{where}:[^\W\d]\w*", value)
        require(is_path, f"{name} must be package.module:function{or_file}, got {value!r}")
    idle = ("gsm8k_mode", "gsm8k_window_chars", *(("workers", "memory_mib") if reward.url else ()))
    for name in idle if reward.url or reward.function else ():
        is_used = getattr(reward, name) == getattr(RewardConfig, name)
        chosen = "url" if reward.url else "function"
        require(is_used, f"reward.{name} has no effect with reward.{chosen}, which scores instead; unset one of them")
    is_one = not (reward.function and reward.url)
    require(is_one, "reward.function and reward.url exclude each other; keep one")
    is_table = not reward.weights or reward.function or reward.url
    require(is_table, "reward.weights weighs the entries of a table, but the built-in rules give one number; unset it")
    is_http = not reward.url or re.match(r"https?://[^/\s]", reward.url)
    require(is_http, f"reward.url must begin with http:// or https:// and a host, got {reward.url!r}")
