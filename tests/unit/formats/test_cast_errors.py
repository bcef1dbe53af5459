"""The errors of casts that receipts state."""

from __future__ import annotations

import math

import pytest
import torch

from holdfast.formats.digests import add_cast_errors
from holdfast.formats.receipt import CastErrors

NONE = CastErrors(0.0, 0.0)


def _measure(*values: float, dtype: torch.dtype = torch.float16, so_far: CastErrors = NONE) -> CastErrors:
    before = torch.tensor(values, dtype=torch.float64)
    return add_cast_errors(so_far, before, before.to(dtype))


def test_an_exact_cast_has_no_errors() -> None:
    assert _measure(0.0, 1.0, -0.5, 1024.0) == NONE


def test_the_largest_errors_are_exact() -> None:
    found = _measure(1.0, 1.0 + 2**-12, 1000.2)

    assert found.max_abs == abs(float(torch.tensor(1000.2, dtype=torch.float16)) - 1000.2)
    assert found.max_rel == pytest.approx(2**-12 / (1 + 2**-12))


def test_values_that_become_infinite_are_counted_apart() -> None:
    assert _measure(1e6, -1e6, 2.0) == CastErrors(0.0, 0.0, 2)


def test_values_that_were_not_finite_do_not_count() -> None:
    assert _measure(math.nan, math.inf, -math.inf) == NONE


def test_a_value_that_becomes_zero_has_a_relative_error_of_one() -> None:
    assert _measure(1e-12).max_rel == 1.0


def test_errors_of_pieces_add_up() -> None:
    first = _measure(1e6, 1.0001)

    found = _measure(1e6, 1.0, so_far=first)

    assert found == CastErrors(first.max_abs, first.max_rel, 2)


def test_a_piece_without_values_changes_nothing() -> None:
    assert _measure(so_far=CastErrors(1.0, 2.0, 3)) == CastErrors(1.0, 2.0, 3)
