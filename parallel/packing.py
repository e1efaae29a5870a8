"""Whole sequences -> micro-batches under a hard token budget. Pure.

Every data-parallel rank gets the same number of micro-batches (collectives run in lock-step); some may be empty. Work
is balanced by length + length^2 / LINEAR_TOKENS (matrix products plus attention), in Python integers, which do not
overflow. Sequences are never cut: context parallelism does that later, for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LINEAR_TOKENS = 24576
"""Length at which attention costs as much as the matrix products (a 7B model; verl uses the same figure)."""


@dataclass(frozen=True)
class PackPlan:
    micro_batches: list[list[list[int]]]
    """[data-parallel rank][micro-batch] -> sequence indices, ascending; possibly empty."""

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches[0])


def pack(
    lengths: Sequence[int], num_ranks: int, budget: int, multiple: int = 1, min_micro_batches: int = 1
) -> PackPlan:
    """Fewest micro-batches per rank in which all sequences fit, then balanced work.

    `budget`: tokens of one micro-batch at most, over all context-parallel ranks. `multiple`: the number of
    micro-batches per rank is a multiple of it (pipeline stages of interleaved schedules).
    ValueError when one sequence alone exceeds the budget.
    """
    sizes = [int(n) for n in lengths]
    longest = max(sizes, default=0)
    if longest > budget:
        raise ValueError(
            f"sequence {sizes.index(longest)} has {longest} tokens, more than the {budget} of one micro-batch; raise "
            f"train.micro_batch_tokens or train.cp (their product is the budget), or lower data.max_response_tokens"
        )
    count = max(min_micro_batches, -(-sum(sizes) // (budget * num_ranks)), 1)
    count = -(-count // multiple) * multiple
    while (bins := _fill(sizes, count * num_ranks, budget)) is None:
        count += multiple
    return PackPlan(_deal(bins, sizes, num_ranks))


@dataclass(frozen=True)
class Update:
    """One optimizer step's sequences and their packing, used by every pass over them."""

    indices: np.ndarray
    """int64 [sequences of the mini-batch], ascending."""
    dealt: list[list[list[int]]]
    """[data-parallel rank][micro-batch] -> sequence numbers of the whole batch."""


def plan_updates(
    prompt_ids: np.ndarray, lengths: np.ndarray, mini_batches: int, num_ranks: int, budget: int, multiple: int = 1
) -> list[Update]:
    """Mini-batches of whole groups, in order of prompt id, as even as can be; each packed on its own.

    Fewer groups than mini-batches (a smaller last batch) make fewer mini-batches: an empty one would be an optimizer
    step without a gradient, which still moves the weights.
    """
    updates, groups = [], np.unique(prompt_ids)
    for part in np.array_split(groups, max(1, min(mini_batches, len(groups)))):
        indices = np.flatnonzero(np.isin(prompt_ids, part))
        plan = pack(lengths[indices], num_ranks, budget, multiple)
        dealt = [[[int(indices[i]) for i in micro] for micro in rank] for rank in plan.micro_batches]
        updates.append(Update(indices, dealt))
    return updates


def work(length: int) -> int:
    """Relative cost of a sequence: length * LINEAR_TOKENS + length^2."""
    return length * (length + LINEAR_TOKENS)


def _fill(sizes: list[int], num_bins: int, budget: int) -> list[list[int]] | None:
    """Longest first: into the bin with the least work that has room; when that fails, into the first with room."""
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    for balanced in (True, False):
        used, load = np.zeros(num_bins, np.int64), np.zeros(num_bins, np.float64)
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        for index in order:
            fits = used + sizes[index] <= budget
            if not fits.any():
                break
            chosen = int(np.argmin(np.where(fits, load, np.inf)) if balanced else np.argmax(fits))
            bins[chosen].append(index)
            used[chosen] += sizes[index]
            load[chosen] += work(sizes[index])
        else:
            return bins
    return None


def _deal(bins: list[list[int]], sizes: list[int], num_ranks: int) -> list[list[list[int]]]:
    """Micro-batches of similar work run at the same time on all ranks; the heaviest goes to the least loaded rank."""
    cost = [sum(work(sizes[i]) for i in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda b: (-cost[b], bins[b]))
    total = [0] * num_ranks
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(bins), num_ranks):
        lightest_first = sorted(range(num_ranks), key=lambda r: (total[r], r))
        for rank, chosen in zip(lightest_first, order[start : start + num_ranks], strict=True):
            ranks[rank].append(sorted(bins[chosen]))
            total[rank] += cost[chosen]
    return ranks
