"""Index fragments: every copy is found, blocks are read as needed, and whatever is damaged or gone only loses hits."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.digest import Digest, hash_bytes
from holdfast.errors import Corrupt, NewerFormat
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.repo.format.columns import column, encode_table
from holdfast.repo.format.layout import INDEX
from holdfast.repo.format.pack import PackedChunk
from holdfast.repo.handle import index as index_module
from holdfast.repo.handle.index import (
    TIER,
    BlockCache,
    ChunkIndex,
    Fragment,
    apply_merge,
    encode_fragment,
    merge_tiers,
    plan_merge,
    write_fragment,
)
from tests.kit.saving import Watched, flip, keys, placed, replace_object, rot

BUDGET = 1 << 20


def pack_id(number: int) -> str:
    return f"{number:024x}-{number:016x}"


def digests(count: int, seed: int = 0) -> list[Digest]:
    rng = random.Random(seed)
    return [Digest(rng.randbytes(32)) for _ in range(count)]


def rows(found: Iterable[Digest], *, pack: int = 0) -> list[PackedChunk]:
    return [placed(digest, pack_id=pack_id(pack), offset=64 * number) for number, digest in enumerate(found)]


def open_only(store: ObjectStore) -> Fragment:
    (info,) = store.list(INDEX)
    return Fragment(store, info.key, info.size_bytes)


def find(store: ObjectStore, digest: Digest, size: int = 1000) -> list[str]:
    return sorted(at.pack_id for at in ChunkIndex(store, limit_bytes=BUDGET).refresh().find(digest, size))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_PREFIXES_PER_BLOCK", 8)
    monkeypatch.setattr(index_module, "_ROWS_PER_BLOCK", 4)


@pytest.fixture
def small_first_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no fragment be so small that opening it reads all of it."""
    monkeypatch.setattr(index_module, "_FIRST_READ_BYTES", 64)


def test_an_empty_index_finds_nothing(store: MemoryStore) -> None:
    assert find(store, digests(1)[0]) == []


def test_what_was_written_is_found_whole(store: MemoryStore) -> None:
    chunks = rows(digests(5000))
    write_fragment(store, chunks)
    index = ChunkIndex(store, limit_bytes=BUDGET).refresh()
    for chunk in chunks[::97]:
        assert index.find(chunk.digest, chunk.size_bytes) == [chunk.location]
    assert index.find(digests(1, seed=1)[0], 1000) == []


def test_a_chunk_of_another_size_is_not_found(store: MemoryStore) -> None:
    (digest,) = digests(1)
    write_fragment(store, rows([digest]))
    assert find(store, digest, size=999) == []


def test_a_fragment_is_named_by_its_digest(store: MemoryStore) -> None:
    key = write_fragment(store, rows(digests(10)))
    assert key == INDEX + hash_bytes(store.contents()[key]).hex()
    assert write_fragment(store, rows(digests(10))) == key


def test_all_rows_come_back_for_merging(store: MemoryStore) -> None:
    chunks = rows(digests(1500))
    write_fragment(store, chunks)
    assert sorted(open_only(store).iter_chunks(), key=lambda chunk: chunk.digest) == sorted(
        chunks, key=lambda chunk: chunk.digest
    )


def test_copies_in_several_packs_and_fragments_are_all_found(store: MemoryStore) -> None:
    (digest,) = digests(1)
    write_fragment(store, [*rows([digest], pack=1), *rows([digest], pack=2)])
    write_fragment(store, rows([digest, *digests(50, seed=1)], pack=3))
    assert find(store, digest) == [pack_id(1), pack_id(2), pack_id(3)]


