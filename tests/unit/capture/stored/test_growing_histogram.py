"""A histogram of one pass counts every value, whatever comes later."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.capture.stored.statistics import GrowingHistogram


def count(*blocks: list[float]) -> tuple[float, float, list[int]]:
    histogram = GrowingHistogram()
    for block in blocks:
        histogram.add(np.array(block))
    return histogram.read()


def test_nothing_is_an_empty_histogram() -> None:
    assert count() == (0.0, 0.0, [])
    assert count([]) == (0.0, 0.0, [])


def test_equal_values_are_one_bin() -> None:
    assert count([2.0, 2.0], [2.0]) == (2.0, 2.0, [3])


@pytest.mark.parametrize("order", [1, -1])
def test_the_range_grows_to_both_sides_and_nothing_is_lost(order: int) -> None:
    blocks = [[0.0, 1.0], [5.0], [-40.0, 3.0], [1000.0], [0.5] * 7][::order]

    low, high, counts = count(*blocks)

    assert low <= -40
    assert high >= 1000
    assert sum(counts) == sum(map(len, blocks))


def test_it_is_close_to_one_that_knows_the_range() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    histogram = GrowingHistogram()
    for start in range(0, values.size, 1000):
        histogram.add(values[start : start + 1000])

    low, high, counts = histogram.read()
    expected, _ = np.histogram(values, bins=len(counts), range=(low, high))

    assert len(counts) > 20
    assert np.abs(np.array(counts) - expected).max() < 0.002 * values.size


@pytest.mark.parametrize("block", [[-1.7e308, 1.7e308], [5e-324, 0.0], [1.0, 1.0 + 2e-16], [3e38, -3e38, 0.0]])
def test_extreme_values_are_counted(block: list[float]) -> None:
    low, high, counts = count(block, [0.0])

    assert sum(counts) == len(block) + 1
    assert np.isfinite([low, high]).all()
