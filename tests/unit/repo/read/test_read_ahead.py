"""Reading ahead: right bytes in few rounds from a server, exactly what is asked from a disk, bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.repo.read.reader import SnapshotReader
from holdfast.repo.read.stream import ReadAhead
from tests.kit.rounds import count_rounds
from tests.kit.s3_server import S3Server, serve_s3
from tests.kit.saving import MIB, Watched, new_repo, noise, save_bytes, snapshot_of
from tests.unit.objects.cloud.servers import open_cloud

SMALL = {f"small-{number}": noise(9000, seed=100 + number) for number in range(20)}
CONTENT = {"x": noise(20 * MIB + 5, seed=1), **SMALL}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """A server with one snapshot, which tests only read."""
    with serve_s3() as running:
        save_bytes(new_repo(open_cloud(running)), "a", CONTENT)
        yield running


@pytest.fixture
def reader(server: S3Server) -> Iterator[SnapshotReader]:
    repo = new_repo(open_cloud(server))
    with SnapshotReader(repo, snapshot_of(repo, "a")) as opened:
        yield opened


def test_announced_entries_are_read_in_one_round(reader: SnapshotReader) -> None:
    ahead = ReadAhead(reader)
    entries = [reader.find_entry(name) for name in SMALL]

    with count_rounds(CloudStore, "_ask") as rounds:
        ahead.announce(entries)
        found = {entry.name: bytes(ahead.read(entry, 0, entry.size_bytes)) for entry in entries}
        middle = ahead.read(entries[3], 10, 20)

    assert found == SMALL
    assert middle == SMALL["small-3"][10:20]
    assert rounds.greatest == 1


def test_a_large_entry_is_read_in_windows(reader: SnapshotReader) -> None:
    ahead, entry = ReadAhead(reader), reader.find_entry("x")

    with count_rounds(CloudStore, "_ask") as rounds:
        ahead.announce([entry])  # too large to be held
        ends = [*range(0, entry.size_bytes, MIB), entry.size_bytes]
        found = b"".join(ahead.read(entry, *pair) for pair in pairwise(ends))

    assert found == CONTENT["x"]
    assert rounds.greatest == 2  # windows of 16 MiB


def test_reads_in_any_order_return_the_right_bytes(reader: SnapshotReader) -> None:
    ahead, entry = ReadAhead(reader), reader.find_entry("x")
    spans = [
        (5 * MIB, 6 * MIB),
        (0, 3),
        (19 * MIB, entry.size_bytes),
        (19 * MIB + 5, 19 * MIB + 9),
        (0, 20 * MIB),
        (7, 7),
    ]

    assert [bytes(ahead.read(entry, *span)) for span in spans] == [CONTENT["x"][low:high] for low, high in spans]


def test_nothing_is_read_ahead_from_a_disk() -> None:
    watched = Watched(MemoryStore())
    repo = new_repo(watched)
    save_bytes(repo, "a", CONTENT)
    with SnapshotReader(repo, snapshot_of(repo, "a")) as reader:
        watched.reads.clear()
        ahead, entry = ReadAhead(reader), reader.find_entry("x")
        ahead.announce([reader.find_entry(name) for name in SMALL])
        assert bytes(ahead.read(entry, 0, 5)) == CONTENT["x"][:5]

    assert sum(size for _, _, size in watched.reads) <= CHUNK_BYTES
