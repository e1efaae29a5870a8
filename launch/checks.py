"""Rules that a Config must keep, beyond names and types: ranges, combinations, the world, the model.

check needs the config only, check_world the number of ranks, check_model the model's shape; each raises one ConfigError
with the numbers and the remedy. A parameter of a choice that was not made (algorithm.gamma with GRPO) is refused; one
of a feature with its own switch (eval.top_p with eval.every_steps = 0) is not. Left out: files, devices, memory.
"""

from __future__ import annotations

import math
import re
from typing import Any

from launch.options import Config, ConfigError
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
    ("rollout.compare_at_start", "rollout.sync_plan", "planned"),
    ("rollout.verify_every_steps", "rollout.sync_plan", "planned"),
    ("train.npu_adaptor", "runtime.device", "npu"),
    *((f"train.optimizer.{name}", "train.optimizer.kind", "adam") for name in ("beta1", "beta2", "eps", "cpu_offload")),
)
"""(option, the choice it belongs to, values that use it)."""


def check_ranges(config: Config) -> None:
    for allowed, accepts, names in RANGES:
        for name in names.split():
            if not accepts(value := _get(config, name)):
                raise ConfigError(f"{name} must be {allowed}, got {value!r}")


def check(config: Config) -> None:
    """Everything that the config alone can tell. With `world` set, check_world of it too."""
    check_ranges(config)
    for name, choice, users in CHOICES:
        value, chosen = _get(config, name), _get(config, choice)
        if value != _get(Config(), name) and chosen not in users.split():
            remedy = f"set {name}=none, or {choice} to {users.replace(' ', ' or ')}"
            raise ConfigError(f"{name} = {value} has no effect with {choice} = {chosen}; {remedy}")
    by_section = (_input_rules, _batch_rules, _train_rules, _rollout_rules, _algorithm_rules, _reward_rules)
    for rules in (*by_section, _sampling_rules):
        rules(config)
    if config.world:
        check_world(config, config.world)


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _input_rules(config: Config) -> None:
    _require(config.model.path, "model.path is empty; give a directory in Hugging Face format")
    _require(config.data.train_files, "data.train_files is empty; give parquet or jsonl files")
    for name in ("every_steps", "before_training"):
        is_fed = config.data.val_files or not getattr(config.eval, name)
        _require(is_fed, f"eval.{name} is set, but data.val_files is empty; give files, or unset it")
    log = config.log
    _require(log.profile_ranks or not log.profile_steps, "log.profile_steps is set, but log.profile_ranks is empty")


def _batch_rules(config: Config) -> None:
    train, data = config.train, config.data
    prompts, parts = data.prompts_per_step, train.mini_batches
    if prompts % parts:
        raise ConfigError(
            f"data.prompts_per_step = {prompts} is not a multiple of train.mini_batches = {parts}; "
            f"use {_or(_multiples(prompts, parts))} prompts, or {_or(_divisors(prompts, parts))} mini-batches"
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
    _require(train.vpp == 1 or train.pp > 1, f"train.vpp = {train.vpp} needs train.pp > 1; use train.vpp = 1")
    for name in ("first_stage_layers", "last_stage_layers"):
        layers = getattr(train, name)
        _require(not layers or train.pp > 1, f"train.{name} = {layers} needs train.pp > 1; use 0")
    dense, etp = train.tp * train.cp, train.etp or train.tp
    if train.order == "tp-cp-ep-pp-dp" and train.pp > 1 and dense != train.ep * etp:
        raise ConfigError(
            f"train.order = {train.order} with train.pp = {train.pp} needs tp*cp = ep*etp (Megatron's rule), got "
            f"{train.tp}*{train.cp} = {dense} and {train.ep}*{etp} = {train.ep * etp}; use train.order = tp-cp-ep-dp-pp"
        )
    if optimizer.lr_schedule != "constant" and optimizer.min_lr > train.lr:
        raise ConfigError(f"train.optimizer.min_lr = {optimizer.min_lr} exceeds train.lr = {train.lr}; lower it")
    repeated = sorted({part for part in train.offload if train.offload.count(part) > 1})
    _require(not repeated, f"train.offload names {_or(repeated)} more than once; name each once")
    can_run = (train.spec, config.runtime.device) != ("te", "cpu")
    _require(can_run, "train.spec = te cannot run on runtime.device = cpu; use train.spec = torch")


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
    _require(is_adapted, f"algorithm.kl_target = {a.kl_target} adapts kl_reward, which is 0; give it a start value")
    tail = a.overlong_buffer_tokens
    _require(tail <= limit, f"algorithm.overlong_buffer_tokens = {tail} exceeds data.max_response_tokens = {limit}")
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
    for name, value in (("reward.function", reward.function), ("log.hook", config.log.hook)):
        is_path = re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value)
        _require(is_path or not value, f"{name} must be package.module:function, got {value!r}")
    is_one = not (reward.function and reward.url)
    _require(is_one, "reward.function and reward.url exclude each other; keep one")
    is_table = not reward.weights or reward.function or reward.url
    _require(is_table, "reward.weights weighs the entries of a table, but the built-in rules give one number; unset it")
    is_http = not reward.url or re.match(r"https?://[^/\s]", reward.url)
    _require(is_http, f"reward.url must begin with http:// or https:// and a host, got {reward.url!r}")


