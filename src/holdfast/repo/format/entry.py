"""Entries: the named bytes of a snapshot with their specs, many of them as columns, and the digests of entries."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from math import prod
from typing import Final, NamedTuple, overload

from holdfast.digest import DIGEST_BYTES, Digest, begin_kind, hash_kind
from holdfast.errors import Corrupt
from holdfast.json_text import Json, canonical_json
from holdfast.repo.format.boxes import Box, Coordinates
from holdfast.repo.format.chunk import ChunkRef, Location
from holdfast.repo.format.source import Source, count_chunks

NO_RANK: Final = 0xFFFFFFFF
"""The rank of an entry that belongs to no single rank."""

_HASHED_BYTES: Final = 32 << 10
_ENTRY_HEAD: Final = struct.Struct("<QQIIIQQ")
_CHUNK: Final = struct.Struct("<Q32s")


class Entry(NamedTuple):
    """Named bytes of a snapshot; `spec` describes what they mean to the layers above."""

    name: str
    size_bytes: int
    chunks: tuple[ChunkRef, ...]
    spec: Json = None
    """Part of the content: entries with different specs have different digests."""
    note: Json = None
    """Not part of the content: origin, time and the like."""
    dims: int = 0
    """0: a plain span of bytes, chunks in order. 1: a span whose chunks each state their start and size in bytes.
    More: each chunk is a box of the tensor, with as many starts and sizes."""
    alias: int = 0
    """Entries with the same alias share memory; 0 for none."""
    rank: int = NO_RANK


class ChunkTable(NamedTuple):
    """The cuts and digests of an entry's chunks, without their locations; equal tables mean equal bytes."""

    dims: int
    sizes: tuple[int, ...]
    digests: bytes
    """32 bytes for each chunk."""
    boxes: tuple[int, ...]

    def find_places(self) -> Sequence[tuple[int, ...]]:
        """Return the place of each chunk: its box, or its first byte and size in an entry that is a span of bytes."""
        if self.dims:
            width = 2 * self.dims
            return [self.boxes[at : at + width] for at in range(0, len(self.boxes), width)]
        return list(zip(accumulate(self.sizes, initial=0), self.sizes, strict=False))

    @property
    def digest_list(self) -> list[bytes]:
        """The digest of each chunk."""
        return [self.digests[at : at + DIGEST_BYTES] for at in range(0, len(self.digests), DIGEST_BYTES)]

    def find_digest(self, row: int) -> Digest:
        """Return the digest of a chunk."""
        return Digest(self.digests[DIGEST_BYTES * row : DIGEST_BYTES * (row + 1)])

    def find_changed(self, before: ChunkTable) -> Sequence[int] | None:
        """Return the chunks that differ from those in the same places before; None if the cuts differ."""
        if (self.dims, self.sizes, self.boxes) != (before.dims, before.sizes, before.boxes):
            return None
        if self.digests == before.digests:
            return []
        rows = range(len(self.sizes))
        return [row for row in rows if self.find_digest(row) != before.find_digest(row)]


def iter_boxes(entry: Entry) -> Iterator[tuple[ChunkRef, Box]]:
    """Yield each chunk of an entry that is stored in boxes, with its box."""
    for ref in entry.chunks:
        yield ref, Box(ref.box[: entry.dims], ref.box[entry.dims :])


def find_shape(entry: Entry) -> Coordinates:
    """Return the shape of the tensor that the boxes of an entry cover; raises Corrupt if they leave gaps."""
    stops = [box.stops for _, box in iter_boxes(entry)]
    shape = tuple(map(max, zip(*stops, strict=True)))
    present_bytes = sum(ref.size_bytes for ref in entry.chunks)
    if not prod(shape) or present_bytes != entry.size_bytes or present_bytes % prod(shape):
        raise Corrupt(f"{entry.name!r}: its boxes do not add up to {entry.size_bytes} bytes; run `holdfast check`")
    return shape


def digest_entry(entry: Entry) -> Digest:
    """Return the content digest of an entry; it does not depend on where chunks are stored."""
    return _digest_entry(entry, canonical_json(entry.spec))


def _digest_entry(entry: Entry, spec: bytes) -> Digest:
    text, size_bytes, chunks, _, _, dims, alias, rank = entry
    name = text.encode()
    parts = [_ENTRY_HEAD.pack(len(name), len(spec), dims, alias, rank, size_bytes, len(chunks)), name, spec]
    if dims:
        boxes = [value for chunk in chunks for value in chunk.box]
        parts.append(struct.pack(f"<{len(boxes)}q", *boxes))
    # A loop is faster than a comprehension for a single chunk, which most entries have.
    for chunk in chunks:
        parts.append(_CHUNK.pack(chunk.size_bytes, chunk.digest))
    return hash_kind("entry", parts)


def digest_snapshot(spec: Json, entries: Sequence[Entry]) -> Digest:
    """Return the content digest of a snapshot: its spec and its entries in order."""
    encoded = canonical_json(spec)
    hasher = begin_kind("snapshot")
    hasher.update(struct.pack("<QQ", len(encoded), len(entries)))
    hasher.update(encoded)
    # Many entries share one spec object, which is encoded once. The key is its id, not its value: 1, 1.0 and True are
    # equal but differ in JSON. The object is kept alive, so that no other object gets the same id.
    specs: dict[int, tuple[Json, bytes]] = {}
    # Collected, because the hasher is faster with many digests at once.
    digests = bytearray()
    for entry in entries:
        own_spec = entry.spec
        known = specs.get(id(own_spec))
        if known is None:
            known = specs[id(own_spec)] = (own_spec, canonical_json(own_spec))
        digests += _digest_entry(entry, known[1])
        if len(digests) >= _HASHED_BYTES:
            hasher.update(digests)
            digests.clear()
    hasher.update(digests)
    return Digest(hasher.digest())


