"""Which test files belong to which area of `launch/test.sh --full AREA`. `python -m tests.areas AREA` lists them.

Files of no area have no tests marked `full`; tests/test_style.py checks that.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent

AREAS: dict[str, list[str]] = {
    "loop": [
        "trainer*",
        "loop*",
        "quickstart*",
        "engine*",
        "prompts*",
        "prepare*",
        "config*",
        "evaluate*",
        "hf*",
        "smollm2*",
    ],
    "reshard": ["reshard*", "layout*", "megatron_layout*", "vllm_layout*", "vllm_p*", "grid*"],
    "training": ["megatron_[!l]*", "training*", "attention*", "packing*", "device*", "log_prob*", "norm_k*", "groups*"],
    "algorithms": [
        "advantage*",
        "loss*",
        "reward*",
        "pool*",
        "schedule*",
        "collect*",
        "batch*",
        "selfcheck*",
        "algorithms*",
    ],
    "state": [
        "checkpoint*",
        "torch_dist*",
        "faults*",
        "runtime*",
        "resume*",
        "state*",
        "convert*",
        "offload*",
        "phases*",
        "train_state*",
    ],
    "launch": [
        "plan*",
        "recipes*",
        "doctor*",
        "memory*",
        "metrics*",
        "report*",
        "migrate*",
        "bench*",
        "slurm*",
        "nodes*",
        "debug*",
        "ranks*",
    ],
    "npu": ["npu*"],
    "moe": ["moe*", "replay*", "routes*", "expert*"],
}


def files(area: str) -> list[str]:
    """Test files of an area, or of all areas; ValueError names the areas when there is no such one."""
    if area != "all" and area not in AREAS:
        raise ValueError(f"no test area {area!r}; one of {', '.join(AREAS)}, all")
    chosen = AREAS if area == "all" else {area: AREAS[area]}
    return sorted({str(path) for names in chosen.values() for name in names for path in TESTS.glob(f"test_{name}.py")})


if __name__ == "__main__":
    try:
        found = files(sys.argv[1])
    except ValueError as error:
        sys.exit(str(error))
    print("\n".join(found) or sys.exit(f"area {sys.argv[1]} has no test files yet"))
