"""Chunks end at the edges of tensors and on the grid of their rows, and never lose or repeat a byte."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.repo.format.grid import Extent, cut_extent, cut_extents

MIB = 1 << 20


@st.composite
def extents(draw: st.DrawFn) -> Extent:
    shape = tuple(draw(st.lists(st.integers(1, 3000), min_size=1, max_size=2)))
    item_bytes = draw(st.sampled_from([1, 2, 4, 8]))
    start = draw(st.integers(0, 4 * MIB))
    size_bytes = item_bytes * shape[0] * (shape[1] if len(shape) > 1 else 1)
    return Extent(start, start + size_bytes, item_bytes, draw(st.sampled_from([shape, ()])))


@given(st.lists(extents(), min_size=1, max_size=6))
def test_chunks_cover_everything_from_the_first_edge_to_the_last(found: list[Extent]) -> None:
    low, high = min(each.start for each in found), max(each.stop for each in found)

    ends = cut_extents(found)

    assert ends[-1] == high
    assert all(0 < stop - start <= CHUNK_BYTES for start, stop in pairwise([low, *ends]))
    assert {edge for each in found for edge in (each.start, each.stop)} <= {low, *ends}


@given(extents(), st.integers(0, 4 * MIB))
def test_the_chunks_of_a_tensor_do_not_depend_on_where_it_is(extent: Extent, shift: int) -> None:
    moved = extent._replace(start=extent.start + shift, stop=extent.stop + shift)

    assert cut_extent(moved) == [end + shift for end in cut_extent(extent)]


def test_a_tensor_is_cut_at_whole_rows() -> None:
    ends = cut_extent(Extent(100, 100 + 3 * 700_000, 1, (3, 700_000)))

    assert ends == [700_100, 1_400_100, 2_100_100]


def test_without_a_shape_a_chunk_has_a_mebibyte() -> None:
    assert cut_extent(Extent(5, 5 + 3 * MIB)) == [MIB + 5, 2 * MIB + 5, 3 * MIB + 5]


def test_bytes_between_two_tensors_are_cut_on_their_own() -> None:
    first, second = Extent(0, 10), Extent(10 + MIB + 7, 20 + MIB + 7)

    assert cut_extents([first, second]) == [10, 10 + MIB, 17 + MIB, 27 + MIB]


def test_of_two_tensors_in_the_same_bytes_the_first_decides() -> None:
    rows = Extent(0, 3 * 700_000, 1, (3, 700_000))

    assert cut_extents([rows, Extent(0, 3 * 700_000)]) == cut_extent(rows)


def test_no_tensors_need_no_cuts() -> None:
    assert cut_extents([]) == []
