"""Packs: chunks are where the footer says, and a false footer is refused before memory is allocated."""

from __future__ import annotations

import struct
import tracemalloc

import pytest

from holdfast.digest import fingerprint, hash_bytes
from holdfast.errors import Corrupt, NewerFormat, NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.columns import ColumnType, column
from holdfast.repo.format.pack import (
    HEADER,
    TRAILER,
    Footer,
    PackBuilder,
    PackedChunk,
    iter_pack_footers,
    parse_pack_key,
    read_footer,
)
from tests.kit.forging import forge_pack, row, seal_pack
from tests.kit.rounds import count_rounds
from tests.kit.saving import PACK_ID, append_run, flip, iter_gaps, keys, noise, packed
from tests.kit.waiting_store import WaitingStore

KEY = f"packs/{PACK_ID}"


def build(store: MemoryStore, *runs: tuple[int, list[bytes]]) -> list[PackedChunk]:
    """Seal a pack of runs, each given by its alignment and its chunks."""
    pack = PackBuilder(store, PACK_ID)
    for alignment, chunks in runs:
        append_run(pack, [(hash_bytes(data), memoryview(data)) for data in chunks], alignment=alignment)
    pack.seal()
    return pack.rows


def read(data: bytes) -> Footer:
    store = MemoryStore()
    store.create(KEY, data)
    return read_footer(store, PACK_ID)


def test_the_footer_lists_what_was_appended(store: MemoryStore) -> None:
    rows = build(store, (64, [b"a" * 100, b"b" * 7]), (4096, [noise(70_000)]))
    footer = read_footer(store, PACK_ID)
    assert list(footer.chunks) == rows
    assert footer.pack_bytes == store.stat(KEY).size_bytes
    data = store.contents()[KEY]
    for chunk in footer.chunks:
        at = chunk.location
        stored = data[at.offset : at.offset + at.stored_bytes]
        assert (hash_bytes(stored), fingerprint(stored)) == (chunk.digest, at.fingerprint)


def test_runs_are_aligned_and_their_chunks_are_adjacent(store: MemoryStore) -> None:
    rows = build(store, (64, [b"a" * 100, b"b" * 7]), (64, [b"c"]), (4096, [b"d" * 9, b"e"]), (1, [b"f"]))
    assert [row.location.offset for row in rows] == [64, 164, 192, 4096, 4105, 4106]


def test_all_that_is_no_chunk_is_zero(store: MemoryStore) -> None:
    build(store, (64, [b"a"]), (4096, [b"b"]), (64, [b"c"]))
    data = store.contents()[KEY]
    footer = read_footer(store, PACK_ID)
    gaps = list(iter_gaps(footer))
    assert gaps == [(65, 4096), (4097, 4160), (4161, footer.footer_offset)]
    assert not any(any(data[start:stop]) for start, stop in gaps)
    assert footer.footer_offset % 64 == 0


def test_nothing_is_visible_before_a_pack_is_sealed(store: MemoryStore) -> None:
    pack = PackBuilder(store, PACK_ID)
    append_run(pack, [(hash_bytes(b"a"), memoryview(b"a"))], alignment=64)
    assert keys(store, "") == []
    pack.abort()
    assert keys(store, "") == []


