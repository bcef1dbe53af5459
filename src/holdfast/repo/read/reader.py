"""Reads ranges of entries into the caller's buffers, verified, from the stated location or any other intact copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Final, Literal, Protocol

from typing_extensions import Self

from holdfast.digest import Digest, fingerprint, hash_bytes
from holdfast.errors import Corrupt, DigestMismatch, NotFound, SnapshotGone, StoreError
from holdfast.objects.blocks import PAGE_BYTES, BlockPool
from holdfast.objects.disk_cache import DiskCache
from holdfast.objects.protocol import PageCacheReads, ReadInto
from holdfast.progress import LockedProgress, Progress
from holdfast.repo.engine import Engine
from holdfast.repo.format.chunk import CHUNK_BYTES, UNIT_BYTES, ChunkRef, verify_chunk
from holdfast.repo.format.codec import apply_delta, decode_into, find_base_digest, open_delta, open_stored
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import pack_key
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.format.rank_manifests import Manifests, read_manifests
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, read_name
from holdfast.repo.read.any_copy import FOLLOWS, AnyCopy, StoredChunk
from holdfast.repo.read.read_plan import (
    BLOCK_BYTES,
    Region,
    Stretch,
    Want,
    choose_rules,
    cut_windows,
    group_stretches,
    is_in_one_piece,
    list_entry_wants,
    list_region_wants,
    plan_stretches,
)

Verify = Literal["full", "fast", "device", False]
"""How bytes are verified: "full" by BLAKE3 of each chunk; "fast" by XXH3, which finds accidents only; False: not.

"device" is "full", and loads then compare what they have copied to other devices than the CPU once more, there.
"""

_MODES: Final[tuple[Verify, ...]] = ("full", "fast", "device", False)
_MAP_ALIGNMENT: Final = 16
"""The size of the largest item of a tensor."""


class WriteObserver(Protocol):
    """Receives a call for every write to a buffer, from the threads that write; `name` is the entry's name."""

    def expect(self, name: str, parts: int) -> None:
        """Note that `parts` parts of the entry will be written."""

    def begin(self, name: str) -> None:
        """Note that bytes of the entry are about to be written; may be called repeatedly."""

    def end(self, name: str) -> None:
        """Note that one part of the entry was written and verified."""


