"""Observing tensors: bytes, digests and statistics, whatever the layout and dtype."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import pytest
import torch

from holdfast.capture.stored.observed import StatsTally, build_copy, find_values, measure_values, observe
from holdfast.errors import Unsupported

BASE: Final = torch.arange(6.0).reshape(2, 3)


def test_equal_values_have_equal_digests_in_every_layout() -> None:
    strided = torch.zeros(2, 6)[:, ::2].copy_(BASE)

    assert observe(strided).digest() == observe(BASE).digest() == observe(BASE.T.contiguous().T).digest()
    assert observe(BASE.T).digest() != observe(BASE).digest()


def test_a_copy_has_the_bytes_and_the_shape_of_the_tensor() -> None:
    observed = observe(BASE.bfloat16())
    memory = np.empty(observed.data.nbytes, dtype=np.uint8)

    observed.copy(memory)

    assert torch.equal(build_copy(memory, observed.dtype, observed.shape), BASE.bfloat16())


@pytest.mark.parametrize(
    "tensor", [BASE.to_sparse(), BASE.to("meta"), torch.quantize_per_tensor(BASE, 0.1, 0, torch.qint8)]
)
def test_a_tensor_that_its_bytes_do_not_describe_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(Unsupported):
        observe(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16])
def test_bytes_become_numbers(dtype: torch.dtype) -> None:
    observed = observe(BASE.to(dtype))

    values = find_values(np.frombuffer(observed.data, dtype=np.uint8), dtype)

    assert values is not None
    assert values.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_tally_of_blocks_has_the_statistics_of_the_whole() -> None:
    values = np.array([1.0, -2.0, 0.0, math.nan, math.inf, -math.inf, 5.0])
    whole, tally = measure_values(values, 0), StatsTally()

    for block in (values[:3], values[3:6], values[6:], values[:0]):
        finite = tally.add(block)
        tally.add_sums(float(finite.sum()), float(np.square(finite).sum()))

    assert tally.finish() == whole
    assert (whole.minimum, whole.maximum, whole.mean, whole.norm) == (-2.0, 5.0, 1.0, math.sqrt(30))
    assert (whole.nan, whole.inf, whole.zero) == (1, 2, 1)


def test_without_finite_values_only_the_counts_are_known() -> None:
    stats = measure_values(np.array([math.nan, math.inf]), 4)

    assert (stats.nan, stats.inf, stats.zero, stats.histogram) == (1, 1, 0, ())
    assert all(math.isnan(value) for value in (stats.minimum, stats.maximum, stats.mean, stats.norm))


def test_squares_that_overflow_float32_are_added_in_float64() -> None:
    stats = measure_values(np.full(4, 1e30, dtype=np.float32), 0)

    assert stats.norm == pytest.approx(2e30)


def test_a_histogram_counts_in_equal_bins() -> None:
    assert measure_values(np.array([0.0, 1.0, 2.0, 3.9, 4.0]), 2).histogram == (2, 3)
    assert measure_values(np.full(5, 2.0), 2).histogram == ()


@pytest.mark.parametrize("size", [1, 7, 1023, 1024, 5000, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32])
def test_statistics_are_those_of_float64_up_to_rounding(size: int, dtype: torch.dtype) -> None:
    tensor = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 50).round().to(dtype)
    exact = tensor.double()

    stats = observe(tensor).measure(8)

    assert stats is not None
    assert (stats.minimum, stats.maximum) == (float(exact.min()), float(exact.max()))
    assert stats.zero == int((exact == 0).sum())
    assert stats.mean == pytest.approx(float(exact.mean()), rel=1e-6, abs=1e-5)
    assert stats.norm == pytest.approx(float(exact.norm()), rel=1e-6)


def test_a_negative_zero_counts_as_zero() -> None:
    stats = observe(torch.tensor([-0.0, 0.0, 1.0])).measure(0)

    assert stats is not None
    assert stats.zero == 2
