"""Turns sources into chunk references: hashes on all cores, reuses chunks that are stored, packs the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice, zip_longest
from time import perf_counter
from typing import Final, NamedTuple

from holdfast.digest import Digest, fingerprint, hash_bytes
from holdfast.errors import SourceChanged
from holdfast.objects.blocks import BlockPool, LentBlock, copy_bytes
from holdfast.progress import Progress
from holdfast.repo.engine import Engine, Stages
from holdfast.repo.format.chunk import (
    BLOSC2,
    CHUNK_BYTES,
    DELTA,
    INLINE_BYTES,
    RAW,
    Base,
    ChunkRef,
    Location,
    iter_places,
)
from holdfast.repo.format.entry import ChunkRows
from holdfast.repo.format.pack import LINE_BYTES, NewChunk, choose_alignment
from holdfast.repo.format.source import SourceChunk, iter_groups
from holdfast.repo.handle.repository import HINTED_BYTES, ChangeHints
from holdfast.repo.read.read_plan import READ_COST_BYTES
from holdfast.repo.write.encoding import ChunkEncoder, Way
from holdfast.repo.write.existing import ExistingChunks, WantedChunk
from holdfast.repo.write.packing import Packer

_SMALL_BYTES: Final = 16 << 10
"""Chunks below this size are hashed on the caller's thread: on a pool, threads would mostly wait for the GIL."""
_STAGED_SHARE: Final = 0.5
"""From this share of new bytes on, chunks are copied before they are hashed: most of the copies will be written."""
_STAGED_BUDGET_BYTES: Final = 64 << 20
"""With a smaller budget, nothing is staged: copies that are being written add to the memory that the engine counts."""
_BATCH_CHUNKS: Final = 1024
"""Most chunks in a batch; bounds the views, digests and references in memory."""
_KEPT_BLOCKS: Final = 64
_Candidate = tuple[WantedChunk, Sequence[Location]]
"""A chunk, and the locations of possible copies."""
ReadChunk = Callable[[SourceChunk], memoryview]


class HashedChunk(NamedTuple):
    """A chunk with its bytes and their digest."""

    chunk: SourceChunk
    data: memoryview
    digest: Digest
    fingerprint: bytes | None
    """Taken before the digest, if the chunk is probably new; reveals a change between hashing and writing."""
    is_ours: bool = False
    """The bytes are our own copy, which no other code can change, and the fingerprint is that of the copy."""
    encoded: bytes | None = None
    """The bytes to store instead, if the chunk was encoded; empty if it does not shrink, and is stored raw."""
    encoded_print: bytes = b""
    """The fingerprint of these bytes."""
    base: Base | None = None
    """The base, if these bytes are a delta."""


class HashedBatch(NamedTuple):
    """Chunks that were hashed together."""

    items: list[HashedChunk]
    block: LentBlock | None = None
    """Contains the chunks that are not inline, laid out as in a pack, from the start of a page."""

    @property
    def size_bytes(self) -> int:
        """Total size of the chunks."""
        return sum([len(item.data) for item in self.items])