class SnapshotReader:
    """Reads entries of one snapshot and verifies every byte as `verify` says. Use it in a `with`."""

    def __init__(
        self,
        repo: Repository,
        snapshot: CommittedSnapshot,
        *,
        verify: Verify = "full",
        manifest: Manifest | None = None,
        progress: Progress | None = None,
        cache: DiskCache | None = None,
        keep: bool = False,
    ) -> None:
        """Read the manifests, unless `manifest`, a merged view of them, is passed; raises NotFound, Corrupt.

        Without `cache`, every byte comes from the store itself. With `keep`, the system keeps what is read in memory,
        if the store is a directory and there is room: the bytes are likely to be wanted again.
        """
        self._cache = cache
        self._progress = None if progress is None else LockedProgress(progress)
        self._verify: Verify = "full" if verify == "device" else verify
        self.snapshot = snapshot
        self.manifests: Manifests | None = None
        """The root and its parts; None if a merged manifest was passed."""
        if manifest is None:
            self.manifests = read_manifests(repo.store, snapshot.manifest, cache=cache)
            manifest = self.manifests.view()
        self.manifest = manifest
        self._any_copy = AnyCopy(repo, snapshot)
        self._store = repo.store
        self.counters = repo.counters
        self.budget_bytes = repo.budget_bytes
        traits = repo.store.traits
        self._lends = traits.lends_reads
        self._reads = repo.store.keep_reads() if keep else PageCacheReads(repo.store.read_into)
        self.ahead_bytes = min(traits.requests_at_once * traits.wait_bytes, max(UNIT_BYTES, repo.budget_bytes // 4))
        """How many bytes to read before a caller asks for them, with all requests that can wait at the same time; 0 if
        requests do not wait."""
        self._stages = repo.counters.stages
        self._proven = repo.proven
        # What is verified by BLAKE3 need not be read again by a save; a store that checks its uploads needs no proof.
        self._is_proof = self._verify == "full" and not traits.checked_uploads
        self._versions: dict[str, str | None] = {}
        """The version of each pack before it was first read from; None if it is unknown, or if the pack is damaged."""
        self._engine = Engine(
            "holdfast-read", budget_bytes=repo.budget_bytes, waits=True, requests=traits.reads_at_once
        )
        self._rules = choose_rules(traits, threads=self._engine.threads, budget_bytes=repo.budget_bytes, keep=keep)
        self._blocks = BlockPool(BLOCK_BYTES, kept=self._engine.threads, huge=True)
        self._decoded = BlockPool(CHUNK_BYTES, kept=self._engine.threads)

    def __enter__(self) -> Self:
        """Return the reader."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the reader's threads."""
        self._engine.__exit__(kind, error, trace)

    @contextmanager
    def reporting(self, task: str, measure: Callable[[], int]) -> Iterator[None]:
        """Report what is read meanwhile as the progress of a task; `measure` returns its total bytes."""
        if self._progress is None:
            yield
            return
        self._progress.begin(task, measure())
        try:
            yield
        finally:
            self._progress.end()

    def _advance(self, wants: Iterable[Want]) -> None:
        if self._progress is not None:
            self._progress.advance(sum(want.size_bytes for want in wants if want.of is None))

    def find_entry(self, name: str) -> Entry:
        """Return the entry called `name`; raises NotFound, which names the command that lists entries."""
        try:
            return self.manifest.find_entry(name)
        except NotFound:
            raise NotFound(
                f"no entry {name!r} in {self.snapshot.name!r}; `holdfast show {self.snapshot.name}` lists them",
                name=name,
            ) from None

    def read_entry(self, name: str) -> bytearray:
        """Read a whole entry into new memory."""
        entry = self.find_entry(name)
        data = bytearray(entry.size_bytes)
        self.read_into(entry, 0, memoryview(data))
        return data

    def read_into(self, entry: Entry, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `entry` from `start` on; reads only the chunks that contain them."""
        self.read_ranges([(entry, start, buffer)])

    def read_ranges(self, wanted: Iterable[tuple[Entry, int, memoryview]]) -> None:
        """Fill one buffer per range, given as an entry and a first byte, concurrently; reads only their chunks."""
        wants: list[Want] = []
        for entry, start, buffer in wanted:
            stop = start + buffer.nbytes
            if start < 0 or stop > entry.size_bytes:
                size_bytes = entry.size_bytes
                raise ValueError(f"bytes {start} to {stop} are out of range: {entry.name!r} has {size_bytes} bytes")
            wants += list_entry_wants(entry, start, buffer.cast("B"))
        self._read(wants)

    def read_all(self, wanted: Sequence[tuple[Entry, memoryview]], *, watch: WriteObserver | None = None) -> None:
        """Fill one buffer per entry, concurrently; no buffer is written to after this returns or raises."""
        self._read([want for entry, buffer in wanted for want in list_entry_wants(entry, 0, buffer)], watch)

    def read_regions(self, wanted: Sequence[tuple[Entry, Region, memoryview]]) -> None:
        """Fill one buffer per region of an entry, concurrently; reads only chunks that overlap the region."""
        self._read([want for each in wanted for want in list_region_wants(*each)])

    def _read(self, wants: Sequence[Want], watch: WriteObserver | None = None) -> None:
        if watch is not None:
            for name, parts in Counter(want.entry.name for want in wants).items():
                watch.expect(name, parts)
        placed, deltas = [], []
        for want in wants:
            if not want.is_packed:
                self._put_chunk(want, watch)
            elif want.location.base is None:
                placed.append(want)
            else:
                deltas.append(want)
        self._read_placed(placed, watch)
        for window in cut_windows(deltas, self.budget_bytes // 4):
            self._read_deltas(window, watch)

    def _read_placed(self, wants: Sequence[Want], watch: WriteObserver | None) -> None:
        rules = self._rules(sum(want.location.stored_bytes for want in wants))
        self._engine.run(partial(self._read_batch, watch), group_stretches(plan_stretches(wants, rules), rules))

    def _read_deltas(self, wants: Sequence[Want], watch: WriteObserver | None) -> None:
        """Read the bases of deltas to where the chunks should be, then turn each into its chunk."""
        for want in wants:
            if watch is not None:
                watch.begin(want.entry.name)
        self._read_placed([want.find_base() for want in wants], None)
        self._read_placed([want for want in wants if want.under is not None], watch)
        for want in wants:
            if want.under is None:
                self._put_chunk(want, watch)
            want.under = None

    def _put_chunk(self, want: Want, watch: WriteObserver | None) -> None:
        """Read one chunk from any intact copy, and copy the wanted bytes into its buffer."""
        if want.of is not None:
            want.of.under = None  # the delta is then read by itself
            return
        self._put(want, self._any_copy.read(want.entry, want.ref, want.start).raw, watch)

    def map_entry(self, entry: Entry) -> memoryview | None:
        """Return a private memory map of an entry, unverified; None if it is not contiguous and aligned in one pack."""
        first = entry.chunks[0].location if is_in_one_piece(entry) else None
        # A reused chunk may be anywhere in a pack, such as in the middle of a file; memory of tensors must be aligned.
        if first is None or first.offset % _MAP_ALIGNMENT:
            return None
        try:
            return self._store.map(pack_key(first.pack_id), first.offset, entry.size_bytes)
        except (NotFound, Corrupt, StoreError):
            return None  # a normal read then finds another copy, or raises an error with the details

    @property
    def window_bytes(self) -> int:
        """How many bytes to read at a time, by callers that do not need all of them at once."""
        return max(UNIT_BYTES, self.ahead_bytes)

    def iter_entry(self, entry: Entry) -> Iterator[memoryview]:
        """Yield an entry in pieces of at most 8 MiB, so that memory stays bounded whatever its size."""
        window_bytes = self.window_bytes
        for start in range(0, entry.size_bytes, window_bytes):
            window = memoryview(bytearray(min(window_bytes, entry.size_bytes - start)))
            self.read_into(entry, start, window)
            for at in range(0, window.nbytes, UNIT_BYTES):
                yield window[at : at + UNIT_BYTES]

    def iter_contents(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, Iterable[memoryview]]]:
        """Yield each entry with its content in pieces, to be used before the next one; reads small ones together."""
        waiting: list[Entry] = []
        left = self.ahead_bytes
        for entry in entries:
            if waiting and entry.size_bytes > left:
                yield from self._read_contents(waiting)
                waiting, left = [], self.ahead_bytes
            waiting.append(entry)
            left -= entry.size_bytes
        yield from self._read_contents(waiting)

    def _read_contents(self, entries: Sequence[Entry]) -> Iterator[tuple[Entry, Iterable[memoryview]]]:
        if len(entries) == 1:
            yield entries[0], self.iter_entry(entries[0])
            return
        contents = [memoryview(bytearray(entry.size_bytes)) for entry in entries]
        self.read_all(list(zip(entries, contents, strict=True)))
        for entry, content in zip(entries, contents, strict=True):
            yield entry, [content] if content else []

    def read_small(self, entry: Entry, start: int, buffer: memoryview) -> None:
        """Fill `buffer` as `read_into` does; on this thread if the entry is one chunk and its read does not wait."""
        if len(entry.chunks) == 1 and not self.ahead_bytes:
            # Waking up a thread would take longer.
            buffer[:] = self.read_chunk(entry, 0)[start : start + buffer.nbytes]
        else:
            self.read_into(entry, start, buffer)

    def read_chunk(self, entry: Entry, position: int) -> memoryview:
        """Read the chunk at `position` among the chunks of an entry."""
        return self.read_stored(entry, position).raw

    def read_stored(self, entry: Entry, position: int) -> StoredChunk:
        """Do the same, and return the stored bytes as well: they can be copied as they are."""
        start = sum(ref.size_bytes for ref in entry.chunks[:position])
        return self._any_copy.read(entry, entry.chunks[position], start)

    def read_base(self, entry: Entry, position: int, digest: Digest) -> StoredChunk:
        """Read the base of a delta, the chunk at `position` of an entry; `digest` is that of the base."""
        ref = entry.chunks[position]
        base = ref.location.base if ref.location else None
        stated = base.location if base and base.digest == digest else None
        return self._any_copy.read_base(entry, ChunkRef(digest, ref.size_bytes, stated))

    def _read_batch(self, watch: WriteObserver | None, batch: Sequence[Stretch]) -> None:
        if self._lends:
            for stretch in batch:
                self._read_lent(stretch, watch)
            return
        with self._reads.run() as read_into:
            self._read_stretches(read_into, batch, watch)

    def _read_stretches(self, read_into: ReadInto, batch: Sequence[Stretch], watch: WriteObserver | None) -> None:
        for stretch in batch:
            try:
                self._note_version(stretch.pack_id)
                self._read_stretch(read_into, stretch, watch)
                self._note_verified(stretch)
            except (NotFound, Corrupt, StoreError):
                # Part of the stretch is unreadable or damaged. Read each chunk by itself, from any intact copy.
                self._versions[stretch.pack_id] = None
                self._proven.forget(stretch.pack_id)
                for want in stretch.wants:
                    self._put_chunk(want, watch)
                continue
            if watch is not None:
                for want in stretch.wants:
                    watch.end(want.entry.name)
            self._advance(stretch.wants)

    def _note_version(self, pack_id: str) -> None:
        """Remember the version of a pack before its first read: if the pack changes later, the proofs are outdated."""
        if self._is_proof and pack_id not in self._versions:
            try:
                version = self._store.stat(pack_key(pack_id)).version
            except (NotFound, StoreError):
                version = None
            self._versions.setdefault(pack_id, version)

    def _note_verified(self, stretch: Stretch) -> None:
        """Remember copies that were read and verified by BLAKE3, so that the next save need not read them."""
        # The chunks of a stretch are all deltas, all bases of deltas, or neither.
        first = stretch.wants[0]
        # A base was only compared with its fingerprint; that it is intact is proven when the delta becomes its chunk.
        if not self._is_proof or first.of is not None:
            return
        self._add_proofs(stretch.pack_id, [want.location.offset for want in stretch.wants])
        if first.location.base is not None:
            for base in (want.location.base for want in stretch.wants):
                if base is not None:
                    self._add_proofs(base.location.pack_id, [base.location.offset])

    def _add_proofs(self, pack_id: str, offsets: Sequence[int]) -> None:
        version = self._versions.get(pack_id)
        if version is not None:
            self._proven.add_all(pack_id, offsets, version=version)

    def _read_lent(self, stretch: Stretch, watch: WriteObserver | None) -> None:
        """Read adjacent chunks, from the cache or with one request; read those that are damaged by themselves."""
        left = stretch if self._cache is None else self._read_cached(self._cache, stretch, watch)
        if left is not None:
            self._request(left, watch)

    def _read_cached(self, cache: DiskCache, stretch: Stretch, watch: WriteObserver | None) -> Stretch | None:
        """Copy the chunks that the cache has, and return what is left of the stretch; None if that is nothing."""
        left = []
        with cache.open(pack_key(stretch.pack_id)) as cached:
            if cached is None:
                return stretch
            for want in stretch.wants:
                data = cached.read(want.location.offset, want.location.stored_bytes)
                chunk = None if data is None else _open_cached(want, data)
                if data is None or chunk is None:
                    left.append(want)
                else:
                    self._put(want, chunk, watch)
                    cache.count_use(hit_bytes=data.nbytes)
        return stretch.narrow(left) if left else None

    def _request(self, stretch: Stretch, watch: WriteObserver | None) -> None:
        """Read adjacent chunks with one request; copy those that are intact, and read the others by themselves."""
        started, key = perf_counter(), pack_key(stretch.pack_id)
        try:
            data = self._store.read_range(key, stretch.start, stretch.size_bytes)
        except (NotFound, Corrupt, StoreError):
            damaged = stretch.wants
        else:
            self._stages.add("read", perf_counter() - started, data.nbytes)
            damaged = self._put_intact(stretch, data, watch)
            if self._cache is not None:
                self._cache.count_use(missed_bytes=data.nbytes)
                self._cache.write(key, stretch.start, data)
        if damaged:
            self._proven.forget(stretch.pack_id)
        for want in damaged:
            self._put_chunk(want, watch)

    def _put_intact(self, stretch: Stretch, data: memoryview, watch: WriteObserver | None) -> Sequence[Want]:
        """Copy the chunks that are intact into their buffers, and return the others."""
        damaged = self._find_damaged(stretch, data)
        for want, part in stretch.iter_parts(data):
            if any(want is each for each in damaged):
                continue
            try:
                self._write(want, part, watch)
            except Corrupt:
                damaged.append(want)
                continue
            self._end(want, watch)
        return damaged

    def _write(self, want: Want, part: memoryview, watch: WriteObserver | None) -> None:
        """Write the wanted bytes of a chunk to their buffer; raises Corrupt if its stored bytes, `part`, are not it."""
        if watch is not None:
            watch.begin(want.entry.name)
        if want.is_raw:
            want.put(part)
            return
        if want.under is not None:
            self._apply(want, part, want.under)
            return
        target = want.find_target()
        if target is not None:
            self._decode(want, part, target)
            return
        with self._decoded.lend() as block:
            chunk = block[: want.ref.size_bytes]
            self._decode(want, part, chunk)
            want.put(chunk)

    def _decode(self, want: Want, part: memoryview, target: memoryview) -> None:
        with self._stages.time("decode", target.nbytes):
            decode_into(part, target)
        self._verify_decoded(want, target)

    def _apply(self, want: Want, part: memoryview, under: memoryview) -> None:
        """Turn the base of a chunk into the chunk; raises Corrupt if the stored bytes are not a delta on it."""
        base = want.location.base
        if base is None or find_base_digest(part) != base.digest:
            raise Corrupt(f"pack {want.location.pack_id}: a delta names another base than its manifest")
        with self._decoded.lend() as block, self._stages.time("decode", under.nbytes):
            apply_delta(part, under, block)
        self._verify_decoded(want, under)
        if want.find_target() is None:
            want.put(under)

    def _verify_decoded(self, want: Want, chunk: memoryview) -> None:
        # That a base is the right one is proven by what becomes of it.
        if self._verify == "full" and want.of is None:
            with self._stages.time("verify", chunk.nbytes):
                verify_chunk(chunk, want.ref.digest, what=f"pack {want.location.pack_id}")

    def _end(self, want: Want, watch: WriteObserver | None) -> None:
        if watch is not None:
            watch.end(want.entry.name)
        self._advance([want])

    def _put(self, want: Want, data: memoryview, watch: WriteObserver | None) -> None:
        """Copy the wanted bytes of a chunk into their buffer."""
        if watch is not None:
            watch.begin(want.entry.name)
        want.put(data)
        self._end(want, watch)

    def _read_stretch(self, read_into: ReadInto, stretch: Stretch, watch: WriteObserver | None) -> None:
        """Read adjacent chunks: directly into the target buffer if they fit there, otherwise through a block."""
        target = stretch.find_target()
        if target is not None:
            if watch is not None:
                watch.begin(stretch.wants[0].entry.name)
            self._fill(read_into, stretch, stretch.start, target)
            self._verify_all(stretch, target)
            return
        with self._blocks.lend() as block:
            # Read from the start of the first page, into an aligned block: direct I/O then needs no other buffer.
            before = stretch.start % PAGE_BYTES
            self._fill(read_into, stretch, stretch.start - before, block[: before + stretch.size_bytes])
            data = block[before : before + stretch.size_bytes]
            self._verify_all(stretch, data)
            for want, part in stretch.iter_parts(data):
                self._write(want, part, watch)

    def _fill(self, read_into: ReadInto, stretch: Stretch, start: int, target: memoryview) -> None:
        started = perf_counter()
        read_into(pack_key(stretch.pack_id), start, target)
        self._stages.add("read", perf_counter() - started, target.nbytes)

    def _verify_all(self, stretch: Stretch, data: memoryview) -> None:
        """Raise DigestMismatch if any chunk is damaged; the chunk-by-chunk read that follows reports which one."""
        if self._find_damaged(stretch, data):
            raise DigestMismatch(f"pack {stretch.pack_id} is damaged: a chunk does not match its digest")

    def _find_damaged(self, stretch: Stretch, data: memoryview) -> list[Want]:
        """Return the chunks of a stretch that do not match their digests, as far as `verify` asks for that.

        Encoded chunks are compared with their fingerprints, before they are decoded; bases are, too.
        """
        if self._verify is False:
            return []
        started = perf_counter()
        is_full = self._verify == "full"
        damaged = [
            want
            for want, part in stretch.iter_parts(data)
            if (
                hash_bytes(part) != want.ref.digest
                if is_full and want.is_raw and want.of is None
                else fingerprint(part) != want.location.fingerprint
            )
        ]
        self._stages.add("verify", perf_counter() - started, data.nbytes)
        return damaged


def _open_cached(want: Want, stored: memoryview) -> memoryview | None:
    """Return a chunk whose stored bytes are in the cache; None if they are not what was written there.

    Compares the digest, whatever `verify` says: nothing else proves a cached byte.
    """
    with suppress(Corrupt):
        at = want.location
        chunk = (
            open_stored(at, stored, want.ref.size_bytes) if want.under is None else open_delta(at, stored, want.under)
        )
        if hash_bytes(chunk) == want.ref.digest:
            return chunk
    return None


def verify_mode(verify: Verify) -> None:
    """Raise ValueError unless `verify` is "full", "fast", "device" or False."""
    if verify not in _MODES:
        raise ValueError(f"verify must be 'full', 'fast', 'device' or False, not {verify!r}")


def open_snapshot(
    repo: Repository,
    snapshot: CommittedSnapshot,
    *,
    verify: Verify = "full",
    progress: Progress | None = None,
    use_cache: bool = True,
) -> SnapshotReader:
    """Open a snapshot for reading; raises SnapshotGone if it was deleted or overwritten, and collected since.

    Without `use_cache` the bytes come from the store itself, and the system need not keep them in memory.
    """
    cache = repo.store.cache if use_cache else None
    for _ in range(FOLLOWS):
        try:
            return SnapshotReader(repo, snapshot, verify=verify, progress=progress, cache=cache, keep=use_cache)
        except NotFound as error:
            newest = read_name(repo.store, snapshot.name).snapshot
            # A repack moves the bytes but keeps the content: the later generation is what the caller asked for.
            if newest is None or newest.generation == snapshot.generation or newest.digest != snapshot.digest:
                raise SnapshotGone(
                    f"{snapshot.name!r} is gone: its manifest was collected or lost; list the snapshots again",
                    name=snapshot.name,
                ) from error
            snapshot = newest
    raise NotFound(f"{snapshot.name!r} keeps being repacked while it is opened; try again", name=snapshot.name)


def is_readable(repo: Repository, snapshot: CommittedSnapshot) -> bool:
    """Read a whole snapshot and return whether every byte is present and intact."""
    try:
        with SnapshotReader(repo, snapshot) as reader:
            for entry in reader.manifest.iter_entries():
                for _ in reader.iter_entry(entry):
                    pass
    except (NotFound, Corrupt, StoreError):
        return False
    return True
