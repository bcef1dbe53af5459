"""`assert_runs_match`, for use in tests."""

from __future__ import annotations

from typing_extensions import Unpack

from holdfast.capture.compare.compare import DiffChoices, describe_mismatch, diff_runs, make_diff_options
from holdfast.capture.compare.result import RunDiff
from holdfast.capture.stored.runs import Run


def assert_runs_match(
    a: Run,
    b: Run,
    *,
    noise: Run | None = None,
    reference: Run | None = None,
    **options: Unpack[DiffChoices],
) -> RunDiff:
    """Compare two runs like `Store.diff_runs`; raises AssertionError that says where they diverge."""
    __tracebackhide__ = True
    result = diff_runs(a, b, noise=noise, reference=reference, options=make_diff_options(options))
    if not result.steps:
        raise AssertionError(result.headline)
    if not result.is_match:
        raise AssertionError(describe_mismatch(result))
    return result
