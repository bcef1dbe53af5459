"""Listing with a cache: the same answers as without, few reads, damage reported, and many records on threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import generation_key, snapshot_stem
from holdfast.repo.handle.repository import init_repository
from holdfast.repo.names.listed import RecordCache, list_user_names
from holdfast.repo.names.snapshots import DamagedName, delete_snapshot, iter_user_names
from holdfast.testing.faults import FaultyStore
from tests.kit.committed import commit, make_committed


class CountingStore(FaultyStore):
    """Counts the objects that are read."""

    num_reads = 0

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        self.num_reads += 1
        return super().read(key, limit_bytes=limit_bytes)


@pytest.fixture
def store() -> CountingStore:
    counting = CountingStore(MemoryStore())
    for name in ("run/1", "run/2", "other", "@own"):
        commit(counting, make_committed(name))
    counting.num_reads = 0
    return counting


def read_names(store: ObjectStore, prefix: str, cache: RecordCache) -> list[str]:
    return sorted(found.name for found in list_user_names(store, prefix, cache) if not isinstance(found, DamagedName))


@pytest.mark.parametrize("prefix", ["", "run/", "run/1", "none", "@", "@o"])
def test_the_answer_is_that_of_a_listing_without_a_cache(store: CountingStore, prefix: str) -> None:
    cache = RecordCache()
    expected = {found.name for found in iter_user_names(store, prefix) if not isinstance(found, DamagedName)}

    for _ in range(2):
        assert set(read_names(store, prefix, cache)) == expected


def test_a_second_listing_reads_nothing(store: CountingStore) -> None:
    cache = RecordCache()
    read_names(store, "run/", cache)
    assert store.num_reads == 2

    read_names(store, "", cache)
    read_names(store, "", cache)

    assert store.num_reads == 3


def test_only_what_changed_is_read_again(store: CountingStore) -> None:
    cache = RecordCache()
    read_names(store, "", cache)
    commit(store, make_committed("run/1", {"step": 2}))
    delete_snapshot(store, "run/2")
    commit(store, make_committed("run/3"))
    store.num_reads = 0

    found = {each.name: each for each in list_user_names(store, "", cache) if not isinstance(each, DamagedName)}

    assert sorted(found) == ["other", "run/1", "run/3"]
    assert found["run/1"].metadata == {"step": 2}
    assert store.num_reads == 3
    assert read_names(store, "", cache) == sorted(found)
    assert store.num_reads == 3, "a deleted name is remembered as well"


def test_what_is_gone_is_forgotten(store: CountingStore) -> None:
    cache = RecordCache()
    read_names(store, "", cache)
    assert len(cache) == 3

    store.delete(generation_key(snapshot_stem("other"), 0))

    assert read_names(store, "", cache) == ["run/1", "run/2"]
    assert len(cache) == 2


def test_a_record_below_a_torn_one_is_read_each_time(store: CountingStore) -> None:
    cache = RecordCache()
    store.create(generation_key(snapshot_stem("run/1"), 1), b"holdfast-record")

    for _ in range(2):
        assert read_names(store, "run/", cache) == ["run/1", "run/2"]
    assert store.num_reads == 2 * 2 + 1


def test_a_damaged_record_is_reported_each_time(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "s")
    init_repository(store)
    commit(store, make_committed("a"))
    commit(store, make_committed("b"))
    cache = RecordCache()
    assert read_names(store, "", cache) == ["a", "b"]
    path = tmp_path / "s" / generation_key(snapshot_stem("a"), 0)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)

    for _ in range(2):
        damaged = [found for found in list_user_names(store, "", cache) if isinstance(found, DamagedName)]
        assert [found.stem for found in damaged] == [snapshot_stem("a")]


def test_many_records_are_read_on_threads() -> None:
    store = MemoryStore()
    names = [f"run/{number}" for number in range(200)]
    for name in names:
        commit(store, make_committed(name))
    cache, small = RecordCache(), RecordCache(limit_bytes=10_000)

    assert read_names(store, "", cache) == read_names(store, "", small) == sorted(names)
    assert len(cache) == 200
    assert 0 < len(small) < 200
    assert read_names(store, "", small) == sorted(names)
