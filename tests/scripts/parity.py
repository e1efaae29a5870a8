"""A reward for tests of dynamic sampling: prompts of odd numbers teach nothing, the others by the response's parity."""

from __future__ import annotations

from typing import Any


def score(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return 0.0 if int(ground_truth) % 2 else float(sum(map(ord, solution)) % 2)
