"""Where metrics go: console, log, metrics.jsonl, TensorBoard, samples, a user's hook. Rank 0 only.

    terminal        step 12/200  reward 0.431  length 5.2  kl 0.0000  grad 0.32  gen 0.12s  step 0.35s  ETA 00:01:05
    log             step:12 - actor/grad_norm:0.32 - ...     every key, full precision; verl's log parsers read it
    metrics.jsonl   {"training/global_step": 12, ...}        the primary record; null stands for NaN and infinities

A resumed run first removes what was written after the resumed step, so that no curve goes back in time.
Left out on purpose: trackers with accounts. `log.hook` names a function that feeds one.
"""

from __future__ import annotations

import html
import importlib
import json
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.metrics import in_order
from launch.runtime import write_atomic

log = logging.getLogger(__name__)

SHORT = {
    "reward": ("critic/rewards/mean", "{:.3f}"),
    "length": ("response_length/mean", "{:.1f}"),
    "kl": ("actor/kl_loss", "{:.4f}"),
    "grad": ("actor/grad_norm", "{:.3g}"),
    "gen": ("timing_s/gen", "{:.2f}s"),
    "update": ("timing_s/update_actor", "{:.2f}s"),
    "sync": ("timing_s/reshard", "{:.2f}s"),
    "step": ("timing_s/step", "{:.2f}s"),
}
"""Word of the terminal line -> metric and format."""


class Writers:
    """All destinations of rank 0. On other ranks make none: `writers = Writers(...) if rank == 0 else None`."""

    def __init__(
        self,
        run_dir: Path,
        total_steps: int,
        resumed_step: int = 0,
        config: Mapping[str, Any] | None = None,
        tensorboard: bool = True,
        samples_per_step: int = 0,
        hook: str = "",
    ) -> None:
        """`config`: flat or nested table for TensorBoard. ValueError when the hook cannot be imported."""
        self.run_dir, self.samples_per_step = run_dir, samples_per_step
        self.progress = Progress(total_steps, resumed_step)
        self.hook = load_hook(hook) if hook else None
        self.history = purge(run_dir, resumed_step)
        self.jsonl = open(run_dir / "metrics.jsonl", "a")  # open for the whole job
        self.board: Any = _open_board(run_dir / "tensorboard", resumed_step, config or {}) if tensorboard else None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step to every destination. A failing hook is a warning, a full disk is an error."""
        metrics = in_order({"training/global_step": step, **metrics})
        # A pipe or a scheduler's file gets the parseable line too: that is what people feed to log viewers.
        log.log(logging.DEBUG if sys.stderr.isatty() else logging.INFO, console_line(step, metrics))
        log.info(self.progress.line(step, metrics))
        self.jsonl.write(json.dumps({key: finite(value) for key, value in metrics.items()}) + "\n")
        self.jsonl.flush()
        self.history.append(dict(metrics))
        for key, value in metrics.items() if self.board else ():
            self.board.add_scalar(key, value, step)
        if self.hook:
            try:
                self.hook(step, dict(metrics))
            except Exception:  # the user's code: whatever it raises must not end a job of days
                log.warning("log.hook failed at step %d", step, exc_info=True)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]], kind: str = "step") -> None:
        """samples/KIND_NNNNNN.jsonl, the first rows as log.samples_per_step says; a few as TensorBoard text."""
        rows = rows[: self.samples_per_step or None] if self.samples_per_step >= 0 else []
        if not rows:
            return
        directory = self.run_dir / "samples"
        directory.mkdir(exist_ok=True)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomic(directory / f"{kind}_{step:06d}.jsonl", text)
        for i, row in enumerate(rows[:3] if self.board else ()):
            self.board.add_text(f"sample/{i}" if kind == "step" else f"{kind}/{i}", sample_text(row), step)

    def histograms(self, step: int, arrays: Mapping[str, Any]) -> None:
        """Distributions to TensorBoard: response lengths, rewards, advantages."""
        for name, values in arrays.items() if self.board else ():
            if len(values):
                self.board.add_histogram(name, values, step)

    def curve(self, key: str = "critic/rewards/mean") -> str:
        """The whole run's curve of one metric, resumed steps included, for the terminal."""
        points = [row[key] for row in self.history if isinstance(row.get(key), (int, float))]
        return draw_curve(points, title=key)

    def close(self) -> None:
        self.jsonl.close()
        if self.board:
            self.board.close()


class Progress:
    """The terminal's line of a step, with the time that is left by the mean of recent steps."""

    def __init__(self, total_steps: int, resumed_step: int = 0) -> None:
        self.total_steps, self.resumed_step = total_steps, resumed_step
        self.recent_s: deque[float] = deque(maxlen=20)

    def line(self, step: int, metrics: Mapping[str, float]) -> str:
        words = [f"step {step}/{self.total_steps}"]
        words += [f"{word} {form.format(metrics[key])}" for word, (key, form) in SHORT.items() if key in metrics]
        self.recent_s.append(metrics.get("timing_s/step", 0.0))
        left_s = (self.total_steps - step) * sum(self.recent_s) / len(self.recent_s)
        return "  ".join([*words, f"ETA {clock(left_s)}"])


