"""From recipes and the command line to one Config: TOML files, `section.key=value`, every mistake one ConfigError.

    defaults  <-  files, left to right, tables merged key by key  <-  overrides, in order

Standard library only (tomli on Python 3.10): help, dry runs and tests need neither torch nor an engine. The tree is in
options.py, rules that join options in checks.py, help and writing in option_text.py; all are offered here, so that the
rest of the project imports launch.config alone. Left out on purpose: environment variables, includes, interpolation.
"""

from __future__ import annotations

import datetime
import difflib
import re
import sys
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from launch.checks import check as check
from launch.layout_checks import check_model as check_model
from launch.layout_checks import check_world as check_world
from launch.option_text import brief, choices, help_text, hints, is_section, join, options, show, type_name, value_text
from launch.option_text import to_toml as to_toml
from launch.options import (  # noqa: F401
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    RuntimeConfig,
    TrainConfig,
)
from launch.shrink import shrunk

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_DEPTH = 20
"""Levels of tables and lists in a pass-through table; no upstream option needs more."""
AROUND = ("checkpoint", "log", "runtime")
"""Sections that do not change what is trained."""


def load(argv: list[str]) -> Config:
    """Config of recipe files and overrides (names and types only; see check). ConfigError names file and option.

    An argument is an override when it has a `=` with no slash before it, else a file; overrides win anywhere.
    """
    files: dict[str, Any] = {}
    overrides = []
    for argument in argv:
        name, equals, text = argument.partition("=")
        if equals and "/" not in name:
            if re.search("[\ud800-\udfff]", argument):  # how Python holds bytes that are not UTF-8
                raise ConfigError(f"{brief(argument)} is not UTF-8")
            overrides.append((name.strip().removeprefix("--"), text.strip()))
        else:
            _merge(files, _read(argument))
    for name, text in overrides:
        _override(files, name, text)
    config = _construct(Config, files)
    return shrunk(config) if config.shrink else config


def answer(argv: list[str]) -> str | None:
    """The text that --help [SECTION] or --show asks for; None when the command line asks for a run."""
    for flag in ("--help", "-h"):
        if flag in argv:
            after = [a for a in argv[argv.index(flag) + 1 :] if "=" not in a and not a.endswith(".toml")]
            return help_text(after[0] if after else None)
    if "--show" not in argv:
        return None
    config = load([a for a in argv if a != "--show"])
    try:
        check(config)
    except ConfigError as error:
        return f"{show(config)}\n# A run with this tree is refused: {error}"
    return show(config)


def changed_options(toml: str, config: Config) -> list[str]:
    """`train.lr 1e-06 -> 2e-06` of every option of the job itself that differs from a resolved tree of before."""

    def flat(table: dict[str, Any], path: str = "") -> dict[str, Any]:
        inner = [flat(v, join(path, k)) if isinstance(v, dict) else {join(path, k): v} for k, v in table.items()]
        return {k: v for values in inner for k, v in values.items()}

    before, now = flat(tomllib.loads(toml)), flat(tomllib.loads(to_toml(config)))
    names = [k for k in before.keys() | now.keys() if k != "run_dir" and k.partition(".")[0] not in AROUND]
    text = {name: [value_text(v[name]) if name in v else "unset" for v in (before, now)] for name in sorted(names)}
    return [f"{name} {old} -> {new}" for name, (old, new) in text.items() if old != new]


def _read(name: str) -> dict[str, Any]:
    if name.startswith("-"):
        raise ConfigError(f"unknown flag {brief(name)}; options are written section.key=value, as in train.lr=1e-6")
    path = Path(name)
    try:
        data = path.read_bytes()
        return _convert(Config, tomllib.loads(data.decode()), "")
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such recipe file{_nearest_file(path)}") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read as a recipe: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line, byte = data[: error.start].count(b"\n") + 1, data[error.start]
        raise ConfigError(f"{name}: line {line} is not UTF-8 (byte 0x{byte:02x}); recipes are TOML") from None
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: lists or tables are nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # TOMLDecodeError, which says the line, and Python's limit of digits, which does not
        raise ConfigError(f"{name}: not valid TOML: {' '.join(str(error).split())[:300]}") from None


