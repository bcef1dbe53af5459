"""Chunks and entries of a save, kept as columns: each is made when it is asked for, and takes few bytes until then."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple, overload

from holdfast.digest import DIGEST_BYTES, Digest
from holdfast.repo.format.chunk import ChunkRef, Location
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.source import Source, count_pieces


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
