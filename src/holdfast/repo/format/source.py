"""Sources: the bytes to be saved. Each source becomes an entry; it is read in chunks, some of them more than once."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

from holdfast.digest import Buffer, Digest
from holdfast.json_text import Json
from holdfast.repo.format.chunk import CHUNK_BYTES, cut


class Source(Protocol):
    """The bytes of one entry.

    `read` may be called more than once for the same range, and MUST return the same bytes until the save ends. The
    writer raises SourceChanged if it does not.
    """

    @property
    def name(self) -> str:
        """The name of the entry."""

    @property
    def size_bytes(self) -> int:
        """The number of bytes."""

    @property
    def spec(self) -> Json:
        """Describes what the bytes mean; part of the content."""

    @property
    def note(self) -> Json:
        """Further information; not part of the content."""

    @property
    def alias(self) -> int:
        """Sources with the same alias share memory; 0 for none. Part of the content."""

    @property
    def cuts(self) -> Sequence[int]:
        """The offsets at which chunks end, the last of them at the end of the bytes; empty for chunks of 1 MiB."""

    @property
    def item_bytes(self) -> int:
        """The size of one number in the bytes, 1 if there are none: a codec groups bytes by it. Need not be exact."""

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
    item_bytes: int = 1

    @property
    def size_bytes(self) -> int:
        """The number of bytes."""
        return memoryview(self.data).nbytes

    def read(self, start: int, stop: int) -> memoryview:
        """Return a view of the bytes."""
        return memoryview(self.data).cast("B")[start:stop]


class SourceChunk(NamedTuple):
    """One chunk to be saved: which source and which bytes of it."""

    source: Source
    position: int
    """The index of the source."""
    start: int
    stop: int
    begins_run: bool = False
    """Whether it need not follow the chunk before it in a pack, but should be aligned there."""
    digest: Digest | None = None
    """The digest, if it was computed on the device that has the bytes. These are read only if the store lacks them."""


class SourceChunks:
    """The chunks of many sources, computed at each iteration, because a list of them takes much memory."""

    def __init__(
        self,
        sources: Sequence[Source],
        runs: Mapping[int, Container[int]] | None = None,
        repeats: Container[int] = (),
        digests: Mapping[int, Sequence[Digest | None]] | None = None,
    ) -> None:
        """Use `runs`: by position, the offsets of chunks that begin a run. Skip the sources at `repeats`.

        `digests` has, by position, the digest of each chunk of a source, None for one that has to be read.
        """
        self._sources = sources
        self._runs = runs or {}
        self._repeats = repeats
        self._digests = digests or {}

    def __iter__(self) -> Iterator[SourceChunk]:
        """Yield the chunks of all sources, in order."""
        for position, source in enumerate(self._sources):
            if position in self._repeats:
                continue
            cuts = source.cuts
            if position in self._digests:
                yield from self._iter_digested(source, position)
                continue
            if len(cuts) == 1:
                yield SourceChunk(source, position, 0, cuts[0])
                continue
            runs = self._runs.get(position, ())
            for start, stop in _iter_spans(source):
                yield SourceChunk(source, position, start, stop, start in runs)

    def _iter_digested(self, source: Source, position: int) -> Iterator[SourceChunk]:
        for (start, stop), digest in zip(_iter_spans(source), self._digests[position], strict=True):
            yield SourceChunk(source, position, start, stop, digest=digest)


def _iter_spans(source: Source) -> Iterable[tuple[int, int]]:
    return pairwise((0, *source.cuts)) if source.cuts else cut(source.size_bytes)


def cut_sources(sources: Sequence[Source]) -> list[SourceChunk]:
    """Return the chunks of all sources, in order."""
    return list(SourceChunks(sources))


def count_chunks(source: Source) -> int:
    """Return the number of chunks of a source."""
    return len(source.cuts) or -(-source.size_bytes // CHUNK_BYTES)


def group_chunks(chunks: Iterable[SourceChunk], *, limit_bytes: int) -> list[list[SourceChunk]]:
    """Group chunks, in order, into batches of at most `limit_bytes` (or one chunk)."""
    return list(iter_groups(chunks, limit_bytes=limit_bytes))


def iter_groups(
    chunks: Iterable[SourceChunk], *, limit_bytes: int, limit_count: int | None = None
) -> Iterator[list[SourceChunk]]:
    """Yield chunks, in order, in batches of at most `limit_bytes` (or one chunk) and `limit_count` chunks."""
    batch: list[SourceChunk] = []
    room = max(limit_bytes, CHUNK_BYTES)
    for chunk in chunks:
        size = chunk.stop - chunk.start
        if batch and (size > room or len(batch) == limit_count):
            yield batch
            batch = []
            room = max(limit_bytes, CHUNK_BYTES)
        batch.append(chunk)
        room -= size
    if batch:
        yield batch
