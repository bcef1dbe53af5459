"""Calls on all ranks: without a process group, this one is alone; with one, an error of one rank is an error of all."""

from __future__ import annotations

import pytest

from holdfast.errors import RankError
from holdfast.integrations.frameworks import call_together
from holdfast.testing.ranks import run_ranks
from tests.kit.patience import RUN_S


def test_a_single_process_gets_its_own_result() -> None:
    assert call_together("count", lambda: 3) == [3]


def test_an_error_of_a_single_process_is_not_changed() -> None:
    with pytest.raises(ZeroDivisionError):
        call_together("divide", lambda: 1 // 0)


def _call(rank: int) -> object:
    results = call_together("squares", lambda: rank * rank)
    try:
        call_together("divide", lambda: 1 // (1 - rank))
    except RankError as error:
        return results, sorted(error.failures)
    return results, []


@pytest.mark.slow
def test_an_error_of_one_rank_is_an_error_of_all() -> None:
    assert run_ranks(2, _call, timeout_s=RUN_S) == [([0, 1], [1])] * 2
