"""Requests at once: results in order, the limit of the store, errors, and nothing left running."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from holdfast.errors import NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import StoreTraits
from holdfast.objects.together import read_together, run_together
from tests.kit.rounds import count_rounds


class Waiting(MemoryStore):
    """A store whose requests wait."""

    at_once = 4

    @property
    def traits(self) -> StoreTraits:
        return replace(super().traits, requests_at_once=self.at_once)


@pytest.fixture
def store() -> Waiting:
    return Waiting()


def test_results_come_in_order(store: Waiting) -> None:
    assert run_together(store, [lambda n=n: n * n for n in range(40)]) == [n * n for n in range(40)]  # type: ignore[misc]


def test_as_many_as_the_store_wants_are_in_flight(store: Waiting) -> None:
    everybody = threading.Barrier(Waiting.at_once)

    def meet() -> bool:
        everybody.wait(timeout=30)
        return True

    assert all(run_together(store, [meet] * (2 * Waiting.at_once)))


def test_a_store_that_does_not_wait_is_asked_by_the_caller() -> None:
    assert set(run_together(MemoryStore(), [threading.get_ident] * 3)) == {threading.get_ident()}


def test_the_first_failure_in_order_is_raised_and_nothing_runs_on(store: Waiting) -> None:
    running: list[int] = []

    def fail(number: int) -> None:
        running.append(number)
        running.remove(number)
        if number in (3, 5):
            raise NotFound(str(number), name=str(number))

    with pytest.raises(NotFound, match="3"):
        run_together(store, [lambda n=n: fail(n) for n in range(50)])  # type: ignore[misc]
    assert not running


def test_objects_are_read_in_one_round(store: Waiting) -> None:
    keys = [f"packs/{number}" for number in range(20)]
    for key in keys:
        store.create(key, key.encode())

    with count_rounds(MemoryStore, "read") as rounds:
        found = read_together(store, keys, limit_bytes=100)
        store.read(keys[0], limit_bytes=100)

    assert found == [key.encode() for key in keys]
    assert (rounds.greatest, len(rounds.requests)) == (2, 21)
