"""Runs -> one HTML page that opens from a file: python -m launch.report RUN_DIR [RUN_DIR ...] [-o FILE.html]

Curves laid over each other, phase times, memory, expert load, samples, options that differ, and the table of step time
and tokens per second. A run is a run directory, its metrics.jsonl, or a log of verl (lines `step:N - key:value - ...`),
so that old and new jobs can be compared. The page holds its data and code (report.html beside this file) and loads
nothing. Left out on purpose: a server, and statistics over seeds.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launch.writers import read_metrics

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

USAGE = "usage: python -m launch.report RUN_DIR|METRICS.jsonl|VERL.log [...] [-o FILE.html]"
TEMPLATE = Path(__file__).with_name("report.html")
SAMPLE_STEPS, SAMPLE_ROWS, SAMPLE_CHARS = 12, 8, 4000
"""Samples on the page: this many steps, spread over the run, rows of each, and characters of a text."""
DIGITS = 6

VERL_LINE = re.compile(r"\bstep:(\d+) - (.*)")
VERL_PAIR = re.compile(r"([A-Za-z_][\w./@+-]*):(?:np\.\w+\()?(-?(?:\d[\d.]*(?:[eE][+-]?\d+)?|nan|inf))\)?(?= - |\s*$)")
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def parse_verl(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Rows of a verl log, whatever stands before `step:`; values that are no numbers are left out."""
    rows = []
    for line in lines:
        if match := VERL_LINE.search(COLOUR.sub("", line)):
            pairs = VERL_PAIR.findall(match[2])
            if pairs:
                rows.append({"training/global_step": int(match[1])} | {key: float(value) for key, value in pairs})
    return rows


def columns(rows: Iterable[Mapping[str, Any]]) -> tuple[list[int], dict[str, list[float | None]]]:
    """(steps, key -> value per step). Rows of one step are joined, later ones win; what is not finite is None."""
    by_step: dict[int, dict[str, Any]] = {}
    for row in rows:
        step = row.get("training/global_step")
        if isinstance(step, (int, float)):
            by_step.setdefault(int(step), {}).update(row)
    steps = sorted(by_step)
    keys = list(dict.fromkeys(key for step in steps for key in by_step[step] if key != "training/global_step"))
    return steps, {key: [_number(by_step[step].get(key)) for step in steps] for key in keys}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value if value == int(value) else float(f"{value:.{DIGITS}g}")


def flatten(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested options by full name."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{path}.{key}" if path else key
        flat |= flatten(value, name) if isinstance(value, Mapping) and value else {name: value}
    return flat


def samples(directory: Path, kind: str = "step") -> dict[int, list[dict[str, Any]]]:
    """Step -> rows, texts cut, of some steps from the first to the last; kind "val": of validation."""
    files = sorted(directory.glob(f"{kind}_*.jsonl"))
    count = min(SAMPLE_STEPS, len(files))
    chosen = [files[round(i * (len(files) - 1) / max(1, count - 1))] for i in range(count)]
    table = {}
    for file in chosen:
        rows = []
        with open(file, encoding="utf-8", errors="replace") as lines:
            for line, _ in zip(lines, range(SAMPLE_ROWS), strict=False):
                try:
                    rows.append({key: _cut(value) for key, value in json.loads(line).items()})
                except ValueError:
                    continue  # a line that a crash tore
        table[int(re.sub(r"\D", "", file.stem) or 0)] = rows
    return table


def _cut(value: Any) -> Any:
    if isinstance(value, float):
        return _number(value)
    return f"{value[:SAMPLE_CHARS]} [...]" if isinstance(value, str) and len(value) > SAMPLE_CHARS else value


def read_run(path: Path, name: str) -> dict[str, Any]:
    """What the page shows of one run. ValueError when there are no steps in it."""
    directory = path if path.is_dir() else path.parent
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.exists():
        raise ValueError(f"{path} holds no metrics.jsonl; give a run directory, a metrics.jsonl or a verl log")
    is_ours = file.suffix == ".jsonl"
    if is_ours:
        rows = read_metrics(file)
    else:
        with open(file, encoding="utf-8", errors="replace") as lines:
            rows = parse_verl(lines)
    steps, table = columns(rows)
    if not steps:
        raise ValueError(f"{file}: no steps; {'the run wrote none yet' if is_ours else 'a verl log has step:N - ...'}")
    options = directory / "config.toml"
    config = tomllib.loads(options.read_text(encoding="utf-8")) if is_ours and options.exists() else {}
    return {
        "name": name,
        "path": str(path),
        "steps": steps,
        "columns": table,
        "config": flatten(config),
        "samples": samples(directory / "samples") if is_ours else {},
        "validation": samples(directory / "samples", "val") if is_ours else {},
    }


def names(paths: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart; equal paths get a number."""
    parts = [path.resolve().with_suffix("").parts[1:] if path.is_file() else path.resolve().parts[1:] for path in paths]
    parts = [p[:-1] if p[-1] == "metrics" and len(p) > 1 else p for p in parts]
    short = []
    for part in parts:
        others = [p for p in parts if p != part]
        depth = next((n for n in range(1, len(part)) if all(p[-n:] != part[-n:] for p in others)), len(part))
        short.append("/".join(part[-depth:]))
    return [f"{s} ({short[:i].count(s) + 1})" if short.count(s) > 1 else s for i, s in enumerate(short)]


def page(paths: list[Path]) -> str:
    """The HTML of runs. ValueError when one of them cannot be shown."""
    runs = [read_run(path, name) for path, name in zip(paths, names(paths), strict=True)]
    data = json.dumps(runs, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")  # no tag ends early
    title = re.sub(r"[<>&@]", " ", " · ".join(run["name"] for run in runs[:3]) + (" ..." if len(runs) > 3 else ""))
    return TEMPLATE.read_text(encoding="utf-8").replace("@TITLE@", title).replace("@DATA@", data)


def main(argv: list[str]) -> int:
    arguments, out = list(argv), None
    if "-o" in arguments[:-1]:
        at = arguments.index("-o")
        out = Path(arguments[at + 1])
        del arguments[at : at + 2]
    if not arguments or any(a.startswith("-") for a in arguments):
        print(USAGE, file=sys.stderr)
        return 2
    paths = [Path(a) for a in arguments]
    out = out or (paths[0] if paths[0].is_dir() else paths[0].parent) / "report.html"
    try:
        text = page(paths)
        out.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{out} ({len(text) / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
