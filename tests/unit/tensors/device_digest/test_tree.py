"""The levels of a tree join all nodes of a run, and no pair overwrites a node that another pair reads."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.tensors.device_digest.pieces import PARENT, ROOT, Runs, TreeLevel, number_firsts, plan_levels


def _list_pairs(level: TreeLevel) -> list[tuple[int, int]]:
    counts = np.diff(level.first_pairs, append=level.num_pairs)
    return [
        (int(row) + 2 * level.stride * pair, int(row) + 2 * level.stride * pair + level.stride)
        for row, count in zip(level.first_rows, counts, strict=True)
        for pair in range(int(count))
    ]


def _nest(first: int, stop: int) -> object:
    """Return BLAKE3's tree of leaves: the left side has the largest power of two that leaves one for the right side."""
    if stop - first == 1:
        return first
    left = 1 << (stop - first - 1).bit_length() - 1
    return _nest(first, first + left), _nest(first + left, stop)


@pytest.mark.parametrize("counts", [[1], [2], [3], [7, 1, 8], [1, 1024, 5, 1000], [13, 2, 2, 31]], ids=str)
def test_nodes_are_joined_as_in_the_specification(counts: list[int]) -> None:
    sizes = np.array(counts, dtype=np.int64)
    firsts = number_firsts(sizes)
    nodes: list[object] = list(range(sum(counts)))

    for level in plan_levels(Runs(firsts, sizes, np.ones_like(sizes))):
        pairs = _list_pairs(level)
        assert len({row for pair in pairs for row in pair}) == 2 * len(pairs)
        for left, right in pairs:
            nodes[left] = (nodes[left], nodes[right])

    assert [nodes[first] for first in firsts] == [
        _nest(int(first), int(first) + count) for first, count in zip(firsts, counts, strict=True)
    ]


def test_only_the_last_pair_of_a_piece_is_a_root() -> None:
    runs = Runs(np.array([0, 3, 7]), np.array([3, 4, 2]), np.array([1, 0, 1]))

    flags = [level.flags.tolist() for level in plan_levels(runs)]

    assert flags == [[PARENT, PARENT, PARENT | ROOT], [PARENT | ROOT, PARENT]]
