"""`assert_runs_match`, for use in tests."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.capture.compare.align import NameMap
from holdfast.capture.compare.compare import DiffOptions, describe_mismatch, diff_runs
from holdfast.capture.compare.result import RunDiff
from holdfast.capture.compare.verdicts import make_bounds
from holdfast.capture.stored.runs import Run
from holdfast.capture.stored.unshard import Dims


def assert_runs_match(
    a: Run,
    b: Run,
    *,
    noise: Run | None = None,
    reference: Run | None = None,
    tolerance: tuple[float, float] | None = None,
    factor: float = 4.0,
    margin: float = 2.0,
    names: NameMap | None = None,
    dims: Dims | None = None,
    steps: Collection[int] | None = None,
    shift: int = 0,
) -> RunDiff:
    """Compare two runs like `Store.diff_runs`; raises AssertionError that says where they diverge.

    The options are those of `Store.diff_runs`.
    """
    __tracebackhide__ = True
    options = DiffOptions(
        bounds=make_bounds(tolerance, factor, margin), names=names or {}, dims=dims or {}, steps=steps, shift=shift
    )
    result = diff_runs(a, b, noise=noise, reference=reference, options=options)
    if not result.steps:
        raise AssertionError(result.headline)
    if not result.is_match:
        raise AssertionError(describe_mismatch(result))
    return result
