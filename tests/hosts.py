"""Hosts on one machine for tests: network namespaces on a bridge, each with its own name, addresses and /etc/hosts.

    with Network(tmp_path, ["n1", "n2"]) as network:
        network.run("n1", "hostname")                    network.start("n2", ...) -> Popen
        network.cut("n2")  network.mend("n2")            no packet passes, nothing is refused: a pulled cable

All of it lives in one process namespace: when the test ends or dies, every process in it ends too. The disk is shared.
Needs root and unshare; `python -m tests.hosts` says what is missing. Host i has 10.9.0.i, "ctl" 10.9.0.254.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SANDBOX = ["unshare", "--pid", "--fork", "--mount-proc", "--net", "--mount", "--uts", "--kill-child"]


def missing() -> str:
    """Why namespaces cannot be hosts here; empty when they can."""
    if absent := [name for name in ("unshare", "nsenter", "ip") if not shutil.which(name)]:
        return f"no {', '.join(absent)} on this machine"
    script = "ip link set lo up && ip link add br0 type bridge && hostname probe"
    done = subprocess.run([*SANDBOX, "sh", "-c", script], capture_output=True, text=True)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else ""


def missing_slurm() -> str:
    """Why no Slurm can be started here."""
    absent = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if not shutil.which(name)]
    return f"not installed: {', '.join(absent)} (.ci/run installs them)" if absent else missing()


def tier(why_not: str) -> Any:
    """Mark of a test: default tier where it can run; elsewhere full, whose skips say why and do not fail CI."""
    import pytest

    return pytest.mark.full if why_not else pytest.mark.slow


class Network:
    def __init__(self, directory: Path, names: list[str], hosts_file: str = ""):
        """`hosts_file`: lines put before the hosts' own in /etc/hosts."""
        self.directory, self.names = directory, names
        self.addresses = {name: f"10.9.0.{number}" for number, name in enumerate(names, 1)}
        table = "127.0.0.1 localhost\n10.9.0.254 ctl\n"
        self.table = hosts_file + table + "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        self.holders: dict[str, int] = {}

    def __enter__(self) -> Network:
        directory = self.directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "hosts").write_text(self.table)
        lines = [
            "set -e; mount --make-rprivate /; hostname ctl; ip link set lo up",
            f"cp {directory}/hosts {directory}/hosts_ctl; mount --bind {directory}/hosts_ctl /etc/hosts",
            "ip link add br0 type bridge; ip addr add 10.9.0.254/24 dev br0; ip link set br0 up",
        ]
        for number, name in enumerate(self.names, 1):
            inner = f"hostname {name}; cp {directory}/hosts {directory}/hosts_{name}; "
            inner += (
                f"mount --bind {directory}/hosts_{name} /etc/hosts; ip link set lo up; touch {directory}/up_{name}; "
            )
            lines += [
                f"unshare --net --uts --mount sh -c '{inner} exec sleep infinity' & pid=$!",
                f"while [ ! -e {directory}/up_{name} ]; do sleep 0.05; done; echo $pid >{directory}/pid_{name}",
                f"ip link add v{number} type veth peer name eth0 netns $pid; ip link set v{number} master br0 up",
                f"nsenter -t $pid -n sh -c 'ip addr add 10.9.0.{number}/24 dev eth0; ip link set eth0 up'",
            ]
        lines += [f"touch {directory}/ready", "exec sleep infinity"]
        with open(directory / "network.log", "w") as log:
            self.process = subprocess.Popen([*SANDBOX, "sh", "-c", "\n".join(lines)], stdout=log, stderr=log)
        wait_for(lambda: (directory / "ready").exists() or self.process.poll() is not None, 20, "the network")
        assert self.process.poll() is None, (directory / "network.log").read_text()
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.root = int(children[0])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # and with it all that runs inside
        self.process.wait()

    def command(self, host: str, *words: str) -> list[str]:
        """As a command of this process; host "ctl" is the machine between the hosts."""
        inside = ["nsenter", "-t", str(self.root), "--all", f"--wd={ROOT}"]
        if host != "ctl":
            pid = (self.directory / f"pid_{host}").read_text().strip()
            inside += ["nsenter", "-t", pid, "--net", "--uts", "--mount", f"--wd={ROOT}"]
        return [*inside, *words]

    def run(
        self, host: str, *words: str, timeout_s: float = 60, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = self.command(host, *words)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment(env))

    def start(self, host: str, *words: str, log: Path, env: dict[str, str] | None = None) -> subprocess.Popen:
        with open(log, "ab") as out:
            return subprocess.Popen(
                self.command(host, *words), stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment(env)
            )

    def cut(self, host: str) -> None:
        self.run("ctl", "ip", "link", "set", f"v{self.names.index(host) + 1}", "nomaster")

    def mend(self, host: str) -> None:
        self.run("ctl", "ip", "link", "set", f"v{self.names.index(host) + 1}", "master", "br0")


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    """This process's, with this interpreter first in PATH and none of a launch's variables."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(more or {})}


def wait_for(condition, timeout_s: float, what: str, poll_s: float = 0.2) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"waited {timeout_s} s for {what}"
        time.sleep(poll_s)


def pause(step: int, metrics: dict[str, float]) -> None:
    """log.hook of jobs that shall not be done too soon."""
    time.sleep(float(os.environ.get("TEST_PAUSE_S", "0.5")))


if __name__ == "__main__":
    for what, why in (("network namespaces", missing()), ("Slurm", missing_slurm())):
        print(f"{what}: {f'tests left out: {why}' if why else 'tests run'}")
