"""Who runs, who holds a run directory, and what a killed job left behind. Standard library, Linux's /proc.

A process is known by pid and start time, boot and pid namespace, so that a reused pid, a reboot or another container is
never taken for it. The lock uses exclusive creation and rename only: both are atomic on NFS and Lustre, where flock may
be missing or local to a node. Left out on purpose: judging processes of other hosts, except a requeued Slurm job's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import time
import uuid
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def identity() -> dict[str, Any]:
    """What tells this process from every other one."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "ticks": _stat(os.getpid())[1],
        "boot": read_text("/proc/sys/kernel/random/boot_id"),
        "namespace": _namespace(),
        "session": os.getsid(0),
        "token": uuid.uuid4().hex,
    }


def is_alive(owner: dict[str, Any], me: dict[str, Any]) -> bool | None:
    """Whether the process of record `owner` still runs, as far as `me` can see; None when it cannot be told."""
    if owner["boot"] == me["boot"] and owner["namespace"] == me["namespace"] and owner["ticks"]:
        try:
            os.kill(owner["pid"], 0)
        except PermissionError:
            return None if not _stat(owner["pid"])[1] else _stat(owner["pid"])[1] == owner["ticks"]
        except ProcessLookupError:
            return False
        return _stat(owner["pid"])[1] == owner["ticks"]
    if owner["host"] == me["host"] and owner["boot"] != me["boot"]:
        return False  # the machine restarted since
    if owner["job"] and owner["job"] == me["job"] and owner["restart"] != me["restart"]:
        return False  # Slurm ends a job before it requeues it
    return None


def lost_ranks(log_dir: Path) -> list[int]:
    """Ranks with a record rank_NNN.json in `log_dir` whose processes on this host are gone."""
    me, records = identity(), {int(f.stem[5:]): parse_table(read_text(f)) for f in sorted(log_dir.glob("rank_*.json"))}
    return [rank for rank, owner in records.items() if me.keys() <= owner.keys() and is_alive(owner, me) is False]


def acquire_lock(path: Path) -> dict[str, Any]:
    """Create the lock file and return its record. ValueError names the process that holds it."""
    me = identity()
    for _ in range(20):
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            _take_over(path, me)
            continue
        try:
            with open(handle, "w") as file:
                json.dump(me, file)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            path.unlink()
            raise
        return me
    raise ValueError(f"{path}: other processes keep taking this lock; start one job on a run directory")


def _take_over(path: Path, me: dict[str, Any]) -> None:
    """Remove a lock whose owner is dead; ValueError when the owner lives or may live."""
    text = read_text(path)
    for _ in range(20):
        if text.endswith("}") or not path.exists():
            break
        time.sleep(0.05)  # between its creation and its first words
        text = read_text(path)
    if not text and not path.exists():
        return
    owner = parse_table(text)
    alive = is_alive(owner, me) if me.keys() <= owner.keys() else None
    named = ", ".join(f"{key} {owner[key]}" for key in ("host", "pid", "job", "since") if owner.get(key))
    if alive is not False:
        doubt = "" if alive else f"; if that job is dead, remove {path}"
        raise ValueError(f"run_dir {path.parent} is in use by {named or 'an unknown process'}{doubt}")
    aside = path.with_name(f".{path.name}.{me['token']}")
    with contextlib.suppress(FileNotFoundError):  # another starter was faster: judge the next lock
        os.rename(path, aside)
        if read_text(aside) == text:
            aside.unlink()
            log.warning("took over the lock of a dead job (%s)", named)
        else:
            os.rename(aside, path)  # it was a new owner's lock: give it back


def clean_leftovers(records: list[dict[str, Any]]) -> list[str]:
    """End the children and unlink the shared memory of dead processes of this host; returns what was removed.

    Only processes that led a session of their own are followed (torchrun's workers do), never a login shell's session.
    """
    me, removed = identity(), []
    records = [r for r in records if me.keys() <= r.keys()]
    dead = [r for r in records if r["host"] == me["host"] and r["boot"] == me["boot"] and is_alive(r, me) is False]
    segments = {Path(name) for record in dead for name in record.get("segments", ())}
    sessions = {r["session"] for r in dead if r["session"] == r["pid"] and not _stat(r["pid"])[1]}
    everyone = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    for pid in everyone:
        if _stat(pid)[0] in sessions:
            segments |= own_segments(pid)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                removed.append(f"process {pid}")
    in_use: set[Path] = set()
    for pid in everyone:
        in_use |= mapped_segments(pid) if _stat(pid)[0] not in sessions else set()
    for segment in sorted(segments - in_use):
        with contextlib.suppress(OSError):
            segment.unlink()
            removed.append(str(segment))
    return removed


def unlink_own_segments() -> None:
    """Names of the shared memory that this process has mapped, which vLLM's CPU build leaves behind; mappings stay."""
    for segment in own_segments(os.getpid()):
        with contextlib.suppress(OSError):
            segment.unlink()


def own_segments(pid: int) -> set[Path]:
    """Of those that a process has mapped, the ones directly in /dev/shm that are not older than it: nobody's data."""
    boot = [line.split()[1] for line in read_text("/proc/stat").splitlines() if line.startswith("btime")]
    began = int(boot[0]) + int(_stat(pid)[1] or 0) / os.sysconf("SC_CLK_TCK") if boot else 0.0
    found = [path for path in mapped_segments(pid) if path.parent == Path("/dev/shm")]
    return {path for path in found if _changed(path) > began - 2}


def mapped_segments(pid: int) -> set[Path]:
    """Files in /dev/shm that a process has mapped; none when it may not be looked at."""
    lines = read_text(f"/proc/{pid}/maps").splitlines()
    return {Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/" in line and "(deleted)" not in line}


def _changed(path: Path) -> float:
    """Seconds since the epoch of a file's last change; 0 when it is gone: another rank may unlink it at any moment."""
    try:
        return path.stat().st_ctime
    except OSError:
        return 0.0


def read_text(path: str | Path) -> str:
    """Stripped text of a file, "" when it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def parse_table(text: str) -> dict[str, Any]:
    """A JSON object; {} when the text is none, for example because a full disk cut it."""
    try:
        table = json.loads(text)
    except ValueError:
        return {}
    return table if isinstance(table, dict) else {}


def _stat(pid: int) -> tuple[int, str]:
    """(session, start time in clock ticks since boot) of a process; (0, "") when there is none or it is a zombie."""
    fields = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(fields[3]), fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else (0, "")


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
