"""One reward process: `python -m reward.worker OPTIONS`, started by reward.pool. Standard library and the rule only.

    fd 0            lifeline: the read end of a pipe that the parent never writes; the kernel kills us when it closes
    OPTIONS.socket  chunks of items in (pickle, from the trusted side), "ready", a score a line and "full" out (JSON)

It has a memory limit for each sample, ignores the signals that stop a job (the parent ends it), and prints to standard
error only.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import resource
import signal
import socket
import sys
import traceback

from launch.config import RewardConfig
from reward.rules import scorer


def die_with_parent() -> None:
    """SIGIO, whose default action is to end the process, when the lifeline closes: also inside an endless regex."""
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)


def address_space() -> int:
    """Bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def limit_growth(mib: int) -> None:
    """Let the process grow by `mib` of address space beyond what it has now: a limit for one sample."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + mib * 2**20, hard))


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    options = json.loads(sys.argv[1])
    with socket.socket(fileno=options["socket"]) as channel, channel.makefile("rb") as chunks:

        def send(message: object) -> None:
            channel.sendall(json.dumps(message).encode() + b"\n")

        try:
            score = scorer(RewardConfig(**options["config"]))
            for module in options["preload"]:
                __import__(module)
        except Exception:
            send({"error": traceback.format_exc()})
            return
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        mib, first = options["config"]["memory_mib"], address_space()
        send("ready")
        while True:
            try:
                chunk = pickle.load(chunks)
            except EOFError:
                return
            for item in chunk:
                limit_growth(mib)
                result = score(item)
                send(result)
                if result.failed == "memory" or address_space() - first > mib * 2**20:
                    return send("full")  # a fresh process takes the rest: the heap is torn, or what was scored stays


if __name__ == "__main__":
    main()
