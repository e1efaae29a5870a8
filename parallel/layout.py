"""Kinds, boxes, pieces and layouts: the plain data in which every weight movement of the project is said.

A *kind* is a family of Hugging Face tensors that differ only in layer and unit, seen as one array with the axes
(layer, unit, row, col). The unit is the expert of expert matrices (a tensor each) and the KV group of q, k and v
(row blocks of one tensor); other kinds have one unit. Vectors have one row (norms) or one column (q, k, v biases).

    box     half-open interval on each axis                        what is held
    piece   box + store name + offset + strides of (unit, row, col)    where it lives; each layer is a store of its own
    layout  rank -> coordinate -> pieces                           who holds it; equal coordinates are replicas

Padding is what no box covers. Nothing here communicates or imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

Box = tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Kind:
    name: str
    """Short and unique, for example "q" or "expert_gate"."""
    template: str
    """Hugging Face tensor name with {layer} and, when each unit is a tensor, {unit}."""
    shape: tuple[int, int, int, int]
    """(layers, units, rows, cols)."""
    ndim: int = 2
    """Dimensions of one Hugging Face tensor."""

    @property
    def unit_is_tensor(self) -> bool:
        return "{unit}" in self.template

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of one Hugging Face tensor of this kind."""
        _, units, rows, cols = self.shape
        rows = rows if self.unit_is_tensor else units * rows
        return (rows, cols) if self.ndim == 2 else (rows * cols,)

    def tensor_name(self, layer: int, unit: int = 0) -> str:
        return self.template.format(layer=layer, unit=unit)

    @property
    def full_box(self) -> Box:
        layers, units, rows, cols = self.shape
        return ((0, layers), (0, units), (0, rows), (0, cols))


@dataclass(frozen=True)
class Piece:
    kind: str
    box: Box
    store: str
    """Parameter name; {layer} in it becomes `first_layer` for the box's first layer, and so on."""
    first_layer: int
    offset: int
    """Elements from the store's start to the box's first element."""
    strides: tuple[int, int, int]
    """Elements between neighbours along unit, row and col."""

    def store_name(self, layer: int) -> str:
        """Store of global layer `layer`."""
        return self.store.replace("{layer}", str(layer - self.box[0][0] + self.first_layer))

    def only(self, wanted: Callable[[str], bool]) -> Iterator[Piece]:
        """Parts of the piece, one a layer, that lie in stores with wanted names; all of it when every name is."""
        (first, last), *rest = self.box
        layers = [layer for layer in range(first, last) if wanted(self.store_name(layer))]
        if len(layers) == last - first:
            yield self
            return
        for layer in layers:
            box: Box = ((layer, layer + 1), *rest)  # type: ignore[assignment]
            yield replace(self, box=box, first_layer=self.first_layer + layer - first)

    def offset_of(self, unit: int, row: int, col: int) -> int:
        (_, (u, _), (r, _), (c, _)) = self.box
        return self.offset + (unit - u) * self.strides[0] + (row - r) * self.strides[1] + (col - c) * self.strides[2]


@dataclass(frozen=True)
class Layout:
    name: str
    kinds: dict[str, Kind]
    coordinates: tuple[Any, ...]
    """One hashable value per rank; ranks with equal coordinates hold equal pieces."""
    pieces_of: Callable[[Any], tuple[Piece, ...]]
    dtype: str
    """Element type of the stores: "bfloat16", "float32"."""

    @property
    def world(self) -> int:
        return len(self.coordinates)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        return self._by_coordinate[self.coordinates[rank]]

    @cached_property
    def _by_coordinate(self) -> dict[Hashable, tuple[Piece, ...]]:
        return {c: self.pieces_of(c) for c in dict.fromkeys(self.coordinates)}

    def only(self, wanted: Callable[[str], bool]) -> Layout:
        """What lies in stores with wanted names; kinds with nothing there are left out."""
        kept = {c: tuple(part for p in pieces for part in p.only(wanted)) for c, pieces in self._by_coordinate.items()}
        used = {piece.kind for pieces in kept.values() for piece in pieces}
        kinds = {name: kind for name, kind in self.kinds.items() if name in used}
        return Layout(self.name, kinds, self.coordinates, kept.__getitem__, self.dtype)

    @cached_property
    def table(self) -> dict[str, dict[Box, tuple[int, ...]]]:
        """kind -> distinct box -> ranks that hold it, ascending. A rank counts once however many stores it has."""
        ranks: dict[Hashable, list[int]] = {}
        for rank, coordinate in enumerate(self.coordinates):
            ranks.setdefault(coordinate, []).append(rank)
        holders: dict[str, dict[Box, set[int]]] = {name: {} for name in self.kinds}
        for coordinate, members in ranks.items():
            for piece in self._by_coordinate[coordinate]:
                holders[piece.kind].setdefault(piece.box, set()).update(members)
        return {k: {box: tuple(sorted(held)) for box, held in boxes.items()} for k, boxes in holders.items()}


def elements(box: Box) -> int:
    """Number of elements; 0 when any interval is empty."""
    count = 1
    for lo, hi in box:
        count *= max(0, hi - lo)
    return count


def intersect(a: Box, b: Box) -> Box | None:
    """Common part of two boxes, or None."""
    box = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return box if all(lo < hi for lo, hi in box) else None  # type: ignore[return-value]
