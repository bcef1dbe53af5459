"""Shares of chunks: every chunk once, each holder a contiguous range, and no share much larger than the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.distributed.checkpoint.plan import plan_shares


@given(st.lists(st.integers(0, 1 << 20), max_size=60), st.integers(1, 20))
def test_every_chunk_is_one_holders_and_no_share_is_large(sizes: list[int], holders: int) -> None:
    shares = plan_shares(sizes, holders)

    assert len(shares) == holders
    assert [chunk for share in shares for chunk in share] == list(range(len(sizes)))
    for share in shares:
        assert holders * sum(sizes[chunk] for chunk in share) <= sum(sizes) + holders * max(sizes, default=0)


@pytest.mark.parametrize(
    ("sizes", "holders", "shares"),
    [
        ([], 3, [[], [], []]),
        ([7], 1, [[0]]),
        ([5, 5, 5, 5], 2, [[0, 1], [2, 3]]),
        ([5, 5], 4, [[], [0], [], [1]]),
        ([100, 1, 1, 1], 2, [[0], [1, 2, 3]]),
        ([0, 0], 2, [[], [0, 1]]),
    ],
)
def test_shares_are_stretches_of_about_the_same_size(sizes: list[int], holders: int, shares: list[list[int]]) -> None:
    assert [list(share) for share in plan_shares(sizes, holders)] == shares


def test_nobody_cannot_share() -> None:
    with pytest.raises(ValueError, match="holders=0"):
        plan_shares([1], 0)
