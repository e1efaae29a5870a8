"""What node.sh and job.sbatch ask: do all nodes reach each other, which CPUs are a rank's, is the run finished?

    python -m launch.nodes meet                          all nodes meet before torchrun starts; prints variables
    python -m launch.nodes cpus RANKS cuda|npu|cpu       CPUs of each local rank by NUMA node: "0-15;16-31", or nothing
    python -m launch.nodes run-dir RECIPE [...]          the run directory of a command line
    python -m launch.nodes steps RUN_DIR                 steps done so far
    python -m launch.nodes verdict RUN_DIR STEPS [yes]   finished, requeue or stop, and why; yes: Slurm gave a signal

The meeting: every node signs in with node 0 at MASTER_ADDR:MASTER_PORT and says at which address others reach it; then
each tries all others. Failures that torchrun and gloo would report after minutes, on some node, as "connection closed"
are one message here, with host and cause. Exit code 1 when the nodes cannot meet. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch.runtime import read_status

INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
REACH_S = 5.0
"""Seconds for one connection between two nodes that both live."""


class Unreachable(RuntimeError):
    """The nodes cannot meet: one message with host and cause."""


def addresses() -> dict[str, str]:
    """IPv4 address -> interface of this host."""
    try:
        shown = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise Unreachable("the command ip is missing here; install the package iproute2") from None
    return {words[3].partition("/")[0]: words[1] for words in map(str.split, shown.splitlines()) if len(words) > 3}


def resolve(master: str, num_nodes: int) -> str:
    """Address of the head node; Unreachable when the name has none, or one that means every host itself."""
    try:
        address = socket.gethostbyname(master)
    except OSError as error:
        raise Unreachable(f"MASTER_ADDR {master} does not resolve ({error.strerror}); see /etc/hosts") from None
    if address.startswith("127.") and num_nodes > 1:
        remedy = "give the head node's address in the network of the nodes, or correct /etc/hosts"
        raise Unreachable(f"MASTER_ADDR {master} resolves to {address}, which is every host itself; {remedy}")
    return address


def own_address(head: str, here: dict[str, str], environment: dict[str, str]) -> tuple[str, str]:
    """(address, interface) at which the other nodes reach this one: the interface that the user named, or the one on
    the way to the head node.
    """
    for name in ("NODE_INTERFACE", *INTERFACE_VARIABLES):
        wanted = environment.get(name, "")
        if not wanted or wanted.startswith("^"):
            continue
        found = [address for address, interface in here.items() if means(name, wanted, interface)]
        if not found:
            raise Unreachable(f"{name} = {wanted}, but the interfaces with an address here are {describe(here)}")
        return found[0], here[found[0]]
    if head in here:
        return head, here[head]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((head, 9))  # sends nothing: asks the routing table
        except OSError as error:
            raise Unreachable(f"no way to MASTER_ADDR {head} from {describe(here)}: {error.strerror}") from None
        address = probe.getsockname()[0]
    return address, here.get(address, "")


def means(name: str, wanted: str, interface: str) -> bool:
    """Whether a variable names the interface: NCCL's and HCCL's values are prefixes, unless they begin with `=`."""
    words = wanted.lstrip("=").split(",")
    if name.startswith(("NCCL", "HCCL")) and not wanted.startswith("="):
        return any(interface.startswith(word) for word in words if word)
    return interface in words


def describe(here: dict[str, str]) -> str:
    return ", ".join(f"{interface} {address}" for address, interface in here.items())


def send(connection: socket.socket, message: Any) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket, until: float) -> Any:
    """One message; OSError when it does not come in time or the other side is gone."""
    connection.settimeout(max(0.01, until - time.monotonic()))
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            raise OSError("connection closed")
        data += part
    return json.loads(data)


def reach(others: Sequence[dict[str, Any]], timeout_s: float = REACH_S) -> list[str]:
    """Which of the nodes do not answer, each with its address and why."""
    failed = []
    for node in others:
        try:
            socket.create_connection((node["address"], node["port"]), timeout_s).close()
        except OSError as error:
            where = f"{node['host']} at {node['address']}" + (f" ({node['interface']})" if node["interface"] else "")
            failed.append(f"{where}: {error.strerror or error}")
    return failed


def host_meeting(me: dict[str, Any], port: int, names: Sequence[str], num_nodes: int, until: float) -> None:
    """Node 0: wait for all, hand out the list, collect who does not reach whom, tell everyone the verdict."""
    try:
        server = socket.create_server(("", port), backlog=num_nodes)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise Unreachable(f"MASTER_PORT {port} cannot be used on this host: {why}; choose another") from None
    nodes, guests, began = {0: me}, {}, time.monotonic()
    problems = []
    while len(nodes) < num_nodes and (left := until - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            connection, _ = server.accept()
            guest = receive(connection, min(until, time.monotonic() + REACH_S))
            number, host = int(guest["node"]), str(guest["host"])
            if guest.get("nodes", num_nodes) != num_nodes:
                problems.append(f"{host} was started with NNODES = {guest['nodes']}, {me['host']} with {num_nodes}")
            if nodes.get(number, guest)["host"] != host:
                problems.append(f"{host} and {nodes[number]['host']} both were started with NODE_RANK = {number}")
            nodes[number], guests[number] = guest, connection
            if problems:
                break
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not one of us, or it will try again
    missing = [number for number in range(num_nodes) if number not in nodes]
    problems += [f"{node['host']}: {node['problem']}" for node in nodes.values() if node.get("problem")]
    if missing and not problems:
        who = ", ".join(f"{number} ({names[number]})" if number < len(names) else str(number) for number in missing)
        came = ", ".join(f"{number} ({node['host']})" for number, node in sorted(nodes.items()))
        waited = f"{time.monotonic() - began:.0f} s"
        problems.append(f"node {who} of {num_nodes} did not come within {waited}; here are node {came}")
    elif not problems:
        for connection in guests.values():
            send(connection, list(nodes.values()))
        problems = [f"{me['host']} cannot reach {text}" for text in reach([nodes[n] for n in sorted(guests)])]
        for number, connection in sorted(guests.items()):
            host = nodes[number]["host"]
            try:
                found = receive(connection, time.monotonic() + num_nodes * REACH_S + 5)
                problems += [f"{host} cannot reach {text}" for text in found]
            except OSError as error:
                problems.append(f"{host} left the meeting: {error}")
    for connection in guests.values():
        try:
            send(connection, problems)
            connection.close()
        except OSError:
            pass
    server.close()
    if problems:
        raise Unreachable("; ".join(problems))


def join_meeting(me: dict[str, Any], head: str, port: int, num_nodes: int, until: float) -> None:
    """A node but 0: sign in, try the others, hear the verdict, which node 0 prints."""
    why = "no answer"
    while (left := until - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((head, port), min(left, REACH_S))
            break
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(0.2)
    else:
        remedy = "is node 0 started there, and is the port open?"
        raise Unreachable(f"no meeting with node 0 at MASTER_ADDR {head}:{port}: {why}; {remedy}")
    with connection:
        send(connection, me)
        try:
            nodes = receive(connection, until + REACH_S)
            if nodes and isinstance(nodes[0], dict):
                send(connection, reach([node for node in nodes if node["node"] != me["node"]]))
                nodes = receive(connection, time.monotonic() + num_nodes * REACH_S * 2 + 5)
        except (OSError, ValueError) as error:
            raise Unreachable(f"node 0 at {head}:{port} left the meeting, or is something else: {error}") from None
        if nodes:
            sys.exit(1)  # node 0 says why


def meet(environment: dict[str, str]) -> dict[str, str]:
    """Variables for the node's ranks; Unreachable when the nodes do not all reach each other."""
    for name in ("NNODES", "NODE_RANK", "MASTER_PORT", "MEET_S"):
        if not environment.get(name, "60").isdigit():
            raise Unreachable(f"{name} = {environment[name]!r}; a whole number is wanted")
    num_nodes, number = int(environment["NNODES"]), int(environment["NODE_RANK"])
    if num_nodes == 1:
        return {}
    if number >= num_nodes:
        raise Unreachable(f"NODE_RANK = {number}, but there are NNODES = {num_nodes}, counted from 0")
    master, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    until = time.monotonic() + float(environment.get("MEET_S", "60"))
    head, here = resolve(master, num_nodes), addresses()
    if number == 0 and here and head not in here:
        raise Unreachable(f"this is node 0, but MASTER_ADDR {head} is none of its addresses: {describe(here)}")
    try:
        address, interface = own_address(head, here, environment)
    except Unreachable as error:
        if number:  # node 0 has the word
            me = {"node": number, "nodes": num_nodes, "host": socket.gethostname(), "problem": str(error)}
            join_meeting(me, head, port, num_nodes, until)
        raise
    with socket.create_server((address, 0), backlog=num_nodes) as listener:  # the kernel answers for it
        me = {"node": number, "nodes": num_nodes, "host": socket.gethostname()}
        me |= {"address": address, "interface": interface}
        me["port"] = listener.getsockname()[1]
        if number == 0:
            host_meeting(me, port, environment.get("NODE_NAMES", "").split(","), num_nodes, until)
        else:
            join_meeting(me, head, port, num_nodes, until)
    named = dict.fromkeys(INTERFACE_VARIABLES, interface) if interface else {}
    return {"NODE_ADDRESS": address} | named


