"""Reading from a server: ranges are merged, many requests are in flight, nothing else is read, damage is named."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest

from holdfast.errors import DigestMismatch, MissingChunk
from holdfast.objects.cloud.cloud_store import REQUESTS_AT_ONCE, CloudStore
from holdfast.repo.format.chunk import CHUNK_BYTES, UNIT_BYTES
from holdfast.repo.format.layout import PACKS
from holdfast.repo.handle.repository import MIN_BUDGET_BYTES, Repository, open_repository
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.repo.read.reader import SnapshotReader
from holdfast.repo.read.stream import open_entry
from tests.kit.rounds import Rounds, count_rounds
from tests.kit.s3_server import S3Server, serve_s3
from tests.kit.saving import MIB, load_bytes, new_repo, noise, only_pack, pack_of, rot, save_bytes, snapshot_of
from tests.unit.objects.cloud.servers import open_cloud

BIG = noise(40 * MIB)
MANY = {f"tensor-{number}": noise(MIB, seed=1000 + number) for number in range(128)}
SMALL = {f"file-{number:03}": noise(40_000, seed=2000 + number) for number in range(100)}


@pytest.fixture(scope="module")
def filled() -> Iterator[S3Server]:
    """A server with three snapshots, which tests only read."""
    with serve_s3() as server:
        repo = new_repo(open_cloud(server))
        save_bytes(repo, "many", MANY)
        save_bytes(repo, "big", {"x": BIG})
        save_bytes(repo, "small", SMALL)
        yield server


@pytest.fixture
def repo(filled: S3Server) -> Repository:
    """A handle that has read nothing but the config."""
    return new_repo(open_cloud(filled))


def open_reader(repo: Repository, name: str) -> SnapshotReader:
    return SnapshotReader(repo, snapshot_of(repo, name))


def list_reads(rounds: Rounds) -> list[str]:
    return [request for request in rounds.requests if PACKS in request]


class Counted(CloudStore):
    """A store that counts how many of its requests are in flight, and which bytes they ask for."""

    most = 0
    read_bytes = 0

    def count(self) -> None:
        self.lock, self.now, self.full = threading.Lock(), 0, threading.Event()

    def read_range(self, key: str, start: int, size_bytes: int) -> memoryview:
        with self.lock:
            self.now += 1
            self.read_bytes += size_bytes
            self.most = max(self.most, self.now)
            if self.now >= 32:
                self.full.set()
        self.full.wait(timeout=10)
        try:
            return super().read_range(key, start, size_bytes)
        finally:
            with self.lock:
                self.now -= 1


def open_counted(server: S3Server, *, waits: bool) -> Counted:
    store = open_cloud(server)
    store.__class__ = Counted
    assert isinstance(store, Counted)
    store.count()
    if not waits:
        store.full.set()
    return store


def test_many_tensors_of_a_mebibyte_are_loaded_with_few_merged_requests(repo: Repository) -> None:
    with count_rounds(CloudStore, "_ask") as rounds:
        snapshot = read_snapshot(repo.store, "many")
        with SnapshotReader(repo, snapshot) as reader:
            buffers = {name: bytearray(MIB) for name in MANY}
            reader.read_all([(reader.find_entry(name), memoryview(data)) for name, data in buffers.items()])

    assert buffers == MANY
    # 128 MiB in ranges of 4 MiB, cut where a pack ends; and the name's listing, its record and its manifest.
    assert len(list_reads(rounds)) <= 36
    assert len(rounds.requests) <= 40
    assert rounds.greatest <= 4


def test_at_least_32_requests_are_in_flight(filled: S3Server) -> None:
    store = open_counted(filled, waits=True)

    found = load_all(open_repository(store), "many")

    assert found == MANY
    assert 32 <= store.most <= REQUESTS_AT_ONCE


def test_fewer_requests_are_in_flight_to_a_server_that_answers_fast(filled: S3Server) -> None:
    store = open_counted(filled, waits=False)
    repo = open_repository(store)
    assert store.traits.reads_at_once == REQUESTS_AT_ONCE
    store.near_s = math.inf

    found = load_all(repo, "many")

    assert found == MANY
    assert store.most <= store.traits.reads_at_once == 16


def load_all(repo: Repository, name: str) -> dict[str, bytes]:
    with open_reader(repo, name) as reader:
        buffers = {entry.name: bytearray(entry.size_bytes) for entry in reader.manifest.iter_entries()}
        reader.read_all([(reader.find_entry(entry), memoryview(data)) for entry, data in buffers.items()])
    return {name: bytes(data) for name, data in buffers.items()}


def test_requests_in_flight_fit_into_a_small_budget(filled: S3Server) -> None:
    store = open_counted(filled, waits=False)

    found = load_all(open_repository(store, budget_bytes=MIN_BUDGET_BYTES), "many")

    assert found == MANY
    assert store.most <= MIN_BUDGET_BYTES // (2 * MIB)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (5 * MIB - 1, 5 * MIB + 1), (3 * MIB, 20 * MIB), (0, len(BIG))])
def test_a_part_is_read_with_the_chunks_at_its_ends_and_nothing_else(filled: S3Server, start: int, stop: int) -> None:
    store = open_counted(filled, waits=False)
    with open_reader(open_repository(store), "big") as reader:
        buffer = memoryview(bytearray(stop - start))
        reader.read_into(reader.find_entry("x"), start, buffer)

    assert buffer == BIG[start:stop]
    assert store.read_bytes < stop - start + 2 * CHUNK_BYTES


def test_ranges_of_one_entry_that_are_near_each_other_are_one_request(repo: Repository) -> None:
    with open_reader(repo, "big") as reader:
        entry = reader.find_entry("x")
        buffers = [memoryview(bytearray(10)) for _ in range(2)]
        with count_rounds(CloudStore, "_ask") as rounds:
            reader.read_ranges([(entry, start, buffer) for start, buffer in zip((7, MIB + 3), buffers, strict=True)])

    assert [bytes(buffer) for buffer in buffers] == [BIG[7:17], BIG[MIB + 3 : MIB + 13]]
    assert len(rounds.requests) == 1


def test_small_entries_are_read_together_in_one_round(repo: Repository) -> None:
    with open_reader(repo, "small") as reader, count_rounds(CloudStore, "_ask") as rounds:
        contents = reader.iter_contents(reader.manifest.iter_entries())
        found = {entry.name: b"".join(pieces) for entry, pieces in contents}

    assert found == SMALL
    assert rounds.greatest == 1


def test_a_large_entry_is_read_in_windows_and_yielded_in_small_pieces(repo: Repository) -> None:
    with open_reader(repo, "big") as reader, count_rounds(CloudStore, "_ask") as rounds:
        pieces = list(reader.iter_entry(reader.find_entry("x")))

    assert b"".join(pieces) == BIG
    assert max(map(len, pieces)) == UNIT_BYTES
    assert rounds.greatest == 1


def test_a_stream_that_is_read_to_its_end_takes_rounds_by_the_logarithm_of_its_size(repo: Repository) -> None:
    with (
        open_reader(repo, "big") as reader,
        open_entry(reader, "x") as stream,
        count_rounds(CloudStore, "_ask") as some,
    ):
        found = b"".join(iter(lambda: stream.read(50_000), b""))

    assert found == BIG
    assert some.greatest <= 6  # 1 + 2 + 4 + 8 + 16 + the rest


def test_a_stream_that_jumps_reads_a_chunk_at_a_time(filled: S3Server) -> None:
    store = open_counted(filled, waits=False)
    with open_reader(open_repository(store), "big") as reader, open_entry(reader, "x") as stream:
        for start in (30 * MIB, 10 * MIB, 20 * MIB):
            stream.seek(start)
            assert stream.read(3) == BIG[start : start + 3]

    assert store.read_bytes == 3 * CHUNK_BYTES


@pytest.fixture
def server() -> Iterator[S3Server]:
    """A server that a test may damage."""
    with serve_s3() as running:
        yield running


def put_second_copy(server: S3Server, data: bytes) -> None:
    """Put a pack with these bytes into the store, as another writer would have."""
    save_bytes(new_repo(open_cloud(server, "other")), "two", {"b": data})
    for key in [key for key in server.objects if key.startswith(("other/packs/", "other/index/"))]:
        server.objects[key.replace("other/", "store/", 1)] = server.objects[key]


def test_of_a_merged_range_with_one_damaged_chunk_only_that_chunk_is_read_again(server: S3Server) -> None:
    repo = new_repo(open_cloud(server))
    content = {"a": noise(MIB, seed=1), "b": noise(MIB, seed=2)}
    save_bytes(repo, "one", content)
    damaged = pack_of(repo, "one", "b")
    rot(repo.store, only_pack(repo.store), damaged.offset + 5)
    put_second_copy(server, content["b"])

    with count_rounds(CloudStore, "_ask") as rounds:
        found = load_all(new_repo(open_cloud(server)), "one")

    assert found == content
    assert sum(damaged.pack_id in request for request in rounds.requests) == 2


def test_a_chunk_without_an_intact_copy_is_named(server: S3Server) -> None:
    repo = new_repo(open_cloud(server))
    save_bytes(repo, "one", {"a": noise(MIB, seed=1), "b": noise(MIB, seed=2)})
    at = pack_of(repo, "one", "b")
    rot(repo.store, only_pack(repo.store), at.offset + 5)

    with pytest.raises(DigestMismatch, match=rf"'one', entry 'b', chunk .* damaged in pack {at.pack_id}"):
        load_all(repo, "one")


def test_a_lost_pack_is_named(server: S3Server) -> None:
    repo = new_repo(open_cloud(server))
    save_bytes(repo, "one", {"a": noise(MIB, seed=1)})
    at = pack_of(repo, "one", "a")
    repo.store.delete(only_pack(repo.store))

    with pytest.raises(MissingChunk, match=rf"'one', entry 'a'.* pack {at.pack_id} is gone"):
        load_bytes(new_repo(open_cloud(server)), "one")


def test_damaged_bytes_are_never_written_to_the_callers_memory(server: S3Server) -> None:
    repo = new_repo(open_cloud(server))
    save_bytes(repo, "one", {"a": noise(MIB, seed=1), "b": noise(MIB, seed=2)})
    rot(repo.store, only_pack(repo.store), pack_of(repo, "one", "b").offset + 5)
    buffer = bytearray(MIB)

    with open_reader(repo, "one") as reader, pytest.raises(DigestMismatch):
        reader.read_all([(reader.find_entry("b"), memoryview(buffer))])

    assert buffer == bytes(MIB)
