"""Rules between a layout and what it must divide: the ranks of the launch, the model's shape. Pure.

check_world needs the config and the number of ranks, check_model the model's shape (a parallel.family.ModelShape); each
raises one ConfigError with the arithmetic and the nearest values that work. The rules of the config alone: checks.py.
"""

from __future__ import annotations

import math
from typing import Any

from launch.options import Config, ConfigError


def check_world(config: Config, world: int) -> None:
    """Both layouts must divide `world` ranks. ConfigError has the arithmetic and the nearest worlds that work."""
    train, rollout = config.train, config.rollout
    is_meant = config.world in (0, world)
    require(is_meant, f"the recipe is for world = {config.world} ranks, launched are {world}; change one of them")
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
                f"use {either(multiples(world, unit))} ranks, or change {section}.{either(axes.split('*'))}"
            )
    for name in ("runtime.debug_rank", "log.profile_ranks"):
        ranks = value_of(config, name)
        highest = max(ranks, default=0) if isinstance(ranks, list) else ranks
        require(highest < world, f"{name}: rank {highest} is not among the {world} ranks; use 0 to {world - 1}")


def check_model(config: Config, shape: Any) -> None:
    """Both layouts must divide the model (a parallel.family.ModelShape), and it must have the positions."""
    for side, tp in (("train", config.train.tp), ("rollout", config.rollout.tp)):
        _divides("num_attention_heads", shape.heads, f"{side}.tp", tp)
        if shape.kv_heads % tp and tp % shape.kv_heads:
            fits = [t for t in range(1, shape.heads + 1) if not shape.heads % t]
            fits = [t for t in fits if not shape.kv_heads % t or not t % shape.kv_heads]
            raise ConfigError(
                f"{side}.tp = {tp} is neither a divisor nor a multiple of num_key_value_heads = {shape.kv_heads}; "
                f"use {side}.tp = {either(_around(fits, tp))}"
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
        valid = [total - shape.experts for total in multiples(slots, size) if total >= shape.experts]
        raise ConfigError(
            f"num_experts + rollout.redundant_experts = {shape.experts} + {rollout.redundant_experts} = {slots} is not "
            f"a multiple of rollout.tp*dp = {size}; use rollout.redundant_experts = {either(valid)}"
        )


def _dense_rules(config: Config, shape: Any) -> None:
    idle = {"train.ep": 1, "train.etp": 0, "rollout.expert_parallel": False, "rollout.routing_replay": "none"}
    for name, off in idle.items():
        value = value_of(config, name)
        require(value == off, f"{name} = {value} needs experts, and {shape.family} has none; set {name}=none")


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
        near = either(divisors(count, size))
        raise ConfigError(f"{what} = {count} is not a multiple of {option} = {size}; use {near}")


def value_of(config: Config, name: str) -> Any:
    """Of an option named as on the command line."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def multiples(value: int, unit: int) -> list[int]:
    """Positive multiples of `unit` on both sides of `value`."""
    return [v for v in (value // unit * unit, (value // unit + 1) * unit) if v > 0]


def divisors(value: int, size: int) -> list[int]:
    """Divisors of `value` on both sides of `size`; of absurdly large values only those that are quick to find."""
    small = [d for d in range(1, min(math.isqrt(value), 100_000) + 1) if value % d == 0]
    return _around(sorted({*small, *(value // d for d in small)}), size)


def _around(ascending: list[int], value: int) -> list[int]:
    """The nearest below and the nearest above."""
    return [v for v in ascending if v < value][-1:] + [v for v in ascending if v > value][:1]


def either(values: list[Any]) -> str:
    """ "2 or 4": what a message offers."""
    return " or ".join(map(str, values))


def require(condition: object, message: str) -> None:
    """ConfigError unless it holds."""
    if not condition:
        raise ConfigError(message)
