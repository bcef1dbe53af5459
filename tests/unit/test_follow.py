"""A follower yields each newer snapshot once, can be stopped from anywhere, and survives what happens to the store."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.errors import Corrupt, NotFound, SnapshotGone, StoreError
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import PACKS
from holdfast.repo.names import latest
from holdfast.repo.upkeep.collect import Rules
from holdfast.store import Store
from tests.faults.hooked_store import HookedStore
from tests.kit.patience import PATIENCE_S

NOW = Rules(min_age_s=0.0)


@pytest.fixture
def objects() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def store(objects: MemoryStore) -> Store:
    return Store(objects)


def noise(seed: int, size: int = 300_000) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_it_ends_when_nothing_comes(store: Store) -> None:
    store.save("v/1", {"n": 1})

    assert [each.name for each in store.follow("v/", timeout_s=0.0)] == ["v/1"]
    assert list(store.follow("w/", timeout_s=0.01, poll_s=0.001)) == []


def test_it_waits_for_the_first_snapshot_and_for_the_next(store: Store) -> None:
    follower = store.follow("v/", poll_s=0.001)
    thread = in_thread(lambda: store.save("v/1", {"n": 1}))
    assert next(follower).name == "v/1"
    thread.join()
    thread = in_thread(lambda: store.save("v/2", {"n": 2}))

    assert next(follower).name == "v/2"
    thread.join()


def test_closing_it_from_another_thread_ends_the_wait(store: Store) -> None:
    with store.follow("v/", poll_s=PATIENCE_S) as follower:
        thread = in_thread(follower.close)
        assert list(follower) == []
        thread.join()
    assert "closed" in repr(follower)
    store.save("v/1", {"n": 1})
    assert list(follower) == []


def test_an_interrupt_ends_the_wait(store: Store) -> None:
    timer = threading.Timer(0.05, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    timer.start()

    with pytest.raises(KeyboardInterrupt):
        next(store.follow("v/", poll_s=PATIENCE_S))
    timer.join()


def test_polling_does_not_wait(store: Store) -> None:
    follower = store.follow("v/", poll_s=PATIENCE_S)
    assert follower.poll() is None
    store.save("v/1", {"n": 1})

    found = follower.poll()

    assert found is not None
    assert found.name == "v/1"
    assert follower.poll() is None


def test_since_may_be_a_name_or_a_snapshot_that_is_gone(store: Store) -> None:
    store.save("v/1", {"n": 1})
    first = store["v/1"]
    store.save("v/2", {"n": 2})
    assert [each.name for each in store.follow("v/", since="v/1", timeout_s=0.0)] == ["v/2"]
    store.delete("v/1")
    store.gc(NOW)

    assert [each.name for each in store.follow("v/", since=first, timeout_s=0.0)] == ["v/2"]
    with pytest.raises(NotFound):
        store.follow("v/", since="v/1")


@pytest.mark.parametrize("choices", [{"poll_s": -1.0}, {"timeout_s": float("nan")}])
def test_times_that_cannot_be_meant_are_refused(store: Store, choices: Any) -> None:
    with pytest.raises(ValueError, match="is a time in seconds"):
        store.follow("v/", **choices)


def test_an_unknown_option_is_refused(store: Store) -> None:
    with pytest.raises(TypeError, match="pol_s"):
        store.follow("v/", pol_s=1.0)  # type: ignore[call-arg]  # that is what is tested


def test_pauses_grow_and_shrink_again_after_a_new_snapshot(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = store.follow("v/", poll_s=1.0)
    pauses: list[float] = []

    def wait(pause_s: float) -> None:
        pauses.append(round(pause_s, 3))
        if len(pauses) in (6, 8):
            store.save(f"v/{len(pauses)}", {"n": len(pauses)})

    monkeypatch.setattr(follower._waiter._closed, "wait", wait)
    next(follower)
    next(follower)

    assert pauses == [0.2, 0.3, 0.45, 0.675, 1.0, 1.0, 0.2, 0.3]


def test_a_store_that_fails_for_a_while_is_asked_again(
    objects: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [StoreError("no network")] * 3

    def fail(name: str, key: str) -> None:
        if name == "list" and failures:
            raise failures.pop()

    Store(objects).save("v/1", {"n": 1})
    reader = Store(HookedStore(objects))
    follower = reader.follow("v/", poll_s=0.001)
    assert isinstance(reader.repository.store, HookedStore)
    reader.repository.store.before = fail

    assert next(follower).name == "v/1"
    assert caplog.text.count("trying again: no network") == 3
    failures.append(StoreError("still none"))
    monkeypatch.setattr(latest, "_PATIENCE_S", 0.0)
    Store(objects).save("v/2", {"n": 2})
    with pytest.raises(StoreError, match="still none"):
        next(follower)


def test_a_tree_follows_and_reads_only_what_changed(store: Store) -> None:
    tree, target = {"a": noise(1, 1 << 20)}, {"a": torch.zeros(1 << 20)}
    store.save("v/1", tree)
    loaded = store.follow("v/", timeout_s=0.0).iter_into(target)
    assert next(loaded).name == "v/1"
    assert torch.equal(target["a"], tree["a"])
    tree["a"][5] += 1
    store.save("v/2", tree)
    before = store.statistics().stages["read"].size_bytes

    assert next(loaded).name == "v/2"

    assert torch.equal(target["a"], tree["a"])
    assert store.statistics().stages["read"].size_bytes - before == 1 << 20
    assert next(loaded, None) is None


class Losing:
    """Deletes and collects a snapshot while it is read, and saves another one."""

    def __init__(self, objects: MemoryStore) -> None:
        self.writer = Store(objects)
        self.objects = objects
        self.is_armed = False

    def before(self, name: str, key: str) -> None:
        if self.is_armed and name == "read_into" and key.startswith(PACKS):
            self.is_armed = False
            self.writer.delete("v/2")
            self.writer.gc(NOW)
            self.writer.save("v/3", {"a": noise(3)})


@pytest.mark.parametrize("is_first", [True, False], ids=["the first load", "a later load"])
def test_a_snapshot_that_is_lost_while_it_is_loaded_is_skipped(objects: MemoryStore, is_first: bool) -> None:
    losing = Losing(objects)
    target = {"a": torch.zeros(300_000)}
    reader = Store(HookedStore(objects, before=losing.before))
    loaded = reader.follow("v/", poll_s=0.001).iter_into(target)
    if not is_first:
        losing.writer.save("v/1", {"a": noise(1)})
        assert next(loaded).name == "v/1"
    losing.writer.save("v/2", {"a": noise(2)})
    losing.is_armed = True

    assert next(loaded).name == "v/3"

    assert not losing.is_armed
    assert torch.equal(target["a"], noise(3))


def test_a_lost_snapshot_is_told_as_such_and_leaves_the_tree_alone(objects: MemoryStore) -> None:
    losing = Losing(objects)
    losing.writer.save("v/1", {"a": noise(1)})
    target = {"a": torch.zeros(300_000)}
    reader = Store(HookedStore(objects, before=losing.before))
    reader.load_into("v/1", target)
    losing.writer.save("v/2", {"a": noise(2)})
    losing.is_armed = True

    with pytest.raises(SnapshotGone, match="was deleted or overwritten while it was read") as caught:
        reader.load_into("v/2", target, since="v/1")

    assert caught.value.name == "v/2"
    assert caught.value.overwritten == ()
    assert torch.equal(target["a"], noise(1))


def test_damage_is_raised_and_the_tree_holds_what_was_yielded_last(store: Store, objects: MemoryStore) -> None:
    target = {"a": torch.zeros(300_000)}
    store.save("v/1", {"a": noise(1)})
    loaded = Store(objects).follow("v/", poll_s=0.001).iter_into(target)
    next(loaded)
    packs = {info.key for info in objects.list(PACKS)}
    store.save("v/2", {"a": noise(2)})
    (pack,) = {info.key for info in objects.list(PACKS)} - packs
    data = bytearray(objects.read(pack, limit_bytes=1 << 30))
    data[len(data) // 2] ^= 1
    objects.delete(pack)
    objects.create(pack, bytes(data))

    with pytest.raises(Corrupt):
        next(loaded)

    assert torch.equal(target["a"], noise(1))
