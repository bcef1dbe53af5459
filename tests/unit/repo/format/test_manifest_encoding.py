"""A manifest with deltas names their bases, and one whose deltas and bases do not fit is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.digest import Digest, hash_bytes
from holdfast.errors import Corrupt
from holdfast.json_text import Json
from holdfast.repo.format.chunk import BLOSC2, DELTA, RAW, Base, ChunkRef, Location
from holdfast.repo.format.entry import ChunkRows, Entry, EntryRows
from holdfast.repo.format.manifest import Manifest, build_table, decode_manifest, encode_manifest
from holdfast.repo.format.source import BytesSource

PACKS = [f"{number:024x}-{number:016x}" for number in range(3)]
SIZE = 5000
BASE = Base(hash_bytes(b"base"), Location(PACKS[2], 64, 900, BLOSC2, b"f" * 16))


def refer(number: int, base: Base | None = None) -> ChunkRef:
    """Return the n-th chunk; a delta if it has a base."""
    codec = RAW if base is None else DELTA
    stored = SIZE if base is None else 100
    at = Location(PACKS[number % 2], 64 + SIZE * number, stored, codec, bytes([number]) * 16, base)
    return ChunkRef(Digest(bytes([number]) * 32), SIZE, at)


def entry(*refs: ChunkRef) -> Entry:
    return Entry("w", SIZE * len(refs), refs, None)


def encode(refs: Sequence[ChunkRef], **options: Any) -> bytes:
    return encode_manifest(None, [entry(*refs)], **options)


def decode(data: bytes) -> Manifest:
    return decode_manifest(data, where="manifests/x")


MIXED = [refer(0), refer(1, BASE), refer(2), refer(3, BASE._replace(digest=hash_bytes(b"other")))]


def test_deltas_keep_their_bases() -> None:
    manifest = decode(encode(MIXED, since_whole=4))
    assert manifest.entry(0) == entry(*MIXED)
    assert manifest.packs == PACKS, "the pack of a base is listed: a collector keeps it"
    assert manifest.since_whole == 4


def test_rows_and_entries_are_encoded_alike() -> None:
    rows = ChunkRows()
    rows.extend(MIXED)
    source = BytesSource("w", bytes(SIZE * 4), cuts=[SIZE, 2 * SIZE, 3 * SIZE, 4 * SIZE])
    from_rows = encode_manifest(None, EntryRows([source], rows), since_whole=2)
    assert from_rows == encode(MIXED, since_whole=2)


def test_a_manifest_without_deltas_has_no_trace_of_them() -> None:
    plain = [refer(0), refer(2)]
    assert encode(plain, since_whole=3) == encode(plain)
    assert not [name for name in build_table(None, [entry(*plain)]).columns if name.startswith("base_")]
    assert decode(encode(plain)).since_whole == 0


def forge(base: Base | None, codec: int = DELTA) -> bytes:
    """Return a manifest with one chunk of a codec and with a base that may be wrong."""
    at = Location(PACKS[0], 64, 100, codec, bytes(16), base)
    return encode([ChunkRef(hash_bytes(b""), SIZE, at)])


@pytest.mark.parametrize(
    ("at", "fault"),
    [
        (BASE.location._replace(codec=DELTA), "a delta itself, or of another length"),
        (BASE.location._replace(codec=9), "a delta itself, or of another length"),
        (BASE.location._replace(codec=RAW, stored_bytes=SIZE - 1), "a delta itself, or of another length"),
        (BASE.location._replace(stored_bytes=SIZE), "a delta itself, or of another length"),
        (BASE.location._replace(offset=1 << 62), "impossible location"),
    ],
)
def test_an_impossible_base_is_refused(at: Location, fault: str) -> None:
    with pytest.raises(Corrupt, match=fault):
        decode(forge(BASE._replace(location=at)))


@pytest.mark.parametrize(("base", "codec"), [(None, DELTA), (BASE, RAW)])
def test_deltas_and_bases_must_add_up(base: Base | None, codec: int) -> None:
    with pytest.raises(Corrupt, match="the deltas and their bases do not add up"):
        decode(forge(base, codec))


@pytest.mark.parametrize("count", [-1, 1 << 32, "1", 1.0, True, None])
def test_a_count_of_saves_is_checked(count: Json) -> None:
    table = build_table(None, [entry(*MIXED)])
    table.head["since_whole"] = count
    with pytest.raises(Corrupt, match="'since_whole' is not a count"):
        Manifest(table, "manifests/x")
