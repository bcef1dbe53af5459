"""Quick blocks give the numbers of the general comparison: exactly, except for sums of products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from holdfast.capture.compare import measure as measuring
from holdfast.capture.compare.measure import Tolerance, measure

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", ["near", "across zero", "far", "not finite", "zeros of both signs"])
def test_quick_blocks_give_the_numbers_of_the_general_ones(
    dtype: torch.dtype, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = torch.randn(200_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    b = a.clone()
    if case == "near":
        b[::7] *= 1 + 4 * torch.finfo(dtype).eps
    elif case == "across zero":
        b[::3] *= -1
    elif case == "far":
        b[5] = torch.finfo(dtype).max
        a[5] = torch.finfo(dtype).min
    elif case == "not finite":
        b[9_000], a[15_000], b[15_001] = torch.inf, torch.nan, 3.0
    else:
        a[:10], b[:10] = 0.0, -0.0
        b[12] += 1

    verify_quick_is_general(a, b, monkeypatch)


def verify_quick_is_general(
    a: torch.Tensor, b: torch.Tensor, monkeypatch: pytest.MonkeyPatch, *, tolerance: Tolerance | None = None
) -> None:
    """Check that quick blocks give the same numbers as the general ones: all exactly, except for sums of products."""
    quick = measure(a, b, tolerance=tolerance)
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "_QUICK", frozenset())
        general = measure(a, b, tolerance=tolerance)
    assert quick.relative_l2 == pytest.approx(general.relative_l2, rel=1e-6)
    assert quick.cosine == pytest.approx(general.cosine, rel=1e-6, abs=1e-6)
    assert quick.sqnr_db == pytest.approx(general.sqnr_db, rel=1e-6, abs=1e-5)
    quick, general = (replace(each, relative_l2=None, cosine=None, sqnr_db=None) for each in (quick, general))
    assert repr(quick) == repr(general)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 1e-12, 1.0, 1e12, 1e30])
@pytest.mark.parametrize("by", [1e-6, 1e-2, 10.0])
def test_quick_blocks_are_right_for_values_of_any_magnitude(
    dtype: torch.dtype, scale: float, by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(2)
    a = (torch.randn(3_000, generator=generator, dtype=torch.float64) * scale).to(dtype)
    b = (a.double() + torch.randn(3_000, generator=generator, dtype=torch.float64) * scale * by).to(dtype)

    verify_quick_is_general(a, b, monkeypatch)
    verify_quick_is_general(a, b, monkeypatch, tolerance=Tolerance(by, 0.0))


def test_values_at_the_bound_of_the_tolerance_are_counted_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = Tolerance(1e-3, 1e-4)
    a = 1 + torch.rand(20_000, generator=torch.Generator().manual_seed(3))
    bound = allowed.atol + allowed.rtol * a.double()
    b = (a.double() + bound).float()

    outside = int(((a.double() - b.double()).abs() > bound).sum())

    assert 0 < outside < len(a), "rounding to float32 puts some outside"
    assert measure(a, b, tolerance=allowed).mismatches == outside
    verify_quick_is_general(a, b, monkeypatch, tolerance=allowed)


def test_of_differences_that_are_equal_in_float32_the_largest_is_found() -> None:
    a = torch.tensor([1.0, 1.0, 1.0])
    b = torch.tensor([-1e-9, -3e-9, -2e-9])

    found = measure(a, b)

    assert (found.at, found.max_abs) == ((1,), 1.0 + float(torch.tensor(3e-9)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_units_in_the_last_place_are_right_beside_zeros_and_large_values(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = torch.tensor([0.0, -0.0, 0.0, 3.0, -60_000.0, 1e-6], dtype=dtype)

    for b in (
        [-0.0, 0.0, 5.0, 3.0, -60_000.0, 1e-6],
        [0.0, 0.0, 0.0, 0.0, -1.0, 1e-6],
        [0.0, -1e-6, 0.0, 3.0, 1.0, -1e-6],
    ):
        verify_quick_is_general(a, torch.tensor(b, dtype=dtype), monkeypatch)
