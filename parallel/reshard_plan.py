"""Plan the movement of weights from one layout to another: who sends which box to whom, in which round. Pure numpy.

    match     distinct source boxes x distinct target boxes -> common boxes; replicas play no part yet
    choose    for each rank that needs a common box: itself, else holders on its node, else all holders. Demand on one
              set of holders is laid on a line, needers by rank, and cut into equal shares: egress is level and a rank
              meets few peers
    schedule  a pair of ranks exchanges one stream of boxes; each round carries an equal share of every stream, so all
              pipeline stages send all the time and the number of rounds is total / cap

Every cut falls on a row, or on a unit (expert) where that is fine enough. Everything is int64 arithmetic on sorted
arrays: equal on every rank and in every process. The whole plan keeps one row a stream box; only `fragments`
expands rounds, for one rank or for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from parallel.layout import Box, Kind, Layout, elements
from parallel.reshard_cuts import Ints, cut, expand, grain, sizes

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MESSAGES_PER_CAP = 128
"""Streams shorter than rounds x cap / this are sent in fewer, longer messages."""
UNITS_PER_ROUND = 16
"""A unit is an atom of rounds when at least this many fit the share of a stream that a round carries."""
UNITS_PER_HOLDER = 64
"""The same for cuts between holders, which decide how level egress is."""


@dataclass(frozen=True)
class Table:
    """Rows of moves. `source` and `target` number the distinct boxes of the kind, as in Plan.*_boxes."""

    kind: Ints
    box: Ints
    """[rows, 4, 2]"""
    src: Ints
    dst: Ints
    source: Ints
    target: Ints

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def size(self) -> Ints:
        """Elements of each row."""
        return sizes(self.box)

    def take(self, index: Ints, box: Ints | None = None) -> Table:
        rows = {f.name: getattr(self, f.name)[index] for f in fields(self)}
        return Table(**rows if box is None else {**rows, "box": box})


@dataclass(frozen=True)
class Plan:
    kinds: tuple[Kind, ...]
    source_boxes: tuple[tuple[Box, ...], ...]
    target_boxes: tuple[tuple[Box, ...], ...]
    world: int
    node_size: int
    item_bytes: int
    """Bytes of an element on the wire: the target's type."""
    cap_bytes: int
    rounds: int
    moves: Table
    """Between ranks, sorted by (src, dst); the rows of one pair are its stream."""
    local: Table
    """Copies within a rank."""
    stream_start: Ints
    """First row of each stream, and the number of rows at the end."""
    parts: Ints
    """[streams] rounds that a stream takes part in, consecutive from `phase` modulo rounds."""
    phase: Ints

    def fragments(self, rank: int | None = None) -> tuple[Ints, Table]:
        """(round, row) of everything that `rank` (None: any rank) sends or receives, in the order of the buffers."""
        moves, streams = self.moves, np.arange(len(self.parts))
        if rank is not None:
            first = self.stream_start[:-1]
            streams = np.flatnonzero((moves.src[first] == rank) | (moves.dst[first] == rank))
        rows, stream = expand(self.stream_start[streams], self.stream_start[streams + 1])
        row, part, box = cut(moves.box[rows], stream, self.parts[streams], UNITS_PER_ROUND)
        number = (self.phase[streams][stream[row]] + part) % self.rounds
        order = np.argsort(number, kind="stable")
        return number[order], moves.take(rows[row[order]], box[order])

    def peak_bytes(self, rank: int) -> tuple[int, int]:
        """(sent, received) bytes of `rank` in its fullest round: the sizes of its buffers."""
        number, table = self.fragments(rank)
        sides = []
        for side in (table.src, table.dst):
            mine = side == rank
            load = np.bincount(number[mine], weights=table.size[mine], minlength=1)
            sides.append(int(load.max()) * self.item_bytes)
        return sides[0], sides[1]

    @property
    def digest(self) -> str:
        """Equal plans have equal digests, whatever process made them."""
        state = hashlib.blake2b(digest_size=16)
        state.update(repr((self.kinds, self.world, self.item_bytes, self.rounds)).encode())
        for table in (self.moves, self.local):
            for field in fields(table):
                state.update(np.ascontiguousarray(getattr(table, field.name), dtype="<i8").tobytes())
        for array in (self.stream_start, self.parts, self.phase):
            state.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return state.hexdigest()


