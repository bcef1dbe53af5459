"""The packs of one save: opened when needed, closed when full, added to the index, and dropped without a trace."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Final

import pytest

from holdfast.digest import Buffer, hash_bytes
from holdfast.errors import StoreError
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.objects.protocol import ObjectStore, StoreTraits, Upload
from holdfast.repo.format.chunk import Location
from holdfast.repo.format.pack import NewChunk, parse_pack_key, read_footer
from holdfast.repo.handle.index import ChunkIndex
from holdfast.repo.handle.repository import MIN_BUDGET_BYTES, Repository, open_repository
from holdfast.repo.names.leases import RENEW_S, Lease
from holdfast.repo.write.packing import Packer, plan_shares
from holdfast.testing.faults import Fault, FaultyStore
from tests.kit.patience import PATIENCE_S
from tests.kit.saving import keys, load_bytes, noise, save_bytes
from tests.kit.waiting_store import let_wait


@pytest.fixture
def lease(store: MemoryStore) -> Lease:
    return Lease(store, purpose="test")


@pytest.fixture
def packer(store: MemoryStore, lease: Lease) -> Packer:
    return make_packer(store, lease)


def make_packer(store: ObjectStore, lease: Lease) -> Packer:
    return Packer(ChunkIndex(store, limit_bytes=1 << 20), lease, plan_shares(store.traits, 256 << 20))


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
    packer.write_index()
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
    packer = make_packer(faulty, Lease(faulty, purpose="test"))
    append(packer, noise(1000))
    faulty._fault, faulty._at = Fault.NO_SPACE, len(faulty.log) + 4
    with caplog.at_level(logging.WARNING):
        packer.seal()
        packer.write_index()
    assert len(keys(store, "packs/")) == 1
    assert keys(store, "index/") == []
    assert "their chunks may be stored twice" in caplog.text


def test_a_pack_that_cannot_be_sealed_is_an_error_and_leaves_nothing(store: MemoryStore) -> None:
    faulty = FaultyStore(store)
    packer = make_packer(faulty, Lease(faulty, purpose="test"))
    append(packer, noise(1000))
    faulty._fault, faulty._at = Fault.FOR_GOOD, len(faulty.log) + 1
    with pytest.raises(StoreError):
        packer.seal()
    packer.abort()
    assert keys(store, "packs/") == []


MIB: Final = 1 << 20


class Bucket(MemoryStore):
    """A store with the traits of a bucket, which counts the bytes of uploads in memory and the commits in progress."""

    def __init__(self, *, meet: int = 1, failing: str = "") -> None:
        """Let the first commits wait until `meet` of them are in progress; fail those of the pack number `failing`."""
        super().__init__()
        self.held_bytes = self.most_bytes = self.most_commits = self.commits = 0
        self._guard = threading.Lock()
        self._meeting = threading.Barrier(meet)
        self._has_met = False
        self._failing = failing
        self._numbers: dict[str, int] = {}

    @property
    def traits(self) -> StoreTraits:
        return replace(let_wait(super().traits, 8), upload_bytes=64 * MIB, checked_uploads=True)

    def upload(self, key: str) -> Upload:  # type: ignore[override]  # any upload will do
        self._numbers[key] = len(self._numbers)
        return _HeldUpload(super().upload(key), key, self)

    def hold_bytes(self, count: int) -> None:
        with self._guard:
            self.held_bytes += count
            self.most_bytes = max(self.most_bytes, self.held_bytes)

    def begin_commit(self, key: str) -> None:
        with self._guard:
            self.commits += 1
            self.most_commits = max(self.most_commits, self.commits)
        if not self._has_met:
            self._meeting.wait(PATIENCE_S)
            self._has_met = True
        if str(self._numbers[key]) == self._failing:
            raise StoreError(f"{key} is refused", key=key, fate="absent")

    def end_commit(self) -> None:
        with self._guard:
            self.commits -= 1


class _HeldUpload(Upload):
    def __init__(self, inner: Upload, key: str, bucket: Bucket) -> None:
        self._inner, self._key, self._bucket = inner, key, bucket
        self._size = 0

    def append(self, *buffers: Buffer) -> None:
        size = sum(map(len, buffers))
        self._size += size
        self._bucket.hold_bytes(size)
        self._inner.append(*buffers)

    def commit(self) -> None:
        try:
            self._bucket.begin_commit(self._key)
            self._inner.commit()
        finally:
            self._bucket.end_commit()
        self.abort()

    def abort(self) -> None:
        self._inner.abort()
        self._bucket.hold_bytes(-self._size)
        self._size = 0


def open_bucket(bucket: Bucket) -> Repository:
    return open_repository(bucket, create=True, budget_bytes=MIN_BUDGET_BYTES)


def large_state() -> dict[str, bytes]:
    return {f"w{number}": noise(3 * MIB, number) for number in range(8)}


def test_several_packs_are_sent_while_the_next_is_filled_within_the_budget() -> None:
    bucket = Bucket(meet=2)
    repo = open_bucket(bucket)
    save_bytes(repo, "a", large_state())
    assert bucket.most_commits >= 2
    assert bucket.most_bytes <= MIN_BUDGET_BYTES * 3 // 4
    assert bucket.held_bytes == 0
    assert len(keys(bucket, "packs/")) >= 6
    assert load_bytes(repo, "a") == large_state()


def test_many_packs_of_one_save_are_one_fragment_of_the_index() -> None:
    bucket = Bucket()
    save_bytes(open_bucket(bucket), "a", large_state())
    assert len(keys(bucket, "index/")) == 1
    assert save_bytes(open_bucket(bucket), "elsewhere/a", large_state()).new_bytes == 0


@pytest.mark.parametrize("failing", ["0", "3", "6"])
def test_a_pack_that_fails_behind_the_save_fails_the_save_and_nothing_is_visible(failing: str) -> None:
    bucket = Bucket(failing=failing)
    with pytest.raises(StoreError, match="is refused"):
        save_bytes(open_bucket(bucket), "a", large_state())
    assert [key for key in keys(bucket, "") if key.startswith(("snapshots/", "manifests/", "leases/"))] == []
    assert (bucket.held_bytes, bucket.commits) == (0, 0)


def test_nothing_refers_to_a_pack_before_it_is_durable() -> None:
    order: list[str] = []

    class Ordered(Bucket):
        def create(self, key: str, data: Buffer, *, durable: bool = True) -> None:
            super().create(key, data, durable=durable)
            order.append(key.partition("/")[0])

        def end_commit(self) -> None:
            super().end_commit()
            order.append("packs")

    save_bytes(open_bucket(Ordered()), "a", large_state())
    last_pack = len(order) - 1 - order[::-1].index("packs")
    assert order.index("index") > last_pack
    assert order.index("manifests") > last_pack
    assert order.index("snapshots") > max(order.index("manifests"), order.index("index"))
