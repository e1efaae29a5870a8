"""Checkpoints: ranges as boxes, bitwise round trips on the same and on other layouts, and no torn state."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import random
import shutil
import subprocess
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel import checkpoint
from parallel.boxes import cover_gap, disjoint, part_of, range_boxes, single_layers, subtract
from parallel.checkpoint import FORMAT, MARKER, Saver, Torn, find, load_own, load_small, prune, read_marker, save
from parallel.device import Device
from parallel.family import kinds, model_shape
from parallel.grid import TrainGrid
from parallel.layout import Kind, Piece, elements, intersect
from parallel.megatron_layout import megatron_layout
from parallel.plain_values import frozen, read_value, write_value
from parallel.restore import restore, restore_newest
from parallel.tensor_file import read, read_header, write
from tests.hf_dirs import CONFIGS, empty_stores, gloo, logical, random_tensors, same_bits
from tests.ranks import run_ranks

CPU = Device("cpu")
SHAPE = model_shape(CONFIGS["qwen3_moe"])
KINDS = kinds(SHAPE)


# -- boxes


def addresses(piece: Piece) -> dict[int, tuple[int, int, int]]:
    (_, units, rows, cols) = piece.box
    return {piece.offset_of(u, r, c): (u, r, c) for u in range(*units) for r in range(*rows) for c in range(*cols)}


@pytest.mark.parametrize("seed", range(200))
def test_a_range_is_at_most_five_boxes(seed):
    pick = random.Random(seed)
    units, rows, cols = (pick.choice([1, 1, 2, 3, 5]) for _ in range(3))
    width = cols + pick.choice([0, 0, 2])
    gap = pick.choice([0, 4])
    corner = [pick.randrange(3) for _ in range(3)]
    box = ((4, 5), *((lo, lo + n) for lo, n in zip(corner, (units, rows, cols), strict=True)))
    piece = Piece("k", box, "s", 0, pick.randrange(6), (rows * width + gap, width, 1))
    size = piece.offset + units * (rows * width + gap) + 3
    start = pick.randrange(size)
    stop = pick.randrange(start, size + 1)
    found = range_boxes(piece, start, stop)
    assert len(found) <= (5 if units > 1 else 3)
    expected = {at - start: place for at, place in addresses(piece).items() if start <= at < stop}
    merged: dict = {}
    for part in found:
        assert not set(merged) & set(addresses(part))
        merged.update(addresses(part))
    assert merged == expected


def test_disjoint_cuts_overlaps_and_keeps_places():
    kind = Kind("k", "k.{layer}", (3, 1, 8, 4))
    pick = random.Random(0)
    for _ in range(50):
        lists = []
        for _ in range(4):
            rows = sorted(pick.sample(range(9), 2))
            layers = sorted(pick.sample(range(4), 2))
            box = (tuple(layers), (0, 1), tuple(rows), (0, 4))
            lists.append([Piece("k", box, "s.{layer}", 7, 100, (32, 4, 1))])
        lists.append([Piece("k", kind.full_box, "full.{layer}", 0, 0, (32, 4, 1))])
        result = disjoint(lists, {"k": kind})
        flat = [piece for row in result for piece in row]
        assert not cover_gap(flat, {"k": kind})
        assert all(intersect(a.box, b.box) is None for i, a in enumerate(flat) for b in flat[:i])
        for original, row in zip(lists, result, strict=True):
            for part in row:
                assert part.store_name(part.box[0][0]) == original[0].store_name(part.box[0][0])
                assert part.offset == original[0].offset_of(*(lo for lo, _ in part.box[1:]))


def test_subtract_is_exact():
    a, b = ((0, 4), (0, 2), (0, 6), (0, 5)), ((1, 3), (1, 2), (2, 9), (0, 3))
    rest = list(subtract(a, b))
    assert sum(map(elements, rest)) == elements(a) - elements(intersect(a, b))
    assert cover_gap([], {"k": Kind("k", "k", (1, 1, 1, 2))}) == "k: 0 of 2 elements"


# -- values


def test_values_come_back_as_they_were(tmp_path):
    value = {
        "step": 7,
        "python": random.Random(3).getstate(),
        "numpy": np.random.RandomState(1).get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "floats": [0.1, 1e-300, float("inf"), None, True],
        "nested": {"ids": np.arange(5, dtype=np.int32), "text": ["\u00e9\n", "\ud83d"], "empty": {}},
        "moment": torch.randn(3, 2).bfloat16(),
    }
    write_value(tmp_path / "v.safetensors", value)
    for back in (read_value(tmp_path / "v.safetensors")[0], frozen(value)):
        assert back["python"] == value["python"] and random.Random().setstate(back["python"]) is None
        assert back["floats"] == value["floats"] and back["step"] == 7
        assert back["nested"]["text"] == value["nested"]["text"] and back["nested"]["empty"] == {}
        assert back["nested"]["ids"].dtype == np.int32 and (back["nested"]["ids"] == np.arange(5)).all()
        assert (back["numpy"]["state"]["key"] == value["numpy"]["state"]["key"]).all()
        assert back["numpy"]["state"]["key"].dtype == np.uint32
        assert same_bits(back["torch"], value["torch"]) and same_bits(back["moment"], value["moment"])
    for bad in ({1: 2}, {"a": object()}, {"a": {1}}, {"a": b"x"}):
        with pytest.raises(ValueError, match="cannot store"):
            write_value(tmp_path / "w.safetensors", bad)


# -- states of virtual ranks: ranges of Megatron's stores, as a distributed optimizer holds them


def range_states(layout, stores, rank: int, cut: int, of: int) -> tuple:
    """Ranges [cut, of) of every flattened store of this rank: what one of `of` data parallel ranks updates."""
    pieces, held = [], {}
    by_store: dict = {}
    for piece in layout.pieces(rank):
        for single in single_layers(piece):
            by_store.setdefault(single.store, []).append(single)
    for name, store in stores.items():
        start, stop = (store.numel() * (cut + i) // of for i in (0, 1))
        if stop > start:
            pieces += [found for piece in by_store[name] for found in range_boxes(piece, start, stop)]
            held[name] = store.view(-1)[start:stop]
    return tuple(pieces), held


def fill(layout, rank: int, tensors) -> dict:
    """Stores of a rank filled from logical tensors."""
    stores = empty_stores(layout, rank, fill=-1.0)
    for piece in layout.pieces(rank):
        (_, units, rows, cols) = piece.box
        size = tuple(hi - lo for lo, hi in (units, rows, cols))
        for layer in range(*piece.box[0]):
            view = stores[piece.store_name(layer)].as_strided(size, piece.strides, piece.offset)
            view.copy_(tensors[piece.kind][layer, slice(*units), slice(*rows), slice(*cols)])
    return stores


GRIDS = {
    "one": (1, dict()),
    "tp2": (2, dict(tp=2, etp=1, ep=2)),
    "pp2": (2, dict(pp=2)),
    "dp2": (2, dict(ep=2)),
    "dp2 ep1": (2, dict()),
    "tp2 pp2": (4, dict(tp=2, pp=2, ep=2)),
}


def layout_of(name: str):
    world, options = GRIDS[name]
    grid = TrainGrid(world, **{**dict(etp=1), **options})
    return megatron_layout(SHAPE, grid, first=1 if grid.pp > 1 else 0, dtype="float32"), grid


def expected_state(state: str) -> dict:
    tensors = random_tensors(CONFIGS["qwen3_moe"], seed=len(state), dtype=torch.float32)
    return logical(CONFIGS["qwen3_moe"], tensors)


def states_of(layout, grid, rank: int, filled: bool) -> dict:
    """State -> (pieces, ranges of stores) of a rank, cut over dp, experts over edp."""
    states = {}
    for state in ("parameters", "exp_avg"):
        stores = fill(layout, rank, expected_state(state)) if filled else empty_stores(layout, rank, float("nan"))
        dense = {name: store for name, store in stores.items() if "experts" not in name}
        expert = {name: store for name, store in stores.items() if "experts" in name}
        coord = grid.coord(rank)
        a = range_states(layout, dense, rank, coord.dp * grid.cp + coord.cp, grid.dp * grid.cp)
        b = range_states(layout, expert, rank, coord.edp, grid.edp)
        states[state] = (a[0] + b[0], {**a[1], **b[1]})
    return states


def _save(rank: int, root: str, name: str, step: int) -> None:
    layout, grid = layout_of(name)
    states = states_of(layout, grid, rank, filled=True)
    with gloo(grid.world):
        save(root, step, KINDS, states, {"step": step, "text": "hello"}, rank, None, {"rank": rank})


def _restore(rank: int, directory: str, name: str) -> dict:
    layout, grid = layout_of(name)
    states = states_of(layout, grid, rank, filled=False)
    with gloo(grid.world):
        restore(directory, KINDS, states, rank, None, CPU)
    return {
        state: (pieces, {store: tensor.numpy().copy() for store, tensor in stores.items()})
        for state, (pieces, stores) in states.items()
    }


def check_restored(results: list) -> None:
    """Every element that any rank's pieces cover has the logical value."""
    for state in ("parameters", "exp_avg"):
        expected = expected_state(state)
        covered = {kind: torch.zeros(tensor.shape, dtype=torch.bool) for kind, tensor in expected.items()}
        for result in results:
            pieces, stores = result[state]
            for piece in pieces:
                (layers, units, rows, cols) = piece.box
                size = tuple(hi - lo for lo, hi in (units, rows, cols))
                store = torch.from_numpy(stores[piece.store])
                at = (layers[0], slice(*units), slice(*rows), slice(*cols))
                assert same_bits(store.as_strided(size, piece.strides, piece.offset), expected[piece.kind][at])
                covered[piece.kind][at] = True
        assert all(mask.all() for mask in covered.values())


