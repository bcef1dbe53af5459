"""The contract suite for object stores: subclass `StoreContract`, define how to make a store, and run pytest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from holdfast.errors import BadName, Corrupt, HoldfastError, NotFound, ObjectExists, ReadOnlyStore, StoreError
from holdfast.objects.blocks import LentBlock, new_block
from holdfast.objects.protocol import (
    MAX_COMPONENT_BYTES,
    MAX_KEY_BYTES,
    ObjectStore,
)

THREADS: Final = 16
LIMIT_BYTES: Final = 1 << 20
REUSED_BYTES: Final = 20 << 20
"""More than the parts in which any client library sends an object."""

BAD_KEYS: Final = {
    "empty": "",
    "parent": "..",
    "parent in the middle": "a/../b",
    "absolute": "/etc/passwd",
    "trailing slash": "a/",
    "empty component": "a//b",
    "nul": "a\0b",
    "newline at the end": "a\n",
    "backslash": "a\\b",
    "space": "a b",
    "upper case": "packs/A",
    "non-ascii": "pack\u00e9",
    "dot-name": ".hidden",
    "dot-name below": "a/.tmp-1",
    "long component": "a" * (MAX_COMPONENT_BYTES + 1),
    "long key": "/".join(["a" * 200] * 3),
}
BAD_PREFIXES: Final = {name: key for name, key in BAD_KEYS.items() if name not in ("empty", "trailing slash")}

KEY_METHODS: Final[dict[str, Callable[[ObjectStore, str], object]]] = {
    "create": lambda store, key: store.create(key, b"x"),
    "upload": lambda store, key: store.upload(key),
    "read": lambda store, key: store.read(key, limit_bytes=LIMIT_BYTES),
    "read_into": lambda store, key: store.read_into(key, 0, memoryview(bytearray(1))),
    "delete": lambda store, key: store.delete(key),
    "stat": lambda store, key: store.stat(key),
}
WRITE_METHODS: Final = ("create", "upload", "delete")
READ_METHODS: Final = ("read", "read_into", "stat")


class StoreContract:
    """Tests for each sentence of the contract in `holdfast.objects.protocol`."""

    def make_store(self, place: Path, *, read_only: bool = False) -> ObjectStore:
        """Return a store for the test that owns the empty directory `place`.

        The first call with a `place` returns an empty store. Later calls with the same `place` must return a store with
        the same objects.
        """
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        """An empty store."""
        return self.make_store(tmp_path)

    def test_what_was_created_is_read_back(self, store: ObjectStore) -> None:
        store.create("packs/one", b"first")
        assert store.read("packs/one", limit_bytes=5) == b"first"

    def test_what_was_created_without_durability_is_read_back(self, store: ObjectStore) -> None:
        store.create("leases/one", b"first", durable=False)
        assert store.read("leases/one", limit_bytes=5) == b"first"

    def test_an_empty_object_is_an_object(self, store: ObjectStore) -> None:
        store.create("marks/one", b"")
        assert store.read("marks/one", limit_bytes=0) == b""
        assert store.stat("marks/one").size_bytes == 0

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_any_buffer_is_accepted(
        self, store: ObjectStore, kind: type[bytes] | type[bytearray] | type[memoryview]
    ) -> None:
        store.create("packs/created", kind(b"abc"))
        with store.upload("packs/uploaded") as upload:
            upload.append(kind(b"abc"), kind(b""))
            upload.commit()
        assert store.read("packs/created", limit_bytes=3) == b"abc"
        assert store.read("packs/uploaded", limit_bytes=3) == b"abc"

    def test_a_second_store_at_the_same_place_has_the_objects(self, store: ObjectStore, tmp_path: Path) -> None:
        store.create("packs/one", b"first")
        assert self.make_store(tmp_path).read("packs/one", limit_bytes=5) == b"first"

    def test_the_longest_keys_work(self, store: ObjectStore) -> None:
        key = "/".join(["a" * MAX_COMPONENT_BYTES, "b" * MAX_COMPONENT_BYTES])
        store.create(key, b"x")
        assert len(key) < MAX_KEY_BYTES
        assert [info.key for info in store.list("")] == [key]

    @pytest.mark.parametrize("durable", [True, False])
    def test_a_second_create_raises_and_keeps_the_first_bytes(self, store: ObjectStore, durable: bool) -> None:
        store.create("snapshots/one/0", b"first", durable=durable)
        with pytest.raises(ObjectExists):
            store.create("snapshots/one/0", b"second", durable=durable)
        assert store.read("snapshots/one/0", limit_bytes=100) == b"first"

    def test_of_many_creates_of_one_key_exactly_one_returns(self, store: ObjectStore) -> None:
        for key in [f"snapshots/name-{number}/0" for number in range(10)]:
            won = _race(partial(_create_numbered, store, key))
            assert len(won) == 1
            assert store.read(key, limit_bytes=100) == b"%d" % won[0]

    def test_of_many_uploads_to_one_key_exactly_one_is_committed(self, store: ObjectStore) -> None:
        def upload_one(index: int) -> None:
            with store.upload("packs/one") as upload:
                upload.append(b"%d" % index)
                upload.commit()

        won = _race(upload_one)
        assert len(won) == 1
        assert store.read("packs/one", limit_bytes=100) == b"%d" % won[0]

    def test_creates_of_different_keys_do_not_disturb_each_other(self, store: ObjectStore) -> None:
        won = _race(lambda index: store.create(f"leases/lease-{index:02}/0", b"%d" % index, durable=False))
        assert len(won) == THREADS
        assert [info.key for info in store.list("leases/")] == [
            f"leases/lease-{index:02}/0" for index in range(THREADS)
        ]

    @pytest.mark.parametrize("method", READ_METHODS)
    def test_a_missing_key_is_not_found(self, store: ObjectStore, method: str) -> None:
        with pytest.raises(NotFound, match="packs/none"):
            KEY_METHODS[method](store, "packs/none")

    def test_a_read_that_exceeds_its_limit_is_refused(self, store: ObjectStore) -> None:
        store.create("packs/one", b"12345")
        with pytest.raises(Corrupt, match="packs/one"):
            store.read("packs/one", limit_bytes=4)

    @pytest.mark.parametrize(("start", "stop"), [(0, 10), (0, 3), (3, 7), (9, 10), (0, 0), (5, 5), (10, 10)])
    def test_a_range_is_read_exactly(self, store: ObjectStore, start: int, stop: int) -> None:
        store.create("packs/one", b"0123456789")
        buffer = bytearray(stop - start)
        store.read_into("packs/one", start, memoryview(buffer))
        assert buffer == b"0123456789"[start:stop]

    def test_a_range_fills_only_its_part_of_a_buffer(self, store: ObjectStore) -> None:
        store.create("packs/one", b"0123456789")
        buffer = bytearray(b"......")
        store.read_into("packs/one", 4, memoryview(buffer)[2:4])
        assert buffer == b"..45.."

    def test_a_range_is_read_into_items_of_any_size(self, store: ObjectStore) -> None:
        store.create("packs/one", b"0123456789abcdef")
        buffer = bytearray(16)
        store.read_into("packs/one", 0, memoryview(buffer).cast("q"))
        assert buffer == b"0123456789abcdef"

    @pytest.mark.parametrize(("start", "size_bytes"), [(0, 11), (9, 2), (10, 1), (1000, 1)])
    def test_a_range_past_the_end_is_corrupt(self, store: ObjectStore, start: int, size_bytes: int) -> None:
        store.create("packs/one", b"0123456789")
        with pytest.raises(Corrupt, match="packs/one"):
            store.read_into("packs/one", start, memoryview(bytearray(size_bytes)))

    def test_a_range_is_lent_as_it_is_read(self, store: ObjectStore) -> None:
        store.create("packs/one", b"0123456789")
        assert bytes(store.read_range("packs/one", 3, 4)) == b"3456"
        for start, size_bytes in ((0, 11), (9, 2), (10, 1), (1000, 1)):
            with pytest.raises(Corrupt, match="packs/one"):
                store.read_range("packs/one", start, size_bytes)
        with pytest.raises(NotFound):
            store.read_range("packs/two", 0, 1)

    def test_a_run_of_kept_reads_returns_the_same_bytes(self, store: ObjectStore) -> None:
        store.create("packs/one", b"0123456789")
        store.create("packs/two", b"abcdefghij")
        buffer = bytearray(4)
        with store.keep_reads().run() as read_into:
            for key, start, found in (
                ("one", 0, b"0123"),
                ("one", 4, b"4567"),
                ("two", 6, b"ghij"),
                ("one", 1, b"1234"),
            ):
                read_into(f"packs/{key}", start, memoryview(buffer))
                assert buffer == found
            with pytest.raises(Corrupt, match="packs/one"):
                read_into("packs/one", 7, memoryview(buffer))
            with pytest.raises(NotFound):
                read_into("packs/three", 0, memoryview(buffer))
            with pytest.raises(BadName):
                read_into("../one", 0, memoryview(buffer))

    def test_stat_returns_key_size_and_time(self, store: ObjectStore) -> None:
        before = store.clock()
        store.create("packs/one", b"12345")
        info = store.stat("packs/one")
        assert (info.key, info.size_bytes) == ("packs/one", 5)
        # The clock of a filesystem is coarser than ours.
        assert before - 2 <= info.modified_s <= store.clock() + 2

    def test_an_empty_store_lists_nothing(self, store: ObjectStore) -> None:
        assert store.list("") == []
        assert store.list("packs/") == []
        assert store.list("packs/a") == []

    def test_a_list_is_ordered_by_the_whole_key(self, store: ObjectStore) -> None:
        keys = ["a-b", "a.b", "a/b", "a/b-c", "a/b.d", "a/b=/c", "a0", "b/a/a", "b/a-a", "b/a0/a", "c"]
        for key in reversed(keys):
            store.create(key, b"", durable=False)
        assert _keys(store, "") == sorted(keys)

    def test_a_list_contains_what_stat_returns(self, store: ObjectStore) -> None:
        store.create("packs/one", b"12345")
        assert store.list("packs/") == [store.stat("packs/one")]

    def test_pages_join_into_the_whole_list(self, store: ObjectStore) -> None:
        keys = sorted([f"packs/{number}" for number in range(7)] + ["packs/1/x", "packs/1-x", "tags/t/0"])
        keys.remove("packs/1")
        for key in keys:
            store.create(key, b"", durable=False)
        for limit in range(1, len(keys) + 2):
            listed: list[str] = []
            while page := store.list("", after=listed[-1] if listed else "", limit=limit):
                assert len(page) <= limit
                listed += [info.key for info in page]
            assert listed == keys

    def test_a_prefix_may_end_inside_a_component(self, store: ObjectStore) -> None:
        for key in ("packs/ab", "packs/abc", "packs/abd/x", "packs/ac", "packsaddle", "tags/ab"):
            store.create(key, b"", durable=False)
        assert _keys(store, "packs/ab") == ["packs/ab", "packs/abc", "packs/abd/x"]
        assert _keys(store, "packs/") == ["packs/ab", "packs/abc", "packs/abd/x", "packs/ac"]
        assert _keys(store, "packs") == ["packs/ab", "packs/abc", "packs/abd/x", "packs/ac", "packsaddle"]
        assert _keys(store, "packs/abd/x/") == []

    def test_a_list_begins_after_a_key_that_need_not_exist(self, store: ObjectStore) -> None:
        for key in ("a/1", "a/3", "a/30", "b"):
            store.create(key, b"", durable=False)
        assert [info.key for info in store.list("a/", after="a/1")] == ["a/3", "a/30"]
        assert [info.key for info in store.list("a/", after="a/2")] == ["a/3", "a/30"]
        assert [info.key for info in store.list("", after="a/30")] == ["b"]
        assert store.list("a/", after="b") == []

    def test_all_ways_to_list_find_the_same_objects(self, store: ObjectStore) -> None:
        keys = ["a/00/x", "a/00/y", "a/01/z", "a/0stray", "a/ff/unexpected", "a/stray", "b/other"]
        for key in keys:
            store.create(key, key.encode(), durable=False)
        listed = store.list("a/")
        assert list(store.iter_objects("a/")) == listed
        assert list(store.iter_folders("a/", ("a/00/", "a/01/", "a/02/"))) == listed
        assert [list(found) for found in store.list_together(("b/", "c/", "a/"))] == [store.list("b/"), [], listed]
        assert list(store.list_at_most("a/", 6) or listed) == listed
        assert store.list_at_most("a/", 5) is None
        assert list(store.skipping_links().iter_objects("a/")) == listed
        assert not list(store.iter_links())

    def test_the_names_in_a_folder_are_those_of_objects_and_folders(self, store: ObjectStore) -> None:
        assert list(store.iter_names("")) == []
        for key in ("a/00/x", "a/00/y", "a/01/z", "a/0stray", "a/00-x", "b/other", "c"):
            store.create(key, b"", durable=False)
        assert list(store.iter_names("")) == ["a/", "b/", "c"]
        assert list(store.iter_names("a/")) == ["a/00-x", "a/00/", "a/01/", "a/0stray"]

    def test_many_objects_are_described_and_deleted(self, store: ObjectStore) -> None:
        keys = [f"packs/{number:03}" for number in range(100)]
        for key in keys:
            store.create(key, key.encode(), durable=False)
        assert store.stat_many(["packs/none", *keys]) == {key: store.stat(key) for key in keys}
        assert store.stat_many(["packs/none", "packs/001"]) == {"packs/001": store.stat("packs/001")}
        assert store.stat_many([]) == {}
        store.delete_many([])
        store.delete_many(["packs/000"])
        store.delete_many([*keys[:99], "packs/none"])
        assert _keys(store, "") == ["packs/099"]

    def test_a_map_is_private_memory_of_the_object(self, store: ObjectStore) -> None:
        store.create("packs/one", b"0123456789")
        mapped = store.map("packs/one", 3, 4)
        if mapped is None:
            pytest.skip("the store cannot map objects")
        assert bytes(mapped) == b"3456"
        mapped[:] = b"...."
        assert store.read("packs/one", limit_bytes=10) == b"0123456789"
        with pytest.raises(Corrupt, match="packs/one"):
            store.map("packs/one", 8, 3)
        with pytest.raises(NotFound):
            store.map("packs/two", 0, 1)

    def test_work_is_done_in_order_and_early_work_once(self, store: ObjectStore) -> None:
        store.create("packs/one", b"1")
        store.create("packs/two", b"2")
        works = [partial(store.read, f"packs/{name}", limit_bytes=1) for name in ("one", "two")]
        assert list(store.run_together(works)) == [b"1", b"2"]
        assert list(store.iter_together((work, 1) for work in works)) == [b"1", b"2"]
        assert list(store.run_early(works)) in ([], [b"1", b"2"])
        with store.begin(works[1]) as call:
            assert [call.result(), call.result()] == [b"2", b"2"]

    def test_the_state_of_a_folder_changes_with_its_objects(self, store: ObjectStore) -> None:
        store.create("a/00/x", b"")
        before = store.read_folder_state("a/", ("00", "01"))
        store.create("a/01/y", b"")
        after = store.read_folder_state("a/", ("00", "01"))
        assert not before or before != after

    def test_a_deleted_object_is_gone_and_may_be_created_again(self, store: ObjectStore) -> None:
        store.create("leases/one/0", b"first")
        store.delete("leases/one/0")
        assert store.list("") == []
        with pytest.raises(NotFound):
            store.stat("leases/one/0")
        store.create("leases/one/0", b"second")
        assert store.read("leases/one/0", limit_bytes=100) == b"second"

    def test_deleting_what_is_absent_is_no_error(self, store: ObjectStore) -> None:
        store.delete("packs/none")
        store.create("packs/one", b"x")
        store.delete("packs/one")
        store.delete("packs/one")

    def test_deleting_one_object_keeps_its_neighbours(self, store: ObjectStore) -> None:
        store.create("leases/one/0", b"")
        store.create("leases/one/1", b"")
        store.delete("leases/one/0")
        assert _keys(store, "") == ["leases/one/1"]

    def test_nothing_is_visible_before_the_commit(self, store: ObjectStore) -> None:
        with store.upload("packs/one") as upload:
            upload.append(b"abc")
            assert store.list("") == []
            with pytest.raises(NotFound):
                store.stat("packs/one")
            upload.commit()
            assert _keys(store, "") == ["packs/one"]

    def test_an_upload_of_blocks_releases_each_block_once(self, store: ObjectStore) -> None:
        released: list[int] = []
        memory = [new_block(size)[:size] for size in (8192, 5000, 8192)]
        with store.upload("packs/one") as upload:
            for number, block in enumerate(memory):
                upload.append_block(LentBlock(block, partial(released.append, number)))
            upload.commit()
        assert sorted(released) == [0, 1, 2]
        assert store.read("packs/one", limit_bytes=LIMIT_BYTES) == b"".join(memory)

    def test_an_upload_is_what_was_appended_in_order(self, store: ObjectStore) -> None:
        with store.upload("packs/one") as upload:
            upload.append(b"a", b"bc")
            upload.append()
            upload.append(b"", b"d")
            upload.commit()
        assert store.read("packs/one", limit_bytes=100) == b"abcd"

    def test_a_buffer_may_be_reused_once_append_returned(self, store: ObjectStore) -> None:
        buffer = bytearray(b"aaaa")
        with store.upload("packs/one") as upload:
            upload.append(memoryview(buffer))
            buffer[:] = b"bbbb"
            upload.append(memoryview(buffer))
            upload.commit()
        assert store.read("packs/one", limit_bytes=100) == b"aaaabbbb"

    def test_a_large_buffer_may_be_reused_once_append_returned(self, store: ObjectStore) -> None:
        buffer = bytearray(b"a" * REUSED_BYTES)
        with store.upload("packs/one") as upload:
            upload.append(memoryview(buffer))
            buffer[:] = bytes(REUSED_BYTES)
            upload.append(memoryview(buffer))
            buffer[:] = b"c" * REUSED_BYTES
            upload.commit()
        stored = store.read("packs/one", limit_bytes=2 * REUSED_BYTES)
        assert stored[:REUSED_BYTES].count(b"a") == REUSED_BYTES
        assert stored[REUSED_BYTES:].count(b"\0") == REUSED_BYTES

    def test_an_upload_of_thousands_of_buffers_keeps_them_all(self, store: ObjectStore) -> None:
        with store.upload("packs/one") as upload:
            upload.append(*[b"%04d" % number for number in range(5000)])
            upload.commit()
        assert store.read("packs/one", limit_bytes=LIMIT_BYTES) == b"".join(b"%04d" % number for number in range(5000))

    def test_a_large_object_is_uploaded_whole(self, store: ObjectStore) -> None:
        part = bytes(range(256)) * 4096
        with store.upload("packs/large") as upload:
            for _ in range(17):
                upload.append(part)
            upload.commit()
        assert store.stat("packs/large").size_bytes == 17 << 20
        buffer = bytearray(len(part))
        store.read_into("packs/large", 16 << 20, memoryview(buffer))
        assert buffer == part

    def test_an_aborted_upload_leaves_nothing(self, store: ObjectStore) -> None:
        upload = store.upload("packs/one")
        upload.append(b"abc")
        upload.abort()
        upload.abort()
        assert store.list("") == []
        store.create("packs/one", b"x")

    def test_leaving_the_with_block_without_a_commit_aborts(self, store: ObjectStore) -> None:
        with store.upload("packs/one") as upload:
            upload.append(b"abc")
        with pytest.raises(StoreError):
            upload.commit()
        assert store.list("") == []

    def test_an_upload_that_ended_accepts_no_more_bytes(self, store: ObjectStore) -> None:
        upload = store.upload("packs/one")
        upload.abort()
        with pytest.raises(StoreError):
            upload.append(b"x")
        with pytest.raises(StoreError):
            upload.commit()
        assert store.list("") == []

    def test_an_abort_after_the_commit_keeps_the_object(self, store: ObjectStore) -> None:
        upload = store.upload("packs/one")
        upload.commit()
        upload.abort()
        assert store.read("packs/one", limit_bytes=0) == b""

    def test_an_upload_to_a_key_in_use_raises_and_keeps_the_first_bytes(self, store: ObjectStore) -> None:
        store.create("packs/one", b"first")
        with store.upload("packs/one") as upload:
            upload.append(b"second")
            with pytest.raises(ObjectExists):
                upload.commit()
        assert store.read("packs/one", limit_bytes=100) == b"first"
        assert _keys(store, "") == ["packs/one"]

    @pytest.mark.parametrize("key", BAD_KEYS.values(), ids=BAD_KEYS.keys())
    def test_a_bad_key_is_refused(self, store: ObjectStore, key: str) -> None:
        for call in KEY_METHODS.values():
            with pytest.raises(BadName):
                call(store, key)

    @pytest.mark.parametrize("prefix", BAD_PREFIXES.values(), ids=BAD_PREFIXES.keys())
    def test_a_bad_prefix_is_refused(self, store: ObjectStore, prefix: str) -> None:
        with pytest.raises(BadName):
            store.list(prefix)

    @pytest.mark.parametrize("method", WRITE_METHODS)
    def test_a_read_only_store_refuses_to_write(self, store: ObjectStore, tmp_path: Path, method: str) -> None:
        store.create("packs/one", b"first")
        reader = self.make_store(tmp_path, read_only=True)
        for key in ("packs/one", "packs/two"):
            with pytest.raises(ReadOnlyStore, match="read_only"):
                KEY_METHODS[method](reader, key)
        assert reader.read("packs/one", limit_bytes=5) == b"first"
        assert _keys(reader, "") == ["packs/one"]

    def test_asking_for_traits_and_free_space_changes_nothing(self, store: ObjectStore) -> None:
        assert store.traits == store.traits
        free_bytes = store.find_free_bytes()
        assert free_bytes is None or free_bytes >= 0
        assert store.list("") == []

    def test_a_version_is_stable_and_the_same_in_listings(self, store: ObjectStore) -> None:
        store.create("packs/one", b"first")
        version = store.stat("packs/one").version
        store.read("packs/one", limit_bytes=100)
        store.create("packs/two", b"second")
        assert store.stat("packs/one").version == version
        assert [info.version for info in store.list("packs/one")] == [version]

    def test_prepare_creates_no_object_and_may_be_repeated(self, store: ObjectStore) -> None:
        for _ in range(2):
            store.prepare(["packs/", "leases/"])
        assert store.list("") == []
        store.create("packs/one", b"first")
        store.prepare(["packs/"])
        assert [info.key for info in store.list("")] == ["packs/one"]

    def test_a_read_only_store_refuses_to_prepare(self, store: ObjectStore, tmp_path: Path) -> None:
        store.create("packs/one", b"first")
        with pytest.raises(ReadOnlyStore):
            self.make_store(tmp_path, read_only=True).prepare(["packs/"])

    def test_sync_changes_nothing_and_works_without_objects(self, store: ObjectStore) -> None:
        store.sync("tags/")
        store.create("tags/one", b"first")
        store.sync("tags/")
        assert [info.key for info in store.list("")] == ["tags/one"]

    def test_writers_share_the_lock_and_exclude_the_exclusive_one(self, store: ObjectStore) -> None:
        store.prepare(["packs/"])
        with store.hold(exclusive=False) as first, store.hold(exclusive=False) as second:
            assert first
            assert second
            with store.hold(exclusive=True) as is_exclusive:
                assert not is_exclusive

    def test_a_lock_creates_no_object_and_is_released_after_an_error(self, store: ObjectStore) -> None:
        store.prepare(["packs/"])
        with pytest.raises(ZeroDivisionError), store.hold(exclusive=False):
            raise ZeroDivisionError
        with store.hold(exclusive=True):
            pass
        with store.hold(exclusive=False) as is_locked:
            assert is_locked
        assert store.list("") == []

    def test_removing_debris_keeps_objects_and_young_uploads(self, store: ObjectStore) -> None:
        store.create("packs/one", b"first")
        with store.upload("packs/two") as upload:
            upload.append(b"sec")
            store.remove_debris(older_than_s=3600.0)
            upload.append(b"ond")
            upload.commit()
        assert store.remove_debris(older_than_s=0.0) == 0
        assert [info.key for info in store.list("")] == ["packs/one", "packs/two"]


def _keys(store: ObjectStore, prefix: str) -> list[str]:
    return [info.key for info in store.list(prefix)]


def _create_numbered(store: ObjectStore, key: str, number: int) -> None:
    store.create(key, b"%d" % number, durable=False)


def _race(act: Callable[[int], None]) -> list[int]:
    """Call `act` from many threads at once; return the numbers of the calls that did not raise ObjectExists."""
    start = threading.Barrier(THREADS)
    won: list[int] = []
    failed: list[HoldfastError] = []

    def run(index: int) -> None:
        start.wait()
        try:
            act(index)
            won.append(index)
        except ObjectExists:
            return
        except HoldfastError as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return won
