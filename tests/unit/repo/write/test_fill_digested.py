"""Chunks whose digests are known before a save are read only if the store lacks them, and hashed again if they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from holdfast.digest import Digest, hash_bytes
from holdfast.errors import SourceChanged
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.chunk import CHUNK_BYTES, INLINE_BYTES
from holdfast.repo.format.layout import MARKS, PACKS
from holdfast.repo.format.record import encode_record
from holdfast.repo.format.source import Source, SourceChunk
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.write.writer import Request, SaveResult, WriteOptions, save
from tests.kit.saving import keys, load_bytes, new_repo, noise, only_pack, rot

MIB = 1 << 20


@dataclass(slots=True)
class Remote:
    """Bytes that are somewhere else: it is counted what is read of them."""

    name: str
    data: bytes
    is_gone: bool = False
    """Only what was said to be missing can still be read."""
    reads: list[tuple[int, int]] = field(default_factory=list)
    spec: Json = None
    note: Json = None
    alias: int = 0
    cuts: Sequence[int] = ()
    item_bytes: int = 1

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    @property
    def spans(self) -> list[tuple[int, int]]:
        return list(pairwise((*range(0, len(self.data), CHUNK_BYTES), len(self.data))))

    @property
    def digests(self) -> list[Digest | None]:
        return [
            hash_bytes(self.data[start:stop]) if stop - start > INLINE_BYTES else None for start, stop in self.spans
        ]

    def read(self, start: int, stop: int) -> memoryview:
        if self.is_gone and stop - start > INLINE_BYTES:
            raise SourceChanged(f"{self.name} is gone")
        self.reads.append((start, stop))
        return memoryview(self.data)[start:stop]


class Missing:
    """Notes which chunks a save needs, and does something else at that moment."""

    def __init__(self) -> None:
        self.found: list[list[tuple[str, int, int]]] = []

    def __call__(self, missing: Sequence[SourceChunk]) -> None:
        self.found.append([(chunk.source.name, chunk.start, chunk.stop) for chunk in missing])


def save_remote(
    repo: Repository,
    name: str,
    *sources: Remote,
    overwrite: bool = False,
    note: Callable[[Sequence[SourceChunk]], None] | None = None,
) -> SaveResult:
    digests = {number: source.digests for number, source in enumerate(sources)}
    given: Sequence[Source] = sources
    options = WriteOptions(overwrite=overwrite)
    request = Request(name, given, digests=digests, note_missing=note, options=options)
    return save(repo, request)


def changed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_first_save_reads_everything_once(repo: Repository) -> None:
    source, missing = Remote("x", noise(3 * MIB + 5)), Missing()

    result = save_remote(repo, "a", source, note=missing)

    assert sorted(source.reads) == source.spans
    assert missing.found == [[("x", start, stop) for start, stop in source.spans if stop - start > INLINE_BYTES]]
    assert load_bytes(repo, "a") == {"x": source.data}
    assert result.new_bytes == len(source.data)


def test_what_is_stored_is_not_read(repo: Repository) -> None:
    save_remote(repo, "a", Remote("x", noise(3 * MIB)), Remote("small", b"12"))
    source, small, missing = Remote("x", noise(3 * MIB), is_gone=True), Remote("small", b"12"), Missing()

    result = save_remote(repo, "b", source, small, note=missing)

    assert source.reads == []
    assert small.reads == [(0, 2)]
    assert missing.found == [[]]
    assert (result.new_bytes, result.reused_bytes) == (2, 3 * MIB)
    assert load_bytes(repo, "b") == {"x": source.data, "small": b"12"}


def test_of_what_changed_a_little_only_that_chunk_is_read(repo: Repository) -> None:
    data = noise(8 * MIB)
    save_remote(repo, "a", Remote("x", data))
    source = Remote("x", changed(data, 5 * MIB + 77))

    save_remote(repo, "b", source)

    assert source.reads == [(5 * MIB, 6 * MIB)]
    assert load_bytes(repo, "b") == {"x": source.data}


def test_a_chunk_that_is_new_and_comes_twice_is_read_once(repo: Repository) -> None:
    one, other, missing = Remote("x", noise(MIB) * 2), Remote("y", noise(MIB)), Missing()

    save_remote(repo, "a", one, other, note=missing)

    assert missing.found == [[("x", 0, MIB)]]
    assert (one.reads, other.reads) == ([(0, MIB)], [])
    assert load_bytes(repo, "a") == {"x": one.data, "y": other.data}


def test_references_are_in_order_whatever_is_read(repo: Repository) -> None:
    old = [Remote(str(number), noise(700 + number, number)) for number in range(6)]
    save_remote(repo, "a", *old)
    new = [Remote(each.name, each.data if number % 2 else noise(900, number + 50)) for number, each in enumerate(old)]
    mixed = [*new, Remote("inline", b"abc"), Remote("last", noise(2 * MIB, 99))]

    save_remote(repo, "b", *mixed)

    assert load_bytes(repo, "b") == {each.name: each.data for each in mixed}
    assert [bool(each.reads) for each in mixed] == [True, False, True, False, True, False, True, True]


def test_the_content_is_the_same_as_without_digests(repo: Repository) -> None:
    source = Remote("x", noise(2 * MIB + 100))

    plain = save(new_repo(), Request("a", [source]))

    assert save_remote(repo, "a", source).digest == plain.digest


def test_a_wrong_digest_names_no_bytes(repo: Repository, store: MemoryStore) -> None:
    source = Remote("x", noise(MIB))
    wrong: dict[int, list[Digest | None]] = {0: [hash_bytes(b"something else")]}

    with pytest.raises(
        SourceChanged, match=r"'x' changed while it was being saved, or its device computes wrong digests"
    ):
        save(repo, Request("a", [source], digests=wrong))

    assert keys(store, "snapshots/") == keys(store, "packs/") == keys(store, "leases/") == []


def test_a_name_with_the_same_content_is_found_without_reading(repo: Repository) -> None:
    save_remote(repo, "a", Remote("x", noise(2 * MIB)))
    source = Remote("x", noise(2 * MIB), is_gone=True)

    assert save_remote(repo, "a", source).existed


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_stored_chunk_that_is_damaged_is_missing(repo: Repository, store: MemoryStore, chunk: int) -> None:
    data = noise(3 * MIB)
    save_remote(repo, "a", Remote("x", data))
    rot(store, only_pack(store), 4096 + chunk * MIB + 99)
    source = Remote("x", data)

    save_remote(new_repo(store), "b", source)

    assert source.reads == [(chunk * MIB, (chunk + 1) * MIB)]
    assert load_bytes(new_repo(store), "b") == {"x": data}


def test_what_a_collector_marks_after_the_look_up_is_written_again_from_its_copy(
    repo: Repository, store: MemoryStore
) -> None:
    data = noise(3 * MIB)
    save_remote(repo, "a", Remote("x", data))
    (old_pack,) = keys(store, PACKS)
    source = Remote("x", changed(data, 2 * MIB))

    def mark(_: object) -> None:
        delete_snapshot(store, "a")
        fields = {"kind": "mark", "keys": [old_pack], "write_id": "collector", "time": store.clock()}
        store.create(MARKS + "collector", encode_record(fields), durable=False)

    save_remote(repo, "b", source, note=mark)

    assert source.reads == [(2 * MIB, 3 * MIB)]
    store.delete(old_pack)
    assert load_bytes(new_repo(store), "b") == {"x": source.data}


def test_a_collector_at_that_moment_waits_for_the_save(repo: Repository, store: MemoryStore) -> None:
    data = noise(2 * MIB)
    save_remote(repo, "a", Remote("x", data))
    source = Remote("x", data, is_gone=True)

    def gather(_: object) -> None:
        delete_snapshot(store, "a")
        collect(store, Rules(min_age_s=0.0))

    save_remote(repo, "b", source, note=gather)
    collect(store, Rules(min_age_s=0.0))

    assert load_bytes(new_repo(store), "b") == {"x": data}
    assert [finding for finding in Checker(store, read=True).iter_findings() if finding.severity != "note"] == []


@pytest.mark.parametrize("is_gone", [False, True], ids=["still there", "gone"])
def test_a_marked_copy_that_is_damaged_is_replaced_from_the_source_or_the_save_fails(
    repo: Repository, store: MemoryStore, is_gone: bool
) -> None:
    data = noise(2 * MIB)
    save_remote(repo, "a", Remote("x", data))
    (old_pack,) = keys(store, PACKS)
    source = Remote("x", data, is_gone=is_gone)

    def mark_and_rot(_: object) -> None:
        rot(store, old_pack, 4096 + 99)
        fields = {"kind": "mark", "keys": [old_pack], "write_id": "collector", "time": store.clock()}
        store.create(MARKS + "collector", encode_record(fields), durable=False)

    if is_gone:
        with pytest.raises(SourceChanged, match="x is gone"):
            save_remote(repo, "b", source, note=mark_and_rot)
        assert len(keys(store, "snapshots/")) == 1
    else:
        save_remote(repo, "b", source, note=mark_and_rot)
        assert load_bytes(new_repo(store), "b") == {"x": data}