def run(name: str, function, *args) -> list:
    world = GRIDS[name][0]
    return run_ranks(world, function, *args) if world > 1 else [function(0, *args)]


@pytest.mark.parametrize("target", ["one"])
def test_round_trip_on_one_rank(tmp_path, target):
    _save(0, str(tmp_path), "one", 3)
    path = tmp_path / "step_000003"
    assert (tmp_path / "latest").read_text() == "step_000003\n"
    check_restored([_restore(0, str(path), target)])
    assert load_small(path)["text"] == "hello" and load_own(path, 5) == {"rank": 0}
    marker = read_marker(path)
    assert marker.step == 3 and marker.world == 1 and marker.states == dict(parameters="float32", exp_avg="float32")
    assert set(marker.files) == {f.name for f in path.iterdir()} - {MARKER}


@pytest.mark.slow
@pytest.mark.parametrize(
    "source, target",
    [("dp2", "dp2"), ("one", "tp2"), ("tp2", "pp2"), ("dp2 ep1", "one"), ("tp2 pp2", "dp2"), ("pp2", "tp2 pp2")],
)
def test_round_trip_onto_another_layout(tmp_path, source, target):
    run(source, _save, str(tmp_path), source, 3)
    check_restored(run(target, _restore, str(tmp_path / "step_000003"), target))


