"""The grid of chunks in a span of bytes: where they end, so that equal tensors have equal chunks wherever they are."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from holdfast.repo.format.boxes import Coordinates, cut_rows, volume, whole
from holdfast.repo.format.chunk import CHUNK_BYTES

ITEM_BYTES: Final = frozenset({1, 2, 4, 8, 16})
"""The sizes that an item of a tensor may have."""


class Extent(NamedTuple):
    """The bytes of one tensor in a span of bytes, such as a file or memory that several tensors share."""

    start: int
    stop: int
    item_bytes: int = 1
    shape: Coordinates = ()
    """Its items are in C order of this shape; () if they are not, or if the shape is not known."""


def cut_extent(extent: Extent) -> list[int]:
    """Return where the chunks of an extent end: at whole rows of its shape, or every CHUNK_BYTES without a shape.

    The rows depend on the shape alone, so a tensor that is saved in shards of rows has the same chunks.
    """
    start, stop, item_bytes, shape = extent
    if stop - start <= CHUNK_BYTES:
        return [stop]
    if not shape:
        return [*range(start + CHUNK_BYTES, stop, CHUNK_BYTES), stop]
    sizes = (volume(cell) * item_bytes for cell in cut_rows(whole(shape), shape, item_bytes))
    return list(accumulate(sizes, initial=start))[1:]


def cut_extents(extents: Iterable[Extent]) -> list[int]:
    """Return where chunks end: at every edge of an extent, and between two edges on the grid of the extent there.

    Of several extents with the same edges, the first decides. Bytes between extents are cut every CHUNK_BYTES.
    """
    known: dict[tuple[int, int], Extent] = {}
    for extent in extents:
        known.setdefault((extent.start, extent.stop), extent)
    edges = sorted({edge for between in known for edge in between})
    return [end for edge in pairwise(edges) for end in cut_extent(known.get(edge) or Extent(*edge))]
