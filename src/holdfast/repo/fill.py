"""From sources to chunk references: hash on all cores, reuse what is held, append the rest to packs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from time import perf_counter
from typing import Final, NamedTuple

from holdfast.digest import Digest, fingerprint, hash_bytes
from holdfast.errors import SourceChanged
from holdfast.progress import Progress
from holdfast.repo.chunk import CHUNK_BYTES, INLINE_BYTES, ChunkRef, Location
from holdfast.repo.engine import Engine
from holdfast.repo.hints import HINTED_BYTES, Hints
from holdfast.repo.holdings import Holdings
from holdfast.repo.pack import NewChunk, choose_alignment
from holdfast.repo.packing import Packer
from holdfast.repo.source import Piece, group_pieces
from holdfast.repo.stages import Stages
from holdfast.repo.stretches import READ_COST_BYTES

_SMALL_BYTES: Final = 16 << 10
"""Pieces below this size are hashed by whoever takes them: threads would only wait for each other's turn in Python."""
_Asked = tuple[Digest, memoryview, Sequence[Location]]
"""A chunk, its bytes, and where copies of it should lie."""


class HashedPiece(NamedTuple):
    """A piece with its bytes and their digest."""

    piece: Piece
    data: memoryview
    digest: Digest
    fingerprint: bytes | None
    """Taken before the digest, if the piece is likely to be new: it tells whether what is written was hashed."""


class Hasher:
    """Reads and hashes pieces on an engine, ahead of whoever takes them."""

    def __init__(self, engine: Engine, stages: Stages, *, batch_bytes: int, hints: Hints | None = None) -> None:
        """Take `batch_bytes` at a time; with `hints`, trust what looks as it did at the last save."""
        self.expects_new = False
        """Whether most pieces are new just now: then their bytes will be written, and have to be the same still."""
        self.engine = engine
        self._stages = stages
        self._batch_bytes = batch_bytes
        self._hints = hints

    def iter_batches(self, pieces: Sequence[Piece]) -> Iterator[list[HashedPiece]]:
        """Yield all pieces in order and in batches, the next ones being read and hashed meanwhile."""
        batches = group_pieces(pieces, limit_bytes=self._batch_bytes)
        for is_small, alike in groupby(batches, _is_small):
            if is_small:
                yield from map(self._hash_batch, alike)
            else:
                sized = ((batch, _count_bytes(batch)) for batch in alike)
                yield from self.engine.iter_results(self._hash_batch, sized)

    def iter_digests(self, pieces: Sequence[Piece]) -> Iterator[ChunkRef]:
        """Yield the identity of every piece, keeping no bytes."""
        for batch in self.iter_batches(pieces):
            yield from (ChunkRef(item.digest, item.data.nbytes, None) for item in batch)

    def _hash_batch(self, batch: Sequence[Piece]) -> list[HashedPiece]:
        started = perf_counter()
        hashed = [self._hash(piece) for piece in batch]
        self._stages.add("hash", perf_counter() - started, _count_bytes(batch))
        return hashed

    def _hash(self, piece: Piece) -> HashedPiece:
        source, _, start, stop = piece
        data = source.read(start, stop).cast("B")
        size_bytes = len(data)
        if size_bytes != stop - start:
            raise SourceChanged(f"{source.name!r} gave {size_bytes} bytes for {stop - start}: did it shrink?")
        before = fingerprint(data) if self.expects_new else None
        if self._hints and size_bytes >= HINTED_BYTES:
            digest = self._hints.hash(source.name, start, data)
        else:
            digest = hash_bytes(data)
        return HashedPiece(piece, data, digest, before)


