"""Launch scripts of verl and slime (or vime) -> a recipe: python -m launch.migrate verl|slime SCRIPT ... [-o OUT]

    python -m launch.migrate verl env.sh train.sh -o recipe.toml model.path=models/Qwen3-235B-A22B
    python -m launch.migrate slime run.sh ACTOR_NUM_NODES=2 MASTER_ADDR=head

Scripts are read, never run (shell_script.py). NAME=value sets a variable of the script, section.key=value an option of
the recipe. Every option of the script ends as translated, unnecessary or unsupported, with the reason; the list stands
in the recipe too. Semantics that differ by default are written out, so that the recipe does what the script did. The
tables are in migrate_verl.py and migrate_slime.py. Left out on purpose: data and checkpoints (docs/migration.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from launch import config as options
from launch import migrate_slime, migrate_verl
from launch.checks import CHOICES
from launch.config import Config, ConfigError
from launch.migration import Translation
from launch.option_text import key_text, value_text
from launch.shell_script import Script

USAGE = (
    "usage: python -m launch.migrate verl|slime SCRIPT [SCRIPT ...] [-o RECIPE.toml] [NAME=value] [section.key=value]"
)


class Source(NamedTuple):
    find: Callable[[Script], tuple[dict[str, str], list[list[str]]]]
    """Options as written, and the commands that are no training."""
    translate: Callable[[Translation], None]


SOURCES = {
    "verl": Source(migrate_verl.find_options, migrate_verl.translate),
    "slime": Source(migrate_slime.find_options, migrate_slime.translate),
}

COMMANDS = {
    "source": "the model's shape comes from its config.json",
    "ray": "torchrun starts the ranks, there is no cluster to start first",
    "converter_hf_to_mcore.py": "Hugging Face files are read directly, in every layout",
    "convert_hf_to_torch_dist.py": "Hugging Face files are read directly, in every layout",
    "gsm8k.py": "python -m launch.prepare gsm8k writes the same columns",
}
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "set by the program where a kernel order needs it",
    "HCCL_ASYNC_ERROR_HANDLING": "must stay on: with 0 a lost rank hangs the others",
    "HCCL_CONNECT_TIMEOUT": "keep it in the job script",
    "HYDRA_FULL_ERROR": "no Hydra",
    "RAY_DEDUP_LOGS": "no Ray; each rank has its own log file",
    "TASK_QUEUE_ENABLE": "keep it in the job script",
    "LD_LIBRARY_PATH": "keep it in the job script",
    "PYTHONBUFFERED": "logs are flushed by line",
    "MASTER_ADDR": "torchrun's --rdzv-endpoint",
    "NCCL_NVLS_ENABLE": "keep it in the job script; NCCL finds NVLink by itself",
}


class Migration(NamedTuple):
    config: Config
    fates: dict[str, tuple[str, str]]
    """Option, command or variable as written -> (translated | unnecessary | unsupported, what or why)."""
    remarks: list[str]


def migrate(system: str, texts: list[str], variables: dict[str, str], overrides: list[str]) -> Migration:
    """The recipe of scripts; ValueError when they hold no training command or cannot be read."""
    source, script = SOURCES[system], Script(variables)
    for text in texts:
        script.read(text)
    given, commands = source.find(script)
    job = Translation(given, script.exported)
    source.translate(job)
    drop_idle(job)
    for name, value in given.items():
        if name not in job.fates:
            job.unsupported(name, f"unknown to this translation (its value is {value!r})")
    for words in commands:
        for word in words:
            if reason := COMMANDS.get(name := word.rpartition("/")[2]):
                job.unnecessary(f"command {name}", reason)
                break
    for name in script.exported:
        if f"${name}" not in job.fates:
            job.unnecessary(
                f"${name}", ENVIRONMENT.get(name, "read by nothing here; keep it if the job's image needs it")
            )
    config = options.load([*(f"{name}={value_text(value)}" for name, value in job.recipe.items()), *overrides])
    return Migration(config, job.fates, list(dict.fromkeys(script.remarks + job.remarks + problems(config))))


def drop_idle(job: Translation) -> None:
    """Leave out what the chosen algorithm does not use: verl and slime take it silently, a recipe is refused for it."""
    for name, choice, users in CHOICES:
        chosen = job.recipe.get(choice, options.options()[choice].default)
        if name in job.recipe and chosen not in users.split():
            job.drop(name, f"{choice} = {chosen} does not use it")


def problems(config: Config) -> list[str]:
    """What the recipe would be refused for, as a remark."""
    try:
        options.check(config)
    except ConfigError as error:
        return [f"the recipe does not run yet: {error}"]
    return []


def recipe_text(result: Migration, names: list[str]) -> str:
    """Options that differ from the defaults, below the fate of everything that was in the script."""
    lines = [f"# From {', '.join(names)} by python -m launch.migrate; --help explains every option.", "#"]
    for fate in ("unsupported", "unnecessary"):
        lines += [f"# {fate}: {name}: {text}" for name, (kind, text) in result.fates.items() if kind == fate]
    lines += [f"# remark: {' '.join(remark.split())}" for remark in result.remarks]
    return "\n".join([*lines, *_changed(result.config, Config(), "")]) + "\n"


def _changed(value: Any, default: Any, path: str) -> list[str]:
    """TOML of a section's options that are not the default; tables below their own header."""
    fields = vars(value) if not isinstance(value, dict) else value
    defaults = vars(default) if not isinstance(default, dict) else default
    plain, tables = [], []
    for key, entry in fields.items():
        if entry == defaults.get(key):
            continue
        if hasattr(entry, "__dataclass_fields__") or isinstance(entry, dict):
            tables += _changed(entry, defaults.get(key, {}), f"{path}.{key}".lstrip("."))
        else:
            plain.append(f"{key_text(key)} = {value_text(entry)}")
    return ([f"\n[{path}]"] if path and plain else []) + plain + tables


def report(result: Migration) -> str:
    """The fate of every option as a table for the terminal, and the counts."""
    width = max((len(name) for name in result.fates), default=0)
    order = ("translated", "unnecessary", "unsupported")
    lines = [
        f"{kind:<12} {name:<{width}}  {text}"
        for wanted in order
        for name, (kind, text) in result.fates.items()
        if kind == wanted
    ]
    kinds = [kind for kind, _ in result.fates.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in order)
    return "\n".join([*lines, *(f"remark       {' '.join(r.split())}" for r in result.remarks), counts])


def main(argv: list[str]) -> int:
    out, arguments = "", list(argv)
    if "-o" in arguments[:-1]:
        at = arguments.index("-o")
        out = arguments[at + 1]
        del arguments[at : at + 2]
    settings = [a for a in arguments[1:] if "=" in a and "/" not in a.partition("=")[0]]
    files = [a for a in arguments[1:] if a not in settings]
    if not arguments or arguments[0] not in SOURCES or not files or any(f.startswith("-") for f in files):
        print(USAGE, file=sys.stderr)
        return 2
    variables = dict(s.partition("=")[::2] for s in settings if s.partition("=")[0].isupper())
    overrides = [s for s in settings if not s.partition("=")[0].isupper()]
    try:
        texts = [Path(file).read_text(encoding="utf-8") for file in files]
        result = migrate(arguments[0], texts, variables, overrides)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(result), file=sys.stderr)
    text = recipe_text(result, [Path(file).name for file in files])
    if out:
        Path(out).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
