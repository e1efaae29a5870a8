"""Nodes without Slurm: node.sh on two hosts that are network namespaces, and every way in which they fail to meet.

Each failure ends within 90 s with one message that names host and cause. tests/hosts.py makes the hosts.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch import nodes
from tests.hosts import ROOT, Network, missing, tier, wait_for
from tests.jobs import Job, prepare

WHY_NOT = missing()
needs_hosts = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
LIMIT_S = 90.0


@pytest.fixture(scope="session")
def options(tmp_path_factory) -> list[str]:
    data = prepare("copy", tmp_path_factory.mktemp("data") / "copy")
    files = [f"model.path={data}/model", f'data.train_files=["{data}/train.parquet"]', "data.val_files=[]"]
    small = ["data.prompts_per_step=4", "rollout.samples_per_prompt=4", "eval.every_steps=0", "log.tensorboard=false"]
    return ["launch/recipes/quickstart.toml", *files, *small]


@pytest.fixture
def network(tmp_path):
    with Network(tmp_path / "net", ["n1", "n2"]) as network:
        yield network


@dataclass
class Launch:
    codes: list[int]
    said: list[str]
    """Output of each node."""
    seconds: float

    @property
    def errors(self) -> list[str]:
        return [line for text in self.said for line in text.splitlines() if line.startswith("error: ")]


def launch(
    network: Network, directory: Path, *words: str, hosts: dict[str, dict[str, str]], until_s: float = LIMIT_S
) -> Launch:
    """`node.sh WORDS` on each of `hosts`, with its own variables, to the end."""
    began, started = time.monotonic(), {}
    for number, (host, variables) in enumerate(hosts.items()):
        given = {"NNODES": "2", "NODE_RANK": str(number), "MASTER_ADDR": "n1", "PLATFORM": "cpu", "MEET_S": "30"}
        log = directory / f"said_{host}"
        started[host] = network.start(
            host, "bash", "launch/node.sh", *words, log=log, env={**given, "PYTHON": sys.executable, **variables}
        )
    codes = [process.wait(max(1.0, began + until_s - time.monotonic())) for process in started.values()]
    said = [(directory / f"said_{host}").read_text() for host in hosts]
    return Launch(codes, said, time.monotonic() - began)


SHOW = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
found = [None] * dist.get_world_size()
dist.all_gather_object(found, (os.uname().nodename, os.environ["GLOO_SOCKET_IFNAME"]))
print(dist.get_rank(), found, flush=True)
os._exit(0)
"""


@pytest.fixture
def program(tmp_path) -> str:
    (tmp_path / "show.py").write_text(SHOW)
    return str(tmp_path / "show.py")


def expect(launched: Launch, *patterns: str) -> None:
    """One message, with host and cause, on one of the nodes; nothing of torch beside it."""
    print(f"{launched.seconds:.1f} s: {launched.errors}")
    assert all(launched.codes) and len(launched.errors) == 1, launched.said
    assert all(re.search(pattern, launched.errors[0]) for pattern in patterns), launched.errors
    assert "Traceback" not in "".join(launched.said), launched.said


@needs_hosts
@tier(WHY_NOT)
def test_an_interface_that_a_host_does_not_have_is_named_at_once(network, tmp_path, program):
    hosts = {"n1": {}, "n2": {"GLOO_SOCKET_IFNAME": "ib7"}}
    launched = launch(network, tmp_path, program, hosts=hosts)
    expect(launched, r"n2: GLOO_SOCKET_IFNAME = ib7", r"lo 127\.0\.0\.1, eth0 10\.9\.0\.2")
    assert launched.seconds < 20


@needs_hosts
@pytest.mark.full
def test_two_hosts_meet_and_use_the_interface_between_them(network, tmp_path, program):
    """Also when a host's own name means 127.0.0.1 on it, where gloo alone would listen on lo."""
    for host in ("n1", "n2"):
        network.run(host, "sh", "-c", f"sed -i '1i 127.0.0.1 {host}-alias' /etc/hosts; hostname {host}-alias")
    launched = launch(network, tmp_path, program, hosts={"n1": {}, "n2": {}})
    assert launched.codes == [0, 0] and not launched.errors, launched.said
    expected = "[('n1-alias', 'eth0'), ('n2-alias', 'eth0')]"
    assert f"0 {expected}" in launched.said[0] and f"1 {expected}" in launched.said[1]
    assert "node 1 of 2 on n2-alias: cpu, 1 ranks; head n1:29500;" in launched.said[1]


