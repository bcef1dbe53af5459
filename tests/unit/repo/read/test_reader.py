"""Reading: exact ranges in few reads, verified; another copy if the hint is wrong; else an error that says all."""

from __future__ import annotations

import threading
from array import array
from pathlib import Path

import pytest

from holdfast.digest import fingerprint, hash_bytes, short_hex
from holdfast.errors import Corrupt, DigestMismatch, MissingChunk, NewerFormat, NotFound, StoreError
from holdfast.objects.blocks import PAGE_BYTES
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.chunk import CHUNK_BYTES, UNIT_BYTES, ChunkRef, Location
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import manifest_key, pack_key
from holdfast.repo.format.pack import PackBuilder, parse_pack_key
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository
from holdfast.repo.read.read_plan import STRETCH_BYTES
from holdfast.repo.read.reader import SnapshotReader, open_snapshot
from holdfast.repo.write.writer import Request, save
from tests.kit.forging import forge_pack, row
from tests.kit.saving import (
    MIB,
    PACK_ID,
    Watched,
    append_run,
    inline_ref,
    keys,
    load_bytes,
    new_repo,
    noise,
    only_pack,
    pack_of,
    replace_object,
    rot,
    save_bytes,
    snapshot_of,
)

BIG = noise(20 * MIB + 777)


@pytest.fixture(scope="module")
def big_store() -> MemoryStore:
    """A store with `a`: an entry of 20 MiB and some; tests only read it."""
    store = MemoryStore()
    save_bytes(new_repo(store), "a", {"x": BIG, "small": b"123"})
    return store


def open_watched(store: MemoryStore) -> tuple[SnapshotReader, Watched]:
    watched = Watched(store)
    repo = new_repo(watched)
    reader = SnapshotReader(repo, snapshot_of(repo, "a"))
    watched.reads.clear()
    return reader, watched


def read_range(reader: SnapshotReader, start: int, stop: int, name: str = "x") -> bytes:
    buffer = bytearray(stop - start)
    reader.read_into(reader.find_entry(name), start, memoryview(buffer))
    return bytes(buffer)


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, 0),
        (0, 1),
        (0, len(BIG)),
        (len(BIG) - 1, len(BIG)),
        (len(BIG), len(BIG)),
        (MIB - 1, MIB + 1),
        (MIB, 2 * MIB),
        (5, 3 * MIB + 5),
        (7 * MIB + 1, 18 * MIB - 1),
        (20 * MIB, len(BIG)),
    ],
)
def test_a_range_is_exactly_what_was_asked(big_store: MemoryStore, start: int, stop: int) -> None:
    reader, _ = open_watched(big_store)
    with reader:
        assert read_range(reader, start, stop) == BIG[start:stop]


def test_a_small_range_reads_only_the_chunks_that_contain_it(big_store: MemoryStore) -> None:
    reader, watched = open_watched(big_store)
    with reader:
        read_range(reader, 10 * MIB - 2048, 10 * MIB + 2048)
    ((_, _, size),) = watched.reads
    assert 2 * CHUNK_BYTES <= size < 2 * CHUNK_BYTES + PAGE_BYTES


def test_an_empty_or_inline_range_reads_nothing(big_store: MemoryStore) -> None:
    reader, watched = open_watched(big_store)
    with reader:
        read_range(reader, 5, 5)
        assert read_range(reader, 1, 3, "small") == b"23"
    assert watched.reads == []