@pytest.mark.usefixtures("small_blocks")
def test_every_row_is_found_however_blocks_divide_equal_prefixes(store: MemoryStore) -> None:
    rng = random.Random(0)
    alike = [Digest(b"same" + rng.randbytes(28)) for _ in range(50)]
    others = [Digest(start + bytes(28)) for start in (b"\0\0\0\0", b"samd", b"samf", b"\xff\xff\xff\xff")]
    chunks = rows([*alike, *others, *digests(30)])
    write_fragment(store, chunks)
    index = ChunkIndex(store, limit_bytes=BUDGET).refresh()
    for chunk in chunks:
        assert index.find(chunk.digest, 1000) == [chunk.location]
    assert index.find(Digest(b"same" + bytes(28)), 1000) == []
    assert index.find(Digest(b"samg" + bytes(28)), 1000) == []


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 7, 8, 9, 16, 17])
def test_every_number_of_rows_can_be_searched(store: MemoryStore, count: int) -> None:
    chunks = rows(digests(count))
    write_fragment(store, chunks)
    index = ChunkIndex(store, limit_bytes=BUDGET).refresh()
    assert [index.find(chunk.digest, 1000) for chunk in chunks] == [[chunk.location] for chunk in chunks]


def test_opening_a_small_fragment_reads_it_once_and_searching_it_not_again(store: MemoryStore) -> None:
    chunks = rows(digests(100))
    key = write_fragment(store, chunks)
    watched = Watched(store)
    index = ChunkIndex(watched, limit_bytes=BUDGET).refresh()
    assert all(index.find(chunk.digest, 1000) == [chunk.location] for chunk in chunks)
    assert watched.reads == [(key, 0, store.stat(key).size_bytes)]


def test_opening_a_large_fragment_reads_its_start_once(store: MemoryStore) -> None:
    key = write_fragment(store, rows(digests(5000)))
    watched = Watched(store)
    ChunkIndex(watched, limit_bytes=BUDGET).refresh()
    assert watched.reads == [(key, 0, 16 << 10)]


def test_a_directory_longer_than_the_first_read_is_read_whole(store: MemoryStore) -> None:
    chunks = [placed(digest, pack_id=pack_id(number)) for number, digest in enumerate(digests(1000))]
    write_fragment(store, chunks)
    index = ChunkIndex(store, limit_bytes=BUDGET).refresh()
    assert [index.find(chunk.digest, 1000) for chunk in chunks] == [[chunk.location] for chunk in chunks]


def test_a_look_up_reads_two_blocks_and_the_next_to_it_none(store: MemoryStore) -> None:
    chunks = rows(digests(40_000))
    write_fragment(store, chunks)
    watched = Watched(store)
    index = ChunkIndex(watched, limit_bytes=BUDGET).refresh()
    opened = len(watched.reads)
    index.find(chunks[0].digest, 1000)
    assert len(watched.reads) - opened == 2
    assert sum(size for _, _, size in watched.reads[opened:]) <= 4 * 16384 + 72 * 512
    index.find(chunks[0].digest, 1000)
    assert len(watched.reads) - opened == 2


@pytest.mark.usefixtures("small_blocks")
def test_blocks_are_cached_within_their_budget(store: MemoryStore) -> None:
    chunks = rows(digests(200))
    write_fragment(store, chunks)
    watched = Watched(store)
    fragment = open_only(watched)
    cache = BlockCache(1000)
    for chunk in chunks * 2:
        assert [at for _, at in fragment.find(chunk.digest, cache)] == [chunk.location]
        assert cache._blocks.size <= 1000
    assert len(watched.reads) > 200


def test_every_flipped_bit_loses_hits_at_most(store: MemoryStore) -> None:
    chunks = rows(digests(20))
    data = encode_fragment(chunks)
    wanted = {chunk.location for chunk in chunks}
    for position in range(len(data)):
        damaged = MemoryStore()
        damaged.create(INDEX + "0" * 64, flip(data, position, position % 8))
        index = ChunkIndex(damaged, limit_bytes=BUDGET).refresh()
        assert {at for chunk in chunks for at in index.find(chunk.digest, 1000)} <= wanted


def test_every_truncation_loses_hits_at_most(store: MemoryStore) -> None:
    chunks = rows(digests(5))
    data = encode_fragment(chunks)
    for length in range(len(data)):
        damaged = MemoryStore()
        damaged.create(INDEX + "0" * 64, data[:length])
        index = ChunkIndex(damaged, limit_bytes=BUDGET).refresh()
        assert index.find(chunks[0].digest, 1000) == []
        assert index.damaged == {INDEX + "0" * 64}


