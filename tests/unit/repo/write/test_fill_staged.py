"""First saves: new bytes are copied once, hashed and written from the copy, with the same locations as without it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import pytest
from blake3 import blake3
from typing_extensions import Self

from holdfast.digest import Buffer, fingerprint, hash_bytes
from holdfast.errors import StoreError
from holdfast.json_text import Json
from holdfast.objects.blocks import LentBlock, copy_bytes, new_block
from holdfast.objects.local import block_io
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.local.upload import LocalUpload
from holdfast.objects.memory import MemoryStore
from holdfast.repo.engine import Engine, Stages
from holdfast.repo.format.pack import PAGE_BYTES, NewChunk, PackBuilder, read_footer
from holdfast.repo.format.source import BytesSource, SourceChunk, cut_sources
from holdfast.repo.handle.repository import MIN_BUDGET_BYTES, Repository, open_repository
from holdfast.repo.write.fill import Hasher
from holdfast.repo.write.writer import Request, save
from tests.kit.saving import MIB, PACK_ID, iter_gaps, keys, load_bytes, new_repo, save_bytes
from tests.kit.scripted_files import Scripted, fail, found_below

# Odd ends, small ones in between, and what is inline.
MIXED = [300, 9 * MIB + 904, 70_000, 100, 4 * MIB, 600, 3 * MIB + 1, 64_000, 12 * MIB, 5000, 6 * MIB + 63]
Rows = list[tuple[bytes, int, int, bytes]]


def noise(size_bytes: int, seed: int = 0) -> bytes:
    """Return bytes that nothing else holds, fast."""
    return blake3(seed.to_bytes(4, "little")).digest(length=size_bytes)


class Traffic:
    """What uploads were given: blocks, and bytes to copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handed_over: list[int] = []
        self.copied = 0
        append_block = LocalUpload.append_block

        def watch(upload: LocalUpload, block: LentBlock) -> None:
            self.handed_over.append(block.memory.nbytes)
            append_block(upload, block)

        def count(target: memoryview, source: memoryview) -> None:
            self.copied += source.nbytes
            copy_bytes(target, source)

        monkeypatch.setattr(LocalUpload, "append_block", watch)
        monkeypatch.setattr(block_io, "copy_bytes", count)


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    return Traffic(monkeypatch)


@pytest.fixture
def local(tmp_path: Path) -> Repository:
    return new_repo(LocalStore(tmp_path))


def rows(repo: Repository) -> Rows:
    """Return what the footers of all packs say, but for the names of the packs."""
    chunks = [chunk for key in keys(repo.store, "packs/") for chunk in read_footer(repo.store, key[6:]).chunks]
    return [(chunk.digest, chunk.size_bytes, chunk.location.offset, chunk.location.fingerprint) for chunk in chunks]


def save_plainly(monkeypatch: pytest.MonkeyPatch, entries: Mapping[str, Buffer]) -> Rows:
    """Save without staging; return the rows."""
    with monkeypatch.context() as patched:
        patched.setattr("holdfast.repo.write.fill._STAGED_SHARE", 2.0)
        repo = new_repo()
        save_bytes(repo, "plain", entries)
        return rows(repo)


def test_new_chunks_are_written_from_the_copy_that_was_hashed(local: Repository, traffic: Traffic) -> None:
    data = bytearray(noise(20 * MIB))
    save_bytes(local, "a", {"x": data})
    assert traffic.handed_over == [8 * MIB, 8 * MIB, 4 * MIB]
    assert traffic.copied < MIB  # header and footer
    assert load_bytes(local, "a") == {"x": data}


