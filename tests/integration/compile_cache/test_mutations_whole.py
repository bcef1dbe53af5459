"""A callable that was stored as a whole before a change of its code is not loaded after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.unit.compile_cache.code.mutation_runner_process import Runner
from tests.unit.compile_cache.code.mutations import MUTATED_CALLABLES, Mutation, judge_callable

# Each is compiled twice, and all of them take long.
_QUICK_NAMES: Final = {
    "method of a layer: an import from inside",
}
_QUICK: Final = [each for each in MUTATED_CALLABLES if each.name in _QUICK_NAMES]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner("wholes", tmp_path_factory.mktemp("wholes")) as runner:
        yield runner


@pytest.mark.parametrize(
    "mutation",
    [each if each in _QUICK else pytest.param(each, marks=pytest.mark.slow) for each in MUTATED_CALLABLES],
    ids=lambda mutation: mutation.name,
)
def test_nothing_is_served_stale(runner: Runner, mutation: Mutation) -> None:
    results = runner.ask(mutation)

    assert judge_callable(results) == []
    assert mutation not in _QUICK or results["again"]["hits"] == 1


def test_the_quick_ones_are_found_by_their_names() -> None:
    assert len(_QUICK) == len(_QUICK_NAMES)
