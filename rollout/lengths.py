"""Expected response lengths, learned from the samples of earlier epochs, so that long requests are handed out first.

They set the hand-out order alone and never change what is sampled. A pure function of the samples seen so far, alike on
all ranks and saved with the data position. Left out on purpose: learning within one rollout, which would need news of
other replicas; before a row's first samples are in, nothing is known but that it may be long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

BETWEEN, WITHIN = 0.75, 0.25
"""Assumed variances of log length: of prompts around their mean, of the samples of a prompt around the prompt."""
KEPT = 0.5
"""Weight that a row's older samples keep when new ones come: the policy has moved on meanwhile."""


class LengthHistory:
    """Log lengths seen per row: weight and weighted sum, each [rows]."""

    def __init__(self, num_rows: int):
        self.weight, self.total = np.zeros(num_rows), np.zeros(num_rows)

    def observe(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Samples of a batch: the row of each one's prompt, and its response tokens."""
        index, size = np.asarray(rows, dtype=np.int64), len(self.weight)
        logs = np.log(np.maximum(np.asarray(tokens, dtype=np.float64), 1.0))
        fresh = np.bincount(index, minlength=size).astype(np.float64)
        kept = np.where(fresh > 0, KEPT, 1.0)
        self.weight = kept * self.weight + fresh
        self.total = kept * self.total + np.bincount(index, logs, size)

    def expected(self, rows: Sequence[int]) -> npt.NDArray[np.float64]:
        """Tokens [len(rows)]: the upper end (one deviation) of the log length's posterior, so that what is known
        little comes early. All 0 before the first sample. Prior: the mean of all rows; variances as above.
        """
        if not self.weight.any():
            return np.zeros(len(rows))
        weight, total = self.weight[list(rows)], self.total[list(rows)]
        prior = self.total.sum() / self.weight.sum()
        precision = 1.0 / BETWEEN + weight / WITHIN
        return np.exp((prior / BETWEEN + total / WITHIN) / precision + precision**-0.5)

    def state(self) -> dict[str, Any]:
        return {"weight": self.weight, "total": self.total}

    def load(self, state: dict[str, Any]) -> None:
        """Of a run on other rows nothing is taken over."""
        if len(state["weight"]) == len(self.weight):
            self.weight, self.total = (np.array(state[name], dtype=np.float64) for name in ("weight", "total"))
