"""Between Hugging Face directories and checkpoints, and the comparison of two of them.

    python -m launch.convert import SOURCE CHECKPOINTS          parameters only, as CHECKPOINTS/step_000000
    python -m launch.convert export CHECKPOINT OUT --model DIR  config and tokenizer come from DIR
    python -m launch.convert verify SOURCE HF_DIR               the comparison, bit for bit

A SOURCE is a Hugging Face directory, Megatron's torch_dist checkpoint (import takes its config.json from --model DIR),
or, to verify, a checkpoint.
One process is enough for a model of any size (files are mapped, written one at a time); under torchrun the files are
shared out. Exit code 0: done, equal; 1: different; 2: bad input, one message.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from parallel.device import Device
    from parallel.family import ModelShape
    from parallel.layout import Layout
    from parallel.torch_dist import TorchDist


@dataclass(frozen=True)
class Job:
    """This process among those of the launch."""

    rank: int
    world: int
    group: Any
    device: Device

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    job = _join()
    try:
        return options.run(options, job)
    except (ValueError, OSError) as error:
        if job.rank == 0:
            print(f"convert: {error}", file=sys.stderr)
        return 2
    finally:
        _leave(job)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch.convert", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="import | export | verify")

    importer = commands.add_parser("import", help="Hugging Face or torch_dist directory -> checkpoint of parameters")
    importer.add_argument("source", type=Path, metavar="SOURCE")
    importer.add_argument("out", type=Path, metavar="CHECKPOINTS", help="directory that gets step_000000")
    importer.add_argument("--model", type=Path, help="directory with config.json, for a torch_dist checkpoint")
    importer.set_defaults(run=run_import)

    exporter = commands.add_parser("export", help="checkpoint -> Hugging Face directory")
    exporter.add_argument("source", type=Path, metavar="CHECKPOINT")
    exporter.add_argument("out", type=Path)
    exporter.add_argument("--model", type=Path, required=True, help="directory with config.json and the tokenizer")
    exporter.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="", help="default: as saved")
    exporter.add_argument("--state", default="parameters", help='"master" exports the fp32 masters')
    exporter.add_argument("--max-shard-gib", type=float, default=5.0)
    exporter.add_argument("--overwrite", action="store_true")
    exporter.set_defaults(run=run_export)

    verifier = commands.add_parser("verify", help="compare a checkpoint or a directory with a directory, bit for bit")
    verifier.add_argument("source", type=Path, metavar="SOURCE")
    verifier.add_argument("hf", type=Path, metavar="HF_DIR")
    verifier.add_argument("--state", default="parameters")
    verifier.set_defaults(run=run_verify)
    return parser


def _join() -> Job:
    import torch.distributed as dist

    from parallel.device import Device

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    return Job(int(os.environ.get("RANK", "0")) if world > 1 else 0, world, None, Device("cpu"))


def _leave(job: Job) -> None:
    import torch.distributed as dist

    if job.world > 1:
        dist.destroy_process_group()


def run_import(options: argparse.Namespace, job: Job) -> int:
    from parallel.checkpoint import save
    from parallel.family import kinds, model_shape, read_config
    from parallel.torch_dist import find_torch_dist

    if options.model is None and find_torch_dist(options.source):
        raise ValueError(f"{options.source}: a torch_dist checkpoint; give --model DIR with the model's config.json")
    model = options.model or options.source
    shape = model_shape(read_config(model), str(model / "config.json"))
    source, stores = _source(options.source, "parameters", shape, job)
    small = {"step": 0, "source": str(options.source), "config": read_config(model)}
    states = {"parameters": (source.pieces(job.rank), stores)}
    path = save(options.out, 0, kinds(shape), states, small, job.rank, job.group)
    job.say(f"{path}: {source.name}, {source.dtype}")
    return 0


def run_export(options: argparse.Namespace, job: Job) -> int:
    from parallel.family import model_shape, read_config
    from parallel.hf import export

    shape = model_shape(read_config(options.model), str(options.model / "config.json"))
    if options.source.resolve().is_relative_to(options.out.resolve()):
        raise ValueError(f"{options.out}: the export would replace {options.source}, which it is made from")
    if not 0 < options.max_shard_gib < float("inf"):
        raise ValueError(f"--max-shard-gib {options.max_shard_gib}: give a size in GiB above 0")
    source, stores = _checkpoint_source(options.source, options.state, shape, job)
    limit = int(options.max_shard_gib * (1 << 30))
    export(
        *(options.out, source, stores, shape, options.model, job.rank, job.group, job.device),
        max_shard_bytes=limit,
        dtype=options.dtype,
        overwrite=options.overwrite,
    )
    job.say(f"{options.out}: written and checked, {options.dtype or source.dtype}")
    return 0


def run_verify(options: argparse.Namespace, job: Job) -> int:
    """Move the source into the layout of the directory's files, round by round, and compare the bytes."""
    from parallel.agree import each, gather, on_first
    from parallel.hf import hf_layouts, read_index, read_stores
    from parallel.reshard import Resharder
    from parallel.reshard_plan import plan
    from parallel.tensor_file import host_bytes

    index = on_first(lambda: read_index(options.hf), job.rank, job.group)
    source, stores = _source(options.source, options.state, index.shape, job)
    if source.dtype != index.dtype:
        job.say(f"different: {options.source} holds {source.dtype}, {options.hf} {index.dtype}")
        return 1
    wrong: list[str] = []
    for layout in hf_layouts(index, index.shape, job.world):
        file = layout.coordinates[job.rank]
        expected = each(lambda file=file: read_stores(index, file, index.dtype), job.group)
        found = {name: tensor.new_zeros(tensor.shape) for name, tensor in expected.items()}
        Resharder(plan(source, layout), job.rank, job.group, source, layout, job.device).run(stores, found)
        wrong += [n for n, tensor in expected.items() if host_bytes(tensor) != host_bytes(found[n])]
    wrong = sorted(name for names in gather(wrong, job.group) for name in names)
    job.say(
        f"{'different' if wrong else 'equal'}: {len(index.tensors) - len(wrong)} of {len(index.tensors)} tensors equal"
    )
    for name in wrong[:10]:
        job.say(f"  {name}")
    return 1 if wrong else 0


