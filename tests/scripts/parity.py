"""Rewards for tests. `score`: prompts of odd numbers teach nothing, the others by the response's parity."""

from __future__ import annotations

import re
from typing import Any


def score(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return 0.0 if int(ground_truth) % 2 else float(sum(map(ord, solution)) % 2)


def hostile(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1, or an endless match inside C code for some responses."""
    if sum(map(ord, solution)) % 8 == 0:
        re.match(r"(a+)+$", "a" * 60 + "b")
    return 1.0
