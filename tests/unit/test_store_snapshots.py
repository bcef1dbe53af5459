"""How snapshots are listed, found and tagged."""

from __future__ import annotations

import pytest

from holdfast.errors import NameInUse
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.store import Store


@pytest.fixture
def store() -> Store:
    return Store(MemoryStore())


def test_snapshots_are_listed_in_natural_order_and_the_newest_is_found() -> None:
    clock = VirtualClock()
    store = Store(MemoryStore(clock=clock))
    for name in ("run/10", "run/9", "other/1"):
        store.save(name, {"name": name})
        clock.advance(1)

    newest = store.latest("run/")

    assert [snap.name for snap in store.snapshots()] == ["other/1", "run/9", "run/10"]
    assert [snap.name for snap in store.snapshots("run/")] == ["run/9", "run/10"]
    assert newest is not None
    assert newest.name == "run/9"
    assert store.latest("none/") is None


def test_of_two_saves_at_one_time_the_later_name_is_the_newest() -> None:
    store = Store(MemoryStore(clock=VirtualClock()))
    for name in ("step-100", "step-99"):
        store.save(name, {})

    newest = store.latest()

    assert newest is not None
    assert newest.name == "step-100"


def test_tags_move_only_if_told(store: Store) -> None:
    store.save("a", 1)
    store.save("b", 2)
    store.tag("best", "a")
    with pytest.raises(NameInUse):
        store.tag("best", "b")

    store.tag("best", "b", move=True)

    assert [(tag.name, tag.snapshot_name) for tag in store.tags()] == [("best", "b")]
    assert store.load("best") == 2
    store.untag("best")
    assert store.tags() == []
    assert store.load("b") == 2
