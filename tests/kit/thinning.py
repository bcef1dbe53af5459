"""Parameters of tests of which a default run has some: the others are slow, so that the slow tests have all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from _pytest.mark import ParameterSet


def make_slow(value: object) -> ParameterSet:
    """Return a case that is slow, and has the id that it would have without; a tuple is the values of several names."""
    found = (
        value if isinstance(value, ParameterSet) else pytest.param(*(value if isinstance(value, tuple) else [value]))
    )
    return pytest.param(*found.values, marks=[*found.marks, pytest.mark.slow], id=found.id)


def thin(cases: Iterable[object], step: int = 3) -> list[object]:
    """Return all cases; the first and each `step`-th after it are quick."""
    return [case if at % step == 0 else make_slow(case) for at, case in enumerate(cases)]


def keep(cases: Iterable[object], *quick: object) -> list[object]:
    """Return all cases; those named are quick."""
    found = list(cases)
    assert all(each in found for each in quick), f"not among the cases: {[e for e in quick if e not in found]}"
    return [case if case in quick else make_slow(case) for case in found]


def pair_up(first: Sequence[object], second: Sequence[object]) -> list[ParameterSet]:
    """Return the product of two lists; the quick cases have each of their values at least once."""
    most = max(len(first), len(second))
    quick = {(at % len(first), at % len(second)) for at in range(most)}
    return [
        pytest.param(one, other, marks=() if (row, column) in quick else pytest.mark.slow)
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]
