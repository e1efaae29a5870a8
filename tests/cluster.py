"""A real Slurm of Debian's packages on the hosts of tests/hosts.py: own configuration and state in a directory.

Nothing of the machine's own Slurm is used or changed. Jobs, daemons and processes end with the network.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from tests.hosts import Network, wait_for

CONFIGURATION = """
ClusterName=test
SlurmctldHost=ctl(10.9.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool_%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd_%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SlurmdTimeout={timeout}
KillWait=30
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster(Network):
    def __init__(self, directory: Path, names: list[str], slurmd_timeout_s: int = 30):
        super().__init__(directory, names)
        text = CONFIGURATION.format(directory=directory, timeout=slurmd_timeout_s)
        self.configuration = text + "".join(
            f"NodeName={name} NodeAddr={address} CPUs=1 RealMemory=2000\n" for name, address in self.addresses.items()
        )
        self.env = {"SLURM_CONF": str(directory / "slurm.conf"), "PLATFORM": "cpu"}

    def __enter__(self) -> Cluster:
        super().__enter__()
        directory = self.directory
        (directory / "state").mkdir()
        (directory / "slurm.conf").write_text(self.configuration)
        (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nIgnoreSystemd=yes\n")
        (directory / "munge.key").write_bytes(bytes(range(128)))
        (directory / "munge.key").chmod(0o400)
        files = [f"--{name}={directory}/munge.{name.split('-')[0]}" for name in ("socket", "key-file", "pid-file")]
        files += [f"--log-file={directory}/munge.log", f"--seed-file={directory}/munge.seed"]
        self.daemon("ctl", "munged", "--foreground", "--force", *files)
        wait_for(lambda: (directory / "munge.socket").exists(), 10, "munge")
        self.daemon("ctl", "slurmctld", "-D")
        for name in self.names:
            self.slurmd(name)
        wait_for(lambda: self.ask("sinfo", "-h", "-o", "%t %D") == f"idle {len(self.names)}", 30, "idle nodes", 0.5)
        return self

    def daemon(self, host: str, *words: str) -> None:
        self.start(host, *words, log=self.directory / f"{words[0]}_{host}.log", env=self.env)

    def slurmd(self, name: str) -> None:
        self.daemon(name, "slurmd", "-D", "-N", name)

    def ask(self, *words: str) -> str:
        done = self.run("ctl", *words, env=self.env)
        return (done.stdout + done.stderr).strip()

    def submit(self, *arguments: str, output: Path, options: tuple[str, ...] = (), env: dict[str, str] | None = None):
        """Job number of `sbatch launch/job.sbatch ARGUMENTS` on all nodes."""
        words = ["sbatch", "--nodes", str(len(self.names)), "--output", str(output), *options]
        done = self.run("ctl", *words, "launch/job.sbatch", *arguments, env={**self.env, **(env or {})})
        assert done.returncode == 0, done.stdout + done.stderr
        return int(re.search(r"\d+", done.stdout)[0])

    def state(self, job: int) -> str:
        """RUNNING, PENDING, COMPLETED, ..."""
        found = re.search(r"JobState=(\w+)", self.ask("scontrol", "show", "job", str(job)))
        return found[1] if found else ""

    def restarts(self, job: int) -> int:
        return int(re.search(r"Restarts=(\d+)", self.ask("scontrol", "show", "job", str(job)))[1])

    def wait(self, job: int, states: tuple[str, ...], timeout_s: float, output: Path) -> str:
        """The state, once it is one of `states`; a requeued job starts at once instead of after two minutes."""
        until = time.monotonic() + timeout_s
        while (state := self.state(job)) not in states:
            text = output.read_text() if output.exists() else ""
            assert time.monotonic() < until, f"job {job} is {state} after {timeout_s} s:\n{text[-6000:]}"
            if state == "PENDING" and self.restarts(job):
                time.sleep(2)  # a node refuses a credential of the second in which it revoked the last one
                self.ask("scontrol", "update", f"jobid={job}", "StartTime=now")
            time.sleep(0.5)
        return state