class Filler:
    """Fills packs with what the store does not hold; used by one thread."""

    def __init__(
        self, hasher: Hasher, holdings: Holdings, packer: Packer, stages: Stages, *, verify_reuse: bool
    ) -> None:
        """Look up in `holdings`, write to `packer`; with `verify_reuse`, be sure of each chunk before relying on it."""
        self.new_bytes = 0
        self._hasher = hasher
        self._holdings = holdings
        self._packer = packer
        self._stages = stages
        self._verify_reuse = verify_reuse
        self._known: dict[Digest, Location] = {}
        self._last: Piece | None = None

    def fill(self, pieces: Sequence[Piece], progress: Progress) -> list[ChunkRef]:
        """Return a reference for every piece, having written those that the store does not hold."""
        refs: list[ChunkRef] = []
        self._hasher.expects_new = self._holdings.is_empty
        for batch in self._hasher.iter_batches(pieces):
            self._packer.keep_alive()
            with self._stages.time("look up"):
                self._known.update(self._find_reusable(batch))
            before = self.new_bytes
            refs += self._write(batch)
            self._hasher.expects_new = self.new_bytes > before
            progress.advance(sum([len(item.data) for item in batch]))
        return refs

    def rewrite(self, pieces: Sequence[Piece], expected: Sequence[ChunkRef]) -> list[ChunkRef]:
        """Write pieces whose chunks must not be relied on any more, wherever else they may be."""
        for ref in expected:
            self._known.pop(ref.digest, None)
        refs: list[ChunkRef] = []
        for batch in self._hasher.iter_batches(pieces):
            refs += self._write(batch)
        if [ref.digest for ref in refs] != [ref.digest for ref in expected]:
            raise SourceChanged("what is being saved changed meanwhile; nothing was committed. Save again")
        return refs

    def _write(self, batch: Sequence[HashedPiece]) -> list[ChunkRef]:
        """Append what is not known yet, each chunk once, and return a reference for every piece."""
        known = self._known
        new: dict[Digest, HashedPiece] = {}
        for item in batch:
            if len(item.data) > INLINE_BYTES and item.digest not in known:
                new.setdefault(item.digest, item)
        if new:
            self._append(list(new.values()))
        refs: list[ChunkRef] = []
        for _, data, digest, _ in batch:
            size = len(data)
            if size > INLINE_BYTES:
                refs.append(ChunkRef(digest, size, known[digest]))
            else:
                refs.append(ChunkRef(digest, size, None, bytes(data)))
                self.new_bytes += size
        return refs

    def _append(self, items: Sequence[HashedPiece]) -> None:
        size_bytes = sum([len(item.data) for item in items])
        with self._stages.time("append", size_bytes):
            locations = self._packer.append(self._align(items))
        for item, location in zip(items, locations, strict=True):
            if not _is_what_was_hashed(item, location):
                # Memory that somebody else writes to: what is stored would not be what its digest says.
                raise SourceChanged(
                    f"{item.piece.source.name!r} changed while it was being saved; nothing was committed."
                    " Save when nobody writes to it, or save a copy (save_async)"
                )
            self._known[item.digest] = location
        self._last = items[-1].piece
        self.new_bytes += size_bytes

    def _align(self, items: Sequence[HashedPiece]) -> list[NewChunk]:
        """Say where items may begin: those that follow each other in one source, or what was appended last, go on."""
        chunks: list[NewChunk] = []
        position, end = (self._last.position, self._last.stop) if self._last else (-1, 0)
        for piece, data, digest, _ in items:
            source, own_position, start, stop = piece
            goes_on = own_position == position and start == end
            chunks.append(NewChunk(digest, data, 1 if goes_on else choose_alignment(source.size_bytes - start)))
            position, end = own_position, stop
        return chunks

    def _find_reusable(self, batch: Sequence[HashedPiece]) -> dict[Digest, Location]:
        """Find intact copies of what is not known yet."""
        if self._holdings.is_empty:
            return {}
        sure: dict[Digest, Location] = {}
        doubtful: dict[Digest, _Asked] = {}
        for item in batch:
            digest, size = item.digest, item.data.nbytes
            if size <= INLINE_BYTES or digest in self._known or digest in sure or digest in doubtful:
                continue
            candidates = []
            for at in self._holdings.iter_copies(digest, size):
                if not self._verify_reuse or self._holdings.is_proven(at):
                    sure[digest] = at
                    break
                candidates.append(at)
            else:
                doubtful[digest] = (digest, item.data, candidates)
        for found in self._hasher.engine.iter_results(self._find_intact, _group_asked(doubtful.values())):
            sure.update(found)
        return sure

    def _find_intact(self, asked: Sequence[_Asked]) -> dict[Digest, Location]:
        """Look at copies; safe in any thread."""
        found = {}
        for digest, data, candidates in asked:
            intact = next((at for at in candidates if self._holdings.is_intact(at, data)), None)
            if intact:
                found[digest] = intact
        return found


def _group_asked(doubtful: Iterable[_Asked]) -> Iterator[tuple[list[_Asked], int]]:
    """Yield groups that are worth a thread's while: one large chunk, or many small ones."""
    group: list[_Asked] = []
    size = 0
    for ask in doubtful:
        group.append(ask)
        size += ask[1].nbytes + READ_COST_BYTES
        if size >= CHUNK_BYTES:
            yield group, size
            group, size = [], 0
    if group:
        yield group, size


def _count_bytes(batch: Sequence[Piece]) -> int:
    return sum([stop - start for _, _, start, stop in batch])


def _is_small(batch: Sequence[Piece]) -> bool:
    return _count_bytes(batch) < _SMALL_BYTES * len(batch)


def _is_what_was_hashed(item: HashedPiece, written: Location) -> bool:
    if item.fingerprint is None:
        return hash_bytes(item.data) == item.digest
    return item.fingerprint == written.fingerprint
