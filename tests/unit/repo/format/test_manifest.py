"""Manifests: decoding returns what was encoded, false ones are refused, and the digest covers exactly the content."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import zstandard

from holdfast.digest import Digest, hash_bytes
from holdfast.errors import Corrupt, DigestMismatch, NewerFormat, NotFound, TooLarge
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.chunk import CHUNK_BYTES, ChunkRef, Location
from holdfast.repo.format.columns import ColumnType
from holdfast.repo.format.entry import Entry, digest_entry, digest_snapshot
from holdfast.repo.format.layout import ManifestRef, manifest_key
from holdfast.repo.format.manifest import INLINE, Manifest, decode_manifest, encode_manifest, read_head, read_manifest
from tests.kit.forging import HONEST, forge_manifest, moved, seal_manifest
from tests.kit.saving import PACK_ID, flip, inline_ref, new_repo, noise, packed_ref, save_bytes

BOXED = Entry(
    "sharded",
    24,
    (inline_ref(b"a" * 8, box=(0, 0, 2, 2)), inline_ref(b"b" * 16, box=(2, 0, -4, 2))),
    {"shape": [6, 2]},
    dims=2,
    alias=3,
    rank=7,
)


GOLDEN = "f054076bb8a31efe171f28565591c3becb21a28bbf16bc3362ffda61fdc5e333"
"""The content digest of HONEST and BOXED with the spec {"a": 1}."""


def decode(data: bytes) -> Manifest:
    return decode_manifest(data, where="manifests/x")


def test_entries_come_back_as_they_were() -> None:
    entries = [*HONEST, BOXED, HONEST[2]._replace(name="alias", alias=1)]
    manifest = decode(encode_manifest({"tree": [1, "\u00e9"]}, entries))
    assert list(manifest.iter_entries()) == entries
    assert manifest.spec == {"tree": [1, "\u00e9"]}
    sizes = [entry.size_bytes for entry in manifest.iter_entries()]
    assert (len(manifest), manifest.num_chunks, sizes) == (5, 6, [3000, 0, 4, 24, 4])
    assert manifest.packs == [PACK_ID]


def test_a_manifest_without_entries_is_a_manifest() -> None:
    manifest = decode(encode_manifest(None, []))
    assert (list(manifest.iter_entries()), manifest.num_chunks) == ([], 0)


def test_an_entry_is_found_by_name() -> None:
    manifest = decode(encode_manifest(None, HONEST))
    assert manifest.find_entry("step") == HONEST[2]
    with pytest.raises(NotFound, match="no entry 'other' in manifests/x"):
        manifest.find_entry("other")


def test_chunks_in_packs_are_located_and_inline_ones_are_not() -> None:
    manifest = decode(encode_manifest(None, HONEST))
    rows = manifest.locate_all()
    assert {digest: manifest.location(row) for digest, row in rows.items()} == {
        chunk.digest: chunk.location for chunk in HONEST[0].chunks
    }


def test_places_are_those_of_the_chunks() -> None:
    entries = [*HONEST, BOXED]
    manifest = decode(encode_manifest(None, entries))
    chunks = [chunk for entry in entries for chunk in entry.chunks]
    assert [(place.pack_id, place.size_bytes) for place in manifest.iter_places()] == [
        (chunk.location.pack_id if chunk.location else "", chunk.size_bytes) for chunk in chunks
    ]
    located = [chunk.location for chunk in chunks if chunk.location]
    packed = [place for place in manifest.iter_places() if place.pack_id]
    assert [(each.offset, each.stored_bytes) for each in packed] == [(at.offset, at.stored_bytes) for at in located]
    assert manifest.chunk_bytes == sum(chunk.size_bytes for chunk in chunks)


def test_every_truncation_is_damage() -> None:
    data = encode_manifest(None, HONEST)
    for length in range(len(data)):
        with pytest.raises(Corrupt, match="manifests/x"):
            decode(data[:length])


def test_every_flipped_bit_is_noticed() -> None:
    data = encode_manifest(None, HONEST)
    for position in range(len(data)):
        with pytest.raises((Corrupt, NewerFormat)):
            decode(flip(data, position, position % 8))


def test_a_manifest_other_than_the_record_says_is_damage(store: MemoryStore) -> None:
    data = encode_manifest(None, HONEST)
    store.create(manifest_key(PACK_ID), data)
    ref = ManifestRef(PACK_ID, hash_bytes(data), len(data))
    assert len(read_manifest(store, ref)) == 3
    with pytest.raises(DigestMismatch, match="not the one that its snapshot states"):
        read_manifest(store, replace(ref, digest=hash_bytes(b"")))
    with pytest.raises(Corrupt):
        read_manifest(store, replace(ref, size_bytes=10))


def store_manifest(store: MemoryStore, data: bytes) -> ManifestRef:
    ref = ManifestRef(PACK_ID, hash_bytes(data), len(data))
    store.create(manifest_key(PACK_ID), data)
    return ref


def test_the_packs_of_a_manifest_are_read_without_the_rest(store: MemoryStore) -> None:
    ref = store_manifest(store, encode_manifest(None, HONEST))
    assert read_head(store, ref)[0] == read_manifest(store, ref).packs == [PACK_ID]


def test_packs_are_not_read_from_a_manifest_other_than_the_record_says(store: MemoryStore) -> None:
    ref = store_manifest(store, encode_manifest(None, HONEST))
    with pytest.raises(DigestMismatch, match="its snapshot states"):
        read_head(store, replace(ref, digest=hash_bytes(b"another")))


@pytest.mark.parametrize(
    ("head", "error"),
    [
        ({"packs": ["../elsewhere"]}, Corrupt),
        ({"packs": [1]}, Corrupt),
        ({"packs": None}, Corrupt),
        ({"parts": ["x"]}, Corrupt),
        ({"parts": None}, Corrupt),
    ],
)
def test_malformed_packs_and_parts_are_refused(
    store: MemoryStore, head: Mapping[str, Json], error: type[Exception]
) -> None:
    ref = store_manifest(store, forge_manifest(head=head))
    with pytest.raises(error):
        read_head(store, ref)


@pytest.mark.parametrize("dims", [0, 1])
def test_sizes_that_only_add_up_in_all_are_damage(dims: int) -> None:
    boxed = Entry("boxed", 0, (), dims=dims)
    entries = [HONEST[2]._replace(size_bytes=HONEST[2].size_bytes + 1), HONEST[0]._replace(size_bytes=2999), boxed]
    with pytest.raises(Corrupt, match="do not add up to its size"):
        decode(encode_manifest(None, entries))


def test_equal_values_that_differ_in_json_stay_different() -> None:
    entries = [Entry(f"{i}", 0, (), spec, spec) for i, spec in enumerate([1, True, 1.0, {"a": 1}, {"a": True}, 1])]
    found = [(entry.spec, entry.note) for entry in decode(encode_manifest(None, entries)).iter_entries()]
    assert repr(found) == repr([(entry.spec, entry.note) for entry in entries])


def test_a_later_major_version_asks_for_an_upgrade() -> None:
    with pytest.raises(NewerFormat, match="manifest version 2, this Holdfast reads up to 1: upgrade"):
        decode(seal_manifest(b"", major=2))


def test_a_later_minor_version_is_read() -> None:
    data = encode_manifest(None, HONEST)
    later = data[:10] + b"\7\0" + data[12:-32]
    assert len(decode(later + hash_bytes(later))) == 3


PART = [PACK_ID, "00" * 32, 10, "11" * 32]


@pytest.mark.parametrize(
    "part",
    [
        "x",
        [],
        PART[:3],
        [*PART, 1],
        ["../x", *PART[1:]],
        [PACK_ID, "00" * 31, 10, "11" * 32],
        [PACK_ID, "zz" * 32, 10, "11" * 32],
        [PACK_ID, "00" * 32, 0, "11" * 32],
        [PACK_ID, "00" * 32, 1 << 40, "11" * 32],
        [PACK_ID, "00" * 32, True, "11" * 32],
        [PACK_ID, 5, 10, None],
    ],
)
def test_a_part_that_cannot_be_is_refused(part: Json) -> None:
    with pytest.raises(Corrupt, match="a part is malformed"):
        decode(forge_manifest(head={"parts": [part]}))


def test_a_root_names_its_parts() -> None:
    (part,) = decode(forge_manifest(head={"parts": [PART]})).parts

    assert part.to_json() == PART


def test_unknown_columns_are_refused_or_ignored_as_they_say() -> None:
    assert len(decode(forge_manifest(extra={"hint": ColumnType("Q", mandatory=False)}))) == 3
    with pytest.raises(NewerFormat, match="'later'"):
        decode(forge_manifest(extra={"later": ColumnType("Q")}))


@pytest.mark.parametrize(
    "head",
    [
        {"names": None},
        {"names": ["a", "b"]},
        {"names": ["a", "b", 3]},
        {"names": ["a", "b", "a"]},
        {"names": ["a", "b", "c", "d"]},
        {"packs": ["../../x"]},
        {"packs": []},
        {"packs": "x"},
        {"specs": []},
        {"specs": None},
        {"notes": {}},
    ],
    ids=str,
)
def test_a_head_that_does_not_fit_is_damage(head: Mapping[str, Json]) -> None:
    with pytest.raises(Corrupt, match="manifests/x"):
        decode(forge_manifest(head=head))


@pytest.mark.parametrize(
    "changes",
    [
        {"entry_bytes": [2999, 0, 4]},
        {"entry_bytes": [3000, 1, 4]},
        {"entry_bytes": [3000, 0]},
        {"entry_chunks": [2, 1, 1]},
        {"entry_chunks": [1, 0, 1]},
        {"entry_chunks": [0xFFFFFFFF, 0, 1]},
        {"entry_chunks": [1, 1, 1]},
        {"entry_spec": [9, 0, 0]},
        {"entry_note": [0, 0, 9]},
        {"entry_dims": [1, 0, 0]},
        {"entry_dims": [255, 255, 255]},
        {"box": [0]},
        {"chunk_bytes": [2000, 1000, 5]},
        {"chunk_bytes": [2000, 1000, 0]},
        {"chunk_bytes": [0xFFFFFFFF, 1000, 4]},
        {"chunk_pack": [1, 0, INLINE]},
        {"chunk_pack": [0, 0, 0xFFFFFFFE]},
        {"chunk_pack": [0, 0]},
        {"chunk_offset": [1 << 62, 0, 0]},
        {"chunk_offset": [64, 2112, 1]},
        {"chunk_offset": [64, 2112, (1 << 64) - 1]},
        {"chunk_stored": [2000, 1000, 3]},
        {"chunk_digest": [0] * 64},
        {"chunk_xxh3": []},
        {"inline": []},
        {"inline": list(b"1234 and more")},
    ],
    ids=str,
)
def test_columns_that_do_not_fit_are_damage(changes: Mapping[str, Sequence[int]]) -> None:
    with pytest.raises(Corrupt, match="manifests/x"):
        decode(forge_manifest(changes=changes))


def test_many_chunks_cannot_share_one_large_inline_value() -> None:
    """Else a small file would expand to as many copies as it has rows."""
    big = [Entry(str(number), CHUNK_BYTES, (inline_ref(bytes(CHUNK_BYTES)),)) for number in range(2)]
    with pytest.raises(Corrupt, match="manifests/x"):
        decode(forge_manifest(entries=big, changes={"chunk_offset": [0, 0], "inline": [0] * CHUNK_BYTES}))


def measure(data: bytes) -> int:
    """Decode what must be refused, and return the peak of memory it took."""
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises((Corrupt, NewerFormat)):
            decode(data)
        assert time.process_time() - started < 1
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("claim", [None, 1 << 30, 1 << 40, (1 << 64) - 1, 0, 100])
def test_a_small_file_does_not_decompress_to_a_huge_one(claim: int | None) -> None:
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(256 << 20))
    claimed = 256 << 20 if claim is None else claim
    assert measure(seal_manifest(bomb, codec=1, table_bytes=claimed)) < 10 << 20


def test_a_frame_that_hides_its_size_is_damage() -> None:
    compressor = zstandard.ZstdCompressor(write_content_size=False)
    assert measure(seal_manifest(compressor.compress(bytes(1000)), codec=1, table_bytes=1000)) < 10 << 20


@pytest.mark.parametrize("body", [b"", b"x", b"\x28\xb5\x2f\xfd", bytes(100)])
@pytest.mark.parametrize("codec", [0, 1, 2, 0xFFFFFFFF])
def test_a_body_that_is_no_table_is_refused(body: bytes, codec: int) -> None:
    assert measure(seal_manifest(body, codec=codec)) < 10 << 20


def test_a_manifest_whose_chunks_are_all_the_same_is_read_back() -> None:
    """A state of zeros compresses far better than any hostile file needs to."""
    chunk = ChunkRef(hash_bytes(b""), CHUNK_BYTES, Location(PACK_ID, 64, CHUNK_BYTES, 0, bytes(16)))
    entry = Entry("zeros", 50_000 * CHUNK_BYTES, (chunk,) * 50_000)
    assert decode(encode_manifest(None, [entry])).entry(0) == entry


def test_what_could_not_be_read_back_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.repo.format.manifest.MAX_TABLE_BYTES", 100)
    with pytest.raises(TooLarge, match="too large for one manifest"):
        encode_manifest(None, HONEST)


def many_entries(count: int) -> list[Entry]:
    rng = random.Random(0)
    return [
        Entry(
            f"model.layers.{number}.weight",
            100_000,
            (
                ChunkRef(
                    Digest(rng.randbytes(32)), 100_000, Location(PACK_ID, 4096 * number, 100_000, 0, rng.randbytes(16))
                ),
            ),
            {"dtype": "float32"},
        )
        for number in range(count)
    ]


@pytest.mark.slow
def test_a_hundred_thousand_entries_are_decoded_fast() -> None:
    data = encode_manifest(None, many_entries(100_000))
    started = time.process_time()
    manifest = decode(data)
    assert time.process_time() - started < 2
    assert len(manifest) == 100_000


class TestContentDigest:
    ENTRIES = (*HONEST, BOXED)

    def digest(self, *entries: Entry, spec: Json = None) -> Digest:
        return digest_snapshot(spec, entries or self.ENTRIES)

    def test_it_is_the_one_that_it_was(self) -> None:
        """Whoever changes this changes the identity of everything ever saved."""
        assert self.digest(spec={"a": 1}).hex() == GOLDEN

    @pytest.mark.parametrize(
        "changed",
        [
            {"name": "other"},
            {"spec": {"dtype": "g"}},
            {"spec": None},
            {"alias": 1},
            {"rank": 0},
            {"dims": 1},
            {"size_bytes": 3001},
            {"chunks": HONEST[0].chunks[::-1]},
            {"chunks": HONEST[0].chunks[:1]},
            {"chunks": (packed_ref(b"x" + b"w" * 1999), HONEST[0].chunks[1])},
        ],
        ids=str,
    )
    def test_a_change_of_content_changes_it(self, changed: dict[str, Json]) -> None:
        entry = HONEST[0]._replace(**changed)
        assert digest_entry(entry) != digest_entry(HONEST[0])
        assert self.digest(entry, *self.ENTRIES[1:]) != self.digest()

    def test_a_change_of_a_box_changes_it(self) -> None:
        chunks = (BOXED.chunks[0]._replace(box=(0, 0, 2, 3)), BOXED.chunks[1])
        assert digest_entry(BOXED._replace(chunks=chunks)) != digest_entry(BOXED)

    def test_order_and_spec_of_the_snapshot_count(self) -> None:
        assert self.digest(*self.ENTRIES[::-1]) != self.digest()
        assert self.digest(spec=1) != self.digest()
        assert self.digest(*self.ENTRIES[:-1]) != self.digest()

    def test_names_and_specs_cannot_flow_into_each_other(self) -> None:
        one, two = Entry("a", 0, (), "b"), Entry('a"b"', 0, (), None)
        assert digest_entry(one) != digest_entry(two)

    def test_place_codec_and_note_do_not_count(self) -> None:
        entries = [moved(entry, 999)._replace(note={"any": "thing"}) for entry in self.ENTRIES]
        assert self.digest(*entries) == self.digest()

    def test_inline_or_packed_does_not_count(self) -> None:
        data = b"same bytes"
        inline, packed = (Entry("x", 10, (ref,)) for ref in (inline_ref(data), packed_ref(data)))
        assert digest_entry(inline) == digest_entry(packed)

    def test_it_survives_the_manifest(self) -> None:
        manifest = decode(encode_manifest({"a": 1}, self.ENTRIES))
        assert self.digest(*manifest.iter_entries(), spec=manifest.spec) == self.digest(spec={"a": 1})

    def test_equal_content_packed_differently_has_it_in_common(self) -> None:
        entries = {"x": noise(3_000_000), "y": noise(70_000, 1), "z": b"12"}
        plain, crowded = new_repo(), new_repo()
        save_bytes(crowded, "before", {"other": noise(100_000, 2), "y": entries["y"]})
        first, second = save_bytes(plain, "a", entries), save_bytes(crowded, "b", entries)
        assert first.digest == second.digest
