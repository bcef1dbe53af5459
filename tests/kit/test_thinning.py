from __future__ import annotations

from collections.abc import Sequence

import pytest
from _pytest.mark import ParameterSet

from tests.kit.thinning import keep, pair_up, thin


def _list_quick(cases: Sequence[object]) -> list[object]:
    return [case for case in cases if not isinstance(case, ParameterSet) or not case.marks]


def test_each_third_case_is_quick_and_none_is_lost() -> None:
    cases = thin("abcde")

    assert len(cases) == 5
    assert _list_quick(cases) == ["a", "d"]


def test_a_slow_case_keeps_its_id_and_its_marks() -> None:
    case = thin([0, pytest.param(1, 2, id="x", marks=pytest.mark.timeout(9))])[1]

    assert isinstance(case, ParameterSet)
    assert (case.values, case.id, [mark.name for mark in case.marks]) == ((1, 2), "x", ["timeout", "slow"])


def test_the_cases_that_are_named_are_quick_and_one_that_does_not_exist_is_reported() -> None:
    assert _list_quick(keep("abc", "b")) == ["b"]
    with pytest.raises(AssertionError, match="not among the cases"):
        keep("abc", "d")


def test_pairs_have_each_value_once_and_are_otherwise_slow() -> None:
    cases = pair_up("abc", "xy")

    assert len(cases) == 6
    assert _list_quick(cases) == [pytest.param("a", "x"), pytest.param("b", "y"), pytest.param("c", "x")]
