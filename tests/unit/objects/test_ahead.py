"""Work that begins ahead: beside its owner on a store that is waited for, otherwise when its result is taken."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from holdfast.errors import NotFound
from holdfast.objects.ahead import Ahead
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import StoreTraits
from tests.kit.patience import PATIENCE_S
from tests.kit.rounds import count_rounds


class Waiting(MemoryStore):
    """A store whose requests wait."""

    @property
    def traits(self) -> StoreTraits:
        return replace(super().traits, requests_at_once=4)


def test_work_runs_beside_its_owner_on_a_store_that_is_waited_for() -> None:
    begun = threading.Event()
    with Ahead(Waiting(), begun.set) as ahead:
        assert begun.wait(PATIENCE_S)
        ahead.result()


def test_work_runs_on_the_thread_of_its_owner_when_the_result_is_taken_otherwise() -> None:
    calls: list[int] = []
    with Ahead(MemoryStore(), lambda: calls.append(threading.get_ident())) as ahead:
        assert calls == []
        ahead.result()
    assert calls == [threading.get_ident()]


@pytest.mark.parametrize("store", [MemoryStore(), Waiting()], ids=["at once", "waiting"])
def test_work_runs_once_and_its_result_stays(store: MemoryStore) -> None:
    calls: list[int] = []

    def work() -> int:
        calls.append(1)
        return len(calls)

    with Ahead(store, work) as ahead:
        assert [ahead.result(), ahead.result()] == [1, 1]


@pytest.mark.parametrize("store", [MemoryStore(), Waiting()], ids=["at once", "waiting"])
def test_an_error_is_raised_when_the_result_is_taken(store: MemoryStore) -> None:
    def work() -> None:
        raise NotFound("gone", name="gone")

    with Ahead(store, work) as ahead, pytest.raises(NotFound):
        ahead.result()


def test_work_whose_result_nobody_takes_has_ended_with_the_block() -> None:
    begun = threading.Event()
    ended: list[int] = []

    def work() -> None:
        begun.set()
        ended.append(sum(range(1_000_000)))

    with Ahead(Waiting(), work):
        assert begun.wait(PATIENCE_S)
    assert len(ended) == 1


def test_two_requests_at_a_time_are_one_round() -> None:
    store = Waiting()
    store.create("packs/a", b"a")
    with count_rounds(MemoryStore, "read") as rounds:
        with Ahead(store, lambda: store.read("packs/a", limit_bytes=9)) as ahead:
            store.read("packs/a", limit_bytes=9)
            ahead.result()
        assert rounds.find() == 1
    assert len(rounds.requests) == 2
