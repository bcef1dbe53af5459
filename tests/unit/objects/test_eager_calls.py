"""Work that begins before its result is needed: on a thread if requests wait, otherwise when its result is taken."""

from __future__ import annotations

import threading

import pytest

from holdfast.errors import NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import StoreTraits
from tests.kit.patience import PATIENCE_S
from tests.kit.rounds import count_rounds
from tests.kit.waiting_store import let_wait


class Waiting(MemoryStore):
    """A store whose requests wait."""

    @property
    def traits(self) -> StoreTraits:
        return let_wait(super().traits, 4)


def test_work_runs_beside_its_owner_on_a_store_that_is_waited_for() -> None:
    begun = threading.Event()
    with Waiting().begin(begun.set) as call:
        assert begun.wait(PATIENCE_S)
        call.result()


def test_work_runs_on_the_thread_of_its_owner_when_the_result_is_taken_otherwise() -> None:
    calls: list[int] = []
    with MemoryStore().begin(lambda: calls.append(threading.get_ident())) as call:
        assert calls == []
        call.result()
    assert calls == [threading.get_ident()]


@pytest.mark.parametrize("store", [MemoryStore(), Waiting()], ids=["at once", "waiting"])
def test_work_runs_once_and_its_result_stays(store: MemoryStore) -> None:
    calls: list[int] = []

    def work() -> int:
        calls.append(1)
        return len(calls)

    with store.begin(work) as call:
        assert [call.result(), call.result()] == [1, 1]


@pytest.mark.parametrize("store", [MemoryStore(), Waiting()], ids=["at once", "waiting"])
def test_an_error_is_raised_when_the_result_is_taken(store: MemoryStore) -> None:
    def work() -> None:
        raise NotFound("gone", name="gone")

    with store.begin(work) as call, pytest.raises(NotFound):
        call.result()


def test_work_whose_result_nobody_takes_has_ended_with_the_block() -> None:
    begun = threading.Event()
    ended: list[int] = []

    def work() -> None:
        begun.set()
        ended.append(sum(range(1_000_000)))

    with Waiting().begin(work):
        assert begun.wait(PATIENCE_S)
    assert len(ended) == 1


def test_two_requests_at_a_time_are_one_round() -> None:
    store = Waiting()
    store.create("packs/a", b"a")
    with count_rounds(MemoryStore, "read") as rounds:
        with store.begin(lambda: store.read("packs/a", limit_bytes=9)) as call:
            store.read("packs/a", limit_bytes=9)
            call.result()
        assert rounds.find() == 1
    assert len(rounds.requests) == 2
