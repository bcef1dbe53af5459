"""From sources to chunk references: hash on all cores, reuse what is held, append the rest to packs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from holdfast.digest import Digest, fingerprint, hash_bytes
from holdfast.errors import SourceChanged
from holdfast.progress import Progress
from holdfast.repo.chunk import INLINE_BYTES, UNIT_BYTES, ChunkRef, Location
from holdfast.repo.holdings import Holdings
from holdfast.repo.pack import choose_alignment
from holdfast.repo.packing import Packer
from holdfast.repo.source import Piece, group_pieces

_AHEAD: Final = 3
"""Batches read and hashed before they are needed; together with the one in hand they stay well within any budget."""


@dataclass(frozen=True, slots=True)
class HashedPiece:
    """A piece with its bytes and their digest."""

    piece: Piece
    data: memoryview
    digest: Digest
    fingerprint: bytes
    """Taken before the digest: it tells whether the bytes have changed by the time they are written."""


def hash_piece(piece: Piece) -> HashedPiece:
    """Read and hash one piece."""
    data = piece.source.read(piece.start, piece.stop).cast("B")
    if data.nbytes != piece.stop - piece.start:
        raise SourceChanged(
            f"{piece.source.name!r} gave {data.nbytes} bytes for {piece.stop - piece.start}: did it shrink?"
        )
    before = fingerprint(data)
    return HashedPiece(piece, data, hash_bytes(data), before)


def _hash_batch(batch: Sequence[Piece]) -> list[HashedPiece]:
    return [hash_piece(piece) for piece in batch]


def iter_hashed(
    pieces: Sequence[Piece], pool: ThreadPoolExecutor, *, limit_bytes: int = UNIT_BYTES
) -> Iterator[list[HashedPiece]]:
    """Yield all pieces in order and in batches, the next ones being read and hashed meanwhile."""
    waiting: deque[Future[list[HashedPiece]]] = deque()
    try:
        for batch in group_pieces(pieces, limit_bytes=limit_bytes):
            waiting.append(pool.submit(_hash_batch, batch))
            if len(waiting) > _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def iter_digests(pieces: Sequence[Piece], pool: ThreadPoolExecutor) -> Iterator[ChunkRef]:
    """Yield the identity of every piece, keeping no bytes."""
    for batch in iter_hashed(pieces, pool):
        yield from (ChunkRef(item.digest, item.data.nbytes, None) for item in batch)


class Filler:
    """Fills packs with what the store does not hold; used by one thread, which owns the pool's results."""

    def __init__(
        self,
        holdings: Holdings,
        packer: Packer,
        pool: ThreadPoolExecutor,
        *,
        verify_reuse: bool,
        batch_bytes: int = UNIT_BYTES,
    ) -> None:
        """Look up in `holdings`, write to `packer`; with `verify_reuse`, read each chunk before relying on it."""
        self.new_bytes = 0
        self._holdings = holdings
        self._packer = packer
        self._pool = pool
        self._verify_reuse = verify_reuse
        self._batch_bytes = batch_bytes
        self._known: dict[Digest, Location] = {}
        self._last: Piece | None = None

    def fill(self, pieces: Sequence[Piece], progress: Progress) -> list[ChunkRef]:
        """Return a reference for every piece, having written those that the store does not hold."""
        refs: list[ChunkRef] = []
        for batch in iter_hashed(pieces, self._pool, limit_bytes=self._batch_bytes):
            self._packer.keep_alive()
            self._known.update(self._find_reusable(batch))
            refs += self._write(batch)
            progress.advance(sum(item.data.nbytes for item in batch))
        return refs

    def rewrite(self, pieces: Sequence[Piece], expected: Sequence[ChunkRef]) -> list[ChunkRef]:
        """Write pieces whose chunks must not be relied on any more, wherever else they may be."""
        for ref in expected:
            self._known.pop(ref.digest, None)
        refs: list[ChunkRef] = []
        for batch in iter_hashed(pieces, self._pool, limit_bytes=self._batch_bytes):
            refs += self._write(batch)
        if [ref.digest for ref in refs] != [ref.digest for ref in expected]:
            raise SourceChanged("what is being saved changed meanwhile; nothing was committed. Save again")
        return refs

    def _write(self, batch: Sequence[HashedPiece]) -> list[ChunkRef]:
        """Append what is not known yet, each chunk once, and return a reference for every piece."""
        new: dict[Digest, HashedPiece] = {}
        for item in batch:
            if item.data.nbytes > INLINE_BYTES and item.digest not in self._known:
                new.setdefault(item.digest, item)
        for run in _split_runs(new.values()):
            self._append(run)
        return [self._refer(item) for item in batch]

    def _append(self, run: Sequence[HashedPiece]) -> None:
        piece = run[0].piece
        goes_on = self._last is not None and _follows(piece, self._last)
        alignment = 1 if goes_on else choose_alignment(piece.source.size_bytes - piece.start)
        locations = self._packer.append([(item.digest, item.data) for item in run], alignment=alignment)
        for item, location in zip(run, locations, strict=True):
            if location.fingerprint != item.fingerprint:
                # Memory that somebody else writes to: what is stored would not be what its digest says.
                raise SourceChanged(
                    f"{item.piece.source.name!r} changed while it was being saved; nothing was committed."
                    " Save when nobody writes to it, or save a copy (save_async)"
                )
            self._known[item.digest] = location
        self._last = run[-1].piece
        self.new_bytes += sum(item.data.nbytes for item in run)

    def _refer(self, item: HashedPiece) -> ChunkRef:
        size = item.data.nbytes
        if size > INLINE_BYTES:
            return ChunkRef(item.digest, size, self._known[item.digest])
        self.new_bytes += size
        return ChunkRef(item.digest, size, None, bytes(item.data))

    def _find_reusable(self, batch: Sequence[HashedPiece]) -> dict[Digest, Location]:
        """Find intact copies of what is not known yet."""
        wanted = {item.digest: item for item in batch if item.data.nbytes > INLINE_BYTES}
        found = {
            digest: self._holdings.find(digest, item.data.nbytes)
            for digest, item in wanted.items()
            if digest not in self._known
        }
        asked = [(digest, candidates) for digest, candidates in found.items() if candidates]
        if not self._verify_reuse:
            return {digest: candidates[0] for digest, candidates in asked}
        chosen = self._pool.map(lambda ask: self._choose_intact(wanted[ask[0]].data, ask[1]), asked)
        return {digest: location for (digest, _), location in zip(asked, chosen, strict=True) if location}

    def _choose_intact(self, data: memoryview, candidates: Sequence[Location]) -> Location | None:
        return next((at for at in candidates if self._holdings.is_intact(at, data)), None)


def _follows(piece: Piece, before: Piece) -> bool:
    return piece.position == before.position and piece.start == before.stop


def _split_runs(items: Iterable[HashedPiece]) -> list[list[HashedPiece]]:
    """Split items into runs that lie back to back in one source."""
    runs: list[list[HashedPiece]] = []
    for item in items:
        if not (runs and _follows(item.piece, runs[-1][-1].piece)):
            runs.append([])
        runs[-1].append(item)
    return runs