def test_adjacent_chunks_come_in_few_large_reads(big_store: MemoryStore) -> None:
    reader, watched = open_watched(big_store)
    with reader:
        assert reader.read_entry("x") == BIG
    assert len(watched.reads) == -(-len(BIG) // STRETCH_BYTES)
    assert max(size for _, _, size in watched.reads) == STRETCH_BYTES
    assert sum(size for _, _, size in watched.reads) == len(BIG)


def test_an_entry_is_read_piece_by_piece(big_store: MemoryStore) -> None:
    reader, _ = open_watched(big_store)
    with reader:
        pieces = [bytes(piece) for piece in reader.iter_entry(reader.find_entry("x"))]
    assert b"".join(pieces) == BIG
    assert max(map(len, pieces)) == UNIT_BYTES


def test_opening_reads_the_manifest_and_nothing_else(big_store: MemoryStore) -> None:
    watched = Watched(big_store)
    repo = new_repo(watched)
    snapshot = snapshot_of(repo, "a")
    watched.reads.clear()
    with SnapshotReader(repo, snapshot):
        assert [key for key, _, _ in watched.reads] == [manifest_key(snapshot.manifest.manifest_id)]


@pytest.mark.parametrize(("start", "size"), [(-1, 1), (0, len(BIG) + 1), (len(BIG), 1)])
def test_a_range_outside_the_entry_is_refused(big_store: MemoryStore, start: int, size: int) -> None:
    reader, _ = open_watched(big_store)
    with reader, pytest.raises(ValueError, match=r"out of range: 'x' has 20972297 bytes"):
        reader.read_into(reader.find_entry("x"), start, memoryview(bytearray(size)))


def test_a_buffer_of_numbers_is_filled_as_bytes(big_store: MemoryStore) -> None:
    numbers = array("I", bytes(3 * MIB))
    reader, _ = open_watched(big_store)
    with reader:
        reader.read_into(reader.find_entry("x"), 100, memoryview(numbers))
    assert numbers.tobytes() == BIG[100 : 100 + 3 * MIB]


def test_an_entry_that_is_not_there_is_named_with_the_next_step(big_store: MemoryStore) -> None:
    reader, _ = open_watched(big_store)
    with reader, pytest.raises(NotFound, match=r"^no entry 'y' in 'a'; `holdfast show a` lists them$"):
        reader.read_entry("y")


def test_a_snapshot_whose_manifest_is_gone_is_not_found(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"x": b"1"})
    snapshot = snapshot_of(repo, "a")
    store.delete(keys(store, "manifests/")[0])
    with pytest.raises(NotFound, match="'a' is gone: its manifest was collected or lost; list the snapshots again"):
        open_snapshot(repo, snapshot)


DATA = noise(3 * MIB)


def add_copy(store: MemoryStore, *chunks: bytes, number: int = 7) -> str:
    """Seal another pack that holds copies of chunks, unknown to any index; return its key."""
    pack_id = f"{number:024x}-{number:016x}"
    pack = PackBuilder(store, pack_id)
    append_run(pack, [(hash_bytes(data), memoryview(data)) for data in chunks], alignment=64)
    pack.seal()
    return pack_key(pack_id)


def damage(store: MemoryStore, key: str, how: str, offset: int) -> None:
    if how == "gone":
        store.delete(key)
    elif how == "short":
        replace_object(store, key, store.contents()[key][: offset + 5])
    else:
        rot(store, key, offset + 5)


@pytest.mark.parametrize("how", ["gone", "short", "rotten"])
@pytest.mark.parametrize("whole", [True, False])
def test_another_copy_is_read_if_the_hint_fails(repo: Repository, store: MemoryStore, how: str, whole: bool) -> None:
    save_bytes(repo, "a", {"x": DATA})
    at = pack_of(repo, "a", "x")
    add_copy(store, *(DATA[start : start + MIB] for start in range(0, len(DATA), MIB)))
    damage(store, pack_key(at.pack_id), how, at.offset)
    with SnapshotReader(repo, snapshot_of(repo, "a")) as reader:
        start, stop = (0, len(DATA)) if whole else (100, MIB - 100)
        assert read_range(reader, start, stop) == DATA[start:stop]


def test_a_rotten_copy_is_passed_over_for_an_intact_one(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"x": DATA[:5000]})
    at = pack_of(repo, "a", "x")
    rot(store, pack_key(at.pack_id), at.offset)
    rot(store, add_copy(store, DATA[:5000], number=1), 70)
    add_copy(store, DATA[:5000], number=2)
    assert load_bytes(repo, "a") == {"x": DATA[:5000]}


