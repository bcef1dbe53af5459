"""Portraits: counts of bins, of NaN and of infinities, for whatever a tensor may hold."""

from __future__ import annotations

import math

import pytest
import torch

from holdfast.capture.report import tensor_summary as portrait
from holdfast.capture.report.tensor_summary import copy_summary, find_ends, format_values, summarize_tensor
from holdfast.capture.stored.events import Stats


def test_a_portrait_has_the_numbers_of_a_tensor() -> None:
    tensor = torch.tensor([[1.0, -2.0, 0.0], [math.nan, math.inf, -math.inf]])

    drawn = summarize_tensor(tensor, bins=3)

    assert (drawn.minimum, drawn.maximum, drawn.zero, drawn.nan, drawn.inf) == (-2.0, 1.0, 1, 1, 2)
    assert drawn.mean == pytest.approx(-1 / 3)
    assert drawn.norm == pytest.approx(math.sqrt(5))
    assert (drawn.low, drawn.high, drawn.histogram) == (-2.0, 1.0, (1, 0, 2))


def test_bins_are_those_of_torch() -> None:
    tensor = torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    drawn = summarize_tensor(tensor, bins=16)

    expected = torch.histc(tensor, bins=16, min=float(tensor.min()), max=float(tensor.max()))
    assert list(drawn.histogram) == [int(count) for count in expected]


def test_a_large_tensor_is_drawn_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1000.0).reshape(10, 100).T
    whole = summarize_tensor(tensor)
    monkeypatch.setattr(portrait, "_BLOCK_ITEMS", 7)

    assert summarize_tensor(tensor) == whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_other_dtypes_have_portraits(dtype: torch.dtype) -> None:
    drawn = summarize_tensor(torch.tensor([0, 1, 1, 1]).to(dtype), bins=2)

    assert (drawn.minimum, drawn.maximum, drawn.zero, drawn.histogram) == (0.0, 1.0, 1, (1, 3))


def test_of_complex_values_the_magnitudes_are_drawn() -> None:
    drawn = summarize_tensor(torch.tensor([3 + 4j, 0j]), bins=2)

    assert (drawn.minimum, drawn.maximum, drawn.histogram) == (0.0, 5.0, (1, 1))


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.full((3,), math.nan)])
def test_without_finite_values_there_is_no_histogram(tensor: torch.Tensor) -> None:
    drawn = summarize_tensor(tensor)

    assert drawn.histogram == ()
    assert drawn.nan == tensor.numel()
    assert find_ends(tensor) is None


def test_a_constant_lies_in_one_bin() -> None:
    drawn = summarize_tensor(torch.full((7,), 0.5), bins=4)

    assert (drawn.low, drawn.high, drawn.histogram) == (0.5, 0.5, (0, 0, 7, 0))


def test_the_whole_range_of_floats_has_bins() -> None:
    most = torch.finfo(torch.float64).max
    drawn = summarize_tensor(torch.tensor([-most, 0.0, most], dtype=torch.float64), bins=4)

    assert sum(drawn.histogram) == 3
    assert (drawn.histogram[0], drawn.histogram[-1]) == (1, 1)


def test_two_sides_share_their_ends() -> None:
    one, other = torch.tensor([0.0, 1.0, math.inf]), torch.tensor([-3.0, 0.5])

    assert find_ends(one, other) == (-3.0, 1.0)
    assert summarize_tensor(one, ends=(-3.0, 1.0), bins=4).histogram == (0, 0, 0, 2)


def test_stored_numbers_make_a_portrait() -> None:
    stats = Stats(minimum=-1.0, maximum=2.0, mean=0.5, norm=3.0, nan=1, inf=2, zero=3, histogram=(1, 2))

    drawn = copy_summary(stats)

    assert (drawn.low, drawn.high, drawn.histogram, drawn.nan, drawn.zero) == (-1.0, 2.0, (1, 2), 1, 3)


def test_only_the_corners_of_a_large_tensor_are_shown() -> None:
    small, large = torch.arange(4, dtype=torch.bfloat16), torch.zeros(1000, 1000)

    assert format_values(small) == ["[0. 1. 2. 3.]"]
    assert len(format_values(large)) < 10
