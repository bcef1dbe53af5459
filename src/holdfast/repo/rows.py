"""Chunks and entries of a save, kept as columns: each is made when it is asked for, and takes few bytes until then."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, overload

from holdfast.digest import Digest
from holdfast.repo.chunk import ChunkRef, Location
from holdfast.repo.entry import Entry
from holdfast.repo.source import Source, count_pieces


class ChunkBytes(NamedTuple):
    """What most of the memory of references is: in the order of the chunks, and as a manifest has them."""

    digests: bytearray
    inline: bytearray
    """The bytes of those that lie in the manifest."""


class ChunkRows(Sequence[ChunkRef]):
    """References to chunks without boxes, in order."""

    def __init__(self) -> None:
        """Begin with none."""
        self._digests = bytearray()
        self._sizes = array("I")
        self._places: list[Location | None] = []
        self._inline = bytearray()
        self._inline_ends = array("Q")

    def extend(self, refs: Iterable[ChunkRef]) -> None:
        """Add references."""
        for digest, size_bytes, location, inline, _ in refs:
            self._digests += digest
            self._sizes.append(size_bytes)
            self._places.append(location)
            self._inline += inline
            self._inline_ends.append(len(self._inline))

    @property
    def bytes(self) -> ChunkBytes:
        """The digests and inline bytes themselves, no copies."""
        return ChunkBytes(self._digests, self._inline)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._sizes)

    @overload
    def __getitem__(self, index: int) -> ChunkRef: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChunkRef]: ...
    def __getitem__(self, index: int | slice) -> ChunkRef | list[ChunkRef]:
        """Return one reference, or some."""
        if isinstance(index, slice):
            return [self._make(row) for row in range(*index.indices(len(self)))]
        return self._make(range(len(self))[index])

    def _make(self, row: int) -> ChunkRef:
        digest = Digest(bytes(self._digests[32 * row : 32 * row + 32]))
        location = self._places[row]
        if location is not None:
            return ChunkRef(digest, self._sizes[row], location)
        start = self._inline_ends[row - 1] if row else 0
        return ChunkRef(digest, self._sizes[row], None, bytes(self._inline[start : self._inline_ends[row]]))

    def __iter__(self) -> Iterator[ChunkRef]:
        """Yield all."""
        return map(self._make, range(len(self)))


class EntryRows(Sequence[Entry]):
    """Entries that are whole sources."""

    def __init__(self, sources: Sequence[Source], refs: Sequence[ChunkRef]) -> None:
        """Take the chunks of all sources, in order."""
        self._sources = sources
        self._refs = refs
        self._ends = array("Q", accumulate(map(count_pieces, sources)))
        assert len(refs) == (self._ends[-1] if sources else 0), "each piece has its reference"

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._sources)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        """Return one entry, or some."""
        if isinstance(index, slice):
            return [self._make(number) for number in range(*index.indices(len(self)))]
        return self._make(range(len(self))[index])

    def _make(self, number: int) -> Entry:
        source, start, end = self._sources[number], self._ends[number - 1] if number else 0, self._ends[number]
        chunks = (self._refs[start],) if end - start == 1 else tuple(self._refs[start:end])
        return Entry(source.name, source.size_bytes, chunks, source.spec, source.note, 0, source.alias)

    def __iter__(self) -> Iterator[Entry]:
        """Yield all."""
        return map(self._make, range(len(self)))

    @property
    def chunk_bytes(self) -> ChunkBytes | None:
        """The digests and inline bytes of all chunks, if they are there as columns."""
        return self._refs.bytes if isinstance(self._refs, ChunkRows) else None

    @property
    def size_bytes(self) -> int:
        """The bytes of all entries."""
        return sum([source.size_bytes for source in self._sources])


def count_bytes(entries: Sequence[Entry]) -> int:
    """Return the bytes of all entries, without making them if they are rows."""
    return entries.size_bytes if isinstance(entries, EntryRows) else sum(entry.size_bytes for entry in entries)
