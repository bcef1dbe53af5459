"""What only the store in memory has: a virtual clock, a capacity, copies, versions."""

from __future__ import annotations

import pytest

from holdfast.errors import StoreError, StoreFull
from holdfast.objects.memory import MemoryStore, VirtualClock


def test_a_virtual_clock_moves_only_by_advance() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    store.create("packs/old", b"")
    clock.advance(60)
    store.create("packs/new", b"")
    assert store.stat("packs/new").modified_s - store.stat("packs/old").modified_s == 60
    assert store.clock() == store.stat("packs/new").modified_s


def test_a_create_beyond_the_capacity_is_refused_and_the_error_has_the_free_bytes() -> None:
    store = MemoryStore(capacity_bytes=10)
    store.create("packs/one", b"123456")
    with pytest.raises(StoreFull, match="packs/two") as caught:
        store.create("packs/two", b"12345")
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (5, 4)
    assert list(store.contents()) == ["packs/one"]


def test_deleting_makes_room() -> None:
    store = MemoryStore(capacity_bytes=4)
    store.create("packs/one", b"1234")
    assert store.find_free_bytes() == 0
    store.delete("packs/one")
    assert store.find_free_bytes() == 4
    store.create("packs/two", b"1234")


def test_an_append_beyond_the_capacity_ends_the_upload() -> None:
    store = MemoryStore(capacity_bytes=4)
    upload = store.upload("packs/one")
    upload.append(b"123")
    with pytest.raises(StoreFull):
        upload.append(b"45")
    with pytest.raises(StoreError, match="has ended"):
        upload.commit()
    assert store.contents() == {}


def test_without_a_capacity_there_is_no_limit() -> None:
    assert MemoryStore().find_free_bytes() is None


def test_a_clone_is_independent_and_keeps_versions() -> None:
    store = MemoryStore()
    store.create("packs/one", b"1")
    twin = store.clone()
    twin.create("packs/two", b"2")
    store.delete("packs/one")
    assert store.contents() == {}
    assert twin.contents() == {"packs/one": b"1", "packs/two": b"2"}
    assert twin.stat("packs/one").version != twin.stat("packs/two").version


def test_contents_are_a_copy() -> None:
    store = MemoryStore()
    store.contents()["packs/one"] = b"1"
    assert store.list("") == []


def test_an_object_deleted_and_created_again_has_another_version() -> None:
    store = MemoryStore()
    store.create("tags/one", b"same")
    first = store.stat("tags/one").version
    store.delete("tags/one")
    store.create("tags/one", b"same")
    assert store.stat("tags/one").version != first