def test_a_pack_is_full_from_its_limit_on(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.repo.format.pack.PACK_LIMIT_BYTES", 1000)
    pack = PackBuilder(store, PACK_ID)
    assert not pack.is_full
    append_run(pack, [(hash_bytes(b""), memoryview(bytes(936)))], alignment=64)
    assert pack.is_full


def test_a_pack_without_chunks_is_a_pack(store: MemoryStore) -> None:
    build(store)
    assert read_footer(store, PACK_ID).chunks == ()


def test_a_pack_that_is_not_there_is_not_found(store: MemoryStore) -> None:
    with pytest.raises(NotFound):
        read_footer(store, PACK_ID)


def test_every_truncation_is_damage(store: MemoryStore) -> None:
    build(store, (64, [b"a" * 600]))
    data = store.contents()[KEY]
    for length in range(len(data)):
        with pytest.raises(Corrupt, match=KEY):
            read(data[:length])


def test_every_flipped_bit_of_header_footer_and_trailer_is_noticed(store: MemoryStore) -> None:
    build(store, (64, [b"a" * 600, b"b"]))
    data = store.contents()[KEY]
    footer_offset = read_footer(store, PACK_ID).footer_offset
    for position in (*range(HEADER.size), *range(footer_offset, len(data))):
        for bit in range(8):
            with pytest.raises((Corrupt, NewerFormat)):
                read(flip(data, position, bit))


def test_a_pack_under_the_name_of_another_is_damage(store: MemoryStore) -> None:
    build(store, (64, [b"a"]))
    other = "1" * 24 + "-" + "2" * 16
    store.create(f"packs/{other}", store.contents()[KEY])
    with pytest.raises(Corrupt, match=f"packs/{other}"):
        read_footer(store, other)


def test_a_later_major_version_asks_for_an_upgrade(store: MemoryStore) -> None:
    build(store, (64, [b"a"]))
    data = store.contents()[KEY]
    with pytest.raises(NewerFormat, match="pack version 2, this Holdfast reads up to 1: upgrade"):
        read(data[:8] + b"\2\0" + data[10:])


def test_a_later_minor_version_is_read() -> None:
    data = forge_pack([row(64)], size=192, head={"minor": 3})
    assert len(read(data[:10] + b"\3\0" + data[12:]).chunks) == 1


@pytest.mark.parametrize("minor", [1, 65536, 1 << 62, -1, "0", None, True, 1.5])
def test_a_minor_version_that_the_header_does_not_have_is_damage(minor: object) -> None:
    with pytest.raises(Corrupt, match=KEY):
        read(forge_pack([row(64)], size=192, head={"minor": minor}))


def test_an_unknown_column_is_ignored_if_it_may_be() -> None:
    assert len(read(forge_pack([row(64)], size=192, extra={"hint": ColumnType("Q", mandatory=False)})).chunks) == 1
    with pytest.raises(NewerFormat, match="'later'"):
        read(forge_pack([row(64)], size=192, extra={"later": ColumnType("Q")}))


@pytest.mark.parametrize(
    ("size", "rows"),
    [
        (192, [row(0)]),
        (192, [row(63)]),
        (320, [row(64), row(163)]),
        (320, [row(200), row(64)]),
        (192, [row(64), row(64)]),
        (64, [row(64, raw=0)]),
        (64, [row(64, raw=100, stored=0)]),
        (192, [row(64, raw=100, stored=99)]),
        (192, [row(64, raw=100, stored=0, codec=7)]),
        (64 + (1 << 20) + 1, [row(64, raw=(1 << 20) + 1)]),
        (192, [row(64, raw=1 << 20)]),
        (192, [row(64, raw=0xFFFFFFFF)]),
        (192, [row((1 << 64) - 1)]),
        (192, [row(1 << 63)]),
        (64 + 4096 + 100, [row(64 + 4096)]),
        (164 + 4096 + 100, [row(64), row(164 + 4096)]),
        (164 + 4096, [row(64)]),
        (64 + 4096, []),
    ],
    ids=lambda case: str(
        [(item.location.offset, item.size_bytes) for item in case] if isinstance(case, list) else case
    ),
)
def test_chunks_where_they_cannot_be_are_damage(size: int, rows: list[PackedChunk]) -> None:
    with pytest.raises(Corrupt, match=KEY):
        read(forge_pack(rows, size=size))


def test_a_chunk_of_a_later_codec_may_have_another_size() -> None:
    (chunk,) = read(forge_pack([row(64, raw=5000, stored=100, codec=7)], size=192)).chunks
    assert (chunk.size_bytes, chunk.location.codec) == (5000, 7)


def test_columns_of_different_lengths_are_damage() -> None:
    with pytest.raises(Corrupt, match="differ in length"):
        read(forge_pack([row(64)], size=192, changes={"codec": column("B", [0, 0])}))


@pytest.mark.parametrize("head", [{"pack": "other"}, {"pack": None}])
def test_the_footer_of_another_pack_is_damage(head: dict[str, object]) -> None:
    with pytest.raises(Corrupt, match="another pack"):
        read(forge_pack([row(64)], size=192, head=head))


@pytest.mark.parametrize(
    "trailer",
    [
        (64, 1 << 63),
        ((1 << 64) - 1, 1),
        (0, 0),
        (64, 300 << 20),
        (1 << 62, 1 << 62),
    ],
)
def test_a_false_trailer_is_damage_and_allocates_nothing(trailer: tuple[int, int]) -> None:
    data = seal_pack(b"", size=64)[: -TRAILER.size] + TRAILER.pack(*trailer, bytes(32), bytes(8), b"HFPKEND\n")
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match=KEY):
            read(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_footer_that_claims_too_many_rows_is_damage_and_costs_nothing() -> None:
    start = (
        struct.pack("<IHH", 2, 1, 0) + struct.pack("<20sBBHQ", b"digest", ord("B"), 1, 32, 1 << 58) + b"{}" + bytes(6)
    )
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="early"):
            read(seal_pack(start, size=64))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_only_keys_of_packs_are_taken_for_such() -> None:
    assert parse_pack_key(KEY) == PACK_ID
    for key in (f"manifests/{PACK_ID}", f"packs/x/{PACK_ID}", "packs/x", PACK_ID):
        assert parse_pack_key(key) is None


def test_a_row_helper_is_what_a_builder_makes(store: MemoryStore) -> None:
    assert build(store, (64, [b"abc"])) == [packed(b"abc")]


@pytest.mark.parametrize("kind", [MemoryStore, WaitingStore])
def test_the_footers_of_many_packs_are_read_in_order_with_their_errors(kind: type[MemoryStore]) -> None:
    store = kind()
    ids = [f"{number:024}-{number:016}" for number in range(5)]
    for pack_id, count in zip(ids, (1, 1200, 3, 0, 2), strict=True):
        pack = PackBuilder(store, pack_id)
        chunks = [i.to_bytes(2, "little") for i in range(count)]
        append_run(pack, [(hash_bytes(data), memoryview(data)) for data in chunks], alignment=64)
        pack.seal()
    store.delete(f"packs/{ids[3]}")
    damaged = store.contents()[f"packs/{ids[4]}"]
    store.delete(f"packs/{ids[4]}")
    store.create(f"packs/{ids[4]}", flip(damaged, len(damaged) - 100))

    sizes = [len(store.contents().get(f"packs/{each}", damaged)) for each in ids]
    found = list(iter_pack_footers(store, zip(ids, sizes, strict=True)))

    assert found[:3] == [read_footer(store, each) for each in ids[:3]]
    assert [len(each.chunks) for each in found[:3] if isinstance(each, Footer)] == [1, 1200, 3]
    assert isinstance(found[3], NotFound)
    assert isinstance(found[4], Corrupt)


def test_a_footer_comes_with_the_end_of_the_pack_where_requests_cost_more_than_bytes() -> None:
    store = WaitingStore()
    build(store, (64, [b"a" * 100, b"b" * 7]))
    with count_rounds(MemoryStore, "read_into") as rounds:
        read_footer(store, PACK_ID)
    assert len(rounds.requests) == 2
