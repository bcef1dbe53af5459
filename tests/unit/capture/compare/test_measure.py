"""The numbers of a comparison: checked against plain formulas, up to the limits of floats."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.testing._comparison import default_tolerances

from holdfast.capture.compare import measure as measuring
from holdfast.capture.compare.measure import (
    EXACT,
    TABLE,
    TensorDistance,
    Tolerance,
    find_tolerance,
    find_wider,
    measure,
    measure_stats,
)
from holdfast.capture.stored.events import Stats
from holdfast.diff import values

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64, torch.complex128, torch.int32, torch.bool])
def test_the_table_is_that_of_torch(dtype: torch.dtype) -> None:
    assert find_tolerance(dtype, dtype) == Tolerance(*default_tolerances(dtype))


def test_the_table_has_all_that_torch_has_for_numbers() -> None:
    assert {*TABLE} == {"float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"}


def test_the_largest_difference_is_found_with_its_index_and_both_values() -> None:
    a = torch.zeros(3, 4)
    b = a.clone()
    b[1, 2], b[2, 3] = 0.5, -2.0

    found = measure(a, b)

    assert (found.max_abs, found.at, found.values) == (2.0, (2, 3), (0.0, -2.0))
    assert (found.total, found.unequal, found.mismatches) == (12, 2, 2)
    assert found.percent == pytest.approx(100 * 2 / 12)
    assert not found.is_close


@given(st.integers(0, 2**31), st.sampled_from(FLOATS), st.sampled_from([1e-7, 1e-3, 1.0]))
def test_norms_are_those_of_the_formulas(seed: int, dtype: torch.dtype, by: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(50, generator=generator, dtype=torch.float64).to(dtype)
    b = (a.double() + by * torch.randn(50, generator=generator, dtype=torch.float64)).to(dtype)
    x, y = a.double(), b.double()

    found = measure(a, b)

    assert found.relative_l2 == pytest.approx(float((x - y).norm() / x.norm()), rel=1e-6, abs=1e-15)
    assert found.cosine == pytest.approx(float(torch.dot(x, y) / x.norm() / y.norm()))
    assert found.unequal == int((a != b).sum())
    if found.unequal:
        assert found.sqnr_db == pytest.approx(20 * math.log10(float(x.norm() / (x - y).norm())), abs=1e-5)
    try:
        assert_close(b, a, equal_nan=True)
        is_close = True
    except AssertionError:
        is_close = False
    assert found.is_close == is_close


@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbours_are_one_ulp_apart_also_across_zero(dtype: torch.dtype) -> None:
    one = torch.ones(1, dtype=dtype)
    tiny = torch.nextafter(torch.zeros(1, dtype=dtype), one)

    assert measure(one, torch.nextafter(one, 2 * one)).max_ulp == 1
    assert measure(tiny, -tiny).max_ulp == 2
    assert measure(torch.zeros(1, dtype=dtype), tiny).max_ulp == 1


def test_opposite_ends_of_float64_are_counted_beyond_any_int64() -> None:
    largest = torch.full((1,), torch.finfo(torch.float64).max, dtype=torch.float64)

    assert measure(largest, -largest).max_ulp == 2 * 0x7FEFFFFFFFFFFFFF


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1.0, 1e160, 1e300])
def test_extreme_numbers_neither_overflow_nor_vanish(scale: float) -> None:
    a = torch.tensor([3.0, 4.0], dtype=torch.float64) * scale
    b = torch.tensor([3.0, 3.0], dtype=torch.float64) * scale

    found = measure(a, b)

    assert found.relative_l2 == pytest.approx(0.2)
    assert found.cosine == pytest.approx(21 / 5 / math.sqrt(18))


def test_nan_and_infinity_at_the_same_index_are_equal() -> None:
    a = torch.tensor([math.nan, math.inf, -math.inf, 1.0])

    found = measure(a, a.clone())

    assert (found.unequal, found.mismatches, found.masks) == (0, 0, 0)
    assert (found.nan, found.inf) == ((1, 1), (2, 2))


def test_nan_and_infinity_on_one_side_are_masks_that_differ() -> None:
    a = torch.tensor([1.0, math.inf, math.nan, 2.0, 5.0])
    b = torch.tensor([1.0, -math.inf, 3.0, math.nan, 5.0])

    found = measure(a, b)

    assert (found.masks, found.unequal, found.mismatches) == (3, 3, 3)
    assert found.at == (1,)
    assert found.max_abs == 0.0
    json.dumps(found.to_json(), allow_nan=False)


def test_a_zero_of_the_other_sign_is_the_same_value() -> None:
    assert measure(torch.zeros(2), -torch.zeros(2)).unequal == 0


def test_integers_are_counted_and_their_differences_exact() -> None:
    a, b = torch.tensor([1, 2, -(2**63)]), torch.tensor([1, 5, 2**63 - 1])

    found = measure(a, b)

    assert (found.unequal, found.mismatches, found.max_abs, found.at) == (2, 2, 2**64 - 1, (2,))
    assert found.relative_l2 is None


def test_bools_and_unsigned_integers_are_counted() -> None:
    assert measure(torch.tensor([True, False]), torch.tensor([True, True])).unequal == 1
    found = measure(torch.tensor([0, 2**64 - 1], dtype=torch.uint64), torch.tensor([0, 0], dtype=torch.uint64))
    assert (found.unequal, found.max_abs) == (1, 2**64 - 1)


def test_other_dtypes_are_compared_in_the_wider_and_it_is_said() -> None:
    a = torch.tensor([1.0, 1 / 3])

    found = measure(a, a.bfloat16())

    assert find_wider(torch.float32, torch.bfloat16) == torch.float32
    assert found.note == "dtypes differ: float32 against bfloat16"
    assert (found.unequal, found.is_close) == (1, False)
    assert measure(a, a.double()).unequal == 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_eight_bits_are_compared(dtype: torch.dtype) -> None:
    a, b = torch.tensor([1.0, 2.0]).to(dtype), torch.tensor([1.0, 4.0]).to(dtype)

    assert (measure(a, b).unequal, measure(a, b).max_abs) == (1, 2.0)
    assert measure(a, torch.tensor([1.0, 2.0])).unequal == 0


def test_complex_numbers_are_compared() -> None:
    a, b = torch.tensor([1 + 1j, 2.0]), torch.tensor([1 + 1j, 2 + 2j])

    found = measure(a, b)

    assert (found.unequal, found.max_abs, found.at, found.values) == (1, 2.0, (1,), (2 + 0j, 2 + 2j))
    assert found.relative_l2 == pytest.approx(2 / math.sqrt(6))


def test_other_shapes_are_said() -> None:
    assert measure(torch.zeros(2, 3), torch.zeros(3, 2)).note == "shapes differ: (2, 3) against (3, 2)"
    assert not measure(torch.zeros(2, 3), torch.zeros(3, 2)).is_close


def test_tensors_without_items_and_scalars_are_measured() -> None:
    assert measure(torch.zeros(0, 3), torch.zeros(0, 3)).is_close
    assert measure(torch.tensor(1.0), torch.tensor(2.0)).at == ()


def test_blocks_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(7, 11, generator=generator) for _ in range(2))
    b[3, 4] = math.nan
    whole = measure(a, b)

    monkeypatch.setattr(measuring, "BLOCK_ITEMS", 10)
    monkeypatch.setattr(values, "BLOCK_ITEMS", 10)
    found = measure(a, b)

    assert found.relative_l2 == pytest.approx(whole.relative_l2)
    assert found.cosine == pytest.approx(whole.cosine)
    assert (found.at, found.values, found.max_ulp, found.masks) == (whole.at, whole.values, whole.max_ulp, 1)


def test_memory_in_another_order_is_the_same_tensor() -> None:
    a = torch.arange(6.0).reshape(2, 3)

    assert measure(a, a.T.contiguous().T).unequal == 0
    assert measure(a.to(torch.complex64).conj(), a.to(torch.complex64)).unequal == 0


def test_a_tolerance_of_the_user_counts_for_all_dtypes() -> None:
    a, b = torch.ones(2), torch.ones(2) + 1e-3

    assert measure(a, b, tolerance=Tolerance(1e-2, 0.0)).is_close
    assert not measure(a, b, tolerance=EXACT).is_close


def test_stats_give_a_lower_bound_of_the_difference() -> None:
    a = Stats(minimum=-1, maximum=2, mean=0, norm=10, nan=0, inf=0, zero=0)
    b = Stats(minimum=-1, maximum=5, mean=0, norm=12, nan=1, inf=0, zero=0)

    found = measure_stats(a, b, 4)

    assert (found.basis, found.max_abs, found.nan) == ("stats", 3, (0, 1))
    assert found.relative_l2 == pytest.approx(0.2)
    assert "at least" in found.note
    assert measure_stats(a, None, 4).basis == "digest"


def test_stats_without_finite_values_give_no_bound() -> None:
    nothing = Stats(math.nan, math.nan, math.nan, math.nan, nan=4, inf=0, zero=0)

    found = measure_stats(nothing, nothing, 4)

    assert (found.max_abs, found.relative_l2) == (None, None)


@pytest.mark.parametrize(
    ("b", "text"),
    [(1.0, "0"), (1.0 + 2**-23, "1"), (1.0 + 1000 * 2**-23, "1000"), (1.001, "> 1000"), (-1e-30, "> 1000")],
)
def test_units_in_the_last_place_are_shown_only_where_they_mean_rounding(b: float, text: str) -> None:
    found = measure(torch.tensor([1.0]), torch.tensor([b]))

    assert found.ulp_text == text
    assert found.max_ulp is not None
    assert found.to_json()["max_ulp"] == found.max_ulp


def test_a_distance_without_values_has_no_units_to_show() -> None:
    assert TensorDistance("digest").ulp_text == ""
