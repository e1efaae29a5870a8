"""Process groups of the job, named, and the check that Megatron's groups are the ones the rank grid says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel.device import Device
from parallel.grid import RolloutGrid, TrainGrid


@dataclass(frozen=True)
class Groups:
    train: TrainGrid
    rollout: RolloutGrid
    world: dist.ProcessGroup
    """All ranks, on the device's backend."""
    host: dist.ProcessGroup
    """All ranks over gloo, for small host data."""
    rank: int

    def describe(self) -> str:
        return describe(self.rank, self.train, self.rollout)


def make_groups(train: TrainGrid, rollout: RolloutGrid, device: Device, timeout_s: float = 1800.0) -> Groups:
    """Join the launch (torchrun's environment) unless this process already did, and make the groups.

    ValueError when the launch has another number of ranks than the grids.
    """
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        device_id = device.torch if device.kind == "cuda" else None  # hccl connects when it is first used: see meet
        dist.init_process_group(device.backend, timeout=timeout, device_id=device_id)
    world = dist.get_world_size()
    if not world == train.world == rollout.world:
        raise ValueError(f"launched {world} ranks; training is laid out on {train.world}, rollout on {rollout.world}")
    host = dist.group.WORLD if device.kind == "cpu" else dist.new_group(backend="gloo", timeout=timeout)
    return Groups(train, rollout, dist.group.WORLD, host, dist.get_rank())


def meet(groups: Iterable[dist.ProcessGroup], device: Device) -> None:
    """One sum in every group of more than one rank, in the same order on all ranks.

    hccl connects a group at its first collective, which can hang when ranks come to several groups in different orders
    (AReaL issue 1254); here they meet before anything depends on them.
    """
    one = torch.ones(1, device=device.torch)
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(one, group=group)
            device.synchronize()


def describe(rank: int, train: TrainGrid, rollout: RolloutGrid) -> str:
    """For example "rank 037 | train pp2 dp1 tp1 | rollout replica 0 dp0 tp5"; axes of size 1 are left out."""
    coord = train.coord(rank)
    axes = [axis for axis in ("pp", "dp", "cp", "tp", "ep", "etp", "edp") if getattr(train, axis) > 1]
    if train.ep == 1 and train.etp in (1, train.tp):
        axes = [axis for axis in axes if axis not in ("ep", "etp", "edp")]  # experts are laid out like the rest
    place = " ".join(f"{axis}{getattr(coord, axis)}" for axis in axes) or "alone"
    replica, dp, tp = rollout.coord(rank)
    return f"rank {rank:03d} | train {place} | rollout replica {replica} dp{dp} tp{tp}"


def check_members(rank: int, grid: TrainGrid, members: Mapping[str, Sequence[int]]) -> None:
    """RuntimeError unless each named group (axes of grid.groups) holds the ranks that the grid puts with `rank`."""
    for axes, ranks in members.items():
        expected = next(group for group in grid.groups(axes) if rank in group)
        if sorted(ranks) != expected:
            raise RuntimeError(
                f"rank {rank}: Megatron's {axes} group is {sorted(ranks)}, the rank grid says {expected} "
                f"(order {grid.order}, tp {grid.tp} cp {grid.cp} ep {grid.ep} etp {grid.etp} pp {grid.pp})"
            )
