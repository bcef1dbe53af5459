"""Between any two operations of a writer another one acts, from beginning to end: it is as if one had come first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import pytest

from holdfast.errors import HoldfastError, NameInUse
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.names.snapshots import delete_snapshot, read_snapshot, set_tag
from holdfast.testing.faults import FaultyStore
from tests.faults.hooked_store import HookedStore
from tests.faults.scenario import (
    DELETE,
    DELETE_TAG,
    FIRST_SAVE,
    INIT,
    MOVE_TAG,
    OVERWRITE,
    SAVE_AGAIN,
    SAVE_BESIDE,
    SECOND,
    THIRD,
    Act,
    State,
    Verb,
    check_store,
    read_state,
    save_content,
)


def _overwrite_too(store: ObjectStore) -> None:
    save_content(store, "run/step-2", {**THIRD, "who": b"the other one"}, overwrite=True)


def _delete_and_save_anew(store: ObjectStore) -> None:
    delete_snapshot(store, "run/step-2")
    save_content(store, "run/step-2", SECOND)


def _save_beside_too(store: ObjectStore) -> None:
    save_content(store, "run/step-3", {**THIRD, "who": b"the other one"})


def _save_elsewhere(store: ObjectStore) -> None:
    save_content(store, "elsewhere", THIRD)


def _save_the_same(store: ObjectStore) -> None:
    save_content(store, "run/step-1", SECOND)


def _move_tag_elsewhere(store: ObjectStore) -> None:
    save_content(store, "elsewhere", THIRD)
    set_tag(store, "best", read_snapshot(store, "elsewhere"), move=True)


PAIRS: Final[list[tuple[Verb, Act]]] = [
    (OVERWRITE, _overwrite_too),
    (OVERWRITE, DELETE.act),
    (OVERWRITE, _delete_and_save_anew),
    (SAVE_BESIDE, _save_beside_too),
    (SAVE_BESIDE, _save_elsewhere),
    (SAVE_AGAIN, OVERWRITE.act),
    (DELETE, _overwrite_too),
    (DELETE, DELETE.act),
    (MOVE_TAG, _move_tag_elsewhere),
    (MOVE_TAG, DELETE_TAG.act),
    (DELETE_TAG, MOVE_TAG.act),
    (FIRST_SAVE, _save_elsewhere),
    (FIRST_SAVE, _save_the_same),
    (FIRST_SAVE, INIT.act),
]


class Interrupted(HookedStore):
    """A store on which another one acts just before the `at`-th operation."""

    def __init__(self, inner: MemoryStore, other: Act, at: int) -> None:
        super().__init__(inner, before=self._count)
        self.met = 0
        self._other = other
        self._at = at

    def _count(self, _name: str, _key: str) -> None:
        self.met += 1
        if self.met == self._at:
            # That the other one is refused is not our error.
            with suppress(HoldfastError):
                self._other(self.inner)


def in_order(base: MemoryStore, *acts: Act) -> State:
    """Return the state after `acts`, one after the other; what is refused changes nothing."""
    store = base.clone()
    for act in acts:
        with suppress(HoldfastError):
            act(store)
    return read_state(store)


def iter_wrong(verb: Verb, other: Act) -> Iterator[str]:
    base = MemoryStore()
    verb.prepare(base)
    alone, first, last = in_order(base, other), in_order(base, verb.act, other), in_order(base, other, verb.act)
    for at in range(1, 1000):
        store = base.clone()
        interrupted = Interrupted(store, other, at)
        try:
            verb.act(interrupted)
            allowed = [first, last]
        except HoldfastError as error:
            # Refused: as if it had never been tried, or overtaken as soon as it was done.
            allowed = [alone, first] if isinstance(error, NameInUse) else [alone, last]
        if interrupted.met < at:
            return
        if read_state(store) not in allowed:
            yield f"at {at}: the state fits no order: {read_state(store)}"
        yield from (f"at {at}: {found.message}" for found in check_store(store) if found.severity != "note")
        yield from (f"at {at}: {info.key} is left" for info in store.list("leases/"))


@pytest.mark.parametrize(
    ("verb", "other"), PAIRS, ids=[f"{verb} and {other.__name__.strip('_')}" for verb, other in PAIRS]
)
def test_whatever_happens_between_two_operations_fits_one_order_of_both(verb: Verb, other: Act) -> None:
    assert list(iter_wrong(verb, other)) == []


@pytest.mark.parametrize("other", [_save_elsewhere, INIT.act], ids=["a save", "init"])
def test_a_place_that_becomes_a_store_at_any_moment_of_a_first_save_is_no_obstacle(other: Act) -> None:
    rehearsal = FaultyStore(MemoryStore())
    FIRST_SAVE.act(rehearsal)
    for at in range(1, len(rehearsal.log)):
        store = MemoryStore()
        interrupted = Interrupted(store, other, at)
        FIRST_SAVE.act(interrupted)
        assert "run/step-1" in read_state(store).names
