"""Measures how much a cast changes the values of a tensor, piece by piece, in float64."""

from __future__ import annotations

import torch

from holdfast.formats.receipt import CastErrors


def add_cast_errors(errors: CastErrors, before: torch.Tensor, after: torch.Tensor) -> CastErrors:
    """Return the errors so far, with those of another piece of the tensor.

    Values that were infinite or NaN before the cast do not count.
    """
    exact, cast = before.to(torch.float64), after.to(torch.float64)
    was_finite = exact.isfinite()
    overflowed = was_finite & ~cast.isfinite()
    gaps = torch.where(was_finite & ~overflowed, (cast - exact).abs(), 0.0)
    shares = torch.where(exact != 0, gaps / exact.abs(), 0.0)
    return CastErrors(
        max(errors.max_abs, _find_max(gaps)),
        max(errors.max_rel, _find_max(shares)),
        errors.num_overflowed + int(overflowed.sum()),
    )


def _find_max(values: torch.Tensor) -> float:
    return float(values.nan_to_num(0.0).max()) if values.numel() else 0.0
