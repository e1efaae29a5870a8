"""What one rank met, every rank raises: nobody waits in a collective for a rank that left with an error.

`group` is a process group with a host (gloo) backend, or None: the default group, or a single process when
torch.distributed is not initialised. Objects travel by torch's own object collectives, between ranks of one job only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def gather(value: T, group: Any = None) -> list[T]:
    """The values of all ranks, in rank order."""
    size = world_size(group)
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def each(function: Callable[[], T], group: Any = None) -> T:
    """This rank's result. A ValueError or OSError of any rank is raised by all, with the rank in it."""
    result, error = None, None
    try:
        result = function()
    except (ValueError, OSError) as caught:
        error = caught
    failures = gather(None if error is None else (isinstance(error, ValueError), str(error)), group)
    for rank, failure in enumerate(failures):
        if failure:
            is_value, text = failure
            kind = ValueError if is_value else OSError
            raise kind(text if len(failures) == 1 else f"rank {rank}: {text}") from error
    return result  # type: ignore[return-value]


def on_first(function: Callable[[], T], rank: int, group: Any = None) -> T:
    """Result of `function` on rank 0, on every rank; its ValueError or OSError is everybody's."""
    return gather(each(lambda: function() if rank == 0 else None, group), group)[0]  # type: ignore[return-value]