def test_chunks_have_the_same_locations_as_without_staging(
    local: Repository, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {str(number): noise(size, number) for number, size in enumerate(MIXED)}
    save_bytes(local, "a", entries)
    assert len(traffic.handed_over) >= 2
    assert rows(local) == save_plainly(monkeypatch, entries)
    assert load_bytes(local, "a") == entries


def test_padding_is_zero_though_blocks_are_used_again(local: Repository) -> None:
    entries = {str(number): b"\xff" * (100_001 + number) for number in range(400)}
    save_bytes(local, "a", entries)
    for key in keys(local.store, "packs/"):
        data = local.store.read(key, limit_bytes=1 << 30)
        for start, stop in iter_gaps(read_footer(local.store, key[6:])):
            assert not any(data[start:stop])


def test_a_chunk_that_comes_twice_in_a_batch_is_written_once(
    local: Repository, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = noise(MIB)
    entries = {"x": noise(4 * MIB, 1) + one + noise(MIB, 2) + one + noise(MIB, 3)}
    save_bytes(local, "a", entries)
    assert traffic.handed_over == []
    assert rows(local) == save_plainly(monkeypatch, entries)
    assert load_bytes(local, "a") == entries


def test_of_a_batch_that_is_half_known_only_the_rest_is_written(local: Repository, traffic: Traffic) -> None:
    held = noise(4 * MIB)
    save_bytes(local, "before", {"x": held[: 2 * MIB], "y": held[2 * MIB :]})
    new = noise(16 * MIB, 1)
    traffic.handed_over.clear()
    result = save_bytes(local, "a", {"new": new, "mixed": held + noise(4 * MIB, 2)})
    assert result.new_bytes == 20 * MIB
    assert load_bytes(local, "a") == {"new": new, "mixed": held + noise(4 * MIB, 2)}


def test_after_new_bytes_the_next_are_expected_to_be_new(
    local: Repository, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.repo.engine.count_cores", lambda: 1)
    monkeypatch.setattr("holdfast.repo.write.packing.UNIT_BYTES", 4 * MIB)
    save_bytes(local, "before", {"x": b"1" * 1000})
    data = noise(24 * MIB, 1)
    save_bytes(local, "a", {"x": data})
    assert len(traffic.handed_over) >= 2
    assert load_bytes(local, "a") == {"x": data}


def test_a_small_budget_stages_nothing(tmp_path: Path, traffic: Traffic) -> None:
    repo = open_repository(LocalStore(tmp_path), create=True, budget_bytes=MIN_BUDGET_BYTES)
    data = noise(20 * MIB)
    save_bytes(repo, "a", {"x": data})
    assert traffic.handed_over == []
    assert load_bytes(repo, "a") == {"x": data}


class Endless:
    """Much of the same, in little memory."""

    name, size_bytes = "endless", 160 * MIB
    spec: Json = None
    note: Json = None
    alias = 0
    cuts: Sequence[int] = ()
    item_bytes = 1

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(bytearray(stop - start))


def test_blocks_under_way_keep_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def count(size: int, *, huge: bool) -> memoryview:
        made.append(size)
        return new_block(size, huge=huge)

    monkeypatch.setattr("holdfast.objects.blocks.new_block", count)
    monkeypatch.setattr("holdfast.repo.engine.count_cores", lambda: 64)
    with Engine("test", budget_bytes=64 * MIB, waits=False) as engine:
        hasher = Hasher(engine, Stages(), batch_bytes=8 * MIB, staged_bytes=4 * MIB)
        hasher.new_share = 1.0
        for batch in hasher.iter_batches(cut_sources([Endless()])):
            assert batch.block
            batch.block.release()
    # What the engine counts, and the one that is in hand.
    assert 1 <= len(made) <= 64 // 8 + 1


def test_an_upload_that_takes_no_blocks_gets_copies(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {str(number): noise(size, number) for number, size in enumerate(MIXED)}
    repo = new_repo(store)
    save_bytes(repo, "a", entries)
    assert rows(repo) == save_plainly(monkeypatch, entries)
    assert load_bytes(repo, "a") == entries


def test_a_block_that_an_upload_cannot_take_is_released(store: MemoryStore) -> None:
    released: list[bool] = []
    sources = [BytesSource("x", noise(8 * MIB))]
    with Engine("test", budget_bytes=64 * MIB, waits=False) as engine:
        hasher = Hasher(engine, Stages(), batch_bytes=8 * MIB, staged_bytes=4 * MIB)
        hasher.new_share = 1.0
        (batch,) = hasher.iter_batches(cut_sources(sources))
    assert batch.block
    chunks = [NewChunk(item.digest, item.data, PAGE_BYTES, item.fingerprint) for item in batch.items]
    pack = PackBuilder(store, PACK_ID)
    pack.append_chunks(chunks, block=LentBlock(batch.block.memory, lambda: released.append(True)))
    assert released == [True]


def test_a_staged_piece_is_hashed_as_it_was_copied() -> None:
    data = bytearray(noise(8 * MIB))
    with Engine("test", budget_bytes=64 * MIB, waits=False) as engine:
        hasher = Hasher(engine, Stages(), batch_bytes=8 * MIB, staged_bytes=4 * MIB)
        hasher.new_share = 1.0
        (batch,) = hasher.iter_batches(cut_sources([BytesSource("x", data)]))
    data[:] = bytes(len(data))
    for item in batch.items:
        assert (item.digest, item.fingerprint) == (hash_bytes(item.data), fingerprint(item.data))


def test_pieces_with_too_many_gaps_between_them_are_not_staged() -> None:
    source = BytesSource("x", noise(8 * MIB))
    pieces = [SourceChunk(source, 0, start, start + 24_577) for start in range(0, 340 * 24_600, 24_600)]
    with Engine("test", budget_bytes=64 * MIB, waits=False) as engine:
        hasher = Hasher(engine, Stages(), batch_bytes=8 * MIB, staged_bytes=4 * MIB)
        hasher.new_share = 1.0
        (batch,) = hasher.iter_batches(pieces)
    assert batch.block is None
    assert [item.digest for item in batch.items] == [
        hash_bytes(source.data[piece.start : piece.stop]) for piece in pieces
    ]


class Restless:
    """Memory that another thread writes to all the time."""

    name, size_bytes = "restless", 16 * MIB
    spec: Json = None
    note: Json = None
    alias = 0
    cuts: Sequence[int] = ()
    item_bytes = 1

    def __init__(self) -> None:
        self._data = bytearray(noise(self.size_bytes))
        self._stop = threading.Event()
        self._writer = threading.Thread(target=self._write)
        self._began = threading.Event()

    def _write(self) -> None:
        for number in cycle(range(256)):
            self._data[:: self.size_bytes // 256] = bytes([number]) * 256
            self._began.set()
            if self._stop.is_set():
                return

    def __enter__(self) -> Self:
        self._writer.start()
        self._began.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._writer.join()

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(self._data)[start:stop]


def test_memory_that_changes_all_the_time_is_stored_as_its_digests_say(local: Repository) -> None:
    with Restless() as source:
        save(local, Request("a", [source]))
    (key,) = keys(local.store, "packs/")
    data = local.store.read(key, limit_bytes=1 << 30)
    for digest, size, offset, _ in rows(local):
        assert hash_bytes(data[offset : offset + size]) == digest
    assert load_bytes(local, "a")


def test_a_save_whose_disk_is_full_leaves_neither_file_nor_thread(tmp_path: Path) -> None:
    files = Scripted()
    repo = new_repo(LocalStore(tmp_path, files=files))
    save_bytes(repo, "before", {"x": b"1"})
    before, threads = found_below(tmp_path), set(threading.enumerate())
    files.before = {"write_at": fail(28)}
    with pytest.raises(StoreError):
        save_bytes(repo, "a", {"x": noise(24 * MIB)})
    assert set(threading.enumerate()) == threads
    assert found_below(tmp_path) == before