def cpus_by_rank(ranks: int, platform: str, system: Path = Path("/sys"), allowed: set[int] | None = None) -> str:
    """CPUs of each local rank, "0-15;16-31": those of its device's NUMA node, or an even share of the nodes. Empty when
    there is one NUMA node. `allowed`: CPUs of this process.
    """
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    nodes = {}
    for directory in sorted((system / "devices/system/node").glob("node[0-9]*"), key=lambda d: int(d.name[4:])):
        if cpus := parse_cpus((directory / "cpulist").read_text()) & allowed:
            nodes[int(directory.name[4:])] = cpus
    if len(nodes) < 2:
        return ""
    places = device_nodes(platform, system)
    numbers = list(nodes)
    chosen = [
        places[rank] if rank < len(places) and places[rank] in nodes else numbers[rank * len(numbers) // ranks]
        for rank in range(ranks)
    ]
    return ";".join(",".join(map(str, sorted(nodes[node]))) for node in chosen)


PCI = {"cuda": ("0x10de", ("0x0300", "0x0302")), "npu": ("0x19e5", ("0x1200",))}
"""Vendor and classes of accelerators on the PCI bus."""


def device_nodes(platform: str, system: Path) -> list[int]:
    """NUMA node of each device in the order of the bus; -1 where the machine does not say."""
    vendor, classes = PCI.get(platform, ("", ()))
    read: Callable[[Path], str] = lambda file: file.read_text().strip() if file.exists() else ""  # noqa: E731
    found = sorted((system / "bus/pci/devices").glob("*")) if vendor else []
    mine = [d for d in found if read(d / "vendor") == vendor and read(d / "class").startswith(classes)]
    return [int(read(device / "numa_node") or -1) for device in mine]


def parse_cpus(text: str) -> set[int]:
    """
    >>> sorted(parse_cpus("0-2,8"))
    [0, 1, 2, 8]
    """
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}


