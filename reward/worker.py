"""One reward process: `python -m reward.worker OPTIONS`, started by reward.pool. Standard library and the rule only.

    fd 0            lifeline: the read end of a pipe that the parent never writes; the kernel kills us when it closes
    OPTIONS.socket  chunks of items in (pickle, from the trusted side), "ready" and one score a line out (JSON)

It has a memory limit, ignores the signals that stop a job (the parent ends it), and prints to standard error only.
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


def limit_memory(mib: int) -> None:
    """Let the process grow by `mib` of address space beyond what its imports took."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


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
        limit_memory(options["config"]["memory_mib"])
        send("ready")
        while True:
            try:
                chunk = pickle.load(chunks)
            except EOFError:
                return
            for item in chunk:
                result = score(item)
                send(result)
                if result.failed == "memory":
                    return  # a fresh process takes the rest: this heap is full or torn


if __name__ == "__main__":
    main()
