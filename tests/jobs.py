"""Start the real job under torchrun for tests, with a deadline, and read what it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMES = ("timing", "perf/", "memory_", "slowest_rank", "val-")


@dataclass
class Job:
    code: int
    output: str
    run_dir: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """metrics.jsonl, one table a step."""
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    @property
    def lasting(self) -> list[dict[str, Any]]:
        """The metrics that depend neither on the clock nor on the process: of two equal jobs they are the same."""
        return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in self.metrics]

    @property
    def status(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "status.json").read_text())

    def samples(self, step: int) -> list[dict[str, Any]]:
        text = (self.run_dir / "samples" / f"step_{step:06d}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def column(self, key: str) -> list[float]:
        return [row[key] for row in self.metrics if key in row]


def run_job(
    run_dir: Path,
    ranks: int,
    *arguments: str,
    timeout_s: float = 300.0,
    expect: int | None = 0,
    script: str = "trainer.py",
    env: dict[str, str] | None = None,
) -> Job:
    """`torchrun SCRIPT ARGUMENTS run_dir=RUN_DIR`; AssertionError with the output unless it ends with `expect`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [script, *arguments, f"run_dir={run_dir}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun hands it on to its ranks
        try:
            output, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        raise AssertionError(f"job not done after {timeout_s} s:\n{output[-6000:]}") from None
    if expect is not None:
        assert process.returncode == expect, f"exit code {process.returncode}, wanted {expect}:\n{output[-8000:]}"
    return Job(process.returncode, output, run_dir)


def prepare(kind: str, out: Path, *arguments: str) -> Path:
    """`python -m launch.prepare KIND OUT`, once per directory."""
    if not out.exists():
        done = subprocess.run(
            [sys.executable, "-m", "launch.prepare", kind, *arguments, str(out)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return out
