"""Statistics of tensors: exact counts and ends, sums up to rounding; the same whether measured alone or together."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from holdfast.capture.stored.events import Measured, Stats
from holdfast.capture.stored.observed import observe
from holdfast.capture.stored.statistics import (
    SMALL_BYTES,
    StatsTally,
    Unmeasured,
    find_values,
    measure_all,
    measure_bytes,
    measure_values,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16])
def test_bytes_become_numbers(dtype: torch.dtype) -> None:
    observed = observe(torch.arange(6.0).to(dtype))

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

    stats = measure_bytes(observe(tensor).data, dtype, 8)

    assert stats is not None
    assert (stats.minimum, stats.maximum) == (float(exact.min()), float(exact.max()))
    assert stats.zero == int((exact == 0).sum())
    assert stats.mean == pytest.approx(float(exact.mean()), rel=1e-6, abs=1e-5)
    assert stats.norm == pytest.approx(float(exact.norm()), rel=1e-6)


def test_a_negative_zero_counts_as_zero() -> None:
    tensor = torch.tensor([-0.0, 0.0, 1.0])

    stats = measure_bytes(observe(tensor).data, torch.float32, 0)

    assert stats is not None
    assert stats.zero == 2


SMALL = {
    "plain": torch.tensor([1.0, -2.0, 0.0, 3.5]),
    "other": torch.tensor([0.25, 0.5, 0.75, 9.0]),
    "nan": torch.tensor([1.0, math.nan, 0.0, 2.0]),
    "infinite": torch.tensor([1.0, math.inf, -math.inf, 2.0]),
    "equal": torch.full((4,), 2.0),
    "wide": torch.tensor([-3e38, 3e38, 0.0, 1.0]),
    "longer": torch.linspace(-1, 1, 100),
    "double": torch.tensor([1.0, 2.0], dtype=torch.float64),
    "integers": torch.arange(5),
    "flags": torch.tensor([True, False]),
    "one": torch.tensor(3.0),
    "none": torch.zeros(0),
    "large": torch.linspace(-2, 3, SMALL_BYTES),
}


def take_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(observe(tensor).data)


def list_exact(stats: Stats) -> list[str]:
    """Return everything but the sums; as text, because NaN is not equal to itself."""
    return [repr(value) for value in vars_of(replace(stats, mean=0.0, norm=0.0))]


def vars_of(stats: Stats) -> list[object]:
    return [getattr(stats, name) for name in Stats.__dataclass_fields__]


def test_tensors_that_are_measured_together_have_the_statistics_of_each_alone() -> None:
    waiting = [Unmeasured(Measured(), take_bytes(tensor), tensor.dtype) for tensor in SMALL.values()]

    measure_all(waiting, 8)

    for each in waiting:
        alone = measure_bytes(each.memory, each.dtype, 8)
        assert alone is not None
        assert each.target.stats is not None
        assert list_exact(each.target.stats) == list_exact(alone)
        assert each.target.stats.mean == pytest.approx(alone.mean, rel=1e-6, abs=1e-7, nan_ok=True)
        assert each.target.stats.norm == pytest.approx(alone.norm, rel=1e-6, nan_ok=True)


def test_statistics_do_not_depend_on_what_is_measured_together() -> None:
    memory = take_bytes(torch.randn(500, generator=torch.Generator().manual_seed(0)))
    others = [take_bytes(torch.full((500,), float(number))) for number in range(9)]
    single, among = Measured(), Measured()

    measure_all([Unmeasured(single, memory, torch.float32)], 8)
    measure_all([Unmeasured(Measured(), other, torch.float32) for other in others[:5]]
                + [Unmeasured(among, memory, torch.float32)]
                + [Unmeasured(Measured(), other, torch.float32) for other in others[5:]], 8)  # fmt: skip

    assert single.stats == among.stats


def test_without_bins_there_are_no_histograms() -> None:
    waiting = [Unmeasured(Measured(), take_bytes(tensor), tensor.dtype) for tensor in SMALL.values()]

    measure_all(waiting, 0)

    assert {each.target.stats.histogram for each in waiting if each.target.stats} == {()}