def digest_parts(spec: Json, entries: Sequence[Entry], parts: Sequence[Digest]) -> Digest:
    """Return the content digest of a snapshot of several parts, from its root and the digest of each part."""
    return hash_kind("parts", [digest_snapshot(spec, entries), *parts])


class ChunkColumns(NamedTuple):
    """References to many chunks, as one column per field."""

    digests: bytearray
    sizes: array[int]
    locations: list[Location | None]
    """None for inline chunks."""
    inline: bytearray
    """The bytes of all inline chunks."""
    inline_ends: array[int]
    """For every chunk, the end of its bytes in `inline`; for one that is not inline, that of the chunk before."""


class ChunkRows(Sequence[ChunkRef]):
    """References to chunks without boxes, stored as columns, which take few bytes; each is created when it is read."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._columns = ChunkColumns(self._digests, array("I"), [], bytearray(), array("Q"))

    def extend(self, refs: Iterable[ChunkRef]) -> None:
        """Append references."""
        digests, sizes, locations, inline_bytes, inline_ends = self._columns
        for digest, size_bytes, location, inline, _ in refs:
            digests += digest
            sizes.append(size_bytes)
            locations.append(location)
            inline_bytes += inline
            inline_ends.append(len(inline_bytes))

    def __len__(self) -> int:
        """Return the number of references."""
        return len(self._columns.sizes)

    @overload
    def __getitem__(self, index: int) -> ChunkRef: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChunkRef]: ...
    def __getitem__(self, index: int | slice) -> ChunkRef | list[ChunkRef]:
        """Return a reference, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self.make(row) for row in range(*index.indices(len(self)))]
        return self.make(range(len(self))[index])

    def make(self, row: int) -> ChunkRef:
        """Return the reference in an existing row, which must not be negative."""
        digests, sizes, locations, inline, inline_ends = self._columns
        digest = Digest(bytes(digests[DIGEST_BYTES * row : DIGEST_BYTES * (row + 1)]))
        location = locations[row]
        if location is not None:
            return ChunkRef(digest, sizes[row], location)
        start = inline_ends[row - 1] if row else 0
        return ChunkRef(digest, sizes[row], None, bytes(inline[start : inline_ends[row]]))

    def __iter__(self) -> Iterator[ChunkRef]:
        """Yield all references."""
        return map(self.make, range(len(self)))

    def release_columns(self) -> ChunkColumns:
        """Return the columns and keep no references, so that the caller can free each column when it is encoded.

        The digests are kept if some chunks are in packs: such a chunk may have to be written again.
        """
        columns = self._columns
        if not any(columns.locations):
            self._digests = bytearray()
        self._columns = ChunkColumns(bytearray(), array("I"), [], bytearray(), array("Q"))
        return columns

    def iter_digests(self) -> Iterator[Digest]:
        """Yield the digests of all chunks; after `release_columns`, none if all chunks are inline."""
        starts = range(0, len(self._digests), DIGEST_BYTES)
        return (Digest(bytes(self._digests[start : start + DIGEST_BYTES])) for start in starts)


def repeat_rows(sources: Sequence[Source], refs: ChunkRows, repeats: Mapping[int, int]) -> ChunkRows:
    """Return references to the chunks of all sources, where `refs` has none for those in `repeats`.

    `repeats` has, by position, the position of an earlier source with the same chunks.
    """
    if not repeats:
        return refs
    known: dict[int, Sequence[ChunkRef]] = {}
    wanted = set(repeats.values())
    rows, at = ChunkRows(), 0
    for position, source in enumerate(sources):
        first = repeats.get(position)
        if first is not None:
            rows.extend(known[first])
            continue
        own = refs[at : at + count_chunks(source)]
        at += len(own)
        rows.extend(own)
        if position in wanted:
            known[position] = own
    return rows


class EntryRows(Sequence[Entry]):
    """The entries of a save in which every source is one entry; each is created when it is read."""

    def __init__(self, sources: Sequence[Source], refs: ChunkRows) -> None:
        """Use `refs`, the references to the chunks of all sources, in order."""
        self.sources = sources
        self.refs = refs
        self.ends = array("Q", accumulate(map(count_chunks, sources)))
        """For every entry, the end of its chunks in `refs`."""
        assert len(refs) == (self.ends[-1] if sources else 0), "every chunk has a reference"

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.sources)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        """Return an entry, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return self._make(self.sources[number], self.ends[number - 1] if number else 0, self.ends[number])

    def _make(self, source: Source, start: int, end: int) -> Entry:
        refs = self.refs
        chunks = (refs.make(start),) if end - start == 1 else tuple(map(refs.make, range(start, end)))
        return Entry(source.name, source.size_bytes, chunks, source.spec, source.note, 0, source.alias)

    def __iter__(self) -> Iterator[Entry]:
        """Yield all entries."""
        return map(self._make, self.sources, chain([0], self.ends), self.ends)

    @property
    def size_bytes(self) -> int:
        """The size of all entries."""
        return sum([source.size_bytes for source in self.sources])


def count_bytes(entries: Sequence[Entry]) -> int:
    """Return the size of all entries; does not create them if they are rows."""
    return entries.size_bytes if isinstance(entries, EntryRows) else sum(entry.size_bytes for entry in entries)
