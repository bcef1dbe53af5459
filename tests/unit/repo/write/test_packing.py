"""The packs of one save: opened when needed, closed when full, added to the index, and dropped without a trace."""

from __future__ import annotations

import logging

import pytest

from holdfast.digest import hash_bytes
from holdfast.errors import StoreError
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.repo.format.chunk import Location
from holdfast.repo.format.pack import NewChunk, parse_pack_key, read_footer
from holdfast.repo.handle.index import ChunkIndex
from holdfast.repo.names.leases import RENEW_S, Lease
from holdfast.repo.write.packing import Packer
from holdfast.testing.faults import Fault, FaultyStore
from tests.kit.saving import keys, noise


@pytest.fixture
def lease(store: MemoryStore) -> Lease:
    return Lease(store, purpose="test")


@pytest.fixture
def packer(store: MemoryStore, lease: Lease) -> Packer:
    return Packer(store, lease)


def append(packer: Packer, data: bytes, *, alignment: int = 64) -> Location:
    (location,) = packer.append([NewChunk(hash_bytes(data), memoryview(data), alignment)])
    return location


def test_a_save_that_writes_nothing_makes_no_pack(packer: Packer, store: MemoryStore) -> None:
    packer.seal()
    packer.abort()
    assert keys(store, "packs/") == keys(store, "index/") == []


def test_a_sealed_pack_is_in_the_store_and_in_the_index(packer: Packer, store: MemoryStore, lease: Lease) -> None:
    location = append(packer, noise(1000))
    packer.seal()
    (key,) = keys(store, "packs/")
    assert parse_pack_key(key) == location.pack_id
    assert location.pack_id.startswith(lease.lease_id + "-")
    assert ChunkIndex(store, limit_bytes=1 << 20).refresh().find(hash_bytes(noise(1000)), 1000) == [location]


def test_a_full_pack_is_closed_before_the_next_chunk(
    packer: Packer, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.repo.format.pack.PACK_LIMIT_BYTES", 2000)
    places = [append(packer, noise(900, seed)) for seed in range(5)]
    packer.seal()
    assert len(keys(store, "packs/")) == 2
    assert [place.pack_id == places[0].pack_id for place in places] == [True, True, True, False, False]
    assert sum(len(read_footer(store, pack_id).chunks) for pack_id in {place.pack_id for place in places}) == 5


def test_an_aborted_pack_leaves_nothing(packer: Packer, store: MemoryStore) -> None:
    append(packer, noise(1000))
    packer.abort()
    packer.seal()
    assert keys(store, "packs/") == keys(store, "index/") == []


def test_a_save_that_appends_shows_that_it_lives(packer: Packer, store: MemoryStore, clock: VirtualClock) -> None:
    for seed in range(3):
        append(packer, noise(10, seed))
        clock.advance(RENEW_S)
    assert len(keys(store, "leases/")) == 3


def test_an_index_that_cannot_be_written_is_only_a_warning(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultyStore(store)
    packer = Packer(faulty, Lease(faulty, purpose="test"))
    append(packer, noise(1000))
    faulty._fault, faulty._at = Fault.NO_SPACE, len(faulty.log) + 4
    with caplog.at_level(logging.WARNING):
        packer.seal()
    assert len(keys(store, "packs/")) == 1
    assert keys(store, "index/") == []
    assert "its chunks may be stored twice" in caplog.text


def test_a_pack_that_cannot_be_sealed_is_an_error_and_leaves_nothing(store: MemoryStore) -> None:
    faulty = FaultyStore(store)
    packer = Packer(faulty, Lease(faulty, purpose="test"))
    append(packer, noise(1000))
    faulty._fault, faulty._at = Fault.FOR_GOOD, len(faulty.log) + 1
    with pytest.raises(StoreError):
        packer.seal()
    packer.abort()
    assert keys(store, "packs/") == []
