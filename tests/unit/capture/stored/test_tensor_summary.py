"""Summaries of tensors: counts of bins, of NaN and of infinities, for every dtype and any values."""

from __future__ import annotations

import math

import pytest
import torch

from holdfast.capture.stored import statistics
from holdfast.capture.stored.events import Stats
from holdfast.capture.stored.statistics import copy_summary, find_ends, format_values, summarize_tensor


def test_a_summary_has_the_numbers_of_a_tensor() -> None:
    tensor = torch.tensor([[1.0, -2.0, 0.0], [math.nan, math.inf, -math.inf]])

    found = summarize_tensor(tensor, bins=3)

    assert (found.stats.minimum, found.stats.maximum, found.stats.zero, found.stats.nan, found.stats.inf) == (
        -2.0,
        1.0,
        1,
        1,
        2,
    )
    assert found.stats.mean == pytest.approx(-1 / 3)
    assert found.stats.norm == pytest.approx(math.sqrt(5))
    assert (found.low, found.high, found.stats.histogram) == (-2.0, 1.0, (1, 0, 2))


def test_bins_are_those_of_torch() -> None:
    tensor = torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    found = summarize_tensor(tensor, bins=16)

    expected = torch.histc(tensor, bins=16, min=float(tensor.min()), max=float(tensor.max()))
    assert list(found.stats.histogram) == [int(count) for count in expected]


def test_a_large_tensor_is_summarized_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1000.0).reshape(10, 100).T
    whole = summarize_tensor(tensor)
    monkeypatch.setattr(statistics, "_SUMMARY_ITEMS", 7)

    assert summarize_tensor(tensor) == whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_other_dtypes_have_summaries(dtype: torch.dtype) -> None:
    found = summarize_tensor(torch.tensor([0, 1, 1, 1]).to(dtype), bins=2)

    assert (found.stats.minimum, found.stats.maximum, found.stats.zero, found.stats.histogram) == (0.0, 1.0, 1, (1, 3))


def test_of_complex_values_the_magnitudes_are_summarized() -> None:
    found = summarize_tensor(torch.tensor([3 + 4j, 0j]), bins=2)

    assert (found.stats.minimum, found.stats.maximum, found.stats.histogram) == (0.0, 5.0, (1, 1))


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.full((3,), math.nan)])
def test_without_finite_values_there_is_no_histogram(tensor: torch.Tensor) -> None:
    found = summarize_tensor(tensor)

    assert found.stats.histogram == ()
    assert found.stats.nan == tensor.numel()
    assert find_ends(tensor) is None


def test_a_constant_is_in_one_bin() -> None:
    found = summarize_tensor(torch.full((7,), 0.5), bins=4)

    assert (found.low, found.high, found.stats.histogram) == (0.5, 0.5, (0, 0, 7, 0))


def test_the_whole_range_of_floats_has_bins() -> None:
    most = torch.finfo(torch.float64).max
    found = summarize_tensor(torch.tensor([-most, 0.0, most], dtype=torch.float64), bins=4)

    assert sum(found.stats.histogram) == 3
    assert (found.stats.histogram[0], found.stats.histogram[-1]) == (1, 1)


def test_two_sides_share_their_ends() -> None:
    one, other = torch.tensor([0.0, 1.0, math.inf]), torch.tensor([-3.0, 0.5])

    assert find_ends(one, other) == (-3.0, 1.0)
    assert summarize_tensor(one, ends=(-3.0, 1.0), bins=4).stats.histogram == (0, 0, 0, 2)


def test_stored_numbers_make_a_summary() -> None:
    stats = Stats(minimum=-1.0, maximum=2.0, mean=0.5, norm=3.0, nan=1, inf=2, zero=3, histogram=(1, 2))

    found = copy_summary(stats)

    assert (found.low, found.high, found.stats.histogram, found.stats.nan, found.stats.zero) == (
        -1.0,
        2.0,
        (1, 2),
        1,
        3,
    )


def test_only_the_corners_of_a_large_tensor_are_shown() -> None:
    small, large = torch.arange(4, dtype=torch.bfloat16), torch.zeros(1000, 1000)

    assert format_values(small) == ["[0. 1. 2. 3.]"]
    assert len(format_values(large)) < 10
