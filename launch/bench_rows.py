"""Rows of launch.bench that use one model: offload, train, generate, step. Each figure stands beside what bounds it.

    offload     hand-over of training state to host memory and back, against the bare copy rate; drift over the cycles
    train       one update on packed micro-batches: model FLOPs utilisation against the device's peak
    generate    decoding with and without a seed for each request, against reading weights and cache once a step
    step        where the seconds of a finished run went, and what launch.plan said about it (--run RUN_DIR)
    checkpoint  save and load of --gb of state in --dir, hashed and synced, against a plain write and a cold read

Random weights of the shape of model.path (its config.json is enough). Model FLOPs count 6 x matrix parameters x tokens
and causal attention at half; recomputation is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.config import Config, load
from launch.estimate import matrix_parameters

if TYPE_CHECKING:
    from parallel.device import Device
    from parallel.family import ModelShape
    from parallel.megatron_model import TrainModel
    from parallel.micro_batches import MicroBatch

GIB, GB = 1 << 30, 1e9


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    floor: float
    """The best that the hardware allows, or the limit, in the same unit; 0 where there is none."""
    unit: str
    note: str = ""

    def line(self) -> str:
        share = self.value / self.floor if self.floor else float("nan")
        return f"{self.name:42} {self.value:11.4g} {self.floor:11.4g} {share:7.3f}  {self.unit:8} {self.note}"


class Bench:
    """What the rows share: options, device, shape."""

    def __init__(self, options: argparse.Namespace, config: Config):
        from parallel.device import pick
        from parallel.family import model_shape, read_config

        self.options, self.config = options, config
        self.device: Device = pick(config.runtime.device, int(os.environ["LOCAL_RANK"]))
        shape = model_shape(read_config(config.model.path))
        self.shape: ModelShape = dataclasses.replace(shape, num_layers=options.layers or shape.num_layers)

    def seconds(self, run: Callable[[], Any], count: int = 1) -> float:
        """Median wall time of `count` calls, each waited for."""
        times = []
        for _ in range(count):
            self.device.synchronize()
            began = time.perf_counter()
            run()
            self.device.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def model(self, **train: Any) -> TrainModel:
        """Training side with random weights, laid out as config.train says."""
        import torch

        from parallel.grid import RolloutGrid, TrainGrid
        from parallel.groups import make_groups
        from parallel.megatron_model import build

        t, world = self.config.train, int(os.environ["WORLD_SIZE"])
        grid = TrainGrid(world, t.tp, t.pp, t.vpp, t.cp, t.ep, t.etp or t.tp, t.order)
        make_groups(grid, RolloutGrid(world, 1, 1, False), self.device)
        config = dataclasses.replace(self.config, train=dataclasses.replace(t, **train))
        model = build(self.shape, config, grid, self.device, 1000)
        torch.manual_seed(0)
        for parameter in model.stores().values():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
        model.after_load()
        return model

    def peak_gib(self) -> float:
        return self.device.runtime.max_memory_allocated() / GIB if self.device.runtime else 0.0


def offload(bench: Bench) -> Iterator[Figure]:
    from parallel.offload import Arena, TrainOffload

    model = bench.model(offload=["params", "optimizer"])
    began = time.perf_counter()
    state = TrainOffload(model)
    pinning = time.perf_counter() - began
    probe = Arena(model.buffers[0].param_data, bench.device.kind != "cpu")
    out = probe.nbytes / bench.seconds(lambda: bench.device.to_host(probe.pairs()), 5) / GB
    back = probe.nbytes / bench.seconds(probe.load, 5) / GB

    def leave() -> None:
        state.free_optimizer()
        state.free_params()

    frees, restores, away, held = [], [], [], []
    for _ in range(bench.options.cycles):
        frees.append(bench.seconds(leave))
        away.append(bench.device.memory()["free"])
        restores.append(bench.seconds(state.restore))
        held.append(bench.device.memory()["free"])
    moved, dropped = state.nbytes / GB, sum(state.sizes) / GB
    note = f"{moved:.1f} GB moved, {dropped:.1f} GB of gradients dropped; host buffers, once: {pinning:.1f} s"
    yield Figure("offload to host", moved / statistics.median(frees), out, "GB/s", note)
    yield Figure("restore to device", moved / statistics.median(restores), back, "GB/s")
    for name, free in (("away", away), ("restored", held)):
        drift = (free[min(1, len(free) - 1)] - free[-1]) / (1 << 20)
        yield Figure(f"drift while {name}, {len(free)} cycles", drift, 64, "MiB")
    yield Figure("device memory free while away", away[-1] / GIB, bench.device.memory()["total"] / GIB, "GiB")


def train(bench: Bench) -> Iterator[Figure]:
    from parallel import megatron_step as step

    options, model = bench.options, bench.model()
    batches, lengths = packed(bench, model)

    def loss(logprobs: Any, entropy: Any, batch: MicroBatch) -> Any:
        return -(logprobs * batch.fields["weight"]).sum(), {}

    def update() -> None:
        step.update(model, batches, loss, 1.0, entropy=True)

    bench.seconds(update, 2)
    update_s = bench.seconds(update, options.repeat)
    score_s = bench.seconds(lambda: step.score(model, batches, 1.0), options.repeat)
    flops, tokens = model_flops(bench.shape, lengths), sum(map(sum, lengths))
    peak, share = options.peak_tflops, model.grid.dp / model.grid.world
    note = f"{tokens / update_s * share:.0f} tokens/s, {update_s:.3f} s an update, peak {bench.peak_gib():.1f} GiB"
    yield Figure("update, a device", flops / update_s * share / 1e12, peak, "TFLOP/s", note)
    yield Figure("score, a device", flops / 3 / score_s * share / 1e12, peak, "TFLOP/s", f"{score_s:.3f} s")
    optimizer_s = bench.seconds(model.optimizer.step_with_ready_grads, options.repeat)
    read = 30 * sum(b.param_data.numel() for b in model.buffers) / model.grid.dp / options.memory_rate
    yield Figure("optimizer step", optimizer_s * 1e3, read * 1e3, "ms", "floor: 30 bytes a parameter")
    if options.profile:
        profile(update, options.profile)


def packed(bench: Bench, model: TrainModel) -> tuple[list[MicroBatch], list[list[int]]]:
    """Micro-batches of `--tokens` tokens each, of sequences of 1/2, 1/4, 1/8, 1/16, 1/32, 1/32 of it."""
    import numpy as np

    from parallel import megatron_step as step

    tokens, count = bench.options.tokens, bench.options.micro_batches
    one = [tokens // part for part in (2, 4, 8, 16, 32, 32)]
    random = np.random.default_rng(0)
    sequences = [random.integers(0, bench.shape.vocab, n) for _ in range(count) for n in one]
    prompts = [max(1, len(s) // 16) for s in sequences]
    total = sum(len(s) - p for s, p in zip(sequences, prompts, strict=True))
    weights = [np.full(len(s) - p, 1 / total, np.float32) for s, p in zip(sequences, prompts, strict=True)]
    indices = [list(range(i * len(one), (i + 1) * len(one))) for i in range(count)]
    return step.micro_batches(model, sequences, prompts, indices, {"weight": weights}), [one] * count


def model_flops(shape: ModelShape, lengths: Sequence[Sequence[int]]) -> float:
    """FLOPs of one update: 6 a matrix parameter and token, causal attention at half, nothing recomputed."""
    tokens, squares = sum(map(sum, lengths)), sum(n * n for batch in lengths for n in batch)
    return 6 * matrix_parameters(shape) * tokens + 12 * squares / 2 * shape.heads * shape.head_dim * shape.num_layers


def profile(run: Callable[[], Any], path: str) -> None:
    """Table of kernels by device time of one call."""
    import torch

    with torch.profiler.profile() as recorded:
        run()
    table = recorded.key_averages().table(sort_by="self_device_time_total", row_limit=60, max_name_column_width=90)
    Path(path).write_text(table)


def generate(bench: Bench) -> Iterator[Figure]:
    from parallel.grid import RolloutGrid, TrainGrid
    from parallel.groups import make_groups
    from rollout.engine import Engine

    rollout, world = bench.config.rollout, int(os.environ["WORLD_SIZE"])
    grid = RolloutGrid(world, rollout.tp, rollout.dp, rollout.expert_parallel)
    make_groups(TrainGrid(world), grid, bench.device)
    engine = Engine(bench.config, bench.shape, grid, bench.device)
    weights = sum(store.nbytes for store in engine.stores.values())
    for store in engine.stores.values():  # the engine's own dummy weights are nearly zero
        store.normal_(0, 0.02) if store.dim() > 1 else store.fill_(1)
    prompt, length, item = 64, bench.config.data.max_response_tokens, 2 if rollout.dtype == "bfloat16" else 4
    cache = 2 * bench.shape.num_layers * bench.shape.kv_heads * bench.shape.head_dim * item
    for count in bench.options.sequences:
        runs: dict[str, list[float]] = {"none": [], "each": []}
        for _ in range(1 + bench.options.repeat):  # in turn, so that drift meets both; the first round warms up
            for name, found in runs.items():
                found.append(decode_ms(bench, engine, count, prompt, name == "each"))
        run = {name: statistics.median(found[1:]) for name, found in runs.items()}
        read = (weights + count * (prompt + length / 2) * cache) / bench.options.memory_rate * 1e3
        rate = f"{count / run['each'] * 1e3:.0f} tokens/s"
        yield Figure(f"decode step, {count} sequences, seeds", run["each"], read, "ms", rate)
        yield Figure(f"decode step, {count} sequences, no seeds", run["none"], read, "ms")
        yield Figure(f"cost of seeds, {count} sequences", run["each"] / run["none"] - 1, 0.05, "share")


def decode_ms(bench: Bench, engine: Any, count: int, prompt: int, seeds: bool) -> float:
    """Milliseconds for each token of `count` sequences of full length, prefill included."""
    from rollout.batch import Request

    ids = [[(7 * i + j) % bench.shape.vocab for j in range(prompt)] for i in range(count)]
    length, none = bench.config.data.max_response_tokens, [None] * count
    seed: list[Any] = list(range(1, count + 1)) if seeds else none
    wanted = [Request(i, 0, ids[i], seed[i], length) for i in range(count)]
    engine.reset_prefix_cache()
    return bench.seconds(lambda: engine.generate(wanted)) / length * 1e3


def step(bench: Bench) -> Iterator[Figure]:
    from launch import bench_run

    return bench_run.step(bench.options.run, bench.options.hardware)


def checkpoint(bench: Bench) -> Iterator[Figure]:
    """Four kinds in turn, so that other load on the machine meets all of them; medians."""
    import shutil
    import tempfile

    import torch

    from parallel.checkpoint import save
    from parallel.device import Device
    from parallel.layout import Kind, Piece
    from parallel.restore import restore

    rows = max(1, round(bench.options.gb * GB / (16 * 4096 * 4)))
    kind, stores = Kind("k", "k.{layer}", (16, 1, rows, 4096)), {f"s{i}": torch.rand(rows * 4096) for i in range(16)}
    pieces = [Piece("k", ((i, i + 1), *kind.full_box[1:]), f"s{i}", 0, 0, (rows * 4096, 4096, 1)) for i in range(16)]
    states, kinds = {"parameters": (pieces, stores)}, {"k": kind}
    with tempfile.TemporaryDirectory(dir=bench.options.dir) as root:
        plain, path = Path(root, "plain"), Path(root, "step_000000")
        runs: dict[str, tuple[Callable[[], Any], list[float]]] = {
            "plain write": (lambda: plain_write(plain, stores), []),
            "save": (lambda: save(root, 0, kinds, states, {}, 0), []),
            "cold read": (lambda: plain_read(plain, stores), []),
            "load": (lambda: restore(path, kinds, states, 0, None, Device("cpu")), []),
        }
        for _ in range(bench.options.repeat):
            for name, (run, times) in runs.items():
                if name in ("cold read", "load"):
                    evict(*Path(root).rglob("*"))
                elif name == "plain write":  # both write new files: blocks that are written again are faster
                    plain.unlink(missing_ok=True)
                else:
                    shutil.rmtree(path, ignore_errors=True)
                times.append(bench.seconds(run))
    size = sum(store.nbytes for store in stores.values()) / GB
    rate = {name: size / statistics.median(times) for name, (_, times) in runs.items()}
    note = f"median of {bench.options.repeat}, {size:.2f} GB; floor:"
    yield Figure("checkpoint save", rate["save"], rate["plain write"], "GB/s", f"{note} a plain write with fsync")
    yield Figure("checkpoint load", rate["load"], rate["cold read"], "GB/s", f"{note} a cold sequential read")


def plain_write(path: Path, stores: dict[str, Any]) -> None:
    with open(path, "wb", buffering=0) as file:
        for store in stores.values():
            for chunk in store.split(2 << 20):
                file.write(memoryview(chunk.numpy()).cast("B"))
        os.fsync(file.fileno())


def plain_read(path: Path, stores: dict[str, Any]) -> None:
    with open(path, "rb", buffering=0) as file:
        for store in stores.values():
            for chunk in store.split(2 << 20):
                file.readinto(memoryview(chunk.numpy()).cast("B"))


def evict(*paths: Path) -> None:
    """Drop the pages of files from the system's cache."""
    for path in paths:
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