# -- finding, pruning, torn states


def one_state(value: float = 1.0) -> dict:
    layout, _ = layout_of("one")
    stores = empty_stores(layout, 0, value)
    pieces = tuple(single for piece in layout.pieces(0) for single in single_layers(piece))
    return {"parameters": (pieces, stores)}


def save_one(run_dir: Path, step: int, value: float | None = None) -> Path:
    states = one_state(float(step) if value is None else value)
    return save(run_dir / "checkpoints", step, KINDS, states, {"step": step}, 0, None, {})


def value_of(directory: Path) -> float:
    states = one_state(float("nan"))
    restore(directory, KINDS, states, 0, None, CPU)
    values = {float(v) for store in states["parameters"][1].values() for v in store.unique()}
    assert len(values) == 1
    return values.pop()


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


SHARD = "parameters-00000.safetensors"
TEARS = {
    "truncated shard": lambda p: os.truncate(p / SHARD, 100),
    "longer shard": lambda p: (p / SHARD).open("ab").write(b"x"),
    "deleted shard": lambda p: (p / SHARD).unlink(),
    "deleted small": lambda p: (p / "small.safetensors").unlink(),
    "no marker": lambda p: (p / MARKER).unlink(),
    "empty marker": lambda p: (p / MARKER).write_text(""),
    "cut marker": lambda p: os.truncate(p / MARKER, 50),
    "flipped marker": lambda p: flip(p / MARKER, 20),
    "marker of the future": lambda p: (p / MARKER).write_text(
        (p / MARKER).read_text().replace(f'"format": {FORMAT}', '"format": 9')
    ),
}
DAMAGE = {
    "flipped data": lambda p: flip(p / SHARD, -5),
    "flipped middle": lambda p: flip(p / SHARD, (p / SHARD).stat().st_size // 2),
    "flipped header": lambda p: flip(p / SHARD, 40),
    "flipped length": lambda p: flip(p / SHARD, 1),
}


@pytest.mark.parametrize("tear", TEARS)
def test_find_passes_over_torn_ones_and_says_why(tmp_path, caplog, tear):
    save_one(tmp_path, 1)
    torn = save_one(tmp_path, 2)
    TEARS[tear](torn)
    with caplog.at_level(logging.WARNING):
        assert find(tmp_path).name == "step_000001"
    assert "skipped" in caplog.text and str(torn) in caplog.text
    assert value_of(find(tmp_path)) == 1.0
    with pytest.raises(ValueError, match=str(torn)):
        find(tmp_path, str(torn))


@pytest.mark.parametrize("target", ["parallel.tensor_file.open", "parallel.restore.read"])
def test_a_file_that_the_system_does_not_read_condemns_no_checkpoint(tmp_path, monkeypatch, target):
    for step in (1, 2, 3):
        save_one(tmp_path, step)

    def away(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(target, away, raising=False)
        with pytest.raises(OSError, match="Input/output error"):
            restore_newest(tmp_path, "auto", KINDS, one_state(), 0, None, CPU)
    assert find(tmp_path).name == "step_000003" and not list(tmp_path.rglob("torn.json"))


def test_a_damaged_only_checkpoint_is_no_silent_restart_however_often_one_tries(tmp_path):
    DAMAGE["flipped data"](save_one(tmp_path, 7))
    for _ in range(3):
        with pytest.raises(ValueError, match='checkpoint.resume = "none" starts anew'):
            restore_newest(tmp_path, "auto", KINDS, one_state(), 0, None, CPU)
    assert find(tmp_path, "none") is None


def test_pruning_touches_what_saves_made_and_nothing_else(tmp_path):
    for step in (1, 2):
        save_one(tmp_path, step)
    root = tmp_path / "checkpoints"
    mine = ["best_step_000001", "step_000001_keep", "export_step_000002", "notes_step_2.txt"]
    for name in mine:
        (root / name).mkdir()
    (root / "step_best").symlink_to("step_000002")
    (root / ".step_000009.part").mkdir()
    save_one(tmp_path, 3)
    assert prune(root, 2) == [".step_000009.part", "step_000001"]
    assert {f.name for f in root.iterdir()} == {*mine, "latest", "step_best", "step_000002", "step_000003"}


def test_two_interrupted_saves_of_one_step_leave_the_complete_one(tmp_path, monkeypatch):
    save_one(tmp_path, 2, 1.0)

    def full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr("parallel.checkpoint.write_bytes", full)
            with pytest.raises(OSError):
                save_one(tmp_path, 2, 5.0)
        assert value_of(find(tmp_path)) == 1.0
    assert save_one(tmp_path, 2, 6.0) == find(tmp_path) and value_of(find(tmp_path)) == 6.0


@pytest.mark.parametrize("saved", [True, False])
def test_a_job_that_is_queued_again_goes_on_from_its_own_checkpoint(tmp_path, monkeypatch, saved):
    old = save_one(tmp_path, 1)
    os.utime(old / MARKER, (1e9, 1e9))
    attempt = tmp_path / "logs" / "attempt_2"
    attempt.mkdir(parents=True)
    (attempt / "rank_000.json").write_text('{"job": "77", "restart": "0"}')
    os.utime(attempt / "rank_000.json", (1.1e9, 1.1e9))
    if saved:
        save_one(tmp_path, 2)
    assert find(tmp_path, "none") is None
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for resume in ("none", str(old)):
        found = find(tmp_path, resume)
        assert (found and found.name) == ("step_000002" if saved else None if resume == "none" else "step_000001")


@pytest.mark.parametrize("damage", DAMAGE)
def test_restore_falls_back_when_a_byte_is_flipped(tmp_path, damage):
    save_one(tmp_path, 1)
    torn = save_one(tmp_path, 2)
    DAMAGE[damage](torn)
    states = one_state(float("nan"))
    with pytest.raises(Torn, match=SHARD):
        restore_newest(tmp_path, str(torn), KINDS, states, 0, None, CPU)
    found = restore_newest(tmp_path, "auto", KINDS, states, 0, None, CPU)
    assert found.name == "step_000001"
    assert all((store == 1.0).all() for store in states["parameters"][1].values())
    assert find(tmp_path).name == "step_000001"  # the damaged one does not count any more
    save_one(tmp_path, 2, 20.0)
    assert find(tmp_path) == torn and value_of(torn) == 20.0


def test_a_damaged_only_checkpoint_is_an_error_not_a_silent_restart(tmp_path):
    flip(save_one(tmp_path, 1) / SHARD, -1)
    with pytest.raises(ValueError, match='checkpoint.resume = "none"'):
        restore_newest(tmp_path, "auto", KINDS, one_state(), 0, None, CPU)
    assert find(tmp_path, "none") is None


def test_stale_latest_is_only_a_hint(tmp_path, caplog):
    save_one(tmp_path, 1)
    save_one(tmp_path, 2)
    latest = tmp_path / "checkpoints" / "latest"
    for text in ("step_000001\n", "gone\n", ""):
        latest.write_text(text)
        with caplog.at_level(logging.WARNING):
            assert find(tmp_path).name == "step_000002"
        assert "latest" in caplog.text
    latest.unlink()
    assert find(tmp_path).name == "step_000002"
    assert find(tmp_path / "elsewhere") is None


def test_newest_is_the_one_saved_last(tmp_path):
    """After a resume from an older checkpoint, those of the abandoned branch are not newer."""
    for step in (10, 20, 30):
        save_one(tmp_path, step)
    save_one(tmp_path, 15)
    assert find(tmp_path).name == "step_000015"


def test_prune_keeps_the_last_and_every_nth(tmp_path):
    root = tmp_path / "checkpoints"
    for step in range(1, 8):
        save_one(tmp_path, step)
    (root / ".step_000099.part").mkdir()
    (root / "step_000003" / MARKER).unlink()
    removed = prune(root, keep=2, keep_every=4)
    assert sorted(p.name for p in root.glob("step_*")) == ["step_000004", "step_000006", "step_000007"]
    assert not list(root.glob(".step*")) and ".step_000099.part" in removed
    for path in root.glob("step_*"):
        (path / MARKER).unlink()
    assert prune(root, keep=1) == []  # nothing is removed while nothing is complete


def test_saving_a_step_again_replaces_it(tmp_path):
    save_one(tmp_path, 1, 1.0)
    path = save_one(tmp_path, 1, 5.0)
    assert value_of(path) == 5.0 and len(list((tmp_path / "checkpoints").glob("*step*"))) == 1


@pytest.mark.parametrize("at", ["write", "rename", "mark", "latest"])
def test_a_crash_at_any_point_of_a_save_leaves_a_complete_one(tmp_path, monkeypatch, at):
    """The same step is saved twice, the second save dies at a point; then a third works."""
    save_one(tmp_path, 1, 1.0)
    save_one(tmp_path, 2, 2.0)

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        if at == "rename":
            patch.setattr(Path, "rename", die)
        elif at == "write":
            patch.setattr(checkpoint, "write", die)
        else:
            done = checkpoint.write_bytes
            name = MARKER if at == "mark" else "latest"
            patch.setattr(
                checkpoint, "write_bytes", lambda file, data: die() if file.name == name else done(file, data)
            )
        with pytest.raises(Killed):
            save_one(tmp_path, 2, 3.0)
    found = find(tmp_path)
    assert (found.name, value_of(found)) == (("step_000002", 3.0) if at == "latest" else (found.name, 2.0))
    path = save_one(tmp_path, 2, 4.0)
    prune(tmp_path / "checkpoints", 2)
    assert value_of(find(tmp_path)) == 4.0 and find(tmp_path) == path
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_000001", "step_000002"]


def test_wrong_model_state_or_dtype_is_one_error(tmp_path):
    path = save_one(tmp_path, 1)
    states = one_state()
    other = kinds(model_shape({**CONFIGS["qwen3_moe"], "vocab_size": 41}))
    with pytest.raises(ValueError, match="another model.*embed"):
        restore(path, other, states, 0, None, CPU)
    with pytest.raises(ValueError, match="no state 'master'"):
        restore(path, KINDS, {"master": states["parameters"]}, 0, None, CPU)
    pieces, stores = states["parameters"]
    half = {"parameters": (pieces, {name: store.bfloat16() for name, store in stores.items()})}
    with pytest.raises(ValueError, match="saved as float32, the model has bfloat16"):
        restore(path, KINDS, half, 0, None, CPU)


def test_background_save_takes_a_snapshot_and_raises_later(tmp_path):
    saver = Saver(tmp_path / "checkpoints", KINDS, 0, None, background=True)
    states, small = one_state(1.0), {"list": [1]}
    saver.save(1, states, small, {}, keep=1)
    for store in states["parameters"][1].values():
        store.fill_(9.0)
    small["list"].append(2)
    saver.wait()
    path = find(tmp_path)
    assert value_of(path) == 1.0 and load_small(path)["list"] == [1]
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("in the way")
    saver.save(2, states, small, {})
    with pytest.raises(OSError):
        saver.wait()
    saver.wait()


def test_the_next_save_waits_for_the_one_in_the_background_and_raises_its_failure(tmp_path, monkeypatch):
    root, states, go = tmp_path / "checkpoints", one_state(1.0), threading.Event()
    original = checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *args: (go.wait(10), original(*args))[1])
    saver = Saver(root, KINDS, 0, None, background=True)
    saver.save(1, states, {"step": 1}, {})
    assert find(tmp_path) is None, "training goes on while it is written"
    threading.Timer(0.2, go.set).start()
    saver.save(2, states, {"step": 2}, {})
    assert (root / "step_000001" / MARKER).exists()
    saver.wait()
    monkeypatch.setattr(checkpoint, "write", full_disk)
    saver.save(3, states, {"step": 3}, {})
    with pytest.raises(OSError, match="No space left"):
        saver.save(4, states, {"step": 4}, {})
    assert find(tmp_path).name == "step_000002"


def full_disk(file: Path, *_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))