@needs_hosts
@pytest.mark.full
def test_an_interface_that_the_others_do_not_reach_is_named(network, tmp_path, program):
    network.run("n2", "sh", "-c", "ip link add x0 type veth peer name x1; ip addr add 192.168.7.2/24 dev x0")
    network.run("n2", "sh", "-c", "ip link set x0 up; ip link set x1 up")
    launched = launch(network, tmp_path, program, hosts={"n1": {}, "n2": {"GLOO_SOCKET_IFNAME": "x0"}})
    expect(launched, r"n1 cannot reach n2 at 192\.168\.7\.2 \(x0\): ")


@needs_hosts
@pytest.mark.full
def test_a_master_that_is_no_host_is_named(network, tmp_path, program):
    launched = launch(network, tmp_path, program, hosts={"n2": {"NODE_RANK": "1", "MASTER_ADDR": "10.9.0.77"}})
    expect(launched, r"n2: no meeting with node 0 at MASTER_ADDR 10\.9\.0\.77:29500: ")
    launched = launch(network, tmp_path, program, hosts={"n1": {"MASTER_ADDR": "10.9.0.77"}})
    errors = launched.errors
    assert errors == [
        "error: n1: this is node 0, but MASTER_ADDR 10.9.0.77 is none of its addresses: lo 127.0.0.1, eth0 10.9.0.1"
    ]


@needs_hosts
@pytest.mark.full
@pytest.mark.parametrize("host", ["n1", "n2"])
def test_a_master_s_name_that_means_every_host_itself_is_named(network, tmp_path, program, host):
    network.run(host, "sed", "-i", "1i 127.0.0.1 head", "/etc/hosts")
    network.run("n1" if host == "n2" else "n2", "sed", "-i", "1i 10.9.0.1 head", "/etc/hosts")
    number = "0" if host == "n1" else "1"
    launched = launch(network, tmp_path, program, hosts={host: {"NODE_RANK": number, "MASTER_ADDR": "head"}})
    expect(launched, rf"{host}: MASTER_ADDR head resolves to 127\.0\.0\.1, which is every host itself")


@needs_hosts
@pytest.mark.full
def test_a_name_without_address_is_named(network, tmp_path, program):
    launched = launch(network, tmp_path, program, hosts={"n1": {"MASTER_ADDR": "nowhere"}})
    expect(launched, r"n1: MASTER_ADDR nowhere does not resolve")


@needs_hosts
@pytest.mark.full
def test_a_node_that_never_comes_is_named(network, tmp_path, program):
    launched = launch(network, tmp_path, program, hosts={"n1": {"NODE_NAMES": "n1,n2"}})
    expect(launched, r"n1: node 1 \(n2\) of 2 did not come within 30 s; here are node 0 \(n1\)")


@needs_hosts
@pytest.mark.full
def test_a_link_cut_in_the_middle_of_a_step_is_named(network, tmp_path, options):
    run_dir = tmp_path / "run"
    words = [*options, "total_steps=100000", "runtime.deadline_s=20", f"run_dir={run_dir}"]
    started = {}
    for number, host in enumerate(("n1", "n2")):
        given = {"NNODES": "2", "NODE_RANK": str(number), "MASTER_ADDR": "n1", "PLATFORM": "cpu"}
        command = ("bash", "launch/node.sh", "trainer.py", *words)
        started[host] = network.start(host, *command, log=tmp_path / host, env={**given, "PYTHON": sys.executable})
    metrics = run_dir / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, 90, "three steps")
    began = time.monotonic()
    network.cut("n2")
    try:
        codes = [process.wait(max(1.0, began + LIMIT_S - time.monotonic())) for process in started.values()]
    finally:
        said = "".join((tmp_path / host).read_text() for host in started)
    print(f"ended {time.monotonic() - began:.1f} s after the cut")
    found = [line for line in said.splitlines() if "CRITICAL hang: " in line]
    assert all(codes) and len(found) == 1, said[-5000:]
    print(found[0])
    assert re.search(r"host n1 cannot reach host n2 \(10\.9\.0\.2\): ", found[0])
    assert Job(1, said, run_dir).status["state"] == "failed"


def numa_tree(root: Path, cpus: list[str], devices: list[tuple[str, str, int]]) -> Path:
    """/sys with NUMA nodes, and PCI devices (vendor, class, node)."""
    for number, text in enumerate(cpus):
        directory = root / f"devices/system/node/node{number}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(text + "\n")
    for number, (vendor, kind, node) in enumerate(devices):
        directory = root / f"bus/pci/devices/0000:{number:02x}:00.0"
        directory.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
            (directory / name).write_text(text + "\n")
    return root