ROWS: dict[str, Callable[[Bench], Iterator[Figure]]] = dict(
    offload=offload, train=train, generate=generate, step=step, checkpoint=checkpoint
)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """ValueError (ConfigError) for unknown options of the configuration."""
    parser = argparse.ArgumentParser(prog="python -m launch.bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("recipe", nargs="*", help="recipes and section.key=value")
    parser.add_argument("--layers", type=int, default=0, help="cut the model to so many layers")
    parser.add_argument("--tokens", type=int, default=8192, help="of one micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of one update and rank")
    parser.add_argument("--repeat", type=int, default=5, help="timed calls, of which the median counts")
    parser.add_argument("--cycles", type=int, default=50, help="hand-overs")
    parser.add_argument("--sequences", type=int, nargs="*", default=[256, 1024], help="decoded at a time")
    parser.add_argument("--peak-tflops", type=float, default=989, help="dense bf16 peak of the device")
    parser.add_argument("--memory-rate", type=float, default=4.3e12, help="bytes/s of device memory")
    parser.add_argument("--profile", default="", help="file for a table of kernels")
    parser.add_argument("--run", default="", help="run directory of row step")
    parser.add_argument("--hardware", default="", help="of row step: a2, h100 or h200")
    parser.add_argument("--gb", type=float, default=1.0, help="size of row checkpoint")
    parser.add_argument("--dir", default=".", help="directory of row checkpoint, on the disk to measure")
    options = parser.parse_intermixed_args(argv)
    return options, load(["model.path=launch/models/qwen3-4b", *options.recipe])


def main(argv: Sequence[str]) -> int:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    try:
        options, config = parse(argv)
        bench = Bench(options, config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    talks = os.environ["RANK"] == "0"
    if talks:
        print(f"{'figure':42} {'value':>11} {'floor':>11} {'ratio':>7}  unit     on {bench.device.name}", flush=True)
    try:
        for figure in ROWS[options.row](bench):
            if talks:
                print(figure.line(), flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
