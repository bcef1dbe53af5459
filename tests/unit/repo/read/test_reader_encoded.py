"""Encoded chunks are decoded where they are wanted, whole or in part, and verified as raw ones are."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.digest import fingerprint, hash_bytes
from holdfast.errors import DigestMismatch, NewerFormat
from holdfast.objects.disk_cache import DiskCache
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.chunk import BLOSC2, ChunkRef, Location
from holdfast.repo.format.entry import Entry
from holdfast.repo.handle.repository import Repository
from holdfast.repo.read.reader import SnapshotReader, Verify
from tests.kit.deltas import delta_repo, trained
from tests.kit.encoded import encoded_repo, halves, save_encoded
from tests.kit.s3_server import serve_s3
from tests.kit.saving import MIB, flip, load_bytes, new_repo, noise, only_pack, pack_of, rot, snapshot_of
from tests.kit.waiting_store import WaitingStore
from tests.unit.objects.cloud.servers import open_cloud

MODES: tuple[Verify, ...] = ("full", "fast", False)
STATE = {"weights": halves(3 * MIB + 777), "noise": noise(MIB, 1), "more": halves(5000, 2)}


@pytest.fixture
def encoded(store: MemoryStore) -> Repository:
    return encoded_repo(store, "a", STATE)


@pytest.mark.parametrize("verify", MODES)
@pytest.mark.parametrize("kind", [MemoryStore, WaitingStore])
def test_every_byte_is_read(verify: Verify, kind: type[MemoryStore]) -> None:
    repo = encoded_repo(kind(), "a", STATE)
    with SnapshotReader(repo, snapshot_of(repo, "a"), verify=verify) as reader:
        assert {name: bytes(reader.read_entry(name)) for name in STATE} == STATE
    assert repo.counters.stages.read()["decode"].size_bytes == 3 * MIB + len(STATE["more"])


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (MIB - 1, MIB + 1), (100, 3 * MIB), (3 * MIB, 3 * MIB + 777)])
def test_a_range_is_read(encoded: Repository, start: int, stop: int) -> None:
    with SnapshotReader(encoded, snapshot_of(encoded, "a")) as reader:
        found = bytearray(stop - start)
        reader.read_into(reader.find_entry("weights"), start, memoryview(found))
    assert bytes(found) == STATE["weights"][start:stop]


def test_an_encoded_entry_is_not_mapped(encoded: Repository) -> None:
    with SnapshotReader(encoded, snapshot_of(encoded, "a")) as reader:
        assert reader.map_entry(reader.find_entry("weights")) is None


@pytest.mark.parametrize("verify", MODES)
@pytest.mark.parametrize("offset", [0, 12, 40, 5000])
def test_a_damaged_chunk_is_an_error_that_names_it(encoded: Repository, verify: Verify, offset: int) -> None:
    at = pack_of(encoded, "a", "weights")
    rot(encoded.store, only_pack(encoded.store), at.offset + offset)
    with SnapshotReader(encoded, snapshot_of(encoded, "a"), verify=verify) as reader:
        if verify is False and offset == 5000:
            return  # not verified: decoded to other bytes, or refused
        with pytest.raises(DigestMismatch, match=r"'a', entry 'weights', chunk .* damaged in pack"):
            reader.read_entry("weights")
        assert bytes(reader.read_entry("noise")) == STATE["noise"]


@pytest.mark.parametrize("kind", [MemoryStore, WaitingStore])
def test_another_copy_is_read_instead_of_a_damaged_one(kind: type[MemoryStore]) -> None:
    store = kind()
    encoded_repo(store, "a", {"weights": STATE["weights"]})
    pack = only_pack(store)
    data = store.read(pack, limit_bytes=1 << 30)
    store.delete(pack)
    save_encoded(new_repo(store), "b", {"weights": STATE["weights"]}, "small")
    store.create(pack, flip(data, 3000))
    assert load_bytes(new_repo(store), "a") == {"weights": STATE["weights"]}


def forge(repo: Repository, stored: bytes, codec: int, raw: bytes) -> Entry:
    """Return an entry with one chunk, whose stored bytes are in a pack of their own."""
    pack_id = f"{'e' * 24}-{'e' * 16}"
    repo.store.create(f"packs/{pack_id}", bytes(64) + stored)
    at = Location(pack_id, 64, len(stored), codec, fingerprint(stored))
    return Entry("forged", len(raw), (ChunkRef(hash_bytes(raw), len(raw), at),))


def test_an_unknown_codec_is_refused(encoded: Repository) -> None:
    entry = forge(encoded, b"x" * 100, 3, bytes(5000))
    with SnapshotReader(encoded, snapshot_of(encoded, "a")) as reader, pytest.raises(NewerFormat, match="codec 3"):
        reader.read_into(entry, 0, memoryview(bytearray(5000)))


def test_bytes_that_decode_to_others_are_refused_unless_nothing_is_verified(encoded: Repository) -> None:
    at = pack_of(encoded, "a", "more")
    pack = encoded.store.read(only_pack(encoded.store), limit_bytes=1 << 30)
    stored = pack[at.offset : at.offset + at.stored_bytes]
    entry = forge(encoded, stored, BLOSC2, noise(5000))
    with SnapshotReader(encoded, snapshot_of(encoded, "a")) as reader, pytest.raises(DigestMismatch):
        reader.read_into(entry, 0, memoryview(bytearray(5000)))
    with SnapshotReader(encoded, snapshot_of(encoded, "a"), verify="fast") as reader:
        found = bytearray(5000)
        reader.read_into(entry, 0, memoryview(found))
    assert bytes(found) == STATE["more"]


def test_a_bucket_and_its_cache_give_the_same_bytes(tmp_path: Path) -> None:
    with serve_s3() as server:
        repo = encoded_repo(open_cloud(server), "a", STATE)
        cache = DiskCache(str(tmp_path), limit_bytes=1 << 30)
        for verify in MODES:
            with SnapshotReader(repo, snapshot_of(repo, "a"), verify=verify, cache=cache) as reader:
                assert {name: bytes(reader.read_entry(name)) for name in STATE} == STATE
        assert cache.find_statistics().hit_bytes > 0
        for path in tmp_path.rglob("*"):
            if path.is_file() and path.stat().st_size > MIB:
                path.write_bytes(flip(path.read_bytes(), 300_000))
        with SnapshotReader(repo, snapshot_of(repo, "a"), verify=False, cache=cache) as reader:
            assert {name: bytes(reader.read_entry(name)) for name in STATE} == STATE


def test_a_damaged_chunk_in_a_bucket_is_an_error_and_others_are_read() -> None:
    with serve_s3() as server:
        repo = encoded_repo(open_cloud(server), "a", STATE)
        rot(repo.store, only_pack(repo.store), pack_of(repo, "a", "weights").offset + 5000)
        for verify in MODES[:2]:
            with SnapshotReader(repo, snapshot_of(repo, "a"), verify=verify) as reader:
                with pytest.raises(DigestMismatch, match=r"entry 'weights', chunk .* damaged in pack"):
                    reader.read_entry("weights")
                assert bytes(reader.read_entry("more")) == STATE["more"]


def test_deltas_in_a_bucket_are_read_with_few_requests_and_from_the_cache(tmp_path: Path) -> None:
    with serve_s3() as server:
        repo = delta_repo(open_cloud(server), steps=2)
        cache = DiskCache(str(tmp_path), limit_bytes=1 << 30)
        for verify in MODES:
            with SnapshotReader(repo, snapshot_of(repo, "run/1"), verify=verify, cache=cache) as reader:
                assert bytes(reader.read_entry("w")) == trained(1)
        assert cache.find_statistics().hit_bytes > cache.find_statistics().missed_bytes > 0
        for path in tmp_path.rglob("*"):
            if path.is_file() and path.stat().st_size > 10_000:
                path.write_bytes(flip(path.read_bytes(), 9_000))
        with SnapshotReader(repo, snapshot_of(repo, "run/1"), cache=cache) as reader:
            assert bytes(reader.read_entry("w")) == trained(1)
