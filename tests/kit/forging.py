"""Packs and manifests with right digests and false contents, as a hostile writer would create them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.digest import Digest, hash_bytes
from holdfast.json_text import Json
from holdfast.repo.format import manifest as manifest_module
from holdfast.repo.format import pack as pack_module
from holdfast.repo.format.chunk import Location
from holdfast.repo.format.columns import ColumnType, Table, column, decode_table, encode_table
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.manifest import encode_manifest
from holdfast.repo.format.pack import HEADER, TRAILER, PackedChunk, encode_header
from tests.kit.saving import PACK_ID, inline_ref, packed_ref

FOOTER = pack_module._FOOTER
SCHEMA = manifest_module.SCHEMA
MANIFEST_HEADER = manifest_module.HEADER

HONEST = [
    Entry("weights", 3000, (packed_ref(b"w" * 2000), packed_ref(b"v" * 1000, offset=2112)), {"dtype": "f"}),
    Entry("empty", 0, ()),
    Entry("step", 4, (inline_ref(b"1234"),), note={"at": 5}),
]


def row(offset: int, *, raw: int = 100, stored: int | None = None, codec: int = 0, digest: bytes = b"d") -> PackedChunk:
    at = Location(PACK_ID, offset, raw if stored is None else stored, codec, bytes(16))
    return PackedChunk(Digest(digest.ljust(32, b"\0")), raw, at)


def forge_pack(
    rows: Sequence[PackedChunk],
    *,
    size: int,
    head: Mapping[str, Json] | None = None,
    extra: Mapping[str, ColumnType] | None = None,
    changes: Mapping[str, memoryview] | None = None,
) -> bytes:
    """Return a pack of `size` bytes before its footer, which states `rows`, `head`, `extra` and `changes`."""
    columns: dict[str, memoryview] = {
        "digest": memoryview(b"".join(item.digest for item in rows)),
        "raw_bytes": column("I", [item.size_bytes for item in rows]),
        "offset": column("Q", [item.location.offset for item in rows]),
        "stored_bytes": column("I", [item.location.stored_bytes for item in rows]),
        "codec": column("B", [item.location.codec for item in rows]),
        "xxh3": memoryview(b"".join(item.location.fingerprint for item in rows)),
    }
    columns.update(changes or {})
    columns.update({name: memoryview(bytes(kind.row_bytes)) for name, kind in (extra or {}).items()})
    fields = {"pack": PACK_ID, "minor": 0, **(head or {})}
    return seal_pack(encode_table(fields, columns, {**FOOTER, **(extra or {})}), size=size)


def seal_pack(footer: bytes, *, size: int) -> bytes:
    trailer = TRAILER.pack(size, len(footer), hash_bytes(footer), bytes(8), b"HFPKEND\n")
    return encode_header(PACK_ID) + bytes(size - HEADER.size) + footer + trailer


def honest_table(entries: Sequence[Entry] = HONEST, spec: Json = None) -> Table:
    """Return the table of an honest manifest, to be changed."""
    data = encode_manifest(spec, entries)
    body = memoryview(data)[MANIFEST_HEADER.size : -32]
    _, _, _, codec, table_bytes = MANIFEST_HEADER.unpack_from(data)
    return decode_table(manifest_module._decompress(body, codec, table_bytes, "test"), SCHEMA, where="test")


def forge_manifest(
    *,
    head: Mapping[str, Json] | None = None,
    extra: Mapping[str, ColumnType] | None = None,
    changes: Mapping[str, Sequence[int]] | None = None,
    entries: Sequence[Entry] = HONEST,
) -> bytes:
    """Return a manifest with fields of its head, or whole columns, replaced."""
    table = honest_table(entries)
    numbers = {**table.columns, **(changes or {})}
    columns = {name: column(SCHEMA[name].letter, list(values)) for name, values in numbers.items()}
    columns.update({name: memoryview(bytes(kind.row_bytes)) for name, kind in (extra or {}).items()})
    return seal_manifest(encode_table({**table.head, **(head or {})}, columns, {**SCHEMA, **(extra or {})}))


def seal_manifest(
    body: bytes, *, codec: int = 0, table_bytes: int | None = None, major: int = 1, minor: int = 0, magic: bytes = b""
) -> bytes:
    size = len(body) if table_bytes is None else table_bytes
    data = MANIFEST_HEADER.pack(magic or b"HFMANIF\n", major, minor, codec, size) + body
    return data + hash_bytes(data)


def moved(entry: Entry, offset: int) -> Entry:
    """Return `entry` with its chunks somewhere else, in another pack and codec."""
    chunks = [
        chunk._replace(location=Location("1" * 24 + "-" + "1" * 16, offset, chunk.size_bytes, 0, b"f" * 16))
        if chunk.location
        else chunk
        for chunk in entry.chunks
    ]
    return entry._replace(chunks=tuple(chunks))
