"""Boxes of tensors: every region is filled from every cut, with the bytes that a brute-force model has there."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.digest import hash_bytes
from holdfast.errors import Corrupt
from holdfast.repo.format.boxes import Box, cut_rows, slices, whole
from holdfast.repo.format.chunk import ChunkRef
from holdfast.repo.format.entry import Entry
from holdfast.repo.read.read_plan import Region, Want, list_entry_wants, list_region_wants

ITEM_BYTES = 2

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(starts, tuple(draw(st.integers(1, size - at)) for at, size in zip(starts, shape, strict=True)))


@st.composite
def tilings(draw: st.DrawFn, box: Box) -> list[Box]:
    """Cut a box in two, now and then, along any dim."""
    wide = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if not wide or draw(st.integers(0, 2)) == 0:
        return [box]
    dim = draw(st.sampled_from(wide))
    at = draw(st.integers(1, box.sizes[dim] - 1))
    low = Box(box.starts, (*box.sizes[:dim], at, *box.sizes[dim + 1 :]))
    high = Box(
        (*box.starts[:dim], box.starts[dim] + at, *box.starts[dim + 1 :]),
        (*box.sizes[:dim], box.sizes[dim] - at, *box.sizes[dim + 1 :]),
    )
    return draw(tilings(low)) + draw(tilings(high))


def make_array(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(prod(shape), dtype=np.uint16).reshape(shape)


def chunk_of(data: bytes, box: tuple[int, ...] = ()) -> ChunkRef:
    return ChunkRef(hash_bytes(data), len(data), None, data, box)


def cut_boxes(array: np.ndarray, tiling: list[Box]) -> Entry:
    chunks = [chunk_of(array[slices(box)].tobytes(), (*box.starts, *box.sizes)) for box in tiling]
    return Entry("x", array.nbytes, tuple(chunks), dims=array.ndim)


def cut_span(array: np.ndarray, cuts: list[int]) -> Entry:
    data, edges = array.tobytes(), sorted({0, array.nbytes, *cuts})
    chunks = [chunk_of(data[low:high]) for low, high in pairwise(edges)]
    return Entry("x", array.nbytes, tuple(chunks))


def fill(wants: list[Want]) -> None:
    for want in wants:
        want.put(memoryview(want.ref.inline))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_region_comes_from_boxes_as_it_is_in_the_tensor(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    array = make_array(shape)
    entry = cut_boxes(array, data.draw(tilings(whole(shape))))
    region = data.draw(boxes(shape))
    buffer = bytearray(prod(region.sizes) * ITEM_BYTES)

    wants = (list_region_wants if len(shape) > 1 else _from_row)(
        entry, Region(region, shape, ITEM_BYTES), memoryview(buffer)
    )
    fill(wants)

    assert bytes(buffer) == array[slices(region)].tobytes()


def _from_row(entry: Entry, region: Region, buffer: memoryview) -> list[Want]:
    chunks = sorted(entry.chunks, key=lambda chunk: chunk.box)
    return list_region_wants(entry._replace(chunks=tuple(chunks), dims=0), region, buffer)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_region_comes_from_a_row_of_bytes_as_it_is_in_the_tensor(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    array = make_array(shape)
    entry = cut_span(array, data.draw(st.lists(st.integers(1, array.nbytes), max_size=5)))
    region = data.draw(boxes(shape))
    buffer = bytearray(prod(region.sizes) * ITEM_BYTES)

    wants = list_region_wants(entry, Region(region, shape, ITEM_BYTES), memoryview(buffer))
    fill(wants)

    assert bytes(buffer) == array[slices(region)].tobytes()
    assert {want.ref.digest for want in wants} <= {ref.digest for ref in _overlapping(entry, region, shape)}


def _overlapping(entry: Entry, region: Box, shape: tuple[int, ...]) -> list[ChunkRef]:
    """Return the chunks that contain a byte of the region: no other chunk may be read."""
    mask = np.zeros(shape, np.uint16)
    mask[slices(region)] = 0xFFFF
    held, end, found = mask.tobytes(), 0, []
    for ref in entry.chunks:
        begin, end = end, end + ref.size_bytes
        if any(held[begin:end]):
            found.append(ref)
    return found


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_range_of_bytes_comes_from_boxes_as_it_is_in_the_tensor(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple))
    array = make_array(shape)
    entry = cut_boxes(array, data.draw(tilings(whole(shape))))
    start = data.draw(st.integers(0, array.nbytes))
    buffer = bytearray(data.draw(st.integers(0, array.nbytes - start)))

    fill(list_entry_wants(entry, start, memoryview(buffer)))

    assert bytes(buffer) == array.tobytes()[start : start + len(buffer)]


def test_only_chunks_that_hold_some_of_a_region_are_read() -> None:
    array = make_array((8, 8))
    entry = cut_boxes(array, [Box((0, at), (8, 2)) for at in range(0, 8, 2)])

    wants = list_region_wants(entry, Region(Box((0, 2), (8, 3)), (8, 8), ITEM_BYTES), memoryview(bytearray(48)))

    assert [want.ref.box for want in wants] == [(0, 2, 8, 2), (0, 4, 8, 2)]


def test_a_box_that_is_wanted_as_a_whole_needs_no_copy() -> None:
    array = make_array((8, 8))
    box = Box((0, 2), (8, 2))
    entry = cut_boxes(array, [Box((0, at), (8, 2)) for at in range(0, 8, 2)])

    (want,) = list_region_wants(entry, Region(box, (8, 8), ITEM_BYTES), memoryview(bytearray(32)))

    assert want.scatter is None
    assert want.is_whole


def test_boxes_that_make_up_no_tensor_are_damage() -> None:
    entry = Entry("x", 7, (chunk_of(b"1234", (0, 0, 2, 2)),), dims=2)

    with pytest.raises(Corrupt, match="its boxes do not add up to 7 bytes"):
        list_entry_wants(entry, 0, memoryview(bytearray(7)))


def test_chunks_of_rows_are_boxes_of_whole_rows() -> None:
    assert cut_rows(Box((3, 0), (5, 1 << 19)), (8, 1 << 19), ITEM_BYTES) == [
        Box((row, 0), (1, 1 << 19)) for row in range(3, 8)
    ]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_chunks_that_hold_none_of_a_region_need_not_be_there(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    array = make_array(shape)
    cuts = [2 * at for at in data.draw(st.lists(st.integers(1, array.size), max_size=5))]
    entry = cut_span(array, cuts)
    region = data.draw(boxes(shape))
    held = {ref.digest for ref in _overlapping(entry, region, shape)}
    begins = np.cumsum([0, *(ref.size_bytes for ref in entry.chunks)]).tolist()
    placed = [ref._replace(box=(at, ref.size_bytes)) for ref, at in zip(entry.chunks, begins, strict=False)]
    some = entry._replace(chunks=tuple(ref for ref in placed if ref.digest in held), dims=1)
    buffer = bytearray(prod(region.sizes) * ITEM_BYTES)

    fill(list_region_wants(some, Region(region, shape, ITEM_BYTES), memoryview(buffer)))

    assert bytes(buffer) == array[slices(region)].tobytes()


@pytest.mark.parametrize("region", [Box((2, 0), (3, 8)), Box((2, 1), (3, 4))])
@pytest.mark.parametrize("kind", ["boxes", "row"])
def test_a_region_whose_chunks_are_not_there_is_refused(region: Box, kind: str) -> None:
    array = make_array((8, 8))
    rows = [Box((at, 0), (2, 8)) for at in (0, 4, 6)]
    some = cut_boxes(array, rows)
    if kind == "row":
        chunks = [ref._replace(box=(16 * ref.box[0], ref.size_bytes)) for ref in some.chunks]
        some = some._replace(chunks=tuple(chunks), dims=1)
    buffer = memoryview(bytearray(ITEM_BYTES * prod(region.sizes)))

    with pytest.raises(Corrupt, match="'x' is only one part of an entry"):
        list_region_wants(some, Region(region, (8, 8), ITEM_BYTES), buffer)
    with pytest.raises(Corrupt, match="'x'"):
        list_entry_wants(some, 0, memoryview(bytearray(array.nbytes)))