def check_world(config: Config, world: int) -> None:
    """Both layouts must divide `world` ranks. ConfigError has the arithmetic and the nearest worlds that work."""
    train, rollout = config.train, config.rollout
    is_meant = config.world in (0, world)
    _require(is_meant, f"the recipe is for world = {config.world} ranks, launched are {world}; change one of them")
    layouts = {
        "train.tp*pp*cp": (train.tp, train.pp, train.cp),
        "train.ep*etp*pp": (train.ep, train.etp or train.tp, train.pp),
        "rollout.tp*dp": (rollout.tp, rollout.dp),
    }
    unit = math.lcm(*map(math.prod, layouts.values()))
    for name, sizes in layouts.items():
        section, _, axes = name.partition(".")
        if world % math.prod(sizes):
            raise ConfigError(
                f"{name} = {'*'.join(map(str, sizes))} = {math.prod(sizes)} does not divide {world} ranks; "
                f"use {_or(_multiples(world, unit))} ranks, or change {section}.{_or(axes.split('*'))}"
            )
    for name in ("runtime.debug_rank", "log.profile_ranks"):
        ranks = _get(config, name)
        highest = max(ranks, default=0) if isinstance(ranks, list) else ranks
        _require(highest < world, f"{name}: rank {highest} is not among the {world} ranks; use 0 to {world - 1}")


def check_model(config: Config, shape: Any) -> None:
    """Both layouts must divide the model (a parallel.family.ModelShape), and it must have the positions."""
    for side, tp in (("train", config.train.tp), ("rollout", config.rollout.tp)):
        _divides("num_attention_heads", shape.heads, f"{side}.tp", tp)
        if shape.kv_heads % tp and tp % shape.kv_heads:
            fits = [t for t in range(1, shape.heads + 1) if not shape.heads % t]
            fits = [t for t in fits if not shape.kv_heads % t or not t % shape.kv_heads]
            raise ConfigError(
                f"{side}.tp = {tp} is neither a divisor nor a multiple of num_key_value_heads = {shape.kv_heads}; "
                f"use {side}.tp = {_or(_around(fits, tp))}"
            )
        if not shape.is_moe:
            _divides("intermediate_size", shape.ffn, f"{side}.tp", tp)
    (_expert_rules if shape.is_moe else _dense_rules)(config, shape)
    _stage_rules(config, shape.num_layers)
    data, limit = config.data, _max_positions(shape)
    longest = data.max_prompt_tokens + data.max_response_tokens
    if longest > limit:
        raise ConfigError(
            f"data.max_prompt_tokens + max_response_tokens = {data.max_prompt_tokens} + {data.max_response_tokens} = "
            f"{longest} exceeds the model's {limit} positions; shorten them by {longest - limit}"
        )


def _max_positions(shape: Any) -> int:
    """max_position_embeddings, or what YaRN stretches its original to."""
    scaling = shape.rope_scaling or {}
    original = scaling.get("original_max_position_embeddings") or shape.max_positions
    return max(shape.max_positions, int(original * scaling.get("factor", 1.0)))