def plan(source: Layout, target: Layout, node_size: int = 8, cap_bytes: int = 256 << 20, partial: bool = False) -> Plan:
    """Moves that write every element of `target` once, from `source`, on the same ranks.

    No rank sends or receives more than `cap_bytes` in a round. With `partial` target boxes that the source does not
    cover are left alone, else they are a ValueError that names tensor and box.
    """
    if source.world != target.world:
        raise ValueError(f"{source.name} is on {source.world} ranks, {target.name} on {target.world}")
    kinds = tuple(target.kinds.values())
    found, source_boxes, target_boxes = [], [], []
    for number, kind in enumerate(kinds):
        if source.kinds.get(kind.name, kind) != kind:
            raise ValueError(f"{kind.name}: {source.name} has {source.kinds[kind.name]}, {target.name} has {kind}")
        held, needed = source.table.get(kind.name, {}), target.table[kind.name]
        common = match(held, needed)
        if _overlaps(kind, common, needed):
            held = _atoms(held)
            common = match(held, needed)
        if not partial:
            _require_cover(kind, common, needed, source, target)
        found.append(_choose(number, common, list(held.values()), list(needed.values()), source.world, node_size))
        source_boxes.append(tuple(held))
        target_boxes.append(tuple(needed))
    rows = Table(*(np.concatenate([getattr(t, f.name) for t in found]) for f in fields(Table)))
    rows = rows.take(np.argsort(rows.src * source.world + rows.dst, kind="stable"))
    moves, local = rows.take(rows.src != rows.dst), rows.take(rows.src == rows.dst)
    item_bytes = ITEM_BYTES[target.dtype]
    start, rounds, parts, phase = _schedule(moves, source.world, cap_bytes // item_bytes)
    return Plan(
        kinds=kinds,
        source_boxes=tuple(source_boxes),
        target_boxes=tuple(target_boxes),
        world=source.world,
        node_size=node_size,
        item_bytes=item_bytes,
        cap_bytes=cap_bytes,
        rounds=rounds,
        moves=moves,
        local=local,
        stream_start=start,
        parts=parts,
        phase=phase,
    )


# Match


@dataclass(frozen=True)
class Match:
    source: Ints
    target: Ints
    box: Ints


def _array(boxes: Iterable[Box]) -> Ints:
    return np.array(list(boxes), dtype=np.int64).reshape(-1, 4, 2)


def match(held: Iterable[Box], needed: Iterable[Box], chunk: int = 1 << 20) -> Match:
    """Common boxes of all pairs, in the order (target, source)."""
    a, b = _array(held), _array(needed)
    parts = []
    step = max(1, chunk // max(1, len(a)))
    for first in range(0, len(b), step):
        block = b[first : first + step]
        hit = np.ones((len(block), len(a)), dtype=bool)
        for axis in range(4):
            hit &= np.maximum(block[:, None, axis, 0], a[None, :, axis, 0]) < np.minimum(
                block[:, None, axis, 1], a[None, :, axis, 1]
            )
        parts.append(np.argwhere(hit) + (first, 0))
    pairs = np.concatenate(parts) if parts else np.zeros((0, 2), dtype=np.int64)
    target, source = pairs[:, 0], pairs[:, 1]
    lo = np.maximum(a[source, :, 0], b[target, :, 0])
    hi = np.minimum(a[source, :, 1], b[target, :, 1])
    return Match(source, target, np.stack([lo, hi], axis=2))


def _covered(common: Match, count: int) -> Ints:
    total = np.zeros(count, dtype=np.int64)
    np.add.at(total, common.target, sizes(common.box))
    return total


def _overlaps(kind: Kind, common: Match, needed: dict[Box, tuple[int, ...]]) -> bool:
    """Whether source boxes overlap within a needed box, also where a gap of equal size hides it: elements are counted
    by random weights, which add up to those of the box only if each is covered once.
    """
    boxes = _array(needed)
    if (_covered(common, len(needed)) > sizes(boxes)).any():
        return True
    weights, full = _weights(kind), _covered(common, len(needed)) == sizes(boxes)
    total = np.zeros(len(needed), dtype=np.uint64)
    np.add.at(total, common.target, _weigh(common.box, weights))
    return bool((total != _weigh(boxes, weights))[full].any())


def _weights(kind: Kind) -> list[np.ndarray]:
    """Running sums, modulo 2**64, of a random weight of every coordinate of every axis; alike in every process."""
    random = np.random.default_rng(0)
    drawn = [random.integers(1, 1 << 63, size, dtype=np.uint64) for size in kind.shape]
    return [np.concatenate([np.zeros(1, np.uint64), np.cumsum(axis, dtype=np.uint64)]) for axis in drawn]


def _weigh(boxes: Ints, weights: list[np.ndarray]) -> np.ndarray:
    spans = [sums[boxes[:, axis, 1]] - sums[boxes[:, axis, 0]] for axis, sums in enumerate(weights)]
    return spans[0] * spans[1] * spans[2] * spans[3]


def _atoms(held: dict[Box, tuple[int, ...]]) -> dict[Box, tuple[int, ...]]:
    """Boxes cut wherever any of them begins or ends, so that no two overlap; their holders joined."""
    cuts = [sorted({edge for box in held for edge in box[axis]}) for axis in range(4)]
    holders: dict[Box, set[int]] = {}
    for box, ranks in held.items():
        inside = [[c for c in cuts[axis] if lo <= c <= hi] for axis, (lo, hi) in enumerate(box)]
        spans = [list(zip(edges, edges[1:], strict=False)) for edges in inside]
        for index in np.ndindex(*(len(span) for span in spans)):
            atom = tuple(span[i] for span, i in zip(spans, index, strict=True))
            holders.setdefault(atom, set()).update(ranks)  # type: ignore[arg-type]
    return {box: tuple(sorted(ranks)) for box, ranks in holders.items()}


def _require_cover(
    kind: Kind, common: Match, needed: dict[Box, tuple[int, ...]], source: Layout, target: Layout
) -> None:
    covered = _covered(common, len(needed))
    for (box, ranks), have in zip(needed.items(), covered, strict=True):
        if have != elements(box):
            name = kind.tensor_name(box[0][0], box[1][0])
            raise ValueError(
                f"reshard: {kind.name} ({name} and on): box {box} of {target.name}, needed by ranks "
                f"{list(ranks)[:8]}, has {have} of {elements(box)} elements in {source.name}"
            )


# Choose


def _choose(
    number: int, common: Match, holders: list[tuple[int, ...]], needers: list[tuple[int, ...]], world: int, node: int
) -> Table:
    """Rows of one kind: every (common box, needer) and who sends it."""
    if not len(common.source):
        empty = np.zeros(0, dtype=np.int64)
        return Table(empty, common.box, empty, empty, empty, empty)
    flat = np.array([rank for ranks in holders for rank in ranks], dtype=np.int64)
    start = np.cumsum([0, *(len(ranks) for ranks in holders)])
    keys = np.repeat(np.arange(len(holders)), np.diff(start)) * world + flat
    pair, dst = _needers(common, needers)
    base = common.source[pair] * world
    lo = np.searchsorted(keys, base + dst)
    local = keys[np.minimum(lo, len(keys) - 1)] == base + dst
    node_start = dst // node * node
    near_lo = np.searchsorted(keys, base + node_start)
    near_hi = np.searchsorted(keys, base + np.minimum(node_start + node, world))
    near = near_lo < near_hi
    first = np.where(local, lo, np.where(near, near_lo, start[common.source[pair]]))
    last = np.where(local, lo + 1, np.where(near, near_hi, start[common.source[pair] + 1]))
    # Demand within a node and demand from other nodes are levelled separately.
    group = (first * (len(flat) + 1) + last) * 2 + near
    order = np.lexsort((common.target[pair], dst, group))
    pair, dst, group, first, last = (x[order] for x in (pair, dst, group, first, last))
    row, holder, box = _share(common.box[pair], group, last - first)
    pair, dst = pair[row], dst[row]
    src = flat[first[row] + holder]
    return Table(np.full(len(row), number), box, src, dst, common.source[pair], common.target[pair])


def _needers(common: Match, needers: list[tuple[int, ...]]) -> tuple[Ints, Ints]:
    """(row of the common boxes, rank) for every rank that needs it."""
    start = np.cumsum([0, *(len(ranks) for ranks in needers)])
    flat = np.array([rank for ranks in needers for rank in ranks], dtype=np.int64)
    index, pair = expand(start[common.target], start[common.target + 1])
    return pair, flat[index]


def _share(box: Ints, group: Ints, holders: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut the line of each group's boxes into equal shares, one a holder: (row, holder, part of the row's box)."""
    begin = np.flatnonzero(np.diff(group, prepend=-1))
    index = np.repeat(np.arange(len(begin)), np.diff(np.append(begin, len(group))))
    return cut(box, index, holders[begin], UNITS_PER_HOLDER)


# Schedule


def _schedule(moves: Table, world: int, cap: int) -> tuple[Ints, int, Ints, Ints]:
    """(stream starts, rounds, parts, phase); `cap` in elements. A round's load counts the coarseness of its cuts."""
    pair = moves.src * world + moves.dst
    begin = np.flatnonzero(np.diff(pair, prepend=-1))
    start = np.append(begin, len(moves))
    if not len(begin):
        return start, 1, begin, begin
    total = np.add.reduceat(moves.size, begin)
    src, dst = moves.src[begin], moves.dst[begin]
    peak = max(int(np.bincount(side, weights=total).max()) for side in (src, dst))
    width = moves.box[:, 3, 1] - moves.box[:, 3, 0]
    quantum = max(cap // MESSAGES_PER_CAP, 1)
    if int(width.max()) * 2 > cap:
        raise ValueError(f"cap of {cap} elements holds less than two rows of {int(width.max())}; raise cap_bytes")
    rounds = max(1, -(-peak // cap))
    while True:
        parts = np.minimum(rounds, -(-total // quantum))
        phase = (np.cumsum(parts) - parts) % rounds
        index = np.repeat(np.arange(len(begin)), np.diff(start))
        grains = grain(moves.box, total[index], parts[index], UNITS_PER_ROUND) * width
        slack = np.where(parts > 1, np.maximum.reduceat(grains, begin), 0)
        if rounds == 1 or _peak_load(src, dst, -(-total // parts) + slack, parts, phase, rounds, world) <= cap:
            return start, rounds, parts, phase
        rounds += max(1, rounds // 32)


def _peak_load(src: Ints, dst: Ints, each: Ints, parts: Ints, phase: Ints, rounds: int, world: int) -> int:
    """Most elements that any rank may send or receive in any round."""
    always = parts == rounds
    some = np.flatnonzero(~always)
    part, stream = expand(np.zeros(len(some), dtype=np.int64), parts[some])
    number = (phase[some][stream] + part) % rounds
    peak = 0
    for side in (src, dst):
        steady = np.bincount(side[always], weights=each[always], minlength=world)
        cell = side[some][stream] * rounds + number
        load = np.bincount(cell, weights=each[some][stream], minlength=world * rounds).reshape(world, rounds)
        peak = max(peak, int((load + steady[:, None]).max()))
    return peak