@pytest.mark.usefixtures("small_first_read")
def test_a_damaged_or_missing_fragment_does_not_hide_the_others(store: MemoryStore) -> None:
    first, second, third = digests(3)
    damaged, gone, _ = (write_fragment(store, rows([digest])) for digest in (first, second, third))
    index = ChunkIndex(store, limit_bytes=BUDGET).refresh()
    rot(store, damaged, store.stat(damaged).size_bytes - 1)
    store.delete(gone)
    assert [len(index.find(digest, 1000)) for digest in (first, second, third)] == [0, 0, 1]
    assert index.damaged == {damaged}
    assert len(index.find(third, 1000)) == 1


@pytest.mark.usefixtures("small_first_read")
def test_a_fragment_on_a_bad_sector_only_loses_hits(store: MemoryStore) -> None:
    first, second = digests(2)
    bad, _ = (write_fragment(store, rows([digest])) for digest in (first, second))
    watched = Watched(store)
    index = ChunkIndex(watched, limit_bytes=BUDGET).refresh()
    watched.failing.add(bad)
    assert [len(index.find(digest, 1000)) for digest in (first, second)] == [0, 1]
    assert find(watched, second) == [pack_id(0)]


def later_version(data: bytes) -> bytes:
    return data[:8] + b"\2\0" + data[10:]


def test_a_fragment_of_a_later_version_is_passed_over(store: MemoryStore) -> None:
    first, second = digests(2)
    key = write_fragment(store, rows([first]))
    write_fragment(store, rows([second]))
    replace_object(store, key, later_version(store.contents()[key]))
    assert (find(store, first), find(store, second)) == ([], [pack_id(0)])
    with pytest.raises(NewerFormat, match="index version 2"):
        Fragment(store, key, store.stat(key).size_bytes)


@pytest.mark.parametrize(
    "header",
    [
        (b"HFINDEX\n", 1, 0, 72, 1 << 63, 0, bytes(32)),
        (b"HFINDEX\n", 1, 0, 72, 0, 1 << 63, bytes(32)),
        (b"HFINDEX\n", 1, 0, 0, 0, 0, bytes(32)),
        (b"HFINDEX\n", 1, 0, 71, 0, 0, bytes(32)),
        (b"NOINDEX\n", 9, 0, 72, 0, 0, bytes(32)),
    ],
)
def test_a_false_header_is_damage_and_allocates_nothing(store: MemoryStore, header: tuple[int, ...]) -> None:
    store.create(INDEX + "0" * 64, struct.pack("<8sHHIQQ32s", *header))
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            open_only(store)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("packs", "fanout", "checks"),
    [(["../x"], 0, 0), ("x", 0, 0), (None, 0, 0), ([1], 0, 0), ([], 1, 0), ([], 0, 1)],
)
def test_a_directory_that_does_not_fit_is_damage(store: MemoryStore, packs: Json, fanout: int, checks: int) -> None:
    columns = {
        "fanout": column("I", [0] * fanout),
        "prefix_check": memoryview(bytes(16 * checks)),
        "row_check": memoryview(bytes(16 * checks)),
    }
    directory = encode_table({"packs": packs}, columns, index_module._DIRECTORY)
    header = struct.pack("<8sHHIQQ32s", b"HFINDEX\n", 1, 0, 72, 0, len(directory), hash_bytes(directory))
    store.create(INDEX + "0" * 64, header + directory)
    with pytest.raises(Corrupt, match=r"malformed pack ids|impossible directory"):
        open_only(store)


def test_a_damaged_file_under_our_name_is_left_as_it_is(store: MemoryStore) -> None:
    chunks = rows(digests(3))
    key = write_fragment(store, chunks)
    rot(store, key, 70)
    assert write_fragment(store, chunks) == key
    assert find(store, chunks[0].digest) == []


