"""Moving chunks: each once, where it is kept, found or written, and in runs as before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from holdfast.errors import DigestMismatch
from holdfast.objects.memory import MemoryStore
from holdfast.progress import Progress, Silent
from holdfast.repo.engine import Engine
from holdfast.repo.format.chunk import ChunkRef, Location
from holdfast.repo.format.entry import Entry
from holdfast.repo.handle.repository import Repository
from holdfast.repo.read.reader import SnapshotReader
from holdfast.repo.upkeep.transfer import Keeps, Stores, Transfer
from holdfast.repo.write.existing import ExistingChunks
from holdfast.repo.write.transaction import ManifestPart, Transaction
from tests.kit.saving import MIB, new_repo, noise, pack_of, read_entries, rot, save_bytes, snapshot_of


@pytest.fixture
def source() -> Repository:
    repo = new_repo(MemoryStore("memory://source"))
    save_bytes(repo, "a", {"big": noise(2 * MIB + 999, 1), "twin": noise(MIB, 1)[:MIB], "tiny": b"x", "none": b""})
    return repo


@pytest.fixture
def transfer(source: Repository, repo: Repository) -> Iterator[Transfer]:
    repo.verify_may_write()
    with (
        Transaction(repo, purpose="test") as transaction,
        SnapshotReader(source, snapshot_of(source, "a")) as reader,
        Engine("test", budget_bytes=16 << 20, waits=True) as engine,
    ):
        yield Transfer(reader, ExistingChunks(repo, [], avoid=frozenset()), transaction.packer, engine, Stores())


def entries_of(source: Repository) -> list[Entry]:
    return list(read_entries(source, "a").values())


def never(_at: Location) -> bool:
    return False


def places(entries: list[Entry]) -> list[Location | None]:
    return [chunk.location for entry in entries for chunk in entry.chunks]


def move(transfer: Transfer, entries: Sequence[Entry], progress: Progress, *, keeps: Keeps) -> list[Entry]:
    transfer.keeps = keeps
    (part,) = transfer.move([ManifestPart(None, entries)], progress)
    return list(part.entries)


def test_each_chunk_moves_once_and_keeps_what_it_is(transfer: Transfer, source: Repository) -> None:
    before = entries_of(source)
    after = move(transfer, before, Silent(), keeps=never)
    assert transfer.moved_bytes == 2 * MIB + 999
    assert [entry._replace(chunks=()) for entry in after] == [entry._replace(chunks=()) for entry in before]
    assert [[(c.digest, c.size_bytes, c.inline) for c in entry.chunks] for entry in after] == [
        [(c.digest, c.size_bytes, c.inline) for c in entry.chunks] for entry in before
    ]
    assert after[1].chunks[0].location == after[0].chunks[0].location


def test_copied_chunks_of_an_entry_are_adjacent(transfer: Transfer, source: Repository) -> None:
    first, second, third = places(move(transfer, entries_of(source), Silent(), keeps=never)[:1])
    assert first
    assert second
    assert third
    assert (first.offset % 4096, second.offset - first.offset, third.offset - second.offset) == (0, MIB, MIB)


def test_what_may_stay_is_neither_read_nor_written(transfer: Transfer, source: Repository) -> None:
    before = entries_of(source)
    assert move(transfer, before, Silent(), keeps=lambda _at: True) == before
    assert transfer.moved_bytes == 0


def test_inline_bytes_and_empty_entries_stay_as_they_are(transfer: Transfer, source: Repository) -> None:
    before = entries_of(source)
    assert move(transfer, before[2:], Silent(), keeps=never) == before[2:]


def test_a_rewrite_writes_again_what_has_a_place(transfer: Transfer, source: Repository) -> None:
    moved = move(transfer, entries_of(source), Silent(), keeps=never)
    refs: list[ChunkRef] = list(moved[0].chunks[1:])
    again = transfer.rewrite(refs)
    assert [ref.digest for ref in again] == [ref.digest for ref in refs]
    assert all(new.location != old.location for new, old in zip(again, refs, strict=True))
    assert transfer.moved_bytes == 2 * MIB + 999 + MIB + 999


def test_rotten_bytes_are_not_moved(transfer: Transfer, source: Repository) -> None:
    at = pack_of(source, "a", "big")
    rot(source.store, f"packs/{at.pack_id}", at.offset + 7)
    with pytest.raises(DigestMismatch, match="'a', entry 'big'"):
        move(transfer, entries_of(source), Silent(), keeps=never)


class Counting(Silent):
    def __init__(self) -> None:
        self.num_bytes = 0

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


def test_progress_counts_what_was_looked_at(transfer: Transfer, source: Repository) -> None:
    progress = Counting()
    move(transfer, entries_of(source), progress, keeps=never)
    assert progress.num_bytes == 3 * MIB + 999
