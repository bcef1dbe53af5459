"""Where the bytes of a save come from: each source is one entry, read in chunks and, if need be, read again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

from holdfast.digest import Buffer
from holdfast.repo.chunk import CHUNK_BYTES, cut
from holdfast.repo.record import Json


class Source(Protocol):
    """The bytes of one entry.

    `read` may be called more than once for the same range and MUST give the same bytes while the save
    lasts; the writer checks that it did.
    """

    @property
    def name(self) -> str:
        """The entry's name."""

    @property
    def size_bytes(self) -> int:
        """How many bytes there are."""

    @property
    def spec(self) -> Json:
        """What the bytes mean; part of the content."""

    @property
    def note(self) -> Json:
        """What is worth knowing besides; not part of the content."""

    @property
    def alias(self) -> int:
        """Sources with the same number, if not 0, share memory; part of the content."""

    @property
    def cuts(self) -> Sequence[int]:
        """Where the chunks end, the last at the end of the bytes; nothing for the plain grid."""

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`; the view stays valid until the save is over."""


@dataclass(frozen=True, slots=True)
class BytesSource:
    """Bytes in memory."""

    name: str
    data: Buffer
    spec: Json = None
    note: Json = None
    alias: int = 0
    cuts: Sequence[int] = ()

    @property
    def size_bytes(self) -> int:
        """How many bytes there are."""
        return memoryview(self.data).nbytes

    def read(self, start: int, stop: int) -> memoryview:
        """Return a view of the bytes."""
        return memoryview(self.data).cast("B")[start:stop]


class Piece(NamedTuple):
    """One chunk to be saved: which source and which bytes of it."""

    source: Source
    position: int
    """Of the source among the sources."""
    start: int
    stop: int


def cut_sources(sources: Sequence[Source]) -> list[Piece]:
    """Cut all sources into chunks, in order."""
    pieces: list[Piece] = []
    for position, source in enumerate(sources):
        cuts = source.cuts
        if len(cuts) == 1:
            pieces.append(Piece(source, position, 0, cuts[0]))
            continue
        spans = pairwise((0, *cuts)) if cuts else cut(source.size_bytes)
        pieces += [Piece(source, position, start, stop) for start, stop in spans]
    return pieces


def group_pieces(pieces: Sequence[Piece], *, limit_bytes: int) -> list[list[Piece]]:
    """Group pieces, in order, into batches of at most `limit_bytes` (or one chunk)."""
    batches: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        size = piece.stop - piece.start
        if size > room:
            batches.append([])
            room = max(limit_bytes, CHUNK_BYTES)
        batches[-1].append(piece)
        room -= size
    return batches
