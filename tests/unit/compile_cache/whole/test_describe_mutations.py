"""A change of code that changes a callable's result changes its key, and is noticed in a running process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.kit.thinning import keep
from tests.unit.compile_cache.code.mutation_runner_process import Runner
from tests.unit.compile_cache.code.mutation_ways import COMMON, OBJECTS
from tests.unit.compile_cache.code.mutations import FUNCTION, MUTATED_CALLABLES, Mutation, judge_callable

# Some ways in one place, and one way in each place.
_QUICK: Final = [
    each
    for each in MUTATED_CALLABLES
    if (each.place is FUNCTION and each.way in (COMMON + OBJECTS)[::5]) or each.way is COMMON[2]
]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner("calls", tmp_path_factory.mktemp("calls")) as runner:
        yield runner


@pytest.mark.parametrize(
    "mutation",
    keep(MUTATED_CALLABLES, *_QUICK),
    ids=lambda mutation: mutation.name,
)
def test_a_change_of_the_result_changes_the_key_and_is_noticed(runner: Runner, mutation: Mutation) -> None:
    assert judge_callable(runner.ask(mutation)) == []


def test_the_search_is_wide_enough() -> None:
    assert len({mutation.name for mutation in MUTATED_CALLABLES}) == len(MUTATED_CALLABLES) >= 140
    assert len(_QUICK) >= 12


def test_stale_callables_are_reported() -> None:
    before = {"key": "a", "eager": [2.0], "answer": [2.0], "saved": True, "hits": 0, "missed": False}
    after = {**before, "key": "b", "eager": [5.0], "answer": [5.0]}
    again = {**before, "saved": False, "hits": 1}
    right = {"before": before, "after": after, "again": again}

    assert judge_callable(right) == []
    assert judge_callable({**right, "after": {**after, "key": "a"}}) == ["stale: both versions have one key"]
    assert judge_callable({**right, "before": {**before, "missed": True}}) == [
        "stale: a change in the running process was not noticed"
    ]
    assert judge_callable({**right, "after": {**after, "answer": [2.0], "hits": 1}}) == [
        "after: [2.0] for [5.0]",
        "stale: a callable that was stored before the change was loaded after it",
    ]
    assert judge_callable({**right, "again": {**again, "hits": 0}}) == ["what was stored was not loaded again"]
    assert judge_callable({**right, "after": {**after, "eager": [2.0], "answer": [2.0]}}) == [
        "the number does not change the result, so this tests nothing"
    ]
    assert judge_callable({**right, "before": {"error": "it raised"}}) == ["it raised"]
