"""The faults themselves: each does what it says, at the chosen operation."""

from __future__ import annotations

import pytest

from holdfast.errors import StoreError, StoreFull
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.testing.faults import Crashed, Fault, FaultyStore, Operation


def work(store: ObjectStore) -> None:
    """Use each operation once: create, upload, append, commit, abort, read, read_into, list, stat, free, delete."""
    store.create("tags/one", b"1234")
    with store.upload("packs/one") as upload:
        upload.append(b"12", b"34")
        upload.commit()
    store.read("tags/one", limit_bytes=4)
    store.read_into("packs/one", 0, memoryview(bytearray(4)))
    store.list("")
    store.stat("packs/one")
    store.find_free_bytes()
    store.delete("tags/one")


def test_the_log_has_every_operation_in_order() -> None:
    store = FaultyStore(MemoryStore())
    work(store)
    assert store.log == (
        Operation("create", "tags/one"),
        Operation("upload", "packs/one"),
        Operation("append", "packs/one"),
        Operation("commit", "packs/one"),
        Operation("abort", "packs/one"),
        Operation("read", "tags/one"),
        Operation("read_into", "packs/one"),
        Operation("list", ""),
        Operation("stat", "packs/one"),
        Operation("find_free_bytes", ""),
        Operation("delete", "tags/one"),
    )


COUNT = 11


@pytest.mark.parametrize("fault", [Fault.CRASH, Fault.CRASH_AFTER, Fault.TORN_WRITE])
@pytest.mark.parametrize("at", range(1, COUNT + 1))
def test_a_crash_at_any_operation_ends_the_process(fault: Fault, at: int) -> None:
    store = FaultyStore(MemoryStore(), fault=fault, at=at)
    with pytest.raises(Crashed):
        work(store)
    assert len(store.log) == at
    with pytest.raises(Crashed):
        store.list("")
    assert len(store.log) == at


@pytest.mark.parametrize("fault", [Fault.ONCE, Fault.FOR_GOOD, Fault.REPLY_LOST])
@pytest.mark.parametrize("at", [at for at in range(1, COUNT + 1) if at != 5])
def test_an_error_at_any_operation_is_of_unknown_fate(fault: Fault, at: int) -> None:
    store = FaultyStore(MemoryStore(), fault=fault, at=at)
    with pytest.raises(StoreError) as caught:
        work(store)
    assert caught.value.fate == "unknown"


def test_an_abort_that_fails_says_nothing() -> None:
    store = FaultyStore(MemoryStore(), fault=Fault.ONCE, at=5)
    work(store)
    assert store.log[4].name == "abort"


def test_no_fault_is_met_beyond_the_last_operation() -> None:
    work(FaultyStore(MemoryStore(), fault=Fault.CRASH, at=COUNT + 1))


def test_a_fault_once_leaves_the_operation_undone_and_the_rest_working() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, fault=Fault.ONCE)
    with pytest.raises(StoreError):
        store.create("tags/one", b"1")
    assert inner.contents() == {}
    store.create("tags/one", b"1")


def test_a_fault_for_good_stays() -> None:
    store = FaultyStore(MemoryStore(), fault=Fault.FOR_GOOD, at=2)
    store.create("tags/one", b"1")
    for _ in range(2):
        with pytest.raises(StoreError):
            store.stat("tags/one")


def test_a_lost_reply_means_that_it_was_done() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, fault=Fault.REPLY_LOST)
    with pytest.raises(StoreError):
        store.create("tags/one", b"1")
    assert inner.contents() == {"tags/one": b"1"}
    store.delete("tags/one")


@pytest.mark.parametrize(("fault", "left"), [(Fault.CRASH, {}), (Fault.CRASH_AFTER, {"tags/one": b"1234"})])
def test_a_crash_comes_before_or_after_the_operation(fault: Fault, left: dict[str, bytes]) -> None:
    inner = MemoryStore()
    with pytest.raises(Crashed):
        FaultyStore(inner, fault=fault).create("tags/one", b"1234")
    assert inner.contents() == left


def test_a_torn_create_leaves_a_part() -> None:
    inner = MemoryStore()
    with pytest.raises(Crashed):
        FaultyStore(inner, fault=Fault.TORN_WRITE).create("tags/one", b"1234")
    assert inner.contents() == {"tags/one": b"12"}


def test_a_torn_commit_leaves_a_part() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, fault=Fault.TORN_WRITE, at=4)
    upload = store.upload("packs/one")
    upload.append(b"12", b"34")
    upload.append(b"5678")
    with pytest.raises(Crashed):
        upload.commit()
    assert inner.contents() == {"packs/one": b"1234"}


def test_a_torn_write_never_replaces_an_object() -> None:
    inner = MemoryStore()
    inner.create("tags/one", b"theirs")
    with pytest.raises(Crashed):
        FaultyStore(inner, fault=Fault.TORN_WRITE).create("tags/one", b"ours")
    assert inner.contents() == {"tags/one": b"theirs"}


def test_without_space_only_writing_fails() -> None:
    inner = MemoryStore()
    inner.create("tags/one", b"1")
    store = FaultyStore(inner, fault=Fault.NO_SPACE)
    with pytest.raises(StoreFull):
        store.create("tags/two", b"1")
    with pytest.raises(StoreFull):
        store.upload("packs/one")
    assert store.read("tags/one", limit_bytes=1) == b"1"
    store.delete("tags/one")


def test_an_upload_that_ran_out_of_space_cannot_be_committed() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, fault=Fault.NO_SPACE, at=2)
    with store.upload("packs/one") as upload:
        with pytest.raises(StoreFull):
            upload.append(b"1234")
        with pytest.raises(StoreError):
            upload.commit()
    assert inner.contents() == {}


def test_a_crash_is_no_ordinary_exception() -> None:
    assert not issubclass(Crashed, Exception)
