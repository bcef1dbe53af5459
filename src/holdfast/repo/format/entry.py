"""Entries: the named bytes of a snapshot with their specs, and the digests of entries and snapshots."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from math import prod
from typing import Final, NamedTuple, overload

from holdfast.digest import DIGEST_BYTES, Digest, begin_kind, hash_kind
from holdfast.errors import Corrupt
from holdfast.json_text import Json, canonical_json
from holdfast.repo.format.boxes import Box, Coordinates
from holdfast.repo.format.chunk import ChunkRef, Location
from holdfast.repo.format.source import Source, count_pieces

NO_RANK: Final = 0xFFFFFFFF
"""Stands for a rank: the entry belongs to no single rank."""

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
        raise Corrupt(f"{entry.name!r}: its boxes do not make up {entry.size_bytes} bytes; run `holdfast check`")
    return shape


def digest_entry(entry: Entry) -> Digest:
    """Return the content digest of an entry; it does not depend on where chunks are stored."""
    return _digest_entry(entry, canonical_json(entry.spec))


def _digest_entry(entry: Entry, spec: bytes) -> Digest:
    text, size_bytes, held, _, _, dims, alias, rank = entry
    name = text.encode()
    parts = [_ENTRY_HEAD.pack(len(name), len(spec), dims, alias, rank, size_bytes, len(held)), name, spec]
    if dims:
        boxes = [value for chunk in held for value in chunk.box]
        parts.append(struct.pack(f"<{len(boxes)}q", *boxes))
    # A loop is faster than a comprehension for a single chunk, which most entries have.
    for chunk in held:
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
    """Many references to chunks: a column for each thing that is known of them, in the order of the chunks."""

    digests: bytearray
    sizes: array[int]
    places: list[Location | None]
    """None for those whose bytes lie in the manifest."""
    inline: bytearray
    """Those bytes, one chunk after the other."""
    inline_ends: array[int]
    """For every chunk, where its inline bytes end, or those of the chunks before it."""


class ChunkRows(Sequence[ChunkRef]):
    """References to chunks without boxes, in order."""

    def __init__(self) -> None:
        """Begin with none."""
        self._digests = bytearray()
        self._columns = ChunkColumns(self._digests, array("I"), [], bytearray(), array("Q"))

    def extend(self, refs: Iterable[ChunkRef]) -> None:
        """Add references."""
        digests, sizes, places, held, inline_ends = self._columns
        for digest, size_bytes, location, inline, _ in refs:
            digests += digest
            sizes.append(size_bytes)
            places.append(location)
            held += inline
            inline_ends.append(len(held))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._columns.sizes)

    @overload
    def __getitem__(self, index: int) -> ChunkRef: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChunkRef]: ...
    def __getitem__(self, index: int | slice) -> ChunkRef | list[ChunkRef]:
        """Return one reference, or some."""
        if isinstance(index, slice):
            return [self.make(row) for row in range(*index.indices(len(self)))]
        return self.make(range(len(self))[index])

    def make(self, row: int) -> ChunkRef:
        """Return the reference in a row that is there."""
        digests, sizes, places, inline, inline_ends = self._columns
        digest = Digest(bytes(digests[DIGEST_BYTES * row : DIGEST_BYTES * (row + 1)]))
        location = places[row]
        if location is not None:
            return ChunkRef(digest, sizes[row], location)
        start = inline_ends[row - 1] if row else 0
        return ChunkRef(digest, sizes[row], None, bytes(inline[start : inline_ends[row]]))

    def __iter__(self) -> Iterator[ChunkRef]:
        """Yield all."""
        return map(self.make, range(len(self)))

    def hand_over(self) -> ChunkColumns:
        """Return the columns to whoever writes a manifest of them: then there are no references here any more.

        Only the digests stay, if there are chunks in packs: these may have to be written anew.
        """
        columns = self._columns
        if not any(columns.places):
            self._digests = bytearray()
        self._columns = ChunkColumns(bytearray(), array("I"), [], bytearray(), array("Q"))
        return columns

    def iter_digests(self) -> Iterator[Digest]:
        """Yield the digests of all chunks, also when the columns were handed over; then none if all were inline."""
        starts = range(0, len(self._digests), DIGEST_BYTES)
        return (Digest(bytes(self._digests[start : start + DIGEST_BYTES])) for start in starts)


class EntryRows(Sequence[Entry]):
    """Entries that are whole sources."""

    def __init__(self, sources: Sequence[Source], refs: ChunkRows) -> None:
        """Take the chunks of all sources, in order."""
        self.sources = sources
        self.refs = refs
        self.ends = array("Q", accumulate(map(count_pieces, sources)))
        """For every entry, where its chunks end among those of all."""
        assert len(refs) == (self.ends[-1] if sources else 0), "each piece has its reference"

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.sources)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        """Return one entry, or some."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return self._make(self.sources[number], self.ends[number - 1] if number else 0, self.ends[number])

    def _make(self, source: Source, start: int, end: int) -> Entry:
        refs = self.refs
        chunks = (refs.make(start),) if end - start == 1 else tuple(map(refs.make, range(start, end)))
        return Entry(source.name, source.size_bytes, chunks, source.spec, source.note, 0, source.alias)

    def __iter__(self) -> Iterator[Entry]:
        """Yield all."""
        return map(self._make, self.sources, chain([0], self.ends), self.ends)

    @property
    def size_bytes(self) -> int:
        """The bytes of all entries."""
        return sum([source.size_bytes for source in self.sources])


def count_bytes(entries: Sequence[Entry]) -> int:
    """Return the bytes of all entries, without making them if they are rows."""
    return entries.size_bytes if isinstance(entries, EntryRows) else sum(entry.size_bytes for entry in entries)