def _expert_rules(config: Config, shape: Any) -> None:
    train, rollout = config.train, config.rollout
    size, slots = rollout.tp * rollout.dp, shape.experts + rollout.redundant_experts
    _divides("num_experts", shape.experts, "train.ep", train.ep)
    etp = "train.etp" if train.etp else "train.etp (0, hence train.tp)"
    _divides("moe_intermediate_size", shape.expert_ffn, etp, train.etp or train.tp)
    if not rollout.expert_parallel:
        _divides("moe_intermediate_size", shape.expert_ffn, "rollout.tp", size)
    elif size > shape.experts:
        raise ConfigError(
            f"rollout.tp*dp = {rollout.tp}*{rollout.dp} = {size} ranks cannot share {shape.experts} experts; "
            f"use at most {shape.experts} ranks per replica"
        )
    elif rollout.redundant_experts and slots % size:
        valid = [total - shape.experts for total in _multiples(slots, size) if total >= shape.experts]
        raise ConfigError(
            f"num_experts + rollout.redundant_experts = {shape.experts} + {rollout.redundant_experts} = {slots} is not "
            f"a multiple of rollout.tp*dp = {size}; use rollout.redundant_experts = {_or(valid)}"
        )


def _dense_rules(config: Config, shape: Any) -> None:
    idle = {"train.ep": 1, "train.etp": 0, "rollout.expert_parallel": False, "rollout.routing_replay": "none"}
    for name, off in idle.items():
        value = _get(config, name)
        _require(value == off, f"{name} = {value} needs experts, and {shape.family} has none; set {name}=none")


def _stage_rules(config: Config, layers: int) -> None:
    """Megatron's split: stages whose layers are named, the others equal, all in vpp equal chunks."""
    pp, vpp = config.train.pp, config.train.vpp
    named = config.train.first_stage_layers, config.train.last_stage_layers
    if _splits(layers, pp, vpp, *named):
        return
    middle = -(-layers // (pp * vpp)) * vpp
    rest = layers - middle * (pp - 2)
    ways = [(0, 0), ((rest + 1) // 2, rest // 2), (0, rest - middle), (0, layers - (layers // pp) * (pp - 1))]
    good = [way for way in ways if min(way) >= 0 and _splits(layers, pp, vpp, *way)]
    remedy = (
        "first_stage_layers = {} and last_stage_layers = {}".format(*good[0]) if good else "another train.pp or vpp"
    )
    raise ConfigError(
        f"{layers} layers do not split into train.pp*vpp = {pp}*{vpp} parts with first_stage_layers = {named[0]} and "
        f"last_stage_layers = {named[1]} (0: like the others); use {remedy}"
    )


def _splits(layers: int, pp: int, vpp: int, first: int, last: int) -> bool:
    stages, rest = pp - (first > 0) - (last > 0), layers - first - last
    if first % vpp or last % vpp or rest < 0:
        return False
    return rest % (stages * vpp) == 0 and rest > 0 if stages else rest == 0


def _divides(what: str, count: int, option: str, size: int) -> None:
    if count % size:
        near = _or(_divisors(count, size))
        raise ConfigError(f"{what} = {count} is not a multiple of {option} = {size}; use {near}")


def _get(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _multiples(value: int, unit: int) -> list[int]:
    """Positive multiples of `unit` on both sides of `value`."""
    return [v for v in (value // unit * unit, (value // unit + 1) * unit) if v > 0]


def _divisors(value: int, size: int) -> list[int]:
    """Divisors of `value` on both sides of `size`; of absurdly large values only those that are quick to find."""
    small = [d for d in range(1, min(math.isqrt(value), 100_000) + 1) if value % d == 0]
    return _around(sorted({*small, *(value // d for d in small)}), size)


def _around(ascending: list[int], value: int) -> list[int]:
    """The nearest below and the nearest above."""
    return [v for v in ascending if v < value][-1:] + [v for v in ascending if v > value][:1]


def _or(values: list[Any]) -> str:
    return " or ".join(map(str, values))
