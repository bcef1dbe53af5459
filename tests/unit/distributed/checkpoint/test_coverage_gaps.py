"""Descriptions of gaps and overlaps in the boxes that ranks store."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.distributed.checkpoint.plan import StoredBox, find_gaps, find_problems
from holdfast.repo.format.boxes import Box, slices, whole
from tests.kit.tilings import boxes_in, shapes, tilings


@st.composite
def holdings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, Box]]]:
    shape = draw(shapes(max_side=5) | st.just(()))
    parts = draw(st.lists(st.tuples(st.integers(0, 3), boxes_in(shape)), max_size=6))
    return shape, parts


@given(holdings())
def test_every_item_that_is_not_held_once_is_in_one_region(
    drawn: tuple[tuple[int, ...], list[tuple[int, Box]]],
) -> None:
    shape, held = drawn
    expected: dict[tuple[int, ...], tuple[int, ...]] = {}
    for at in np.ndindex(*shape):
        ranks = sorted(rank for rank, box in held if _is_inside(at, box))
        if len(ranks) != 1:
            expected[at] = tuple(ranks)

    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for problem in find_gaps("w", shape, held):
        assert problem.region is not None
        for at in np.ndindex(*shape):
            if _is_inside(at, problem.region):
                assert at not in found
                found[at] = problem.ranks

    assert found == expected


def _is_inside(at: tuple[int, ...], box: Box) -> bool:
    return all(start <= x < stop for x, start, stop in zip(at, box.starts, box.stops, strict=True))


@given(shapes(max_side=6).flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape))))
def test_what_is_held_once_has_no_problems(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, parts = drawn
    counts = np.zeros(shape, int)
    for box in parts:
        counts[slices(box)] += 1

    assert (counts == 1).all()
    assert find_gaps("w", shape, list(enumerate(parts))) == []


def texts(shape: tuple[int, ...], *held: tuple[int, Box]) -> list[str]:
    return [problem.text for problem in find_gaps("model.w", shape, held)]


def test_a_gap_is_named_by_rows_and_columns() -> None:
    left, lower = Box((0, 0), (4, 8)), Box((4, 0), (4, 16))

    assert texts((8, 16), (0, left), (1, lower)) == ["model.w: rows 0:4, columns 8:16 are held by no rank"]


def test_an_overlap_names_its_ranks() -> None:
    upper, lower = Box((0, 0), (5, 16)), Box((4, 0), (4, 16))

    assert texts((8, 16), (1, upper), (3, lower)) == ["model.w: rows 4:5 are held by ranks 1 and 3"]


def test_columns_that_everybody_has_are_named_alone() -> None:
    assert texts((8, 16), (0, Box((0, 4), (8, 12)))) == ["model.w: columns 0:4 are held by no rank"]


@pytest.mark.parametrize(
    ("shape", "held", "text"),
    [
        ((), [], "model.w: all of it is held by no rank"),
        ((3, 4), [], "model.w: all of it is held by no rank"),
        ((3,), [(0, whole((3,))), (1, whole((3,)))], "model.w: all of it is held by ranks 0 and 1"),
        ((), [(2, whole(())), (2, whole(()))], "model.w: all of it is held by rank 2 twice"),
        ((8,), [(0, Box((2,), (6,)))], "model.w: items 0:2 are held by no rank"),
        ((4, 4, 4), [(0, Box((0, 0, 0), (4, 4, 2)))], "model.w: [:, :, 2:4] is held by no rank"),
        ((4, 0), [], "model.w: all of it is held by no rank"),
        ((0,), [(0, whole((0,))), (5, whole((0,)))], "model.w: all of it is held by ranks 0 and 5"),
    ],
)
def test_a_problem_is_a_sentence(shape: tuple[int, ...], held: list[tuple[int, Box]], text: str) -> None:
    assert texts(shape, *held) == [text]


def test_what_lies_outside_is_named_and_the_rest_still_looked_at() -> None:
    assert texts((4, 4), (0, Box((0, 0), (3, 4))), (1, Box((4, 0), (1, 4)))) == [
        "model.w: rank 1 holds rows 4:5, columns 0:4, outside of shape (4, 4)",
        "model.w: rows 3:4 are held by no rank",
    ]


def test_a_region_with_many_edges_beside_it_is_told_once() -> None:
    held = [(rank, Box((rank, 0), (1, 3))) for rank in range(6)]

    assert texts((6, 4), *held) == ["model.w: columns 3:4 are held by no rank"]


def test_many_boxes_are_swept_quickly() -> None:
    held = [(n, Box((n // 100 * 2, n % 100 * 3), (2, 3))) for n in range(10_000)]

    assert texts((200, 300), *held[:-1]) == ["model.w: rows 198:200, columns 297:300 are held by no rank"]


def test_ranks_that_differ_in_dtype_or_shape_are_named() -> None:
    wide, narrow = whole((4, 8)), whole((4, 4))
    found = find_problems(
        [
            StoredBox(0, "a", "float32", (4, 8), wide),
            StoredBox(1, "a", "bfloat16", (4, 8), wide),
            StoredBox(2, "a", "bfloat16", (4, 8), wide),
            StoredBox(0, "b", "float32", (4, 8), wide),
            StoredBox(3, "b", "float32", (4, 4), narrow),
            StoredBox(0, "c", "float32", (4, 4), narrow),
            StoredBox(0, "d", "float32", (4, 8), narrow),
        ]
    )

    assert [problem.text for problem in found] == [
        "a: its dtype is float32 on rank 0 and bfloat16 on ranks 1 and 2",
        "b: its shape is (4, 8) on rank 0 and (4, 4) on rank 3",
        "d: columns 4:8 are held by no rank",
    ]
    assert found[0].ranks == (0, 1, 2)
