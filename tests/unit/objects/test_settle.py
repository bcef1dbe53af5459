"""The fate of a create whose reply was lost is learnt by looking."""

from __future__ import annotations

import pytest

from holdfast.errors import ObjectExists, StoreError, StoreFull
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.objects.settle import commit_settled, create_settled
from holdfast.testing.faults import Fault, FaultyStore

KEY = "snapshots/one/0"


class Refusing(FaultyStore):
    """Answers the first creates with ObjectExists though nothing is there, as some servers do under load."""

    def __init__(self, inner: ObjectStore, *, refusals: int) -> None:
        super().__init__(inner)
        self._refusals = refusals

    def create(self, key: str, data: bytes | bytearray | memoryview, *, durable: bool = True) -> None:
        if self._refusals:
            self._refusals -= 1
            raise ObjectExists(f"{key} is being created", key=key)
        super().create(key, data, durable=durable)


class Blind(FaultyStore):
    """Loses the reply to a create, and cannot be asked what is there."""

    def create(self, key: str, data: bytes | bytearray | memoryview, *, durable: bool = True) -> None:
        raise StoreError("no reply", key=key, fate="unknown")

    def stat(self, key: str) -> ObjectInfo:
        raise StoreError("no reply", key=key)


def test_a_create_whose_reply_was_lost_is_our_success() -> None:
    inner = MemoryStore()
    create_settled(FaultyStore(inner, fault=Fault.REPLY_LOST), KEY, b"ours")
    assert inner.contents() == {KEY: b"ours"}


def test_a_create_that_never_arrived_is_sent_again() -> None:
    inner = MemoryStore()
    create_settled(FaultyStore(inner, fault=Fault.ONCE), KEY, b"ours")
    assert inner.contents() == {KEY: b"ours"}


def test_our_own_bytes_under_the_key_are_our_success() -> None:
    store = MemoryStore()
    store.create(KEY, b"ours")
    create_settled(store, KEY, b"ours")


@pytest.mark.parametrize("theirs", [b"them", b"longer than ours", b""])
def test_the_bytes_of_another_under_the_key_are_a_conflict(theirs: bytes) -> None:
    store = MemoryStore()
    store.create(KEY, theirs)
    with pytest.raises(ObjectExists, match="another process"):
        create_settled(store, KEY, b"ours")
    assert store.contents() == {KEY: theirs}


def test_a_refusal_in_passing_is_tried_again() -> None:
    inner = MemoryStore()
    create_settled(Refusing(inner, refusals=2), KEY, b"ours")
    assert inner.contents() == {KEY: b"ours"}


def test_a_refusal_that_stays_is_raised() -> None:
    with pytest.raises(ObjectExists):
        create_settled(Refusing(MemoryStore(), refusals=9), KEY, b"ours")


def test_a_store_that_cannot_be_asked_leaves_the_fate_unknown() -> None:
    with pytest.raises(StoreError, match="so did reading it back") as caught:
        create_settled(Blind(MemoryStore()), KEY, b"ours")
    assert caught.value.fate == "unknown"


def test_a_full_store_is_no_matter_of_fate() -> None:
    with pytest.raises(StoreFull):
        create_settled(MemoryStore(capacity_bytes=1), KEY, b"ours")


@pytest.mark.parametrize("fault", [None, Fault.REPLY_LOST])
def test_an_upload_that_was_committed_is_settled_whatever_was_replied(fault: Fault | None) -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, fault=fault, at=3)
    with store.upload("packs/one") as upload:
        upload.append(b"1234")
        commit_settled(store, upload, "packs/one", 4)
    assert [operation.name for operation in store.log][2] == "commit"
    assert inner.contents() == {"packs/one": b"1234"}


def test_a_commit_that_never_arrived_is_raised() -> None:
    store = FaultyStore(MemoryStore(), fault=Fault.ONCE, at=3)
    with store.upload("packs/one") as upload:
        upload.append(b"1234")
        with pytest.raises(StoreError) as caught:
            commit_settled(store, upload, "packs/one", 4)
    assert caught.value.fate == "unknown"


def test_a_commit_onto_an_object_of_another_size_is_raised() -> None:
    store = MemoryStore()
    store.create("packs/one", b"12345")
    with store.upload("packs/one") as upload:
        upload.append(b"1234")
        with pytest.raises(ObjectExists):
            commit_settled(store, upload, "packs/one", 4)