def _save_on_full_disk(rank: int, root: str) -> str:
    pieces, stores = one_state()["parameters"]
    states = {"parameters": (pieces if rank == 0 else (), stores if rank == 0 else {})}
    big = {"parameters": (pieces, {**stores, "filler": torch.zeros(4 << 20)})} if rank == 1 else states
    with gloo(2):
        save(root, 1, KINDS, states, {}, rank, None, {"rank": rank})
        with pytest.raises(OSError) as error:
            save(root, 2, KINDS, big, {}, rank, None, {"rank": rank})
    return str(error.value)


@pytest.mark.slow
def test_a_full_disk_is_everybodys_error_and_leaves_the_last_checkpoint(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        messages = run_ranks(2, _save_on_full_disk, str(disk / "checkpoints"))
        assert all(
            "rank " in message and "No space left" in message and ".safetensors" in message for message in messages
        )
        assert find(disk).name == "step_000001" and value_of(find(disk)) == 1.0
        assert not list((disk / "checkpoints").glob(".*"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_mutated_checkpoints_are_refused_or_intact(tmp_path):
    """Any change of any byte of any file is found, by name, and never changes a value."""
    good = save_one(tmp_path / "good", 1)
    files = {file.name: file.read_bytes() for file in good.iterdir()}
    for seed in range(100):
        pick = random.Random(seed)
        bad = tmp_path / "bad"
        bad.mkdir(exist_ok=True)
        for name, data in files.items():
            (bad / name).write_bytes(data)
        name = pick.choice(sorted(files))
        data = bytearray(files[name])
        if pick.random() < 0.5:
            data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
        else:
            del data[pick.randrange(len(data)) :]
        (bad / name).write_bytes(data)
        try:
            load_small(bad), load_own(bad, 0)
            assert value_of(bad) == 1.0
        except ValueError as error:
            assert str(bad) in str(error) and len(str(error).splitlines()) <= 5
            continue
        raise AssertionError(f"seed {seed}: a change in {name} went unnoticed")


# -- size


def test_a_235b_checkpoint_of_128_ranks_is_planned_and_checked_in_seconds(tmp_path):
    config = {
        **CONFIGS["qwen3_moe"],
        **dict(hidden_size=16, num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4, head_dim=2),
        **dict(num_experts=128, moe_intermediate_size=8, vocab_size=512),
    }
    shape = model_shape(config)
    grid = TrainGrid(128, tp=4, pp=8, ep=4, etp=4)
    layout = megatron_layout(shape, grid, first=11, last=11)
    lists = []
    began = time.process_time()
    for rank in range(128):
        by_store: dict = {}
        for piece in layout.pieces(rank):
            for single in single_layers(piece):
                by_store.setdefault(single.store, []).append(single)
        coord = grid.coord(rank)
        found = []
        for name, pieces in by_store.items():
            size = 1 + max(p.offset_of(*(hi - 1 for _, hi in p.box[1:])) for p in pieces)
            cut, of = (coord.edp, grid.edp) if "experts" in name else (coord.dp, grid.dp)
            start, stop = size * cut // of, size * (cut + 1) // of
            found += [part for piece in pieces for part in range_boxes(piece, start, stop)]
        lists.append(found)
    flat = disjoint(lists, kinds(shape))
    assert not cover_gap([piece for row in flat for piece in row], kinds(shape))
    assert time.process_time() - began < 5


def test_part_of_keeps_the_layer_number():
    piece = Piece("k", ((4, 8), (0, 1), (0, 2), (0, 3)), "s.{layer}", 1, 5, (6, 3, 1))
    part = part_of(piece, ((6, 7), (0, 1), (1, 2), (1, 3)))
    assert part.store_name(6) == piece.store_name(6) == "s.3" and part.offset == 9


def test_the_hash_of_a_file_is_that_of_its_blocks(tmp_path):
    """Whatever pieces the writer and the reader give, and on disk: sha256 over the CRC-32 of every 8 MiB."""
    stores = {"a": torch.rand(3 << 20), "b": torch.rand(5), "c": torch.rand(2 << 20)}
    size, written, _ = write(tmp_path / "f", stores)
    data = (tmp_path / "f").read_bytes()
    blocks = [zlib.crc32(data[i : i + (8 << 20)]).to_bytes(4, "little") for i in range(0, len(data), 8 << 20)]
    assert len(blocks) == 3 and size == len(data)
    assert written == hashlib.sha256(b"".join(blocks)).hexdigest()
    assert read(tmp_path / "f", read_header(tmp_path / "f"), {}, hashed=True) == written
