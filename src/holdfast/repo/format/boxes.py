"""Boxes: rectangular parts of a global tensor, their overlaps, and how they are cut into chunks; without torch.

A box of volume zero is empty, whatever its starts are. A 0-d tensor is the box of two empty tuples, of volume one.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from holdfast.repo.format.chunk import CHUNK_BYTES

Coordinates = tuple[int, ...]


class Box(NamedTuple):
    """A part of a global tensor: its start and its size in each dim."""

    starts: Coordinates
    sizes: Coordinates

    @property
    def stops(self) -> Coordinates:
        """The end of the box in each dim, exclusive."""
        return add(self.starts, self.sizes)


def add(left: Coordinates, right: Coordinates) -> Coordinates:
    """Add dim by dim; both have the same number of dims."""
    return tuple(a + b for a, b in zip(left, right, strict=True))


def subtract(left: Coordinates, right: Coordinates) -> Coordinates:
    """Subtract dim by dim; both have the same number of dims."""
    return tuple(a - b for a, b in zip(left, right, strict=True))


def whole(shape: Coordinates) -> Box:
    """Return the box that covers a whole tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def volume(box: Box) -> int:
    """Return the number of items in a box."""
    return math.prod(box.sizes)


def overlap(left: Box, right: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    starts = tuple(map(max, left.starts, right.starts))
    sizes = subtract(tuple(map(min, left.stops, right.stops)), starts)
    return Box(starts, sizes) if all(size > 0 for size in sizes) else None


def contains(outer: Box, inner: Box) -> bool:
    """Return whether `inner` is inside `outer`; an empty box is inside every box."""
    return volume(inner) == 0 or overlap(outer, inner) == inner


def relative(box: Box, origin: Coordinates) -> Box:
    """Return the box relative to `origin`, such as the starts of the box that contains it."""
    return Box(subtract(box.starts, origin), box.sizes)


def slices(box: Box) -> tuple[slice, ...]:
    """Return the index that selects the box from a tensor."""
    return tuple(map(slice, box.starts, box.stops))


def cut_rows(box: Box, global_shape: Coordinates, item_bytes: int) -> list[Box]:
    """Cut a box into chunks, in C order, on the grid of cells of the global tensor.

    Cells are whole rows of the outermost dim. Their boundaries depend on the *global* tensor alone, so a tensor that is
    sharded differently has the same chunks, except in cells that an edge of a box crosses. If a row of the box is
    larger than a chunk, the row is cut along the next dim in the same way.
    """
    if volume(box) == 0:
        return []
    if not box.sizes:
        return [box]
    starts, sizes = box.starts[1:], box.sizes[1:]
    if math.prod(sizes) * item_bytes > CHUNK_BYTES:
        inner = cut_rows(Box(starts, sizes), global_shape[1:], item_bytes)
        rows = range(box.starts[0], box.stops[0])
        return [Box((row, *part.starts), (1, *part.sizes)) for row in rows for part in inner]
    edges = _find_edges(box.starts[0], box.stops[0], global_shape[0], math.prod(global_shape[1:]) * item_bytes)
    return [Box((low, *starts), (high - low, *sizes)) for low, high in pairwise(edges)]


def _find_edges(start: int, stop: int, rows: int, row_bytes: int) -> list[int]:
    """Return the cell boundaries from `start` to `stop`, both included; `rows` counts those of the whole tensor."""
    count = count_cells(rows, row_bytes)
    # The first edge above `start`, and all below `stop`: edge i is at row i * rows // count.
    first, last = start * count // rows + 1, -(-stop * count // rows)
    edges = (number * rows // count for number in range(first, last))
    return [start, *(edge for edge in edges if start < edge < stop), stop]


def count_cells(rows: int, row_bytes: int) -> int:
    """Return the number of cells of a tensor; their numbers of rows differ by at most one.

    There are at least so many that each fits in a chunk, and up to a third more, to reach a multiple of a large power
    of two: rows that are divided equally between 2, 4, 8 or more ranks are then cut at cell boundaries.
    """
    least = -(-rows // max(1, CHUNK_BYTES // max(row_bytes, 1)))
    count, step = least, 2
    while (rounded := -(-least // step) * step) <= min(rows, least + least // 3):
        count, step = rounded, 2 * step
    return count


def is_span(box: Box, shape: Coordinates) -> bool:
    """Return whether a box is one contiguous range of the global tensor in C order, or empty."""
    # Inside the outermost dim in which the box has more than one item, it must cover every dim.
    is_one = True
    for size, length in zip(box.sizes, shape, strict=True):
        if not is_one and size != length:
            return volume(box) == 0
        is_one = is_one and size == 1
    return True


def span_of(box: Box, shape: Coordinates, item_bytes: int) -> tuple[int, int]:
    """Return the byte range, in the global tensor in C order, of a box for which `is_span` holds."""
    assert is_span(box, shape)
    if volume(box) == 0:
        return (0, 0)
    first = 0
    for start, length in zip(box.starts, shape, strict=True):
        first = first * length + start
    return (first * item_bytes, (first + volume(box)) * item_bytes)
