"""Boxes against sets of coordinates, and chunks that do not depend on how many ranks hold a tensor."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.repo.format import boxes as module
from holdfast.repo.format.boxes import (
    Box,
    add,
    contains,
    count_cells,
    cut_rows,
    is_span,
    overlap,
    relative,
    slices,
    span_of,
    subtract,
    volume,
    whole,
)
from holdfast.repo.format.chunk import CHUNK_BYTES
from tests.kit.tilings import boxes_in, shapes


def members(box: Box) -> set[tuple[int, ...]]:
    return set(product(*map(range, box.starts, box.stops)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(shapes(min_side=0))
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


@given(pairs())
def test_an_overlap_is_what_both_hold(drawn: tuple[tuple[int, ...], Box, Box]) -> None:
    _, left, right = drawn

    found = overlap(left, right)

    assert (set() if found is None else members(found)) == members(left) & members(right)
    assert found is None or volume(found) == len(members(found)) > 0


@given(pairs())
def test_a_box_contains_what_it_holds_all_of(drawn: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, left, right = drawn

    assert contains(left, right) == (members(right) <= members(left))
    assert contains(whole(shape), left)


@given(pairs())
def test_a_box_can_be_seen_from_elsewhere_and_back(drawn: tuple[tuple[int, ...], Box, Box]) -> None:
    _, left, right = drawn

    seen = relative(left, right.starts)

    assert Box(add(seen.starts, right.starts), seen.sizes) == left
    assert relative(left, left.starts) == whole(left.sizes)


def test_what_has_another_number_of_dims_is_not_added() -> None:
    with pytest.raises(ValueError, match="shorter"):
        add((1, 2), (1,))
    with pytest.raises(ValueError, match="longer"):
        subtract((1,), (1, 2))


def test_a_scalar_is_one_box_of_one_item() -> None:
    box = whole(())

    assert volume(box) == 1
    assert overlap(box, box) == box
    assert cut_rows(box, (), 8) == [box]
    assert is_span(box, ())
    assert span_of(box, (), 8) == (0, 8)


@given(pairs())
def test_a_span_is_one_stretch_of_the_global_tensor(drawn: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, box, _ = drawn
    items = np.arange(math.prod(shape)).reshape(shape)[slices(box)].reshape(-1).tolist()
    is_stretch = all(right == left + 1 for left, right in pairwise(items))

    assert is_span(box, shape) == is_stretch
    if is_stretch:
        assert span_of(box, shape, 4) == ((4 * items[0], 4 * items[-1] + 4) if items else (0, 0))


@st.composite
def cut_cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, int, int]:
    shape = draw(shapes(max_side=9, min_side=0))
    return shape, draw(boxes_in(shape)), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([4, 8, 32, 100]))


@given(cut_cases())
def test_chunks_are_small_and_hold_every_item_once_in_order(case: tuple[tuple[int, ...], Box, int, int]) -> None:
    shape, box, item, limit = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", limit)
        chunks = cut_rows(box, shape, item)

    numbers = np.arange(math.prod(shape)).reshape(shape)
    counts = np.zeros(shape, int)
    for chunk in chunks:
        counts[slices(chunk)] += 1
        assert 0 < volume(chunk) * item <= limit
        assert contains(box, chunk)
    wanted = np.zeros(shape, int)
    wanted[slices(box)] = 1
    assert (counts == wanted).all()
    firsts = [int(numbers[chunk.starts]) for chunk in chunks]
    assert firsts == sorted(firsts)


@given(cut_cases())
def test_a_cell_that_no_edge_cuts_is_a_chunk_of_the_whole(case: tuple[tuple[int, ...], Box, int, int]) -> None:
    shape, box, item, limit = case
    rows = Box((box.starts[0], *(0 for _ in shape[1:])), (box.sizes[0], *shape[1:]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", limit)
        cells = [cell for cell in cut_rows(whole(shape), shape, item) if contains(rows, cell)]
        chunks = cut_rows(rows, shape, item)

    assert set(cells) <= set(chunks)


def test_rows_larger_than_a_chunk_are_cut_along_the_next_dim() -> None:
    shape = (2, 600, 1024)

    chunks = cut_rows(whole(shape), shape, 4)

    assert chunks[:3] == [
        Box((0, 0, 0), (1, 150, 1024)),
        Box((0, 150, 0), (1, 150, 1024)),
        Box((0, 300, 0), (1, 150, 1024)),
    ]
    assert len(chunks) == 8


@pytest.mark.parametrize(
    ("rows", "row_bytes", "cells"),
    [
        (1, 10, 1),
        (4, 256 << 10, 1),
        (5, 256 << 10, 2),
        (3, 700 << 10, 3),  # only one row fits
        (11008, 8192, 96),  # 86 would do
        (5120, 10240, 64),
        (32000, 8192, 256),
        (7, 1 << 20, 7),  # there are no more rows
        (3, 5 << 20, 3),
    ],
)
def test_cells_are_a_multiple_of_a_power_of_two_that_costs_no_more_than_a_third(
    rows: int, row_bytes: int, cells: int
) -> None:
    assert count_cells(rows, row_bytes) == cells


def test_an_edge_inside_of_a_cell_cuts_that_cell_only() -> None:
    shape = (1000, 1024)  # 250 rows of float32 are a cell

    chunks = cut_rows(Box((100, 0), (800, 1024)), shape, 4)

    assert [(chunk.starts[0], chunk.stops[0]) for chunk in chunks] == [(100, 250), (250, 500), (500, 750), (750, 900)]


def cut_for_ranks(shape: tuple[int, ...], world_size: int) -> set[Box]:
    """Return the chunks that ranks have of a tensor of two bytes an item, cut along its first dim."""
    rows = -(-shape[0] // world_size)
    chunks: set[Box] = set()
    for start in range(0, shape[0], rows):
        part = overlap(whole(shape), Box((start, *(0 for _ in shape[1:])), (rows, *shape[1:])))
        assert part is not None
        chunks.update(cut_rows(part, shape, 2))
    return chunks


def count_shared(left: set[Box], right: set[Box]) -> int:
    return 2 * sum(volume(chunk) for chunk in left & right)


LLM_SHAPES = [(32000, 4096), (128256, 8192), (28672, 8192), (11008, 4096), (4096, 11008), (5120, 5120), (13824, 5120)]


@pytest.mark.parametrize("shape", [*LLM_SHAPES, (64, 2048, 4096)])
def test_most_chunks_of_large_shards_are_the_same_for_any_number_of_ranks(shape: tuple[int, ...]) -> None:
    by_world = {world_size: cut_for_ranks(shape, world_size) for world_size in (1, 8, 16)}

    for left, right in ((1, 8), (1, 16), (8, 16)):
        assert count_shared(by_world[left], by_world[right]) >= 0.9 * 2 * math.prod(shape)


@pytest.mark.parametrize("shape", LLM_SHAPES)
def test_no_more_than_a_chunk_is_lost_at_each_edge_between_ranks(shape: tuple[int, ...]) -> None:
    by_world = {world_size: cut_for_ranks(shape, world_size) for world_size in (1, 6, 8, 16)}

    for left, right in ((1, 6), (1, 8), (1, 16), (8, 16)):
        lost = 2 * math.prod(shape) - count_shared(by_world[left], by_world[right])
        assert lost <= (left - 1 + right - 1) * CHUNK_BYTES
