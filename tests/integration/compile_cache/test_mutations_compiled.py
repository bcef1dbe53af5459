"""What was compiled before a change is not served after it: compiled by torch, kept in a store, used by processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.unit.compile_cache.mutation_runner_process import TIMEOUT_S, Runner
from tests.unit.compile_cache.mutations import MUTATIONS, OPERATORS, Mutation, judge

# No C++ kernel comes of these, so that they compile in a second.
_QUICK_PLACE: Final = next(place for place in OPERATORS if place.name == "backward by another operator")
_QUICK_WAYS: Final = {
    "attributes of attributes",
    "an import from inside",
    "a module in a closure's cell",
    "the environment",
}
_QUICK: Final = [each for each in MUTATIONS if each.place is _QUICK_PLACE and each.way.name in _QUICK_WAYS]


def find_wrong(mutation: Mutation, told: dict[str, Any]) -> list[str]:
    """Return what is wrong with three processes: one before a change, one after it, one before it again."""
    wrong = judge(mutation, told["before"], told["after"]) + judge(mutation, told["again"], told["after"])
    if wrong:
        return wrong
    hits = [told[role]["hits"] for role in ("before", "after", "again")]
    return [] if hits == [0, 0, 0 if mutation.refusal else 1] else [f"hits of the three: {hits}"]


def find_stale(mutations: Sequence[Mutation], folder: Path) -> dict[str, list[str]]:
    """Return what is wrong, by mutation."""
    with Runner("stores", folder) as runner:
        wrong = {each.name: find_wrong(each, runner.ask(each)) for each in mutations}
    return {name: complaints for name, complaints in wrong.items() if complaints}


@pytest.mark.timeout(TIMEOUT_S)
def test_nothing_is_served_stale(tmp_path: Path) -> None:
    assert len(_QUICK) == len(_QUICK_WAYS)
    assert find_stale(_QUICK, tmp_path) == {}


@pytest.mark.slow  # many minutes: each mutation is compiled twice
@pytest.mark.timeout(TIMEOUT_S)
def test_nothing_is_served_stale_wherever_it_stands(tmp_path: Path) -> None:
    assert find_stale(MUTATIONS, tmp_path) == {}
