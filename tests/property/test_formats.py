"""Laws of the format: what was encoded decodes to itself, and no bytes whatever crash a decoder."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.digest import Digest, hash_bytes
from holdfast.errors import Corrupt, NewerFormat
from holdfast.json_text import Json, canonical_json, parse_json
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.chunk import CHUNK_BYTES, DELTA, RAW, Base, ChunkRef, Location
from holdfast.repo.format.columns import ColumnType, Letter, column, decode_table, encode_table
from holdfast.repo.format.entry import Entry, digest_snapshot
from holdfast.repo.format.manifest import decode_manifest, encode_manifest
from holdfast.repo.format.pack import PackBuilder, PackedChunk, read_footer
from holdfast.repo.format.record import decode_record, encode_record
from holdfast.repo.handle.index import BlockCache, Fragment, encode_fragment
from tests.kit.forging import seal_manifest, seal_pack
from tests.kit.saving import PACK_ID, append_run, flip, iter_gaps

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(allow_nan=False, allow_infinity=False), TEXT
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)
PACK_IDS = st.from_regex(r"[0-9a-f]{24}-[0-9a-f]{16}", fullmatch=True)
DIGESTS = st.binary(min_size=32, max_size=32).map(Digest)
LOCATIONS = st.builds(
    Location,
    PACK_IDS,
    st.integers(0, (1 << 62) - 1),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, 255).filter(lambda codec: codec != DELTA),
    st.binary(min_size=16, max_size=16),
    st.none(),
)
SIZES = st.integers(1, CHUNK_BYTES)
PACKED = st.builds(ChunkRef, DIGESTS, SIZES, LOCATIONS, st.just(b""), st.just(()))
BASES = st.builds(Base, DIGESTS, LOCATIONS)
DELTAS = st.tuples(PACKED, BASES).map(lambda pair: _make_delta(*pair))
INLINE = st.binary(min_size=1, max_size=40).map(lambda data: ChunkRef(hash_bytes(data), len(data), None, data))


def _make_delta(ref: ChunkRef, base: Base) -> ChunkRef:
    """Return a chunk as a delta on a base of its own length, which is stored raw."""
    assert ref.location is not None
    raw = base.location._replace(codec=RAW, stored_bytes=ref.size_bytes)
    return ref._replace(location=ref.location._replace(codec=DELTA, base=base._replace(location=raw)))


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    names = draw(st.lists(TEXT, unique=True, max_size=5))
    return [draw(_entries(name)) for name in names]


@st.composite
def _entries(draw: st.DrawFn, name: str) -> Entry:
    chunks = draw(st.lists(st.one_of(PACKED, INLINE, DELTAS), max_size=4))
    dims = draw(st.integers(0, 3))
    numbers = st.integers(-(1 << 63), (1 << 63) - 1)
    if dims:
        box = st.lists(numbers, min_size=2 * dims, max_size=2 * dims).map(tuple)
        chunks = [chunk._replace(box=draw(box)) for chunk in chunks]
    size = draw(st.integers(0, 1 << 60)) if dims else sum(chunk.size_bytes for chunk in chunks)
    u32 = st.integers(0, (1 << 32) - 1)
    spec = st.sampled_from([None, {"dtype": "f", "shape": [1, 2]}, "\u00e9", [0.5]])
    return Entry(name, size, tuple(chunks), draw(spec), draw(spec), dims, draw(u32), draw(u32))


@given(st.dictionaries(TEXT, JSON, max_size=4))
def test_a_record_decodes_to_itself(fields: dict[str, Json]) -> None:
    found = decode_record(encode_record(fields), key="k")
    assert found is not None
    assert found.values == fields


@given(JSON)
def test_the_canonical_form_is_that_of_what_comes_back(value: Json) -> None:
    encoded = canonical_json(value)
    assert canonical_json(parse_json(encoded, where="x")) == encoded


@given(st.binary(max_size=300))
def test_any_bytes_are_json_or_damage(data: bytes) -> None:
    try:
        value = parse_json(data, where="x")
    except Corrupt:
        return
    canonical_json(value)


@given(
    st.dictionaries(TEXT, JSON, max_size=2),
    st.lists(
        st.tuples(st.sampled_from(["B", "H", "I", "Q", "q"]), st.integers(1, 3), st.integers(0, 5), st.data()),
        max_size=4,
    ),
)
def test_a_table_decodes_to_itself(head: dict[str, Json], kinds: list[tuple[Letter, int, int, st.DataObject]]) -> None:
    schema = {f"c{number}": ColumnType(letter, width) for number, (letter, width, _, _) in enumerate(kinds)}
    values = {}
    for number, (letter, width, rows, data) in enumerate(kinds):
        bits = 8 * struct.calcsize("=" + letter)
        limits = (-(1 << 63), (1 << 63) - 1) if letter == "q" else (0, (1 << bits) - 1)
        numbers = st.lists(st.integers(*limits), min_size=width * rows, max_size=width * rows)
        values[f"c{number}"] = data.draw(numbers)
    columns = {name: column(schema[name].letter, numbers) for name, numbers in values.items()}
    table = decode_table(memoryview(encode_table(head, columns, schema)), schema, where="x")
    assert (table.head, {name: list(numbers) for name, numbers in table.columns.items()}) == (head, values)


@given(JSON, entries())
def test_a_manifest_decodes_to_itself(spec: Json, wanted: list[Entry]) -> None:
    manifest = decode_manifest(encode_manifest(spec, wanted), where="x")
    assert (manifest.spec, list(manifest.iter_entries())) == (spec, wanted)
    assert digest_snapshot(manifest.spec, list(manifest.iter_entries())) == digest_snapshot(spec, wanted)
    assert [manifest.find_entry(entry.name) for entry in wanted] == wanted


@given(entries(), st.data())
def test_a_manifest_notices_any_flipped_bit(wanted: list[Entry], data: st.DataObject) -> None:
    encoded = encode_manifest(None, wanted)
    position, bit = data.draw(st.integers(0, len(encoded) - 1)), data.draw(st.integers(0, 7))
    with pytest.raises((Corrupt, NewerFormat)):
        decode_manifest(flip(encoded, position, bit), where="x")


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 64, 4096]), st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=4)
        ),
        max_size=4,
    )
)
def test_a_footer_tells_what_was_appended(runs: list[tuple[int, list[bytes]]]) -> None:
    store = MemoryStore()
    pack = PackBuilder(store, PACK_ID)
    for alignment, chunks in runs:
        first, *_ = append_run(pack, [(hash_bytes(data), memoryview(data)) for data in chunks], alignment=alignment)
        assert first.offset % alignment == 0
    assert pack.seal() == store.stat(f"packs/{PACK_ID}").size_bytes
    footer = read_footer(store, PACK_ID)
    assert list(footer.chunks) == pack.rows
    content = store.contents()[f"packs/{PACK_ID}"]
    places = [chunk.location for chunk in footer.chunks]
    assert [content[at.offset : at.offset + at.stored_bytes] for at in places] == [
        data for _, run in runs for data in run
    ]
    assert not any(any(content[start:stop]) for start, stop in iter_gaps(footer))


PREFIXED = st.tuples(st.sampled_from([b"aaaa", b"aaab", b"zzzz"]), st.binary(min_size=28, max_size=28)).map(
    lambda parts: Digest(parts[0] + parts[1])
)
ROWS = st.lists(st.builds(PackedChunk, st.one_of(DIGESTS, PREFIXED), SIZES, LOCATIONS), max_size=40)


@given(ROWS)
def test_a_fragment_finds_all_that_it_was_given(rows: list[PackedChunk]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.repo.handle.index._PREFIXES_PER_BLOCK", 4)
        patch.setattr("holdfast.repo.handle.index._ROWS_PER_BLOCK", 3)
        store = MemoryStore()
        data = encode_fragment(rows)
        store.create("index/x", data)
        fragment = Fragment(store, "index/x", len(data))
        cache = BlockCache(500)
        assert set(fragment.iter_chunks()) == set(rows)
        for row in rows:
            assert set(fragment.find(row.digest, cache)) == {
                (other.size_bytes, other.location) for other in rows if other.digest == row.digest
            }


def _read_pack(data: bytes) -> object:
    store = MemoryStore()
    store.create(f"packs/{PACK_ID}", data)
    return read_footer(store, PACK_ID)


def _read_fragment(data: bytes) -> object:
    store = MemoryStore()
    store.create("index/x", data)
    return list(Fragment(store, "index/x", len(data)).iter_chunks())


DECODERS: list[Callable[[bytes], object]] = [
    lambda data: decode_record(data, key="x"),
    lambda data: decode_table(memoryview(data), {"x": ColumnType("Q")}, where="x"),
    lambda data: decode_manifest(data, where="x"),
    lambda data: decode_manifest(seal_manifest(data), where="x"),
    lambda data: decode_manifest(seal_manifest(data, codec=1, table_bytes=100), where="x"),
    _read_pack,
    lambda data: _read_pack(seal_pack(data, size=64)),
    _read_fragment,
]


@given(st.sampled_from(DECODERS), st.binary(max_size=400))
def test_any_bytes_are_decoded_or_refused(decode: Callable[[bytes], object], data: bytes) -> None:
    try:
        decode(data)
    except (Corrupt, NewerFormat):
        return


@given(entries(), st.lists(st.tuples(st.integers(0), st.binary(min_size=1, max_size=12)), min_size=1, max_size=4))
def test_an_honest_table_with_bytes_changed_is_decoded_or_refused(
    wanted: list[Entry], changes: list[tuple[int, bytes]]
) -> None:
    """Its digests are made to fit again: only the checks of the decoder are left."""
    body = bytearray(_table(wanted))
    for where, patch in changes:
        start = where % len(body)
        body[start : start + len(patch)] = patch[: len(body) - start]
    try:
        manifest = decode_manifest(seal_manifest(bytes(body)), where="x")
    except (Corrupt, NewerFormat):
        return
    digest_snapshot(manifest.spec, list(manifest.iter_entries()))


def _table(wanted: list[Entry]) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.repo.format.manifest.MAX_RATIO", 0)
        return encode_manifest(None, wanted)[24:-32]
