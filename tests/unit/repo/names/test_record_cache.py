"""The record cache: an object that was replaced is not found, and the sizes add up to at most the limit."""

from __future__ import annotations

from dataclasses import replace

from holdfast.objects.protocol import ObjectInfo
from holdfast.repo.names.listed import CachedRecord, RecordCache
from tests.kit.committed import make_committed

INFO = ObjectInfo("snapshots/00/a@00000000", 500, 0.0, "v1")
SNAPSHOT = make_committed("a")


def test_a_record_is_found_while_its_object_is_the_same() -> None:
    cache = RecordCache()
    cache.put(INFO, SNAPSHOT)

    assert cache.find(INFO) == CachedRecord(500, "v1", SNAPSHOT)
    assert cache.find(replace(INFO, modified_s=9.0)) is not None
    assert cache.find(replace(INFO, version="v2")) is None
    assert cache.find(replace(INFO, size_bytes=501)) is None
    assert cache.find(replace(INFO, key="snapshots/00/a@00000001")) is None


def test_a_deleted_name_is_remembered_too() -> None:
    cache = RecordCache()
    cache.put(INFO, None)

    assert cache.find(INFO) == CachedRecord(500, "v1", None)


def test_an_object_without_a_version_is_not_remembered() -> None:
    cache = RecordCache()
    cache.put(replace(INFO, version=""), SNAPSHOT)

    assert (len(cache), cache.num_new) == (0, 0)


def test_no_more_than_the_limit_is_remembered() -> None:
    cache = RecordCache(limit_bytes=1200)
    infos = [replace(INFO, key=f"snapshots/00/{number}@00000000") for number in range(4)]
    for info in infos:
        cache.put(info, SNAPSHOT)
    assert (len(cache), cache.num_new) == (2, 2)

    cache.put(infos[0], SNAPSHOT)
    assert len(cache) == 2, "a record that is replaced makes room for itself"
    cache.keep_only({infos[1].key})
    cache.put(infos[3], SNAPSHOT)
    assert {key for key, _ in cache.iter_records()} == {infos[1].key, infos[3].key}


def test_records_of_a_file_do_not_count_as_new() -> None:
    cache = RecordCache()

    assert cache.put_records({INFO.key: CachedRecord(500, "v1", SNAPSHOT)}) == 1
    assert (len(cache), cache.num_new) == (1, 0)