def info(rows_held: int, number: int) -> ObjectInfo:
    return ObjectInfo(f"index/{number:064x}", 300 + 76 * rows_held, 0.0)


def test_a_merge_is_planned_only_for_a_full_size_class() -> None:
    assert plan_merge([info(1, number) for number in range(TIER - 1)]) == []
    assert len(plan_merge([info(1, number) for number in range(TIER + 3)])) == TIER
    assert plan_merge([info(8**number, number) for number in range(6)]) == []


def test_the_smallest_class_is_merged_first_and_none_into_a_giant() -> None:
    small = [info(2, number) for number in range(TIER)]
    large = [info(5000, 100 + number) for number in range(TIER)]
    giant = [info(100_000, 200 + number) for number in range(TIER)]
    assert plan_merge([*giant, *large, *small]) == small
    assert plan_merge([*giant, *large]) == large
    assert plan_merge(giant) == []


def test_merging_loses_no_copy(store: MemoryStore) -> None:
    chunks = [placed(digest, pack_id=pack_id(number)) for number, digest in enumerate(digests(TIER))]
    for chunk in chunks:
        write_fragment(store, [chunk])
    merge_tiers(store)
    assert len(keys(store, INDEX)) == 1
    assert [find(store, chunk.digest) for chunk in chunks] == [[chunk.location.pack_id] for chunk in chunks]


def test_a_thousand_small_fragments_stay_few(store: MemoryStore) -> None:
    most = 0
    for number, digest in enumerate(digests(1000)):
        write_fragment(store, [placed(digest, pack_id=pack_id(number))])
        merge_tiers(store)
        most = max(most, len(keys(store, INDEX)))
    assert most <= 32
    assert sum(Fragment(store, found.key, found.size_bytes).num_rows for found in store.list(INDEX)) == 1000


def test_merging_what_somebody_else_has_merged_changes_nothing(store: MemoryStore) -> None:
    chunks = rows(digests(TIER))
    for chunk in chunks:
        write_fragment(store, [chunk])
    plan = plan_merge(store.list(INDEX))
    apply_merge(store, plan)
    once = store.contents()
    apply_merge(store, plan)
    assert all(find(store, chunk.digest) == [pack_id(0)] for chunk in chunks)
    assert once.items() <= store.contents().items()
    merge_tiers(store)


def test_many_that_merge_at_once_lose_no_copy(store: MemoryStore) -> None:
    found = digests(200)
    with ThreadPoolExecutor(4) as pool:

        def work(digest: Digest) -> None:
            write_fragment(store, rows([digest]))
            merge_tiers(store)

        list(pool.map(work, found))
    assert all(set(find(store, digest)) == {pack_id(0)} for digest in found)


@pytest.mark.usefixtures("small_first_read")
def test_a_search_goes_on_while_its_fragments_are_merged_away(store: MemoryStore) -> None:
    found = digests(TIER)
    for digest in found:
        write_fragment(store, rows([digest]))
    before = ChunkIndex(store, limit_bytes=BUDGET).refresh()
    merge_tiers(store)
    assert [before.find(digest, 1000) for digest in found] == [[]] * TIER
    assert all(find(store, digest) for digest in found)


def test_damaged_fragments_are_merged_away(store: MemoryStore) -> None:
    found = digests(TIER)
    names = [write_fragment(store, rows([digest])) for digest in found]
    rot(store, names[0], 70)
    merge_tiers(store)
    assert len(keys(store, INDEX)) == 1
    assert [bool(find(store, digest)) for digest in found] == [False] + [True] * (TIER - 1)


def test_fragments_of_a_later_version_are_merged_away_because_they_can_be_rebuilt(
    store: MemoryStore,
) -> None:
    found = digests(2 * TIER)
    names = [write_fragment(store, rows([digest])) for digest in found]
    for name in names[:TIER]:
        replace_object(store, name, later_version(store.contents()[name]))
    merge_tiers(store)
    assert not set(names[:TIER]) & set(keys(store, INDEX))
    assert all(find(store, digest) for digest in found[TIER:])
