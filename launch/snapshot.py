"""What ran: every attempt keeps its program text and its command line beside its config.toml and its logs.

    logs/attempt_K/  code.tar.gz (sources, recipes and scripts of the checkout)  launch.json (command, environment)

A run that is looked at months later, or resumed from a changed checkout, still says which text made which steps.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("launch", "parallel", "reward", "rollout")
SUFFIXES = (".py", ".toml", ".sh", ".sbatch", ".txt", ".json")
VARIABLES = (
    *("SLURM_JOB", "SLURM_NNODES", "SLURM_RESTART", "MASTER_", "NODE_", "RANK_CPUS", "OMP_NUM", "CUDA_", "NCCL_"),
    *("TORCH_", "PYTORCH_", "GLOO_", "HCCL_", "TASK_QUEUE", "ASCEND_", "VLLM_", "TP_SOCKET", "WORLD_SIZE"),
)
"""Beginnings of the names of variables that change a run; no others are written: they may hold secrets."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")


def sources() -> list[Path]:
    """Files of the checkout that make the program, in order."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return sorted([*found, *ROOT.glob("*.py"), *ROOT.glob("*.toml")])


def keep(directory: Path) -> None:
    """Write both files. OSError when the disk does not take them."""
    with tarfile.open(directory / "code.tar.gz", "w:gz", compresslevel=1) as archive:
        for path in sources():
            archive.add(path, path.relative_to(ROOT).as_posix())
    names = [name for name in sorted(os.environ) if name.startswith(VARIABLES) and not SECRET.search(name)]
    chosen = {name: os.environ[name] for name in names}
    record = {"command": sys.orig_argv, "directory": os.getcwd(), "host": socket.gethostname(), "environment": chosen}
    (directory / "launch.json").write_text(json.dumps(record, indent=1) + "\n")