def test_ranks_get_the_cpus_beside_their_device(tmp_path):
    gpu, bridge = ("0x10de", "0x030200"), ("0x10de", "0x068000")
    tree = numa_tree(tmp_path, ["0-1,4", "2-3"], [(*gpu, 1), (*bridge, 0), (*gpu, 0), (*gpu, 1)])
    everything = set(range(8))
    assert nodes.cpus_by_rank(3, "cuda", tree, everything) == "2,3;0,1,4;2,3"
    assert nodes.cpus_by_rank(3, "cuda", tree, {0, 2}) == "2;0;2", "only CPUs that the job may use"
    assert nodes.cpus_by_rank(4, "npu", tree, everything) == "0,1,4;0,1,4;2,3;2,3", "no such device: even shares"
    assert nodes.cpus_by_rank(3, "cuda", tree, {0, 1}) == "", "one NUMA node: nothing to bind"


def test_a_rank_stays_on_its_cpus():
    script = "import os; from launch.nodes import bind_cpus; bind_cpus(1, '0;1'); print(os.sched_getaffinity(0))"
    if os.cpu_count() == 1 or not {0, 1} <= os.sched_getaffinity(0):
        script = script.replace("'0;1'", f"'none;{min(os.sched_getaffinity(0))}'")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() in ("{1}", f"{{{min(os.sched_getaffinity(0))}}}"), done.stderr


def test_variables_of_the_user_choose_the_interface():
    here = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "10.1.0.1": "ib0"}
    assert nodes.own_address("10.0.0.1", here, {}) == ("10.0.0.1", "eth0")
    assert nodes.own_address("10.0.0.1", here, {"NCCL_SOCKET_IFNAME": "=ib0,ib1"}) == ("10.1.0.1", "ib0")
    with pytest.raises(nodes.Unreachable, match="eth1"):
        nodes.own_address("10.0.0.1", here, {"HCCL_SOCKET_IFNAME": "eth1"})


def test_the_libraries_prefixes_name_an_interface_too():
    here = {"10.0.0.1": "eth0", "10.1.0.1": "ib0"}
    for value, address in (("ib", "10.1.0.1"), ("enp,eth", "10.0.0.1")):
        assert nodes.own_address("10.0.0.1", here, {"HCCL_SOCKET_IFNAME": value})[0] == address
        with pytest.raises(nodes.Unreachable):  # gloo wants the whole name, and = makes a name exact
            nodes.own_address("10.0.0.1", here, {"GLOO_SOCKET_IFNAME": value})
        with pytest.raises(nodes.Unreachable):
            nodes.own_address("10.0.0.1", here, {"NCCL_SOCKET_IFNAME": f"={value}"})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"NNODES": "x"}, "NNODES = 'x'"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT = 'abc'"),
        ({"MEET_S": "ten"}, "MEET_S = 'ten'"),
        ({"NODE_RANK": "2"}, "NODE_RANK = 2, but there are NNODES = 2"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT 99999 cannot be used"),
        ({"MASTER_PORT": "taken"}, "cannot be used on this host: Address already in use"),
        ({"PATH": "/nowhere"}, "iproute2"),
    ],
)
def test_a_wrong_environment_is_one_message(wrong, said):
    with socket.create_server(("", 0)) as other:
        wrong = {name: str(other.getsockname()[1]) if value == "taken" else value for name, value in wrong.items()}
        variables = {"NNODES": "2", "NODE_RANK": "0", "MASTER_PORT": "0", "MASTER_ADDR": own_ip()} | wrong
        command = [sys.executable, "-m", "launch.nodes", "meet"]
        env = {**os.environ, **variables}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def own_ip() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 9))
        except OSError:
            pytest.skip("this machine has no network interface")
        return probe.getsockname()[0]


@pytest.mark.parametrize(
    ("guest", "said"),
    [
        ({"nodes": 3, "node": 1, "host": "b"}, "b was started with NNODES = 3, a with 2"),
        ({"nodes": 2, "node": 0, "host": "b"}, "b and a both were started with NODE_RANK = 0"),
    ],
)
def test_nodes_that_were_started_differently_are_told(guest, said):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def visit():
        wait_for(
            lambda: not nodes.reach([{"host": "a", "address": "127.0.0.1", "port": port, "interface": ""}]), 10, "a"
        )
        with socket.create_connection(("127.0.0.1", port)) as connection:
            nodes.send(connection, guest)
            nodes.receive(connection, time.monotonic() + 10)

    visitor = threading.Thread(target=visit)
    visitor.start()
    with pytest.raises(nodes.Unreachable, match=said):
        nodes.host_meeting({"node": 0, "host": "a"}, port, ["a", "b"], 2, time.monotonic() + 20)
    visitor.join()