def _nearest_file(path: Path) -> str:
    if str(path) in options():
        return f"; an option is written {path}=VALUE"
    close = difflib.get_close_matches(path.name, sorted(p.name for p in path.parent.glob("*.toml")), 1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _override(tree: dict[str, Any], name: str, text: str) -> None:
    """Sets, or with `none` clears, one option, section, or key of a pass-through table."""
    keys, path = name.split("."), ""
    kind: Any = Config
    for key in keys:
        kind = _child(kind, path, key)
        path = join(path, key)
    is_none = text.lower() == "none"
    if is_none and "none" not in choices(kind):
        _clear(tree, keys)
        return
    table = _convert(kind, "none" if is_none else _parse(text, kind), path, len(keys))
    for key in reversed(keys):
        table = {key: table}
    _merge(tree, table)


def _clear(tree: dict[str, Any], keys: list[str]) -> None:
    for key in keys[:-1]:
        tree = tree.get(key, {})
        if not isinstance(tree, dict):
            return
    tree.pop(keys[-1], None)


def _parse(text: str, kind: Any) -> Any:
    """`text` as a TOML value where it is one, else as it stands. String options keep 5, true and 2026-01-01 as text."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = parsed["value"]
    stays = isinstance(value, (datetime.date, datetime.time)) or _takes_text(kind) and not isinstance(value, str)
    return text if stays or len(parsed) > 1 else value


def _merge(tree: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def _construct(cls: Any, tree: dict[str, Any]) -> Any:
    kinds = hints(cls)
    return cls(**{k: _construct(kinds[k], v) if is_section(kinds[k]) else v for k, v in tree.items()})


def _child(kind: Any, path: str, key: str) -> Any:
    """Type of `key` in a section, a table or a pass-through table. ConfigError when it does not exist."""
    if is_section(kind):
        kinds = hints(kind)
        return kinds[key] if key in kinds else _unknown(path, key, list(kinds))
    if kind is Any:
        return Any
    if get_origin(kind) is dict:
        return get_args(kind)[1]
    raise ConfigError(f"unknown option {brief(join(path, key))}: {path} is {type_name(kind)}, not a table")


def _unknown(path: str, key: str, siblings: list[str]) -> Any:
    """Raises with the nearest name: the same key in another section, else a similar one beside it, else anywhere."""
    known, full = list(options()), join(path, key)
    close = [name for name in known if name.rpartition(".")[2] == key][:2]
    close = close or [join(path, name) for name in difflib.get_close_matches(key, siblings, 1)]
    close = close or difflib.get_close_matches(full[:100], known, 1, cutoff=0.0)
    raise ConfigError(f"unknown option {brief(full)}; did you mean {' or '.join(map(repr, close))}?")


def _convert(kind: Any, value: Any, path: str, depth: int = 0) -> Any:
    """`value` as an option of this type; sections stay tables without defaults. ConfigError names the path."""
    origin = get_origin(kind)
    if depth > MAX_DEPTH:
        raise ConfigError(f"{brief(path)} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict) and (is_section(kind) or origin is dict or kind is Any):
        below = ((key, item, join(path, key)) for key, item in value.items())
        return {key: _convert(_child(kind, path, key), item, name, depth + 1) for key, item, name in below}
    if isinstance(value, list) and (origin is list or kind is Any):
        element = get_args(kind)[0] if origin is list else Any
        return [_convert(element, item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if kind is Any and type(value) in (bool, int, float, str):
        return _convert(type(value), value, path, depth)
    if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:  # false for nan
        return float(value)
    if kind is int and type(value) is int and -(2**63) <= value < 2**63:
        return value
    if kind is bool and isinstance(value, bool):
        return value
    if isinstance(value, str) and (value in choices(kind) or kind is str or origin is Union):
        return value
    raise ConfigError(f"{path} must be {type_name(kind)}, got {brief(value)}{_hint(kind, value)}")


def _hint(kind: Any, value: Any) -> str:
    if isinstance(value, str) and (close := difflib.get_close_matches(value, choices(kind), 1)):
        return f"; did you mean {close[0]}?"
    if isinstance(value, str) and kind in (int, float, bool) and _parse(value, kind) != value:
        return "; write it without quotes"
    if get_origin(kind) is list:
        return "; a list is written " + ("[1, 2]" if get_args(kind)[0] is int else '["a", "b"]')
    if isinstance(value, (datetime.date, datetime.time)):
        return "; quote dates and times"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and kind in (int, float):
        return "; inf, nan and integers beyond 64 bits are refused" if type(value) is kind else ""
    return ""


def _takes_text(kind: Any) -> bool:
    return kind is str or bool(choices(kind))


def check_passthrough(
    table: dict[str, Any], fields: dict[str, Any], owned: dict[str, str], where: str, upstream: str
) -> None:
    """Refuses names that `upstream` (said with its version: "vLLM 0.32.0 EngineArgs") does not have, or that we set.

    fields: upstream's field names -> types; a value is checked where the type is a plain or optional scalar.
    owned: names that the run sets itself -> our option ("tensor_parallel_size" -> "rollout.tp").
    """
    for name, value in table.items():
        path = join(where, name)
        if name in owned:
            raise ConfigError(f"{path} is not free: the run sets it from {owned[name]}; change that instead")
        if name not in fields:
            close = difflib.get_close_matches(name[:100], [*fields, *owned], 1, cutoff=0.0)
            nearest = "".join(f"; did you mean {owned.get(near, near)!r}?" for near in close)
            raise ConfigError(f"unknown option {brief(path)}{nearest} ({upstream})")
        is_union = get_origin(fields[name]) in (Union, types.UnionType)
        kinds = [k for k in get_args(fields[name]) if k is not type(None)] if is_union else [fields[name]]
        if len(kinds) == 1 and kinds[0] in (bool, int, float, str):
            try:
                _convert(kinds[0], value, path)
            except ConfigError as error:
                raise ConfigError(f"{error} ({upstream})") from None