def bind_cpus(local_rank: int, text: str) -> None:
    """This process and what it starts stay on the CPUs that RANK_CPUS gives to its local rank."""
    shares = text.split(";")
    if text and text != "none" and local_rank < len(shares):
        os.sched_setaffinity(0, parse_cpus(shares[local_rank]))


def verdict(run_dir: str, before: int, announced: bool) -> str:
    """What becomes of a job whose launch has ended. `before`: steps done when it began; `announced`: Slurm's signal."""
    status = read_status(run_dir)
    state, why, step = status.get("state", "nothing"), status.get("why", ""), status.get("step", 0)
    told = f"{run_dir} says {state}" + (f" after step {step}" if step else "") + (f": {why}" if why else "")
    if state == "finished":
        return f"finished: {told}"
    in_time = why.startswith("time limit") or (announced and why.startswith("found"))
    if state == "stopped" and in_time and step > before:
        return f"requeue: {told}"
    reason = "; it made no step, so it is not queued again" if state == "stopped" and in_time else ""
    return f"stop: {told}{reason}"


def main(argv: list[str]) -> None:
    command, *rest = argv or [""]
    if command == "meet":
        print("\n".join(f"{name}={value}" for name, value in meet(dict(os.environ)).items()))
    elif command == "cpus" and len(rest) == 2:
        print(cpus_by_rank(int(rest[0]), rest[1]))
    elif command == "run-dir":
        from launch.debug import flags
        from launch.options import ConfigError

        try:
            from launch.config import load

            print(load(flags(rest)).run_dir)
        except ConfigError as error:
            sys.exit(f"error: {error}")
    elif command == "steps" and len(rest) == 1:
        print(read_status(rest[0]).get("step", 0))
    elif command == "verdict" and len(rest) >= 2:
        print(verdict(rest[0], int(rest[1]), "yes" in rest[2:]))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Unreachable as error:
        sys.exit(f"error: {socket.gethostname()}: {error}")