def clock(seconds: float) -> str:
    """Seconds as HH:MM:SS, with days in front when there are any."""
    whole = max(0, round(seconds))
    days = f"{whole // 86400}d " if whole >= 86400 else ""
    return f"{days}{whole // 3600 % 24:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def console_line(step: int, metrics: Mapping[str, float]) -> str:
    """verl's line: `step:N - key:value - ...`, numbers with full precision."""
    pairs = [f"{key}:{_plain(value)!r}" for key, value in metrics.items() if _plain(value) is not None]
    return " - ".join([f"step:{step}", *pairs])


def finite(value: Any) -> Any:
    """A number as JSON can say it: NaN and infinities become null."""
    value = _plain(value)
    return value if value is None or math.isfinite(value) else None


def _plain(value: Any) -> int | float | None:
    """Python number of a Python, numpy or torch scalar; None for what is no number."""
    value = value.item() if hasattr(value, "item") else value
    return value if isinstance(value, (int, float)) else None


def sample_text(row: Mapping[str, Any]) -> str:
    """A sample as TensorBoard text: preformatted and escaped, because TensorBoard renders Markdown and HTML."""
    return "<pre>" + html.escape("\n".join(f"{key}: {value}" for key, value in row.items())) + "</pre>"


def config_table(config: Mapping[str, Any]) -> str:
    """Nested options as a Markdown table."""
    rows = [f"| {key} | {value} |" for key, value in _flat(config, "")]
    return "\n".join(["| option | value |", "|---|---|", *rows])


def _flat(config: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", html.escape(str(value)).replace("|", "&#124;").replace("\n", " ")


def load_hook(name: str) -> Callable[[int, dict[str, float]], Any]:
    """The function named "package.module:function". ValueError when there is none."""
    module, _, function = name.partition(":")
    try:
        hook = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"log.hook = {name!r}: {error}; give package.module:function") from None
    if not callable(hook):
        raise ValueError(f"log.hook = {name!r} is a {type(hook).__name__}, not a function")
    return hook


def purge(run_dir: Path, resumed_step: int) -> list[dict[str, Any]]:
    """Remove metrics and samples after the resumed step, and a torn last line; the metrics that stay."""
    file = run_dir / "metrics.jsonl"
    kept = [row for row in read_metrics(file) if row.get("training/global_step", 0) <= resumed_step]
    if file.exists():
        write_atomic(file, "".join(json.dumps(row) + "\n" for row in kept))
    for samples in (run_dir / "samples").glob("*_*.jsonl"):
        step = samples.stem.rpartition("_")[2]
        if step.isdigit() and int(step) > resumed_step:
            samples.unlink()
    return kept


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl; lines that a crash tore are left out. No file: no rows."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows += [row] if isinstance(row, dict) else []
    return rows


def _open_board(directory: Path, resumed_step: int, config: Mapping[str, Any]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        log.warning("no TensorBoard files: %s; install tensorboard or set log.tensorboard = false", error)
        return None
    board = SummaryWriter(str(directory), purge_step=resumed_step + 1 if resumed_step else 0)
    board.add_text("config", config_table(config), resumed_step)
    return board


def draw_curve(values: Sequence[float], width: int = 72, height: int = 12, title: str = "") -> str:
    """Values over steps 1..n as text: each column is the mean of its steps; eighths of a line are told apart.

    NaN columns are blank; the axis shows the least and the greatest mean.
    """
    if not len(values):
        return f"{title}: no values"
    width = min(width, len(values))
    cuts = [i * len(values) // width for i in range(width + 1)]
    columns = [sum(values[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    shown = [c for c in columns if math.isfinite(c)]
    low, high = (min(shown), max(shown)) if shown else (0.0, 0.0)
    scale = (height * 8 - 1) / (high - low) if high > low else 0.0
    eighths = [round((c - low) * scale) + 1 if math.isfinite(c) else 0 for c in columns]
    lines = []
    for row in range(height - 1, -1, -1):
        label = {height - 1: f"{high:.4g}", 0: f"{low:.4g}"}.get(row, "")
        cells = "".join(" ▁▂▃▄▅▆▇█"[min(8, max(0, e - row * 8))] for e in eighths)
        lines.append(f"{label:>9} ┤{cells}")
    lines.append(f"{'':>9} └{'─' * width}")
    lines.append(f"{'':>11}1{str(len(values)) if len(values) > 1 else '':>{max(0, width - 1)}}")
    return "\n".join(([title] if title else []) + lines)
