"""Pure arithmetic on pieces that checkpoints need: ranges of flattened stores as boxes, and disjoint covers.

A distributed optimizer holds ranges of flattened parameters. Elements of a piece lie in its store in the order
(unit, row, col), so a range of the store is a run of that order, and a run over three axes is at most five boxes:

    first unit   [....####]   the rest of a row, then whole rows
    whole units  [########]
    last unit    [####....]   whole rows, then the beginning of a row
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from parallel.layout import Box, Kind, Piece, elements, intersect


def single_layers(piece: Piece) -> Iterator[Piece]:
    """One piece for each layer, its store spelled out."""
    (first, last), *rest = piece.box
    for layer in range(first, last):
        box = ((layer, layer + 1), *rest)
        yield replace(piece, box=box, store=piece.store_name(layer), first_layer=0)  # type: ignore[arg-type]


def part_of(piece: Piece, box: Box) -> Piece:
    """The part of a piece that `box`, which lies within it, covers."""
    first_layer = piece.first_layer + box[0][0] - piece.box[0][0]
    return replace(piece, box=box, first_layer=first_layer, offset=piece.offset_of(*(lo for lo, _ in box[1:])))


def range_boxes(piece: Piece, start: int, stop: int) -> list[Piece]:
    """The parts of a single-layer piece within elements [start, stop) of its store, as pieces of that range.

    Their store is the range alone, so offsets count from `start`.
    """
    sizes = [hi - lo for lo, hi in piece.box[1:]]
    if min(sizes) <= 0:
        return []
    ordered = piece.strides[0] >= (sizes[1] - 1) * piece.strides[1] + sizes[2] and piece.strides[1] >= sizes[2]
    assert piece.strides[2] == 1 and (ordered or sizes[0] == 1 or sizes[1] == 1), f"store order of {piece}"
    first, last = (_elements_before(piece, sizes, at) for at in (start, stop))
    corner = [lo for lo, _ in piece.box[1:]]
    found = []
    for run in _runs(first, last, sizes):
        inside = tuple((c + lo, c + hi) for c, (lo, hi) in zip(corner, run, strict=True))
        part = part_of(piece, (piece.box[0], *inside))  # type: ignore[arg-type]
        found.append(replace(part, offset=part.offset - start))
    return found


def _elements_before(piece: Piece, sizes: Sequence[int], at: int) -> int:
    """How many elements of the piece lie before element `at` of the store."""
    left, count, block = at - piece.offset, 0, math.prod(sizes)
    for size, stride in zip(sizes, piece.strides, strict=True):
        if left <= 0:
            return count
        block //= size
        whole = min(left // stride, size) if size > 1 else 0
        count += whole * block
        if whole == size:
            return count
        left -= whole * stride
    return count + (left > 0)


def _runs(first: int, last: int, sizes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Elements [first, last) of a row-major array as boxes of as few axes' cuts as possible."""
    if first >= last:
        return
    if len(sizes) == 1:
        yield [(first, last)]
        return
    block = math.prod(sizes[1:])
    low, high = -(-first // block), last // block  # whole items of the outermost axis
    if low > high:
        item = high
        for run in _runs(first - item * block, last - item * block, sizes[1:]):
            yield [(item, item + 1), *run]
        return
    for run in _runs(first - (low - 1) * block, block, sizes[1:]) if first < low * block else ():
        yield [(low - 1, low), *run]
    if low < high:
        yield [(low, high), *((0, size) for size in sizes[1:])]
    for run in _runs(0, last - high * block, sizes[1:]):
        yield [(high, high + 1), *run]


def subtract(box: Box, other: Box) -> Iterator[Box]:
    """The parts of `box` outside `other`, disjoint."""
    common = intersect(box, other)
    if common is None:
        yield box
        return
    left = list(box)
    for axis, (lo, hi) in enumerate(common):
        for part in ((left[axis][0], lo), (hi, left[axis][1])):
            if part[0] < part[1]:
                yield tuple([*left[:axis], part, *left[axis + 1 :]])  # type: ignore[misc]
        left[axis] = (lo, hi)


def disjoint(lists: Sequence[Sequence[Piece]], kinds: dict[str, Kind]) -> list[list[Piece]]:
    """The same lists with every element in one piece only: the first that holds it.

    Replicas are mostly equal boxes. Only kinds that still hold more elements than they have are cut layer by layer.
    """
    seen: set[tuple[str, Box]] = set()
    unique: list[list[Piece]] = []
    held = dict.fromkeys(kinds, 0)
    for pieces in lists:
        unique.append([])
        for piece in pieces:
            if (piece.kind, piece.box) not in seen:
                seen.add((piece.kind, piece.box))
                unique[-1].append(piece)
                held[piece.kind] += elements(piece.box)
    crowded = {name for name, kind in kinds.items() if held[name] > elements(kind.full_box)}
    taken: dict[tuple[str, int], list[Box]] = {}
    return [
        [part for piece in pieces for part in (_untaken(piece, taken) if piece.kind in crowded else (piece,))]
        for pieces in unique
    ]


def _untaken(piece: Piece, taken: dict[tuple[str, int], list[Box]]) -> Iterator[Piece]:
    for single in single_layers(piece):
        boxes = taken.setdefault((single.kind, single.box[0][0]), [])
        parts = [single.box]
        for other in boxes:
            parts = [rest for part in parts for rest in subtract(part, other)]
        boxes += parts
        yield from (part_of(single, part) for part in parts)


def cover_gap(pieces: Sequence[Piece], kinds: dict[str, Kind]) -> str:
    """What disjoint pieces leave uncovered, in words; "" when they cover every kind."""
    held = dict.fromkeys(kinds, 0)
    for piece in pieces:
        held[piece.kind] += elements(piece.box)
    gaps = [
        f"{name}: {held[name]} of {elements(kind.full_box)} elements"
        for name, kind in kinds.items()
        if held[name] != elements(kind.full_box)
    ]
    return "; ".join(gaps[:3])
