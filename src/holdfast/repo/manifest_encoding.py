"""Writing manifests: entries and chunks as columns, compressed unless that would hide how much they unfold into."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import zstandard

from holdfast.digest import Buffer, hash_parts
from holdfast.errors import TooLarge
from holdfast.repo.chunk import RAW
from holdfast.repo.columns import MAX_TABLE_BYTES, Table, consume_table
from holdfast.repo.entry import Entry
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
from holdfast.repo.record import Json, canonical_json, encode_texts
from holdfast.repo.rows import ChunkBytes

_ZSTD_LEVEL: Final = 3
_NO_FINGERPRINT: Final = bytes(16)


def encode_manifest(
    spec: Json, entries: Iterable[Entry], parts: Sequence[PartRef] = (), *, held: ChunkBytes | None = None
) -> bytes:
    """Encode a manifest file; with `parts` that of a root, whose entries have their chunks there.

    `held` are the digests and inline bytes of all chunks of `entries`, if the caller has them: they are not collected
    a second time.
    """
    table = _encode_table(build_table(spec, entries, parts, held=held))
    size = len(table)
    if size > MAX_TABLE_BYTES:
        raise TooLarge("a snapshot of so many entries, or with such a tree, is too large for one manifest")
    body: Buffer
    codec, body = ZSTD_TABLE, zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(table)
    if size > MAX_RATIO * len(body):
        codec, body = RAW_TABLE, table
    del table  # before the file is put together, which takes as much memory again as the body
    header = HEADER.pack(MAGIC, MANIFEST_MAJOR, MANIFEST_MINOR, codec, size)
    # The referrer keeps the digest of the whole file; this one proves a manifest that nobody refers to any more.
    return b"".join([header, body, hash_parts([header, body])])


def _encode_table(described: Table) -> bytearray:
    # In a function of its own: nobody else refers to the columns, so each is freed once it is copied.
    described.head["names"] = encode_texts(described.head["names"])
    return consume_table(described.head, described.columns, SCHEMA)


def build_table(
    spec: Json, entries: Iterable[Entry], parts: Sequence[PartRef] = (), *, held: ChunkBytes | None = None
) -> Table:
    """Return entries as what a manifest holds; goes over them once, because each may be made when it is asked for."""
    columns = {name: array(kind.letter) for name, kind in SCHEMA.items() if kind.width == 1}
    digests, prints, inline = bytearray(), bytearray(), bytearray()
    inline_bytes = 0
    names: list[str] = []
    specs, notes = _Numbers(), _Numbers()
    packs: dict[str, int] = {}
    for entry in entries:
        name, size_bytes, chunks, own_spec, note, dims, alias, rank = entry
        names.append(name)
        columns["entry_bytes"].append(size_bytes)
        columns["entry_chunks"].append(len(chunks))
        columns["entry_spec"].append(specs.find(own_spec))
        columns["entry_note"].append(notes.find(note))
        columns["entry_dims"].append(dims)
        columns["entry_alias"].append(alias)
        columns["entry_rank"].append(rank)
        for digest, chunk_bytes, at, data, box in chunks:
            if held is None:
                digests += digest
                inline += data
            columns["chunk_bytes"].append(chunk_bytes)
            if at is None:
                # Inline ones lie one after the other in a column of their own.
                row = (INLINE, inline_bytes, len(data), RAW, _NO_FINGERPRINT)
            else:
                number = packs.setdefault(at.pack_id, len(packs))
                row = (number, at.offset, at.stored_bytes, at.codec, at.fingerprint)
            columns["chunk_pack"].append(row[0])
            columns["chunk_offset"].append(row[1])
            columns["chunk_stored"].append(row[2])
            columns["chunk_codec"].append(row[3])
            prints += row[4]
            inline_bytes += len(data)
            columns["box"].extend(box)
    head: dict[str, Json] = {
        "spec": spec,
        "names": names,
        "specs": specs.values,
        "notes": notes.values,
        "packs": list(packs),
        "parts": [part.to_json() for part in parts],
    }
    views = {name: memoryview(values) for name, values in columns.items()}
    if held is not None:
        digests, inline = held
    wide = {"chunk_digest": memoryview(digests), "chunk_xxh3": memoryview(prints), "inline": memoryview(inline)}
    return Table(head, views | wide)


class _Numbers:
    """The values that differ, in the order in which they come, and the number of each among them."""

    def __init__(self) -> None:
        self.values: list[Json] = []
        # By identity first, which many share. The value is kept beside its number, so that no other has its identity.
        self._known: dict[int, tuple[Json, int]] = {}
        self._encoded: dict[bytes, int] = {}

    def find(self, value: Json) -> int:
        known = self._known.get(id(value))
        if known is None:
            number = self._encoded.setdefault(canonical_json(value), len(self.values))
            if number < len(self.values):
                return number
            self.values.append(value)
            known = self._known[id(value)] = (value, number)
        return known[1]
