"""Figures of one part of a job, with the floor beside them.

    torchrun --standalone --nproc-per-node 4 -m launch.bench reshard [RECIPE] [--repeats 5] [--json] [a.b=c ...]

reshard  the weight sync of the recipe on synthetic stores (no engine, no model): planned, golden (bucketed gather, then
         a loader), and a bare all_to_all_single of the bytes that the planned path moves. Without a recipe: a MoE of
         200 MB in 3,147 tensors, EP2 PP2 -> DP2 x TP2 EP4. On any number of ranks that both layouts divide.
offload, train, generate, step, checkpoint    in bench_rows.py
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from launch import bench_rows

if TYPE_CHECKING:
    import torch

    from parallel.device import Device
    from parallel.layout import Layout
    from parallel.reshard import Stores, View

EXAMPLE = """model.path=bench-moe train.ep=2 train.etp=1 train.pp=2
    rollout.tp=2 rollout.dp=2 rollout.expert_parallel=true"""
WARM_UPS = 2


def main(argv: list[str]) -> int:
    if argv and argv[0] in bench_rows.ROWS:
        return bench_rows.main(argv)
    parser = argparse.ArgumentParser(prog="python -m launch.bench", description=__doc__.split("\n")[0])
    parser.add_argument("row", choices=["reshard", *bench_rows.ROWS])
    parser.add_argument("recipe", nargs="*", help="recipes and section.key=value")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--node-size", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options, rest = parser.parse_known_intermixed_args(argv)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        found = reshard([*options.recipe, *rest], rank, world, options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if rank == 0:
        print(json.dumps(found) if options.json else _table(found))
    return 0


def reshard(argv: list[str], rank: int, world: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds are of the slowest rank, bytes and memory of the rank with most."""
    import torch.distributed as dist

    from launch.config import load
    from launch.plan import layouts, read_shape
    from parallel.device import pick
    from parallel.layout import elements
    from parallel.reshard import Resharder
    from parallel.reshard_check import prepare, verify
    from parallel.reshard_golden import gather_full, num_broadcasts
    from parallel.reshard_plan import plan

    has_model = any(a.endswith(".toml") or a.startswith("model.path") for a in argv)
    config = load([*([] if has_model else EXAMPLE.split()), *argv])
    source, target = layouts(config, read_shape(config.model.path), world)
    device = pick(config.runtime.device, int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1:
        dist.init_process_group(device.backend)
    group = dist.group.WORLD if world > 1 else None
    bench = _Bench(group, device, options.repeats)
    held, got = synthetic(source, rank, device), synthetic(target, rank, device)
    start = time.perf_counter()
    moves = plan(source, target, options.node_size, config.rollout.sync_staging_mib << 20)
    plan_s, memory = time.perf_counter() - start, peak_bytes(device)
    resharder = Resharder(moves, rank, group, source, target, device)
    prepare(resharder, device)
    splits = [[sum(step.send_splits[r] for step in resharder.rounds) for r in range(world)]]
    splits.append([sum(step.receive_splits[r] for step in resharder.rounds) for r in range(world)])
    loader = Loader(target, rank, got)

    def golden() -> None:
        for name, tensor in gather_full(source, held, rank, group, device):
            loader.load(name, tensor)

    peaks = []
    for way in (lambda: resharder.run(held, got), golden):
        for store in got.values():
            store.zero_()
        bench.times(way, repeats=WARM_UPS)
        verify(source, target, held, got, rank, group, device)
        peaks.append(bench.most(peak_bytes(device) - memory))
        memory = peak_bytes(device)
    exchange = bare_exchange(splits, resharder.dtype, group, device)
    bench.times(exchange, repeats=WARM_UPS)
    # In turn, so that other load on the machine meets all three.
    times = bench.times(lambda: resharder.run(held, got), exchange, golden)
    received = bench.most(sum(splits[1]) * resharder.dtype.itemsize)
    whole = resharder.dtype.itemsize * sum(elements(kind.full_box) for kind in source.kinds.values())
    gathered = bench.most(whole - sum(store.numel() * store.element_size() for store in held.values()))
    found = {
        "planned": _row(times[0], times[0], received, len(resharder.rounds), peaks[0]),
        "bare": _row(times[1], times[0], received, 1 if group else 0, 0.0),
        "golden": _row(times[2], times[0], gathered, num_broadcasts(source) if group else 0, peaks[1]),
    }
    if world > 1:
        dist.destroy_process_group()
    return {
        "world": world,
        "device": device.name,
        "source": source.name,
        "target": target.name,
        "tensors": len(loader.places),
        "plan_s": plan_s,
        **found,
    }


def synthetic(layout: Layout, rank: int, device: Device) -> Stores:
    """Stores of a rank with random bits of finite numbers."""
    import torch

    from parallel.reshard import views

    size: dict[str, int] = {}
    for piece in layout.pieces(rank):
        for view in views(piece, piece.box):
            size[view.store] = max(size.get(view.store, 0), view.end)
    torch.manual_seed(0)  # replicas hold equal weights
    noise = torch.randn(max(size.values()), dtype=torch.float32)
    return {name: noise[:n].to(device.torch, getattr(torch, layout.dtype)) for name, n in size.items()}


def bare_exchange(splits: list[list[int]], dtype: Any, group: Any, device: Device) -> Callable[[], None]:
    """One all_to_all_single of the same bytes between the same ranks: no packing, no rounds, no writes."""
    import torch
    import torch.distributed as dist

    send, receive = (torch.zeros(sum(split), dtype=dtype, device=device.torch) for split in splits)

    def run() -> None:
        if group is not None:
            dist.all_to_all_single(receive, send, splits[1], splits[0], group=group)

    return run


class Loader:
    """What an engine's loader does with whole tensors: slice what this rank needs, copy it into the parameter."""

    def __init__(self, target: Layout, rank: int, stores: Stores):
        self.target, self.stores = target, stores
        self.places: dict[str, list[tuple[View, tuple[slice, ...], tuple[int, int, int]]]] = {}
        for kind in target.kinds.values():
            for layer in range(kind.shape[0]):
                for unit in range(kind.shape[1] if kind.unit_is_tensor else 1):
                    self.places[kind.tensor_name(layer, unit)] = []
        for piece in target.pieces(rank):
            self._add(piece)

    def _add(self, piece: Any) -> None:
        from parallel.reshard import views

        kind, (layers, units, rows, cols) = self.target.kinds[piece.kind], piece.box
        own = [(u, u + 1) for u in range(*units)] if kind.unit_is_tensor else [units]
        shape = (1 if kind.unit_is_tensor else kind.shape[1], *kind.shape[2:])
        for span in own:
            inside = slice(0, 1) if kind.unit_is_tensor else slice(*span)
            part = (inside, slice(*rows), slice(*cols))
            for layer, view in zip(range(*layers), views(piece, (layers, span, rows, cols)), strict=True):
                self.places[kind.tensor_name(layer, span[0])].append((view, part, shape))

    def load(self, name: str, tensor: torch.Tensor) -> None:
        for view, part, shape in self.places[name]:
            view.of(self.stores).copy_(tensor.view(shape)[part])


class _Bench:
    def __init__(self, group: Any, device: Device, repeats: int):
        self.group, self.device, self.repeats = group, device, repeats

    def times(self, *functions: Callable[[], None], repeats: int = 0) -> list[list[float]]:
        """Seconds of each function, in turn: barrier, run, synchronise; the slowest rank counts."""
        import torch.distributed as dist

        found: list[list[float]] = [[] for _ in functions]
        for _ in range(repeats or self.repeats):
            for function, times in zip(functions, found, strict=True):
                self.device.synchronize()
                if self.group is not None:
                    dist.barrier(group=self.group)
                start = time.perf_counter()
                function()
                self.device.synchronize()
                times.append(self.most(time.perf_counter() - start))
        return found

    def most(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        if self.group is None:
            return value
        # Whole millionths: hccl reduces no float64, and float32 is too coarse for bytes.
        found = torch.tensor([round(value * 1e6)], dtype=torch.int64, device=self.device.torch)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return int(found) / 1e6


def _row(times: list[float], planned: list[float], received: float, collectives: int, peak: float) -> dict[str, float]:
    """`x_planned` is the median quotient of neighbours in time, which other load on the machine moves least."""
    ordered, quotients = sorted(times), [a / b for a, b in zip(times, planned, strict=True)]
    return {
        "median_s": ordered[len(ordered) // 2],
        "x_planned": sorted(quotients)[len(quotients) // 2],
        "min_s": ordered[0],
        "max_s": ordered[-1],
        "received_bytes": received,
        "collectives": collectives,
        "peak_bytes": peak,
    }


def peak_bytes(device: Device) -> int:
    """Highest allocation so far: of the device, or of the process on cpu."""
    if device.runtime:
        return device.runtime.max_memory_allocated(device.index)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['source']}  ->  {found['target']}, {found['tensors']} tensors, {found['device']}",
        f"{'':10}{'median s':>10}{'min s':>10}{'max s':>10}{'x planned':>11}{'MB in':>10}{'calls':>7}{'peak MB':>9}",
    ]
    for name in ("planned", "bare", "golden"):
        row = found[name]
        lines.append(
            f"{name:10}{row['median_s']:10.4f}{row['min_s']:10.4f}{row['max_s']:10.4f}{row['x_planned']:11.2f}"
            f"{row['received_bytes'] / 1e6:10.1f}{row['collectives']:7}{row['peak_bytes'] / 1e6:9.1f}"
        )
    return "\n".join([*lines, f"planned in {found['plan_s']:.3f} s; both results verified"])


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # engines' libraries complain for pages, or hang, when they are taken apart
