"""What changes an answer changes the key, or takes it away: a search over places of code and ways to reach a value."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.thinning import keep
from tests.unit.compile_cache.code.mutation_runner_process import Runner
from tests.unit.compile_cache.code.mutations import BACKWARD, MUTATIONS, QUICK, REPLACEMENTS, Mutation, judge


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner("keys", tmp_path_factory.mktemp("keys")) as runner:
        yield runner


@pytest.fixture(scope="module")
def answering_runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner("answers", tmp_path_factory.mktemp("answers")) as runner:
        yield runner


@pytest.mark.parametrize(
    "mutation",
    # Each place in each run, but only some of the ways.
    keep(QUICK, *(each for number, each in enumerate(QUICK) if number % 10 == 0 or each.place is not BACKWARD)),
    ids=lambda mutation: mutation.name,
)
def test_a_change_of_the_result_changes_the_key(runner: Runner, mutation: Mutation) -> None:
    told = runner.ask(mutation)

    assert judge(mutation, told["before"], told["after"]) == []


@pytest.mark.slow  # minutes: each version is traced twice in a process of its own
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_changes_the_result_of_plain_torch_and_the_key(
    answering_runner: Runner, mutation: Mutation
) -> None:
    told = answering_runner.ask(mutation)

    assert judge(mutation, told["before"], told["after"]) == []


def test_the_search_is_wide_enough() -> None:
    assert len({mutation.name for mutation in QUICK}) >= 120
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 200
    assert len({mutation.place.name for mutation in QUICK}) >= 16


def test_a_stale_key_and_a_stale_result_are_reported() -> None:
    mutation = QUICK[0]
    fresh, stale = {"key": "a", "eager": [[2.0]]}, {"key": "a", "eager": [[5.0]]}

    assert judge(mutation, fresh, stale) == ["stale: both versions have one key"]
    assert judge(mutation, fresh, {**stale, "key": "b"}) == []
    assert judge(mutation, fresh, {**stale, "key": "b", "eager": [[2.0]]}) == [
        "the number does not change the result, so this tests nothing"
    ]
    assert judge(mutation, fresh, {"reason": "odd", "eager": [[5.0]]}) == ["it could be cached: odd"]
    assert judge(mutation, fresh, {**stale, "key": "b", "answer": [[2.0]]}) == ["[[2.0]] for [[5.0]]"]


def test_a_result_that_a_replacement_does_not_change_is_reported() -> None:
    mutation = next(each for each in QUICK if each.place is REPLACEMENTS[0])
    before, after = {"key": "a", "eager": [[0.1]]}, {"key": "b", "eager": [[0.1]]}
    right, own = {"plain": [[5.0] * 4]}, {"plain": [[0.1] * 4]}
    first = {**before, "plain": [[2.0] * 4]}

    assert judge(mutation, first, {**after, **right}) == []
    assert judge(mutation, first, {**after, **own}) == [f"{own['plain']} for {right['plain']}"]
    assert judge(mutation, first, {**after, **right, "answer": own["plain"]}) == [
        f"{own['plain']} for {right['plain']}"
    ]


def test_code_that_torch_does_not_use_is_listed_with_the_reason_and_reported_if_torch_uses_it() -> None:
    mutation = next(each for each in QUICK if each.place.unused)
    before, after = ({"key": key, "eager": [[0.1]], "plain": [[0.1]]} for key in "ab")
    used = {**after, "plain": [[5.0] * 4]}

    assert judge(mutation, before, {**after, "answer": [[0.1]]}) == []
    assert judge(mutation, before, {**after, "key": "a"}) == ["stale: both versions have one key"]
    assert judge(mutation, before, used) == [
        f"the number changes the result, which contradicts this: {mutation.place.unused}"
    ]


def test_a_graph_that_only_one_version_refuses_or_that_is_refused_for_something_else_is_reported() -> None:
    mutation = next(each for each in QUICK if each.refusal)
    right, odd = {"reason": f"it uses {mutation.refusal}"}, {"reason": "odd"}

    assert judge(mutation, {"key": "a"}, right) == ["it has a key, although this code cannot be followed"]
    assert judge(mutation, right, odd) == [f"not for {mutation.refusal}: odd"]
    assert judge(mutation, right, right) == []
