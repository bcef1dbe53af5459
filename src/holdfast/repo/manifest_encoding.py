"""Writing manifests: entries and chunks as columns, compressed unless that would hide how much they unfold into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import zstandard

from holdfast.digest import hash_bytes
from holdfast.errors import TooLarge
from holdfast.repo.chunk import RAW, ChunkRef
from holdfast.repo.columns import MAX_TABLE_BYTES, Table, column, encode_table
from holdfast.repo.entry import Entry, encode_each
from holdfast.repo.layout import PartRef
from holdfast.repo.manifest import (
    HEADER,
    INLINE,
    MAGIC,
    MANIFEST_MAJOR,
    MANIFEST_MINOR,
    MAX_RATIO,
    RAW_TABLE,
    SCHEMA,
    ZSTD_TABLE,
)
from holdfast.repo.record import Json, encode_object

_ZSTD_LEVEL: Final = 3
_NO_FINGERPRINT: Final = bytes(16)


def encode_manifest(spec: Json, entries: Sequence[Entry], parts: Sequence[PartRef] = ()) -> bytes:
    """Encode a manifest file; with `parts` that of a root, whose entries have their chunks there."""
    described = build_table(spec, entries, parts)
    table = encode_table(encode_object(described.head), described.columns, SCHEMA)
    if len(table) > MAX_TABLE_BYTES:
        raise TooLarge(f"a snapshot of {len(entries)} entries is too large for one manifest")
    codec, body = ZSTD_TABLE, zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(table)
    if len(table) > MAX_RATIO * len(body):
        codec, body = RAW_TABLE, table
    data = HEADER.pack(MAGIC, MANIFEST_MAJOR, MANIFEST_MINOR, codec, len(table)) + body
    # The referrer keeps the digest of the whole file; this one proves a manifest that nobody refers to any more.
    return data + hash_bytes(data)


def build_table(spec: Json, entries: Sequence[Entry], parts: Sequence[PartRef] = ()) -> Table:
    """Return entries as what a manifest holds."""
    chunks = [chunk for entry in entries for chunk in entry.chunks]
    specs, spec_numbers = _number_values([entry.spec for entry in entries])
    notes, note_numbers = _number_values([entry.note for entry in entries])
    packs = list(dict.fromkeys([chunk.location.pack_id for chunk in chunks if chunk.location]))
    columns = {
        "entry_bytes": column("Q", [entry.size_bytes for entry in entries]),
        "entry_chunks": column("I", [len(entry.chunks) for entry in entries]),
        "entry_spec": column("I", spec_numbers),
        "entry_note": column("I", note_numbers),
        "entry_dims": column("B", [entry.dims for entry in entries]),
        "entry_alias": column("I", [entry.alias for entry in entries]),
        "entry_rank": column("I", [entry.rank for entry in entries]),
        "chunk_digest": memoryview(b"".join([chunk.digest for chunk in chunks])),
        "chunk_bytes": column("I", [chunk.size_bytes for chunk in chunks]),
        **_encode_places(chunks, packs),
        "box": column("q", [value for chunk in chunks for value in chunk.box]),
        "inline": memoryview(b"".join([chunk.inline for chunk in chunks])),
    }
    head: dict[str, Json] = {
        "spec": spec,
        "names": [entry.name for entry in entries],
        "specs": specs,
        "notes": notes,
        "packs": packs,
        "parts": [part.to_json() for part in parts],
    }
    return Table(head, columns)


def _encode_places(chunks: Sequence[ChunkRef], packs: Sequence[str]) -> dict[str, memoryview]:
    """Return the columns that say where chunks lie; inline ones lie one after the other in a column of their own."""
    numbers = {pack_id: number for number, pack_id in enumerate(packs)}
    rows: list[tuple[int, int, int, int, bytes]] = []
    end = 0
    for chunk in chunks:
        at = chunk.location
        if at is None:
            rows.append((INLINE, end, len(chunk.inline), RAW, _NO_FINGERPRINT))
            end += len(chunk.inline)
        else:
            rows.append((numbers[at.pack_id], at.offset, at.stored_bytes, at.codec, at.fingerprint))
    return {
        "chunk_pack": column("I", [row[0] for row in rows]),
        "chunk_offset": column("Q", [row[1] for row in rows]),
        "chunk_stored": column("I", [row[2] for row in rows]),
        "chunk_codec": column("B", [row[3] for row in rows]),
        "chunk_xxh3": memoryview(b"".join([row[4] for row in rows])),
    }


def _number_values(values: list[Json]) -> tuple[list[Json], list[int]]:
    """Return the values that differ, in the order in which they come, and the number of each value among them."""
    encoded = encode_each(values)
    distinct = dict(zip(encoded, values, strict=True))
    numbers = {text: number for number, text in enumerate(distinct)}
    return list(distinct.values()), [numbers[text] for text in encoded]
