"""A graph that was compiled and stored before a change of user code is not loaded after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.unit.compile_cache.code.mutation_runner_process import Runner
from tests.unit.compile_cache.code.mutations import MUTATIONS, OPERATORS, Mutation, judge

# A graph without a C++ kernel compiles in a second.
_QUICK_PLACE: Final = next(place for place in OPERATORS if not place.makes_kernels)
_QUICK_WAYS: Final = {
    "attributes of attributes",
    "the environment",
}
_QUICK: Final = [each for each in MUTATIONS if each.place is _QUICK_PLACE and each.way.name in _QUICK_WAYS]


def find_wrong(mutation: Mutation, results: dict[str, Any]) -> list[str]:
    """Return what is wrong with the results of three processes: before a change, after it, and before it again."""
    wrong = judge(mutation, results["before"], results["after"]) + judge(mutation, results["again"], results["after"])
    if wrong:
        return wrong
    hits = [results[role]["hits"] for role in ("before", "after", "again")]
    return [] if hits == [0, 0, 0 if mutation.refusal else 1] else [f"hits of the three: {hits}"]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner("stores", tmp_path_factory.mktemp("stores")) as runner:
        yield runner


@pytest.mark.parametrize(
    "mutation",
    # All of them take an hour: each is compiled twice.
    [each if each in _QUICK else pytest.param(each, marks=pytest.mark.slow) for each in MUTATIONS],
    ids=lambda mutation: mutation.name,
)
def test_nothing_is_served_stale(runner: Runner, mutation: Mutation) -> None:
    assert find_wrong(mutation, runner.ask(mutation)) == []


def test_the_quick_ones_are_found_by_their_names() -> None:
    assert len(_QUICK) == len(_QUICK_WAYS)


def test_a_hit_on_what_was_compiled_before_a_change_and_a_lost_hit_are_reported() -> None:
    before = {"key": "a", "eager": [[2.0]], "answer": [[2.0]], "hits": 0}
    after = {"key": "b", "eager": [[5.0]], "answer": [[5.0]], "hits": 0}
    again = {**before, "hits": 1}
    mutation = next(each for each in _QUICK if not each.refusal)

    assert find_wrong(mutation, {"before": before, "after": after, "again": again}) == []
    assert find_wrong(mutation, {"before": before, "after": after, "again": before}) == ["hits of the three: [0, 0, 0]"]
    assert find_wrong(mutation, {"before": before, "after": {**after, "answer": [[2.0]]}, "again": again}) != []
    assert find_wrong(mutation, {"before": before, "after": after, "again": {**again, "answer": [[5.0]]}}) == [
        "[[5.0]] for [[2.0]]"
    ]
