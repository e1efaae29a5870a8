"""Cutting many boxes at once: equal parts of a line of boxes, at row or unit boundaries. Pure numpy."""

from __future__ import annotations

import numpy as np

Ints = np.ndarray


def sizes(boxes: Ints) -> Ints:
    """Elements of each of `boxes` [n, 4, 2]."""
    return (boxes[:, :, 1] - boxes[:, :, 0]).prod(axis=1)


def grain(box: Ints, total: Ints, parts: Ints, fine: int) -> Ints:
    """Rows that stay together: a unit where `fine` of them fit a part, else one."""
    rows = box[:, 2, 1] - box[:, 2, 0]
    width = box[:, 3, 1] - box[:, 3, 0]
    return np.where(rows * width * parts * fine <= total, rows, 1)


def cut(box: Ints, line: Ints, parts: Ints, fine: int) -> tuple[Ints, Ints, Ints]:
    """Lay boxes on lines, one after another, and cut line i into parts[i] of equal length at row boundaries.

    `line` [n] ascends. Returns (row, part, box) of each fragment, in the order of the line.
    """
    if not len(box):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), box
    size = sizes(box)
    begin = np.flatnonzero(np.diff(line, prepend=-1))
    end = np.cumsum(size)
    total = np.add.reduceat(size, begin)[line]
    low = end - size - (end[begin] - size[begin])[line]
    high, count = low + size, parts[line]
    first = ((low + 1) * count - 1) // total
    part, row = expand(first, (high * count - 1) // total + 1)
    start = np.maximum(part * total[row] // count[row], low[row]) - low[row]
    stop = np.minimum((part + 1) * total[row] // count[row], high[row]) - low[row]
    width = box[row, 3, 1] - box[row, 3, 0]
    atom = grain(box[row], total[row], count[row], fine)
    start = start // (width * atom) * atom
    stop = np.where(stop == size[row], size[row] // width, stop // (width * atom) * atom)
    index, pieces = carve(box[row], start, stop)
    return row[index], part[index], pieces


def carve(box: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """Rows [lo, hi) of boxes, counted in the order (layer, unit, row), as boxes: at most five each.

    a0 rows a1 units a2 layers a3 units a4 rows a5
    """
    extent = box[:, :, 1] - box[:, :, 0]
    unit, layer = extent[:, 2], extent[:, 1] * extent[:, 2]
    a1 = np.minimum(hi, -(-lo // unit) * unit)
    a2 = np.maximum(a1, np.minimum(-(-a1 // layer) * layer, hi // unit * unit))
    a3 = np.maximum(a2, hi // layer * layer)
    a4 = np.maximum(a3, hi // unit * unit)
    edges = np.stack([lo, a1, a2, a3, a4, hi], axis=1)
    keep = edges[:, :-1] < edges[:, 1:]
    index, segment = np.nonzero(keep)
    begin, length = edges[index, segment], edges[index, segment + 1] - edges[index, segment]
    unit, layer = unit[index], layer[index]
    out = box[index].copy()
    by_layer, by_row = segment == 2, (segment == 0) | (segment == 4)
    out[:, 0, 0] += begin // layer
    out[:, 0, 1] = np.where(by_layer, out[:, 0, 0] + length // layer, out[:, 0, 0] + 1)
    at = out[:, 1, 0] + begin % layer // unit
    out[:, 1, 0] = np.where(by_layer, out[:, 1, 0], at)
    out[:, 1, 1] = np.where(by_layer, out[:, 1, 1], at + np.where(by_row, 1, length // unit))
    at = out[:, 2, 0] + begin % unit
    out[:, 2, 0] = np.where(by_row, at, out[:, 2, 0])
    out[:, 2, 1] = np.where(by_row, at + length, out[:, 2, 1])
    return index, out


def expand(start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """All integers of the ranges [start, stop) one after another, and which range each comes from."""
    count = stop - start
    which = np.repeat(np.arange(len(count)), count)
    return np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + start[which], which
