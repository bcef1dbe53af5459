"""Requests at once: results in order, the limit of the store, errors, and nothing left running."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from holdfast.errors import NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import StoreTraits
from holdfast.objects.together import AHEAD_BYTES
from tests.kit.rounds import count_rounds
from tests.kit.waiting_store import let_wait


class Waiting(MemoryStore):
    """A store whose requests wait."""

    at_once = 4

    @property
    def traits(self) -> StoreTraits:
        return let_wait(super().traits, self.at_once)


@pytest.fixture
def store() -> Waiting:
    return Waiting()


def test_results_come_in_order(store: Waiting) -> None:
    assert store.run_together([lambda n=n: n * n for n in range(40)]) == [n * n for n in range(40)]  # type: ignore[misc]


def test_as_many_as_the_store_wants_are_in_flight(store: Waiting) -> None:
    everybody = threading.Barrier(Waiting.at_once)

    def meet() -> bool:
        everybody.wait(timeout=30)
        return True

    assert all(store.run_together([meet] * (2 * Waiting.at_once)))


def test_a_store_that_does_not_wait_is_asked_by_the_caller() -> None:
    assert set(MemoryStore().run_together([threading.get_ident] * 3)) == {threading.get_ident()}


def test_the_first_failure_in_order_is_raised_and_nothing_runs_on(store: Waiting) -> None:
    running: list[int] = []

    def fail(number: int) -> None:
        running.append(number)
        running.remove(number)
        if number in (3, 5):
            raise NotFound(str(number), name=str(number))

    with pytest.raises(NotFound, match="3"):
        store.run_together([lambda n=n: fail(n) for n in range(50)])  # type: ignore[misc]
    assert not running


def test_objects_are_read_in_one_round(store: Waiting) -> None:
    keys = [f"packs/{number}" for number in range(20)]
    for key in keys:
        store.create(key, key.encode())

    with count_rounds(MemoryStore, "read") as rounds:
        found = store.run_together([partial(store.read, key, limit_bytes=100) for key in keys])
        store.read(keys[0], limit_bytes=100)

    assert found == [key.encode() for key in keys]
    assert (rounds.greatest, len(rounds.requests)) == (2, 21)


def test_results_of_a_stream_come_in_order_and_are_worked_on_ahead(store: Waiting) -> None:
    everybody = threading.Barrier(Waiting.at_once)

    def meet(number: int) -> int:
        everybody.wait(timeout=30)
        return number

    works = [(lambda n=n: meet(n), 1) for n in range(3 * Waiting.at_once)]
    assert list(store.iter_together(works)) == list(range(3 * Waiting.at_once))


def test_a_stream_runs_ahead_by_as_many_requests_as_the_store_wants_and_no_more(store: Waiting) -> None:
    begun: list[int] = []
    found = store.iter_together((lambda n=n: n, 1) for n in _note(begun, 40))  # type: ignore[misc]

    assert [next(found), next(found)] == [0, 1]
    assert len(begun) == 2 + Waiting.at_once
    found.close()


def test_a_stream_runs_ahead_by_a_bounded_number_of_bytes(store: Waiting) -> None:
    begun: list[int] = []
    found = store.iter_together((lambda n=n: n, AHEAD_BYTES // 2) for n in _note(begun, 40))  # type: ignore[misc]

    assert next(found) == 0
    assert len(begun) == 3  # two that fit, and the one for which the caller was asked to take the first
    found.close()


def test_a_work_that_is_larger_than_the_limit_runs_alone(store: Waiting) -> None:
    assert list(store.iter_together([(lambda: "all", 2 * AHEAD_BYTES)] * 3)) == ["all"] * 3


def test_a_store_that_does_not_wait_is_asked_when_the_caller_takes_a_result() -> None:
    asked: list[int] = []
    found = MemoryStore().iter_together((lambda n=n: asked.append(n), 1) for n in range(9))  # type: ignore[misc]

    next(found)
    next(found)

    assert asked == [0, 1]


def test_the_first_failure_of_a_stream_is_raised_after_the_results_before_it(store: Waiting) -> None:
    def fail(number: int) -> int:
        if number in (3, 5):
            raise NotFound(str(number), name=str(number))
        return number

    found = store.iter_together((lambda n=n: fail(n), 1) for n in range(50))  # type: ignore[misc]

    assert [next(found) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(NotFound, match="3"):
        next(found)


def test_a_stream_counts_a_round_for_each_turn_of_requests(store: Waiting) -> None:
    store.create("packs/a", b"a")
    works = [(lambda: store.read("packs/a", limit_bytes=1), 1)] * (3 * Waiting.at_once)

    with count_rounds(MemoryStore, "read") as rounds:
        assert len(list(store.iter_together(works))) == len(works)

    assert (rounds.greatest, rounds.count_waves(Waiting.at_once)) == (3, 3)


def test_objects_are_deleted_one_by_one_where_the_store_has_no_request_for_many(store: Waiting) -> None:
    for number in range(9):
        store.create(f"packs/{number}", b"")
    store.delete_many([f"packs/{number}" for number in range(1, 20)])
    assert list(store.contents()) == ["packs/0"]


def _note(begun: list[int], count: int) -> Iterator[int]:
    for number in range(count):
        begun.append(number)
        yield number
