"""New snapshots are found once each, in the order of `latest`, and a look that finds nothing costs little."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import StoreError
from holdfast.objects.local import local_store
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import SNAPSHOTS
from holdfast.repo.names.latest import NameWatch
from holdfast.repo.names.listed import RecordCache
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.store import Store
from tests.kit.hooking import Hook
from tests.kit.waiting_store import WaitingStore


class Clocked(MemoryStore):
    """A store whose clock a test sets."""

    now_s = 1000.0

    def clock(self) -> float:
        return self.now_s


@pytest.fixture(params=[MemoryStore, WaitingStore], ids=["one request at a time", "many requests at once"])
def objects(request: pytest.FixtureRequest) -> ObjectStore:
    made: ObjectStore = request.param()
    return made


def watch(objects: ObjectStore, prefix: str = "v/", *, since: str = "", every: bool = False) -> NameWatch:
    record = read_snapshot(objects, since) if since else None
    return NameWatch(objects, prefix, RecordCache(), since=record, every=every)


def names(found: NameWatch) -> list[str]:
    return [each.name for each in found.read_newer()]


def test_the_present_one_is_found_first_and_then_nothing(objects: ObjectStore) -> None:
    store = Store(objects)
    for number in range(3):
        store.save(f"v/{number}", {"n": number})
    store.save("other/9", {"n": 9})
    seen = watch(objects)

    assert names(seen) == ["v/2"]
    assert names(seen) == []


def test_those_in_between_are_skipped_or_not(objects: ObjectStore) -> None:
    store = Store(objects)
    store.save("v/0", {"n": 0})
    newest, every = watch(objects), watch(objects, every=True)
    assert names(newest) == names(every) == ["v/0"]
    for number in (1, 2, 10):
        store.save(f"v/{number}", {"n": number})

    assert names(newest) == ["v/10"]
    assert names(every) == ["v/1", "v/2", "v/10"]


def test_since_yields_only_newer_ones(objects: ObjectStore) -> None:
    store = Store(objects)
    for number in range(4):
        store.save(f"v/{number}", {"n": number})

    assert names(watch(objects, since="v/1")) == ["v/3"]
    assert names(watch(objects, since="v/1", every=True)) == ["v/2", "v/3"]
    assert names(watch(objects, since="v/3")) == []


def test_an_older_one_is_not_new_because_the_newest_was_deleted(objects: ObjectStore) -> None:
    store = Store(objects)
    for number in range(3):
        store.save(f"v/{number}", {"n": number})
    seen = watch(objects)
    names(seen)

    store.delete("v/2")
    assert names(seen) == []
    store.gc()
    assert names(seen) == []
    store.save("v/3", {"n": 3})
    assert names(seen) == ["v/3"]


def test_an_overwritten_name_is_new_and_one_with_the_same_content_is_not(objects: ObjectStore) -> None:
    store = Store(objects)
    store.save("v/latest", {"n": 0})
    seen = watch(objects)
    names(seen)

    store.save("v/latest", {"n": 1}, overwrite=True)
    assert names(seen) == ["v/latest"]
    assert names(seen) == []


def test_an_overwrite_by_a_clock_that_is_behind_is_new() -> None:
    objects = Clocked()
    store = Store(objects)
    store.save("v/latest", {"n": 0})
    seen = watch(objects)
    names(seen)
    objects.now_s -= 500

    store.save("v/latest", {"n": 1}, overwrite=True)

    assert names(seen) == ["v/latest"]


def test_equal_times_are_ordered_by_name() -> None:
    objects = Clocked()
    store = Store(objects)
    store.save("v/2", {"n": 2})
    seen = watch(objects, every=True)
    assert names(seen) == ["v/2"]

    store.save("v/10", {"n": 10})
    store.save("v/9", {"n": 9})

    assert names(seen) == ["v/9", "v/10"]


def test_a_record_that_could_not_be_read_is_read_the_next_time(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    objects = MemoryStore()
    store = Store(objects)
    store.save("v/0", {"n": 0})
    seen = watch(objects)
    names(seen)
    store.save("v/1", {"n": 1})
    read = objects.read

    def fail(key: str, *, limit_bytes: int) -> bytes:
        raise StoreError("no answer")

    hook(objects, "read", fail)
    with pytest.raises(StoreError):
        seen.read_newer()
    monkeypatch.setattr(objects, "read", read)

    assert names(seen) == ["v/1"]


def test_a_damaged_record_hides_nothing_else() -> None:
    objects = MemoryStore()
    store = Store(objects)
    store.save("v/0", {"n": 0})
    (key,) = [info.key for info in objects.list(SNAPSHOTS)]
    seen = watch(objects)
    names(seen)
    objects.delete(key)
    objects.create(key, b"{}" * 60)

    store.save("v/1", {"n": 1})

    assert names(seen) == ["v/1"]


class Listing(LocalStore):
    """Counts the listings."""

    listings = 0

    def list(self, prefix: str, *, after: str = "", limit: int = 1000) -> list:  # type: ignore[type-arg]  # of infos
        self.listings += 1
        return super().list(prefix, after=after, limit=limit)


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Listing:
    """A store in a directory that is believed to be on a local disk, with changes that are old at once."""
    monkeypatch.setattr(Listing, "is_network", False)
    monkeypatch.setattr(local_store, "_SETTLED_S", -1e9)
    return Listing(tmp_path / "store")


def test_a_directory_that_has_not_changed_is_not_listed(local: Listing) -> None:
    store = Store(local)
    store.save("v/0", {"n": 0})
    seen = watch(local)
    assert names(seen) == ["v/0"]
    local.listings = 0

    for _ in range(5):
        assert names(seen) == []
    assert local.listings == 0
    store.save("v/1", {"n": 1})
    local.listings = 0

    assert names(seen) == ["v/1"]
    assert local.listings == 1


def test_a_directory_that_has_just_changed_is_listed_again(local: Listing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two changes in one step of the filesystem's clock have the same time, and the second must not be missed."""
    monkeypatch.setattr(local_store, "_SETTLED_S", 1e9)
    Store(local).save("v/0", {"n": 0})
    seen = watch(local)
    names(seen)
    local.listings = 0

    names(seen)

    assert local.listings == 1


def test_two_commits_at_the_same_time_of_the_directory_are_both_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "is_network", False)
    objects = LocalStore(tmp_path / "store")
    store = Store(objects)
    store.save("v/0", {"n": 0})
    seen = watch(objects)
    names(seen)
    before = {shelf: os.stat(shelf).st_mtime_ns for shelf in (tmp_path / "store/snapshots").iterdir()}
    store.save("v/1", {"n": 1})
    for shelf, time_ns in before.items():
        os.utime(shelf, ns=(time_ns, time_ns))  # as if the clock had not advanced

    assert names(seen) == ["v/1"]


def test_a_network_filesystem_is_always_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "is_network", True)

    assert LocalStore(tmp_path).read_folder_state(SNAPSHOTS, ["00"]) == ""


def test_a_store_that_does_not_exist_yet_has_no_snapshots(tmp_path: Path) -> None:
    objects = LocalStore(tmp_path / "later")
    seen = watch(objects)
    assert names(seen) == []

    Store(objects).save("v/0", {"n": 0})

    assert names(seen) == ["v/0"]