class Hasher:
    """Reads and hashes chunks on an engine, ahead of the caller."""

    def __init__(
        self,
        engine: Engine,
        stages: Stages,
        *,
        batch_bytes: int,
        staged_bytes: int | None = None,
        huge_pages: bool = True,
        hints: ChangeHints | None = None,
        encoder: ChunkEncoder | None = None,
    ) -> None:
        """Hash `batch_bytes` at a time; with `hints`, reuse the digests of memory that has not changed since.

        Batches of at least `staged_bytes` that are probably new are copied before they are hashed, if the budget is
        not small; with `huge_pages`, to blocks of such pages. With an `encoder`, chunks that are probably new are
        encoded as well, from where they are.
        """
        self.new_share = 0.0
        """Share of new bytes in the last batch; predicts the next. Unless it is 0, chunks get a fingerprint first."""
        self.engine = engine
        self._stages = stages
        self._batch_bytes = batch_bytes
        self._staged_bytes = staged_bytes if engine.budget_bytes >= _STAGED_BUDGET_BYTES else None
        self._hints = hints
        self.encoder = encoder
        # Room for gaps: they take less than an eighth, except between chunks from the middle of many sources. A batch
        # that does not fit is hashed without being staged.
        largest_bytes = max(batch_bytes, CHUNK_BYTES)
        self._blocks = BlockPool(largest_bytes + largest_bytes // 8, kept=_KEPT_BLOCKS, huge=huge_pages)

    @property
    def encodes(self) -> bool:
        """Whether new chunks may be encoded."""
        return self.encoder is not None and not self.encoder.is_off

    def iter_batches(self, chunks: Iterable[SourceChunk], read: ReadChunk | None = None) -> Iterator[HashedBatch]:
        """Yield all chunks in order, in batches, while the next batches are read and hashed in the background.

        With `read`, this function reads the chunks, instead of their sources.
        """
        read = read or _read
        batches = iter_groups(chunks, limit_bytes=self._batch_bytes, limit_count=_BATCH_CHUNKS)
        for is_small, alike in groupby(batches, _is_small):
            if is_small:
                yield from (self._hash_batch(batch, read) for batch in alike)
            else:
                copies = self.encoder.copies if self.encoder else 1
                sized = ((batch, copies * _count_bytes(batch)) for batch in alike)
                yield from self.engine.iter_results(partial(self._stage_or_hash, read=read), sized)

    def iter_digests(self, chunks: Iterable[SourceChunk]) -> Iterator[ChunkRef]:
        """Yield a reference without location for every chunk; keeps no bytes, and reads none whose digest is known.

        `chunks` are iterated over twice, at the same time.
        """
        unknown = (chunk for chunk in chunks if chunk.digest is None)
        hashed = (item.digest for batch in self.iter_batches(unknown) for item in batch.items)
        for _, _, start, stop, _, digest in chunks:
            yield ChunkRef(digest or next(hashed), stop - start, None)

    def _stage_or_hash(self, batch: Sequence[SourceChunk], read: ReadChunk) -> HashedBatch:
        if self.new_share < _STAGED_SHARE:
            return self._hash_batch(batch, read)
        if self.encoder is not None and self.encodes:
            ways = [self.encoder.choose(chunk.stop - chunk.start, chunk.source.item_bytes) for chunk in batch]
            if any(ways):
                return self._hash_batch(batch, read, ways)
        least = self._staged_bytes
        if least is None or _count_bytes(batch) < least:
            return self._hash_batch(batch, read)
        return self._stage_batch(batch, read)

    def encode_new(self, items: Sequence[HashedChunk]) -> list[HashedChunk]:
        """Return chunks that turned out to be new; those that were not encoded yet are encoded now, on all cores."""
        encoder = self.encoder
        if encoder is None or encoder.is_off:
            return list(items)
        ways = [
            None if item.encoded is not None else encoder.choose(len(item.data), item.chunk.source.item_bytes)
            for item in items
        ]
        # Only what has to be encoded: it waits until the batches that are hashed ahead are done.
        wanted = ((pair, (encoder.copies - 1) * len(pair[0].data)) for pair in zip(items, ways, strict=True) if pair[1])
        encoded = self.engine.iter_results(lambda pair: self._encode(*pair), wanted)
        return [item if way is None else next(encoded) for item, way in zip(items, ways, strict=True)]

    def _encode(self, item: HashedChunk, way: Way | None) -> HashedChunk:
        """Encode a chunk; raises SourceChanged if its bytes are no longer those that were hashed."""
        if way is None or self.encoder is None:
            return item
        encoded, base = self.encoder.encode(item.chunk, item.data, way)
        if not encoded:
            return item._replace(encoded=b"")
        is_same = hash_bytes(item.data) == item.digest if item.fingerprint is None else _has_print(item)
        if not is_same:
            raise _make_changed(item)
        return item._replace(encoded=encoded, encoded_print=fingerprint(encoded), base=base)

    def _hash_batch(
        self, batch: Sequence[SourceChunk], read: ReadChunk, ways: Sequence[Way | None] = ()
    ) -> HashedBatch:
        """Hash chunks, and encode each in its way, if there are ways, while it is in the CPU cache."""
        seconds = 0.0
        items = []
        for chunk, way in zip_longest(batch, ways):
            started = perf_counter()
            data = read(chunk)
            before = fingerprint(data) if self.new_share else None
            item = HashedChunk(chunk, data, self._hash(chunk, data), before)
            seconds += perf_counter() - started
            items.append(item if way is None else self._encode(item, way))
        self._stages.add("hash", seconds, _count_bytes(batch))
        return HashedBatch(items)

    def _stage_batch(self, batch: Sequence[SourceChunk], read: ReadChunk) -> HashedBatch:
        """Copy chunks into a block that can be written as it is, and hash each copy while it is in the CPU cache."""
        started = perf_counter()
        memory = self._blocks.take()
        end = 0
        last: SourceChunk | None = None
        items = []
        for chunk in batch:
            data = read(chunk)
            if len(data) <= INLINE_BYTES:
                data = memoryview(bytes(data))
            else:
                start = end + -end % _choose_alignment(chunk, last)
                memory[end:start] = bytes(start - end)
                end, last = start + len(data), chunk
                if end > len(memory):
                    self._blocks.put_back(memory)
                    return self._hash_batch(batch, read)
                copy_bytes(memory[start:end], data)
                data = memory[start:end]
            items.append(HashedChunk(chunk, data, self._hash(chunk, data), fingerprint(data), is_ours=True))
        self._stages.add("hash", perf_counter() - started, _count_bytes(batch))
        return HashedBatch(items, LentBlock(memory[:end], partial(self._blocks.put_back, memory)))

    def _hash(self, chunk: SourceChunk, data: memoryview) -> Digest:
        if chunk.digest is not None:
            # A digest that a device computed must not name bytes: a device that computes wrong ones is noticed here.
            if hash_bytes(data) != chunk.digest:
                raise SourceChanged(
                    f"{chunk.source.name!r} changed while it was being saved, or its device computes wrong digests;"
                    " nothing was committed. Save when no other code writes to it, and run `holdfast doctor --devices`"
                )
            return chunk.digest
        if self._hints and len(data) >= HINTED_BYTES:
            return self._hints.hash(chunk.source.name, chunk.start, data)
        return hash_bytes(data)


class Filler:
    """Writes the chunks that the store lacks into packs; used by one thread."""

    def __init__(
        self, hasher: Hasher, existing: ExistingChunks, packer: Packer, stages: Stages, *, verify_reuse: bool
    ) -> None:
        """Search `existing`, write to `packer`; with `verify_reuse`, read each stored copy before it is reused."""
        self.new_bytes = 0
        """Bytes of the chunks that were written, and of values in manifests."""
        self.stored_bytes = 0
        """What they take in the store."""
        self._hasher = hasher
        self._existing = existing
        self._packer = packer
        self._stages = stages
        self._verify_reuse = verify_reuse
        self._known: dict[Digest, Location] = {}
        self._encoded_sizes: dict[Digest, int] = {}
        """The raw sizes of known chunks that are stored encoded."""
        self.lost: set[Digest] = set()
        """Chunks that were reused before their copy was found to be damaged: the caller must `rewrite` them."""
        self._last: SourceChunk | None = None

    def fill(self, chunks: Iterable[SourceChunk], progress: Progress) -> ChunkRows:
        """Write the chunks that the store lacks, and return a reference for every chunk."""
        return self._rewrite_lost(chunks, self._fill(chunks, progress))

    def fill_digested(
        self,
        chunks: Iterable[SourceChunk],
        progress: Progress,
        note_missing: Callable[[Sequence[SourceChunk]], None] | None = None,
    ) -> ChunkRows:
        """Fill with chunks of which some have a digest: of these, only the ones that the store lacks are read.

        `note_missing` is called with those before any chunk is read. No other chunk with a digest will be read from its
        source, unless its stored copy turns out to be damaged.
        """
        missing = self._find_missing(chunk for chunk in chunks if chunk.digest is not None)
        if note_missing is not None:
            note_missing(list(missing.values()))
        places = {(chunk.position, chunk.start) for chunk in missing.values()}

        def is_read(chunk: SourceChunk) -> bool:
            return chunk.digest is None or (chunk.position, chunk.start) in places

        progress.advance(sum([chunk.stop - chunk.start for chunk in chunks if not is_read(chunk)]))
        read = iter(self._fill((chunk for chunk in chunks if is_read(chunk)), progress))
        refs = ChunkRows()
        refs.extend(next(read) if is_read(chunk) else self._refer(chunk) for chunk in chunks)
        return self._rewrite_lost(chunks, refs)

    def _fill(self, chunks: Iterable[SourceChunk], progress: Progress) -> ChunkRows:
        refs = ChunkRows()
        self._hasher.new_share = float(self._existing.is_empty)
        for batch in self._hasher.iter_batches(chunks):
            self._packer.keep_alive()
            packed = (item for item in batch.items if len(item.data) > INLINE_BYTES)
            wanted = [WantedChunk(digest, len(data), data) for _, data, digest, *_ in packed]
            with self._stages.time("look up"):
                self._note_known(wanted, self._find_reusable(wanted))
            before, size_bytes = self.new_bytes, batch.size_bytes
            refs.extend(self._write(batch))
            self._hasher.new_share = (self.new_bytes - before) / size_bytes if size_bytes else 0.0
            progress.advance(size_bytes)
        return refs

    def _find_missing(self, digested: Iterator[SourceChunk]) -> dict[Digest, SourceChunk]:
        """Look chunks up by their digests, and return those that have to be written, each once."""
        unknown: dict[Digest, SourceChunk] = {}
        while batch := list(islice(digested, _BATCH_CHUNKS)):
            self._packer.keep_alive()
            for chunk in batch:
                if chunk.digest:
                    unknown.setdefault(chunk.digest, chunk)
            wanted = [WantedChunk(chunk.digest, chunk.stop - chunk.start) for chunk in batch if chunk.digest]
            with self._stages.time("look up"):
                self._note_known(wanted, self._find_reusable(wanted))
        self._note_damage()
        # Only those of this call: damaged chunks of earlier calls stay in `lost`, because the caller rewrites them.
        damaged = self.lost & unknown.keys()
        for digest in damaged:
            del self._known[digest]
        self.lost -= damaged
        return {digest: chunk for digest, chunk in unknown.items() if digest not in self._known}

    def _refer(self, chunk: SourceChunk) -> ChunkRef:
        assert chunk.digest is not None, "a chunk without a digest is read"
        return ChunkRef(chunk.digest, chunk.stop - chunk.start, self._known[chunk.digest])

    def _rewrite_lost(self, chunks: Iterable[SourceChunk], refs: ChunkRows) -> ChunkRows:
        """Read every reused chunk in packs that were found damaged, and rewrite the damaged ones among `chunks`.

        Damaged chunks of earlier calls to `fill` stay in `lost`.
        """
        self._note_damage()
        if not self.lost:
            return refs
        found = {ref.digest: (chunk, ref) for chunk, ref in zip(chunks, refs, strict=True) if ref.digest in self.lost}
        moved = {ref.digest: ref for ref in self.rewrite(*zip(*found.values(), strict=True))} if found else {}
        renewed = ChunkRows()
        renewed.extend(moved.get(ref.digest, ref) for ref in refs)
        return renewed

    def _note_damage(self) -> None:
        """Add the chunks to `lost` whose copies are damaged, in packs of which at least one copy was."""
        damaged, self._existing.damaged_packs = self._existing.damaged_packs, set()
        if not damaged:
            return
        # Damage is seldom a single chunk. Others of the same pack may have been reused without being read.
        for digest, at in self._known.items():
            if any(place.pack_id in damaged for place in iter_places(at)) and not self._is_copy(digest, at):
                self.lost.add(digest)

    def _note_known(self, chunks: Iterable[WantedChunk], found: Mapping[Digest, Location]) -> None:
        self._known.update(found)
        for digest, size_bytes, _ in chunks if any(at.codec != RAW for at in found.values()) else ():
            if digest in found and found[digest].codec != RAW:
                self._encoded_sizes[digest] = size_bytes

    def _is_copy(self, digest: Digest, at: Location) -> bool:
        return self._existing.is_copy(at, digest, self._encoded_sizes.get(digest, at.stored_bytes))

    def rewrite(self, chunks: Sequence[SourceChunk], expected: Sequence[ChunkRef]) -> list[ChunkRef]:
        """Write chunks again whose stored copies must not be reused, even if the store has other copies.

        Chunks that were looked up by their digests are read from these copies: their bytes may not be in host memory,
        or no longer anywhere else. That is safe: a collector that has marked a copy waits for the lease of this save.
        """
        if self._hasher.encoder is not None:
            self._hasher.encoder.deltas = None  # the bases may be what must not be used
        for ref in expected:
            self._known.pop(ref.digest, None)
            self.lost.discard(ref.digest)
        refs: list[ChunkRef] = []
        copies = {ref.digest: ref.location for ref in expected if ref.location}
        for batch in self._hasher.iter_batches(chunks, partial(self._read_again, copies)):
            refs += self._write(batch)
        if [ref.digest for ref in refs] != [ref.digest for ref in expected]:
            raise SourceChanged("the data changed while it was being saved; nothing was committed. Save again")
        return refs

    def _read_again(self, copies: Mapping[Digest, Location], chunk: SourceChunk) -> memoryview:
        if chunk.digest is not None and (at := copies.get(chunk.digest)):
            copy = self._existing.read_copy(at, chunk.digest, chunk.stop - chunk.start)
            if copy is not None:
                return memoryview(copy.raw)
        return _read(chunk)

    def _write(self, batch: HashedBatch) -> list[ChunkRef]:
        """Append the chunks that have no location yet, each once, and return a reference for every chunk."""
        known, block = self._known, batch.block
        packed = [item for item in batch.items if len(item.data) > INLINE_BYTES]
        new: dict[Digest, HashedChunk] = {}
        for item in packed:
            if item.digest not in known:
                new.setdefault(item.digest, item)
        # The block can be written as it is only if every chunk in it is new, and none is in it twice.
        if block and new and len(new) == len(packed):
            self._append(packed, block=block)
        else:
            if new:
                self._append(self._hasher.encode_new(list(new.values())))
            if block:
                block.release()
        refs: list[ChunkRef] = []
        for _, data, digest, *_ in batch.items:
            size = len(data)
            if size > INLINE_BYTES:
                refs.append(ChunkRef(digest, size, known[digest]))
            else:
                refs.append(ChunkRef(digest, size, None, bytes(data)))
                self.new_bytes += size
                self.stored_bytes += size
        return refs

    def _append(self, items: Sequence[HashedChunk], *, block: LentBlock | None = None) -> None:
        size_bytes = sum([len(item.data) for item in items])
        with self._stages.time("append", size_bytes):
            locations = self._packer.append(self._align(items), block=block)
        known = {}
        for item, location in zip(items, locations, strict=True):
            if not item.encoded and not _is_what_was_hashed(item, location):
                raise _make_changed(item)
            self.stored_bytes += location.stored_bytes
            known[item.digest] = location._replace(base=item.base) if item.base else location
        self._note_known((WantedChunk(item.digest, len(item.data)) for item in items), known)
        self._last = items[-1].chunk
        self.new_bytes += size_bytes

    def _align(self, items: Sequence[HashedChunk]) -> list[NewChunk]:
        """Choose alignments: a chunk that follows the one before it in the same source needs no gap."""
        chunks: list[NewChunk] = []
        last = self._last
        for chunk, data, digest, known, is_ours, encoded, encoded_print, base in items:
            alignment = _choose_alignment(chunk, last)
            if encoded:
                # Nobody maps encoded bytes, so they need no page of their own.
                stored = memoryview(encoded)
                place = min(alignment, LINE_BYTES)
                codec = DELTA if base else BLOSC2
                chunks.append(NewChunk(digest, stored, place, encoded_print, codec, len(data)))
            else:
                chunks.append(NewChunk(digest, data, alignment, known if is_ours else None))
            last = chunk
        return chunks

    def _find_reusable(self, batch: Sequence[WantedChunk]) -> dict[Digest, Location]:
        """Return the locations of intact copies, for chunks that have no location yet."""
        if self._existing.is_empty:
            return {}
        batch = [wanted for wanted in batch if wanted.digest not in self._known]
        self._existing.read_packs(batch)
        sure: dict[Digest, Location] = {}
        doubtful: dict[Digest, _Candidate] = {}
        for wanted in batch:
            digest = wanted.digest
            if digest in sure or digest in doubtful:
                continue
            candidates = []
            for at in self._existing.iter_copies(digest, wanted.size_bytes):
                if not self._verify_reuse or self._existing.is_proven(at):
                    sure[digest] = at
                    break
                candidates.append(at)
            else:
                if candidates:
                    doubtful[digest] = (wanted, candidates)
        for found in self._hasher.engine.iter_results(self._read_intact, _group_candidates(doubtful.values())):
            sure.update(found)
        return sure

    def _read_intact(self, doubtful: Sequence[_Candidate]) -> dict[Digest, Location]:
        """Read copies until one of each chunk is intact, and return where; safe in any thread."""
        found = {}
        for wanted, candidates in doubtful:
            intact = next((at for at in candidates if self._existing.is_intact(at, wanted)), None)
            if intact:
                found[wanted.digest] = intact
        return found


def _read(chunk: SourceChunk) -> memoryview:
    source, _, start, stop, _, _ = chunk
    data = source.read(start, stop).cast("B")
    if len(data) != stop - start:
        raise SourceChanged(f"{source.name!r} returned {len(data)} bytes instead of {stop - start}: did it shrink?")
    return data


def _choose_alignment(chunk: SourceChunk, last: SourceChunk | None) -> int:
    """Return a chunk's alignment in a pack: 1 if it continues `last` in its source, otherwise that of a new run."""
    source, position, start, stop, begins_run, _ = chunk
    if begins_run:
        return choose_alignment(stop - start)
    if last and last.position == position and last.stop == start:
        return 1
    return choose_alignment(source.size_bytes - start)


def _group_candidates(doubtful: Iterable[_Candidate]) -> Iterator[tuple[list[_Candidate], int]]:
    """Yield groups, each enough work for a thread: one large chunk, or many small ones; and the size of each."""
    group: list[_Candidate] = []
    size = 0
    for candidate in doubtful:
        group.append(candidate)
        size += candidate[0].size_bytes + READ_COST_BYTES
        if size >= CHUNK_BYTES:
            yield group, size
            group, size = [], 0
    if group:
        yield group, size


def _count_bytes(batch: Sequence[SourceChunk]) -> int:
    return sum([stop - start for _, _, start, stop, _, _ in batch])


def _is_small(batch: Sequence[SourceChunk]) -> bool:
    return _count_bytes(batch) < _SMALL_BYTES * len(batch)


def _has_print(item: HashedChunk) -> bool:
    return fingerprint(item.data) == item.fingerprint


def _make_changed(item: HashedChunk) -> SourceChanged:
    """Return the error for memory that other code writes to: the stored bytes would not match their digest."""
    return SourceChanged(
        f"{item.chunk.source.name!r} changed while it was being saved; nothing was committed."
        " Save when no other code writes to it, or save a copy (save_async)"
    )


def _is_what_was_hashed(item: HashedChunk, written: Location) -> bool:
    if item.fingerprint is None:
        return hash_bytes(item.data) == item.digest
    return item.fingerprint == written.fingerprint
