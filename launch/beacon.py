"""Which hosts of the job still answer, asked when something hangs: a listening socket per node, a file beside its logs.

The kernel answers for the socket, so a rank that hangs does too: a host that does not is lost or cut off. Only jobs of
several nodes have beacons, at the address that the nodes agreed on when they met (node.sh's NODE_ADDRESS).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from typing import Any

from launch.processes import parse_table, read_text
from launch.runtime import RunDir, write_atomic

REACH_S = 3.0


class Beacon:
    def __init__(self, run: RunDir, address: str | None = None):
        """`address`: of this host among the nodes; None takes NODE_ADDRESS, without which there is no beacon."""
        self.run, self.socket = run, None
        address = os.environ.get("NODE_ADDRESS", "") if address is None else address
        if address and int(os.environ.get("LOCAL_RANK", run.rank)) == 0:
            with contextlib.suppress(OSError):
                self.socket = socket.create_server((address, 0), backlog=1024)
                record = {"host": socket.gethostname(), "address": address, "port": self.socket.getsockname()[1]}
                write_atomic(run.log_dir / f"beacon_{run.rank:03d}.json", json.dumps(record))

    def unreachable(self) -> list[str]:
        """Hosts that do not answer this one, with address and why; asked all at once, at most REACH_S seconds."""
        others = [parse_table(read_text(file)) for file in sorted(self.run.log_dir.glob("beacon_*.json"))]
        answers: list[str] = []
        threads = [threading.Thread(target=_ask, args=(other, answers), daemon=True) for other in others if other]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(REACH_S + 1)
        return sorted(answers)


def _ask(other: dict[str, Any], answers: list[str]) -> None:
    try:
        socket.create_connection((other["address"], other["port"]), REACH_S).close()
    except OSError as error:
        where = f"{other['host']} ({other['address']})"
        answers.append(f"host {socket.gethostname()} cannot reach host {where}: {error.strerror or error}")