def test_a_pack_that_is_gone_and_nowhere_else_is_a_missing_chunk(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"layer.weight": DATA})
    store.delete(only_pack(store))
    with pytest.raises(MissingChunk) as caught:
        load_bytes(repo, "a")
    text = str(caught.value)
    for part in (
        "'a', entry 'layer.weight'",
        "chunk ",
        "(bytes ",
        "is gone",
        "holdfast check --read",
        "restore the pack",
    ):
        assert part in text
    assert caught.value.key.startswith("packs/")


def test_rotten_bytes_are_never_returned_and_the_error_names_them(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"w": DATA})
    at = pack_of(repo, "a", "w")
    rot(store, pack_key(at.pack_id), at.offset + MIB + 1)
    with pytest.raises(DigestMismatch) as caught:
        load_bytes(repo, "a")
    text = str(caught.value)
    chunk = f"chunk {short_hex(hash_bytes(DATA[MIB : 2 * MIB]))} (bytes {MIB} to {2 * MIB})"
    for part in ("'a', entry 'w'", chunk, f"damaged in pack {at.pack_id}", "no other intact copy", "holdfast check"):
        assert part in text


def test_a_range_beside_the_rot_is_still_read(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"w": DATA})
    at = pack_of(repo, "a", "w")
    rot(store, pack_key(at.pack_id), at.offset + MIB + 1)
    with SnapshotReader(repo, snapshot_of(repo, "a")) as reader:
        assert read_range(reader, 0, MIB, "w") == DATA[:MIB]


def test_a_disk_that_fails_is_a_store_error_that_names_the_entry(store: MemoryStore) -> None:
    save_bytes(new_repo(store), "a", {"w": DATA})
    watched = Watched(store)
    watched.failing.add(only_pack(store))
    with pytest.raises(StoreError, match=r"'a', entry 'w', chunk .* cannot be read \(input/output error"):
        load_bytes(new_repo(watched), "a")


def with_entry(repo: Repository, entry: Entry) -> SnapshotReader:
    save_bytes(repo, "any", {})
    reader = SnapshotReader(repo, snapshot_of(repo, "any"))
    reader.manifest.find_entry = lambda name: entry  # type: ignore[method-assign]  # an entry no writer makes
    return reader


def located(repo: Repository, data: bytes, **changes: object) -> Entry:
    """Return an entry whose only chunk has the location of that in `a`, with `changes`."""
    save_bytes(repo, "a", {"x": data})
    at = pack_of(repo, "a", "x")._replace(**changes)  # type: ignore[arg-type]  # each test knows its field
    return Entry("x", len(data), (ChunkRef(hash_bytes(data), len(data), at),))


def test_an_unknown_codec_asks_for_an_upgrade(repo: Repository) -> None:
    at = Location(PACK_ID, 64, 100, 9, bytes(16))
    entry = Entry("x", 5000, (ChunkRef(hash_bytes(b""), 5000, at),))
    with with_entry(repo, entry) as reader:
        with pytest.raises(NewerFormat, match=r"entry 'x', chunk .* is stored with codec 9, .*: upgrade"):
            reader.read_entry("x")


def test_an_unknown_codec_is_no_matter_if_a_plain_copy_is_there(repo: Repository, store: MemoryStore) -> None:
    data = noise(5000)
    entry = located(repo, data, codec=9)
    add_copy(store, data)
    with with_entry(repo, entry) as reader:
        assert reader.read_entry("x") == data