def _source(path: Path, state: str, shape: ModelShape, job: Job) -> tuple[Layout, dict[str, torch.Tensor]]:
    """Layout and stores of a checkpoint, a torch_dist checkpoint or a Hugging Face directory."""
    from parallel.agree import on_first
    from parallel.checkpoint import MARKER
    from parallel.hf import read_index
    from parallel.torch_dist import find_torch_dist, read_torch_dist

    if (path / MARKER).exists():
        return _checkpoint_source(path, state, shape, job)
    if directory := find_torch_dist(path):
        found = on_first(lambda: read_torch_dist(directory, shape), job.rank, job.group)
        return _torch_dist_source(found, shape, job)
    return _hf_source(on_first(lambda: read_index(path, shape), job.rank, job.group), job)


def _torch_dist_source(found: TorchDist, shape: ModelShape, job: Job) -> tuple[Layout, dict[str, torch.Tensor]]:
    """All files of a torch_dist checkpoint, mapped and dealt to the ranks."""
    from parallel.agree import each
    from parallel.boxes import cover_gap, disjoint
    from parallel.family import kinds
    from parallel.layout import Layout

    dealt = [list(found.chunks)[rank :: job.world] for rank in range(job.world)]
    held = [[piece for name in files for _, row in found.chunks[name] for piece in row] for files in dealt]
    parts = [tuple(row) for row in disjoint(held, kinds(shape))]
    if gap := cover_gap([piece for row in parts for piece in row], kinds(shape)):
        raise ValueError(f"{found.path}: does not hold the whole model of config.json: {gap}")
    stores = each(lambda: {k: v for name in dealt[job.rank] for k, v in found.stores(name).items()}, job.group)
    return Layout(str(found.path), kinds(shape), tuple(range(job.world)), parts.__getitem__, found.dtype), stores


def _hf_source(index: Any, job: Job) -> tuple[Layout, dict[str, torch.Tensor]]:
    """All files of a directory at once, mapped: rank r holds those that it is dealt."""
    import torch

    from parallel.family import kinds
    from parallel.hf import hf_layouts
    from parallel.layout import Layout
    from parallel.tensor_file import mapped

    rounds = hf_layouts(index, index.shape, job.world)
    parts = [tuple(piece for layout in rounds for piece in layout.pieces(rank)) for rank in range(job.world)]
    dtype = getattr(torch, index.dtype)
    stores = {
        name: tensor.to(dtype)
        for layout in rounds
        if (file := layout.coordinates[job.rank])
        for name, tensor in mapped(index.path / file, index.headers[file]).items()
        if name not in index.skipped
    }
    ranks = tuple(range(job.world))
    return Layout(str(index.path), kinds(index.shape), ranks, parts.__getitem__, index.dtype), stores


def _checkpoint_source(
    directory: Path, state: str, shape: ModelShape, job: Job
) -> tuple[Layout, dict[str, torch.Tensor]]:
    """All files of one state, hashed and mapped. Stores are "FILE/STORE", since ranks use the same names."""
    from parallel.agree import each, gather, on_first
    from parallel.boxes import disjoint
    from parallel.checkpoint import read_marker
    from parallel.family import kinds
    from parallel.layout import Layout
    from parallel.restore import check_kinds, state_files, verified_pieces
    from parallel.tensor_file import mapped, read_header

    marker = on_first(lambda: read_marker(directory), job.rank, job.group)
    check_kinds(directory, marker, kinds(shape))
    files = state_files(directory, marker, state)[job.rank :: job.world]
    found = each(lambda: [verified_pieces(directory, marker, name) for name in files], job.group)
    pieces = [replace(p, store=f"{name}/{p.store}") for name, row in zip(files, found, strict=True) for p in row]
    parts = [tuple(row) for row in disjoint(gather(pieces, job.group), kinds(shape))]
    stores = {
        f"{name}/{store}": tensor
        for name in files
        for store, tensor in mapped(directory / name, read_header(directory / name)).items()
    }
    ranks = tuple(range(job.world))
    return Layout(str(directory), kinds(shape), ranks, parts.__getitem__, marker.states[state]), stores


if __name__ == "__main__":
    sys.exit(main())
