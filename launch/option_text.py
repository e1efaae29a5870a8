"""Options as text: names, types and values for messages, --help and TOML. Nothing here reads a file but options.py.

Python drops the string under a field, so its help is taken from the source with `ast`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import json
import math
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from launch import options as tree
from launch.options import Config, ConfigError

USAGE = """\
usage: trainer.py RECIPE.toml [MORE.toml ...] [section.key=value ...]
       trainer.py --help [SECTION]         options with default, type and meaning
       trainer.py --show RECIPE.toml ...   the resolved options
Files are merged left to right, then come the values, written as in TOML; key=none goes back to the default.
"""


class Option(NamedTuple):
    kind: Any
    default: Any
    help: str


@functools.cache
def hints(cls: Any) -> dict[str, Any]:
    """Field -> type of a section; evaluating the annotations is what takes the time of loading."""
    return get_type_hints(cls)


def is_section(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def options() -> dict[str, Option]:
    """Every option by its full name, in the order of options.py."""
    return _options(Config, Config(), _docs(), "")


def _options(cls: Any, defaults: Any, docs: dict[str, dict[str, str]], path: str) -> dict[str, Option]:
    found: dict[str, Option] = {}
    for name, kind in hints(cls).items():
        default = getattr(defaults, name)
        if is_section(kind):
            found |= _options(kind, default, docs, join(path, name))
        else:
            found[join(path, name)] = Option(kind, default, docs[cls.__name__].get(name, ""))
    return found


def _docs() -> dict[str, dict[str, str]]:
    """class -> field -> the string below the field."""
    docs: dict[str, dict[str, str]] = {}
    for cls in ast.parse(Path(str(tree.__file__)).read_text(encoding="utf-8")).body:
        if not isinstance(cls, ast.ClassDef):
            continue
        fields = docs.setdefault(cls.name, {})
        for field, doc in zip(cls.body, cls.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
                fields[field.target.id] = str(ast.literal_eval(doc.value))
    return docs


def help_text(section: str | None = None) -> str:
    """Options with default, type and one sentence: all, those of a section ("train", "train.optimizer"), or one."""
    known = options()
    chosen = {n: o for n, o in known.items() if section is None or f"{n}.".startswith(f"{section}.")}
    if not chosen:
        sections = sorted({n.rpartition(".")[0] for n in known} - {""})
        close = difflib.get_close_matches(str(section), [*sections, *known], 1)
        hint = f"did you mean {close[0]}?" if close else f"sections: {', '.join(sections)}"
        raise ConfigError(f"--help: no section or option {brief(section)}; {hint}")
    lines = [USAGE] if section is None else []
    for name, option in chosen.items():
        lines += [f"{name} = {value_text(option.default)}    ({type_name(option.kind)})", f"    {option.help}"]
    return "\n".join(lines) + "\n"


def to_toml(config: Config) -> str:
    """The whole tree as TOML; load() of it gives an equal Config."""
    return "\n".join(_lines(dataclasses.asdict(config), {}, "")).lstrip() + "\n"


def show(config: Config) -> str:
    """to_toml with the default beside every value that differs from it."""
    return "\n".join(_lines(dataclasses.asdict(config), dataclasses.asdict(Config()), "")).lstrip() + "\n"


def _lines(table: dict[str, Any], defaults: dict[str, Any], path: str) -> list[str]:
    lines = [f"\n[{path}]"] if path else []
    for key, value in table.items():
        if not isinstance(value, dict):
            is_changed = key in defaults and defaults[key] != value
            default = f"  # default {value_text(defaults[key])}" if is_changed else ""
            lines.append(f"{key_text(key)} = {value_text(value)}{default}")
    for key, value in table.items():  # tables last: TOML gives every key to the header above it
        if isinstance(value, dict):
            lines += _lines(value, defaults.get(key, {}), join(path, key))
    return lines


def value_text(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key_text(k)} = {value_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(value_text, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, str):  # JSON's escapes are TOML's; DEL is the one character that only TOML escapes
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    raise ConfigError(f"{brief(value)} cannot be written as TOML")


def key_text(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else value_text(key)


def join(path: str, key: str) -> str:
    return f"{path}.{key_text(key)}" if path else key_text(key)


def brief(value: Any) -> str:
    """repr on one line, cut to 100 characters."""
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 100 else text[:97] + "..."


def type_name(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (Literal, Union):
        return "one of " + ", ".join(choices(kind)) + (", or str" if origin is Union else "")
    if origin is list:
        return f"list, each {type_name(get_args(kind)[0])}"
    if origin is dict and get_args(kind)[1] is not Any:
        return f"table, each {type_name(get_args(kind)[1])}"
    if origin is dict or is_section(kind):
        return "table"
    return {bool: "true or false", Any: "bool, int, float, str, list or table"}.get(kind) or str(kind.__name__)


def choices(kind: Any) -> tuple[str, ...]:
    """Named values of an option, for example auto and none of Literal["auto", "none"] | str."""
    if get_origin(kind) is Union:
        return tuple(choice for part in get_args(kind) for choice in choices(part))
    return get_args(kind) if get_origin(kind) is Literal else ()