def test_a_copy_in_an_unknown_codec_is_passed_over(repo: Repository, store: MemoryStore) -> None:
    data = noise(5000)
    save_bytes(repo, "a", {"x": data})
    store.delete(only_pack(store))
    store.create(
        pack_key(PACK_ID), forge_pack([row(64, raw=5000, stored=100, codec=9, digest=hash_bytes(data))], size=192)
    )
    with pytest.raises(MissingChunk):
        load_bytes(repo, "a")
    add_copy(store, data)
    assert load_bytes(repo, "a") == {"x": data}


def test_a_hint_of_the_wrong_length_is_only_a_wrong_hint(repo: Repository, store: MemoryStore) -> None:
    entry = located(repo, noise(5000), stored_bytes=4999)
    with with_entry(repo, entry) as reader:
        assert reader.read_entry("x") == noise(5000)


def test_inline_bytes_are_verified(repo: Repository) -> None:
    lie = inline_ref(b"1234")._replace(inline=b"1235")
    with with_entry(repo, Entry("x", 4, (lie,))) as reader:
        with pytest.raises(DigestMismatch, match="inline in its manifest"):
            reader.read_entry("x")


def test_a_part_of_an_entry_without_the_others_is_damage(repo: Repository) -> None:
    entry = Entry("x", 4, (inline_ref(b"1234", box=(0, 4)),), dims=1)
    with with_entry(repo, entry) as reader, pytest.raises(Corrupt, match=r"'x' is only one part of an entry"):
        reader.read_entry("x")


class Stuck(Watched):
    """Blocks reads beyond the first chunk until it is released; the first chunk cannot be read."""

    def __init__(self, inner: MemoryStore, at: Location) -> None:
        super().__init__(inner)
        self.go_on = threading.Event()
        self.finished = 0
        self._damaged_at = at

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        if key == pack_key(self._damaged_at.pack_id) and start == self._damaged_at.offset:
            self.go_on.set()
            raise Corrupt("rot", key=key)
        if key == pack_key(self._damaged_at.pack_id) and start > self._damaged_at.offset:
            self.go_on.wait(10)
        super().read_into(key, start, buffer)
        self.finished += 1


def test_after_an_error_no_thread_writes_into_the_buffer(store: MemoryStore) -> None:
    save_bytes(new_repo(store), "a", {"x": BIG})
    stuck = Stuck(store, pack_of(new_repo(store), "a", "x"))
    repo = new_repo(stuck)
    with SnapshotReader(repo, snapshot_of(repo, "a")) as reader:
        with pytest.raises(Corrupt):
            read_range(reader, 100, len(BIG))
        finished = stuck.finished
    assert stuck.finished == finished


def test_a_chunk_is_verified_only_by_its_bytes(repo: Repository, store: MemoryStore) -> None:
    """A hint into another chunk of the same size is rot as well."""
    save_bytes(repo, "a", {"x": noise(5000), "y": noise(5000, 1)})
    x, y = (pack_of(repo, "a", name) for name in "xy")
    entry = Entry("x", 5000, (ChunkRef(hash_bytes(noise(5000)), 5000, x._replace(offset=y.offset)),))
    assert parse_pack_key(only_pack(store)) == x.pack_id
    assert x.fingerprint == fingerprint(noise(5000))
    with with_entry(repo, entry) as reader:
        assert reader.read_entry("x") == noise(5000)


@pytest.mark.parametrize(("shift", "is_mapped"), [(1024, True), (1001, False)])
def test_an_entry_is_mapped_only_where_it_is_aligned(tmp_path: Path, shift: int, is_mapped: bool) -> None:
    """The second entry consists of one chunk, which is reused from the middle of the first."""
    repo = new_repo(LocalStore(tmp_path / "store"))
    data = noise(shift + 100_000)
    save(repo, Request("a", [BytesSource("x", data, cuts=[shift, len(data)])]))
    save_bytes(repo, "b", {"x": data[shift:]})

    with open_snapshot(repo, snapshot_of(repo, "b")) as reader:
        mapped = reader.map_entry(reader.find_entry("x"))

    assert (mapped is not None) is is_mapped
    assert mapped is None or bytes(mapped) == data[shift:]
