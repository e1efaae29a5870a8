"""The parts of stacks.sh: which hosts have ranks, asking those of this host, showing what all wrote.

python -m launch.stacks where RUN_DIR     "HOST JOB" of every host of the newest attempt; - is no Slurm job
python -m launch.stacks ask RUN_DIR       SIGUSR2 to the ranks of this host, which are known by more than their pid
python -m launch.stacks show RUN_DIR      the last stacks in the log of every rank; exit code 1 when there are none
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from launch.processes import identity, is_alive, parse_table, read_text

WAIT_S = 5.0
DUMP = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+", re.M)


def attempt(run_dir: Path) -> Path:
    """Log directory of the newest attempt. SystemExit when there is none."""
    found = [d for d in (run_dir / "logs").glob("attempt_*") if d.name[8:].isdigit()]
    if not found:
        sys.exit(f"error: {run_dir}/logs has no attempt: is it a run directory?")
    return max(found, key=lambda d: int(d.name[8:]))


def ranks(directory: Path) -> list[tuple[Path, dict[str, Any]]]:
    """(log, record) of every rank that signed in."""
    records = [(file.with_suffix(".log"), parse_table(read_text(file))) for file in directory.glob("rank_*.json")]
    return sorted((pair for pair in records if pair[1]), key=lambda pair: pair[0])


def ask(directory: Path) -> None:
    """Signal the living ranks of this host and wait until each has written."""
    me, asked = identity(), []
    for log, record in ranks(directory):
        if record["host"] == me["host"] and is_alive(record, me):
            asked.append((log, log.stat().st_size))
            (directory / f"{log.stem}.asked").write_text(str(asked[-1][1]))
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(record["pid"], signal.SIGUSR2)
    until = time.monotonic() + WAIT_S
    while any(log.stat().st_size == size for log, size in asked) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.2)  # the last lines of the last one


def show(directory: Path) -> int:
    """Print what each rank wrote since it was asked; 1 when none did."""
    shown = 0
    for log, record in ranks(directory):
        mark = directory / f"{log.stem}.asked"
        if not mark.exists():
            continue
        with open(log) as file:
            file.seek(int(mark.read_text()))
            text = file.read()
        mark.unlink()
        if found := DUMP.search(text):
            head = f"=== rank {int(log.stem[5:])} on {record['host']}, pid {record['pid']}"
            print(f"{head}\n{text[found.start() :].rstrip()}")
            shown += 1
    if not shown:
        print(f"error: no rank of {directory} runs, or none answered", file=sys.stderr)
    return 0 if shown else 1


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[0] not in ("where", "ask", "show"):
        sys.exit(__doc__)
    directory = attempt(Path(argv[1]))
    if argv[0] == "show":
        return show(directory)
    if argv[0] == "ask":
        ask(directory)
    else:
        places = {(record["host"], record.get("job") or "-") for _, record in ranks(directory)}
        print("\n".join(f"{host} {job}" for host, job in sorted(places)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
