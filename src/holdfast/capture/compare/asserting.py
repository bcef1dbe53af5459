"""For tests of the user: two runs match, or the test fails with the first place where they part."""

from __future__ import annotations

from typing import Unpack

from holdfast.capture.compare.compare import DiffChoices, describe_mismatch, diff_runs, make_ways
from holdfast.capture.compare.result import RunDiff
from holdfast.capture.stored.runs import Run


def assert_runs_match(
    a: Run,
    b: Run,
    *,
    noise: Run | None = None,
    reference: Run | None = None,
    **ways: Unpack[DiffChoices],
) -> RunDiff:
    """Compare two runs as `Store.diff_runs` does; raises AssertionError that says where they part."""
    __tracebackhide__ = True
    result = diff_runs(a, b, noise=noise, reference=reference, ways=make_ways(ways))
    if not result.steps:
        raise AssertionError(result.headline)
    if not result.is_match:
        raise AssertionError(describe_mismatch(result))
    return result
