"""Encodes manifests, from entries or directly from the columns of a save."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import CDLL
from itertools import chain, repeat
from operator import sub
from typing import Final

import zstandard

from holdfast.digest import Buffer, hash_parts
from holdfast.errors import TooLarge
from holdfast.json_text import Json, canonical_json, encode_texts
from holdfast.repo.format.chunk import RAW, Base, Location
from holdfast.repo.format.columns import MAX_TABLE_BYTES, LazyColumn, Letter, Table, consume_table
from holdfast.repo.format.entry import NO_RANK, ChunkColumns, Entry, EntryRows
from holdfast.repo.format.layout import PartRef
from holdfast.repo.format.manifest import (
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

_ZSTD_LEVEL: Final = 3
_LARGE_BYTES: Final = 1 << 20
"""Before a table of this size or more is compressed, freed memory is returned to the system."""
_NO_FINGERPRINT: Final = bytes(16)


def encode_manifest(
    spec: Json, entries: Iterable[Entry], parts: Sequence[PartRef] = (), *, since_whole: int = 0
) -> bytes:
    """Encode a manifest file; with `parts`, that of a root, whose entries have their chunks in the parts.

    `since_whole` is stored if some chunks are deltas; see `Manifest.since_whole`.
    If `entries` are EntryRows, their chunk columns are released afterwards, so that they can be freed early.
    """
    # No variable refers to the columns, so each is freed as soon as it is copied.
    table = (
        _encode_rows(spec, entries, since_whole)
        if isinstance(entries, EntryRows)
        else _encode_table(spec, entries, parts, since_whole)
    )
    size = len(table)
    if size > MAX_TABLE_BYTES:
        raise TooLarge("a snapshot of so many entries, or with such a tree, is too large for one manifest")
    if size >= _LARGE_BYTES:
        _return_freed_memory()
    body: Buffer
    codec, body = ZSTD_TABLE, zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(table)
    if size > MAX_RATIO * len(body):
        codec, body = RAW_TABLE, table
    del table  # before the file is joined, which takes as much memory as the body
    header = HEADER.pack(MAGIC, MANIFEST_MAJOR, MANIFEST_MINOR, codec, size)
    # Records refer to a manifest by the digest of its whole file. This digest also proves one without a record.
    return b"".join([header, body, hash_parts([header, body])])


def _return_freed_memory() -> None:
    """Return memory to the system that was freed while columns grew; otherwise the C library keeps it.

    Only glibc has a function for it; with another C library nothing is done.
    """
    trim = getattr(CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _encode_table(spec: Json, entries: Iterable[Entry], parts: Sequence[PartRef], since_whole: int) -> memoryview:
    head, columns = _list_columns(spec, entries, parts)
    head["names"] = encode_texts(head["names"])
    if "base_pack" in columns:
        head["since_whole"] = since_whole
    return consume_table(head, columns, SCHEMA)


def _encode_rows(spec: Json, rows: EntryRows, since_whole: int) -> memoryview:
    """Encode the same table as `_encode_table`, directly from columns, without creating entries."""
    specs, notes = _Numbers(), _Numbers()
    names: list[str] = []
    sizes, spec_numbers, note_numbers, aliases = array("Q"), array("I"), array("I"), array("I")
    for source in rows.sources:
        names.append(source.name)
        sizes.append(source.size_bytes)
        spec_numbers.append(specs.find(source.spec))
        note_numbers.append(notes.find(source.note))
        aliases.append(source.alias)
    columns: dict[str, memoryview | LazyColumn] = {
        "entry_bytes": memoryview(sizes),
        "entry_chunks": _later("I", len(rows), lambda: map(sub, rows.ends, chain([0], rows.ends))),
        "entry_spec": memoryview(spec_numbers),
        "entry_note": memoryview(note_numbers),
        "entry_dims": memoryview(bytes(len(rows))),
        "entry_alias": memoryview(aliases),
        "entry_rank": _later("I", len(rows), lambda: repeat(NO_RANK, len(rows))),
        "box": memoryview(array("q")),
    }
    del sizes, spec_numbers, note_numbers, aliases
    chunks = rows.refs.release_columns()
    bases = [at.base for at in chunks.locations if at and at.base]
    pack_ids = dict.fromkeys(at.pack_id for at in chunks.locations if at)
    pack_ids |= dict.fromkeys(base.location.pack_id for base in bases)
    packs = {pack_id: number for number, pack_id in enumerate(pack_ids)}
    head: dict[str, Json] = {
        "spec": spec,
        "names": encode_texts(names),
        "specs": specs.values,
        "notes": notes.values,
        "packs": list(packs),
        "parts": [],
    }
    if bases:
        head["since_whole"] = since_whole
    columns |= _describe_chunks(chunks, packs) | _describe_bases(bases, packs)
    del chunks, names, bases
    return consume_table(head, columns, SCHEMA)


def _describe_chunks(chunks: ChunkColumns, packs: Mapping[str, int]) -> dict[str, memoryview | LazyColumn]:
    digests, sizes, locations, inline, inline_ends = chunks
    count = len(sizes)
    # Inline chunks are adjacent; the offsets of others come from their locations. Mostly all are inline, or none is.
    located = locations if packs else []
    return {
        "chunk_digest": memoryview(digests),
        "chunk_bytes": memoryview(sizes),
        "chunk_pack": _later("I", count, lambda: [packs[at.pack_id] if at else INLINE for at in locations]),
        "chunk_offset": LazyColumn(8 * count, lambda: _overlay(_find_starts(inline_ends), located, "offset")),
        "chunk_stored": LazyColumn(4 * count, lambda: _overlay(sizes[:], located, "stored_bytes")),
        "chunk_codec": LazyColumn(count, lambda: _overlay(array("B", [RAW]) * count, located, "codec")),
        "chunk_xxh3": LazyColumn(16 * count, lambda: memoryview(_join_fingerprints(located, count))),
        "inline": memoryview(inline),
    }


def _describe_bases(bases: Sequence[Base], packs: Mapping[str, int]) -> dict[str, memoryview]:
    """Return the columns of the bases; none if no chunk is a delta."""
    if not bases:
        return {}
    places = [base.location for base in bases]
    return {
        "base_digest": memoryview(b"".join([base.digest for base in bases])),
        "base_pack": memoryview(array("I", [packs[at.pack_id] for at in places])),
        "base_offset": memoryview(array("Q", [at.offset for at in places])),
        "base_stored": memoryview(array("I", [at.stored_bytes for at in places])),
        "base_codec": memoryview(array("B", [at.codec for at in places])),
        "base_xxh3": memoryview(b"".join([at.fingerprint for at in places])),
    }


def _later(letter: Letter, count: int, iter_values: Callable[[], Iterable[int]]) -> LazyColumn:
    return LazyColumn(count * array(letter).itemsize, lambda: memoryview(array(letter, iter_values())))


def _find_starts(ends: array[int]) -> array[int]:
    starts = array("Q", [0])
    starts.extend(ends)
    starts.pop()
    return starts


def _overlay(values: array[int], locations: Sequence[Location | None], field: str) -> memoryview:
    """Return `values`, replaced by `field` of the location for each chunk that has one."""
    for row, at in enumerate(locations):
        if at is not None:
            values[row] = getattr(at, field)
    return memoryview(values)


def _join_fingerprints(locations: Sequence[Location | None], count: int) -> bytes:
    if not locations:
        return bytes(len(_NO_FINGERPRINT) * count)
    return b"".join([at.fingerprint if at else _NO_FINGERPRINT for at in locations])


def build_table(spec: Json, entries: Iterable[Entry], parts: Sequence[PartRef] = ()) -> Table:
    """Return entries as the table of a manifest."""
    return Table(*_list_columns(spec, entries, parts))


def _list_columns(
    spec: Json, entries: Iterable[Entry], parts: Sequence[PartRef]
) -> tuple[dict[str, Json], dict[str, memoryview]]:
    columns = {name: array(kind.letter) for name, kind in SCHEMA.items() if kind.width == 1 and kind.always}
    digests, prints, inline = bytearray(), bytearray(), bytearray()
    names: list[str] = []
    specs, notes = _Numbers(), _Numbers()
    packs: dict[str, int] = {}
    bases: list[Base] = []
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
            digests += digest
            columns["chunk_bytes"].append(chunk_bytes)
            if at is None:
                # The bytes of inline chunks are adjacent in their own column.
                row = (INLINE, len(inline), len(data), RAW, _NO_FINGERPRINT)
            else:
                number = packs.setdefault(at.pack_id, len(packs))
                row = (number, at.offset, at.stored_bytes, at.codec, at.fingerprint)
                if at.base:
                    bases.append(at.base)
            columns["chunk_pack"].append(row[0])
            columns["chunk_offset"].append(row[1])
            columns["chunk_stored"].append(row[2])
            columns["chunk_codec"].append(row[3])
            prints += row[4]
            inline += data
            columns["box"].extend(box)
    for base in bases:
        packs.setdefault(base.location.pack_id, len(packs))
    head: dict[str, Json] = {
        "spec": spec,
        "names": names,
        "specs": specs.values,
        "notes": notes.values,
        "packs": list(packs),
        "parts": [part.to_json() for part in parts],
    }
    views = {name: memoryview(values) for name, values in columns.items()}
    wide = {"chunk_digest": memoryview(digests), "chunk_xxh3": memoryview(prints), "inline": memoryview(inline)}
    return head, views | wide | _describe_bases(bases, packs)


class _Numbers:
    """Numbers distinct values in the order in which they are first seen."""

    def __init__(self) -> None:
        self.values: list[Json] = []
        # By id first, because many entries share one object. The object is kept alive, so that no other gets its id.
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
