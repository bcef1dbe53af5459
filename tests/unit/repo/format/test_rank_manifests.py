"""Joining the parts that several ranks saved into one entry."""

from __future__ import annotations

import pytest

from holdfast.digest import hash_bytes
from holdfast.errors import Corrupt
from holdfast.repo.format.chunk import ChunkRef
from holdfast.repo.format.entry import NO_RANK, Entry
from holdfast.repo.format.rank_manifests import join_entry

STATED = Entry("x", 6, ())


def make_part(*pieces: tuple[bytes, tuple[int, ...]], dims: int = 1) -> Entry:
    """Return one rank's part: bytes, each with its box."""
    refs = tuple(ChunkRef(hash_bytes(data), len(data), None, data, box) for data, box in pieces)
    return STATED._replace(chunks=refs, dims=dims)


def list_bytes(entry: Entry) -> list[bytes]:
    return [ref.inline for ref in entry.chunks]


def test_spans_of_all_ranks_are_joined_in_order() -> None:
    parts = [make_part((b"cd", (2, 2))), make_part((b"ef", (4, 2)), (b"ab", (0, 2)))]
    joined = join_entry(STATED, parts, None)
    assert list_bytes(joined) == [b"ab", b"cd", b"ef"]
    assert joined.dims == 0
    assert all(ref.box == () for ref in joined.chunks)


def test_the_same_span_of_two_ranks_counts_once() -> None:
    parts = [make_part((b"abcd", (0, 4))), make_part((b"abcd", (0, 4)), (b"ef", (4, 2)))]
    assert list_bytes(join_entry(STATED, parts, None)) == [b"abcd", b"ef"]


@pytest.mark.parametrize(
    "pieces",
    [
        [(b"ab", (0, 2)), (b"ef", (4, 2))],
        [(b"ab", (0, 2)), (b"cd", (2, 2))],
        [(b"abcd", (0, 4)), (b"cdef", (2, 4))],
        [],
    ],
    ids=["gap", "end missing", "overlap", "nothing"],
)
def test_spans_with_a_gap_or_an_overlap_are_damage(pieces: list[tuple[bytes, tuple[int, ...]]]) -> None:
    with pytest.raises(Corrupt, match="do not add up to its 6 bytes"):
        join_entry(STATED, [make_part(*pieces)], None)


def test_boxes_that_are_whole_rows_become_a_span() -> None:
    parts = [make_part((b"def", (1, 0, 1, 3)), dims=2), make_part((b"abc", (0, 0, 1, 3)), dims=2)]
    joined = join_entry(STATED, parts, None)
    assert (joined.dims, list_bytes(joined)) == (0, [b"abc", b"def"])


def test_boxes_that_are_columns_stay_boxes() -> None:
    parts = [make_part((b"ad", (0, 0, 2, 1)), dims=2), make_part((b"bcef", (0, 1, 2, 2)), dims=2)]
    joined = join_entry(STATED, parts, None)
    assert (joined.dims, list_bytes(joined)) == (2, [b"ad", b"bcef"])


@pytest.mark.parametrize(("rank", "expected"), [(1, b"one"), (2, b"second"), (None, b"one"), (5, b"one")])
def test_of_a_value_that_differs_by_rank_one_is_chosen(rank: int | None, expected: bytes) -> None:
    variants = [
        Entry("x", len(data), (ChunkRef(hash_bytes(data), len(data), None, data),), rank=owner)
        for owner, data in ((2, b"second"), (1, b"one"))
    ]
    joined = join_entry(STATED, variants, rank)
    assert (list_bytes(joined), joined.size_bytes, joined.rank) == ([expected], len(expected), NO_RANK)
