"""The write transaction: lease, reuse what is held, fill packs, commit last; a failure before that is invisible."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from holdfast.digest import Digest, hash_bytes
from holdfast.errors import (
    BadName,
    CommitUnknown,
    Corrupt,
    LeaseLost,
    NameInUse,
    NotFound,
    StoreError,
    StoreFull,
    TooLarge,
    Unsupported,
)
from holdfast.progress import Progress, Silent
from holdfast.repo.chunk import INLINE_BYTES, UNIT_BYTES, ChunkRef
from holdfast.repo.fill import Filler, iter_digests
from holdfast.repo.holdings import Holdings, find_base, read_bases
from holdfast.repo.index import merge_tiers
from holdfast.repo.layout import ManifestRef, manifest_key, new_file_id, new_write_id, pack_key, verify_name
from holdfast.repo.leases import Lease
from holdfast.repo.manifest import Entry, digest_snapshot, encode_manifest
from holdfast.repo.marks import read_bad_packs, read_marked
from holdfast.repo.packing import Packer
from holdfast.repo.reader import SnapshotReader
from holdfast.repo.record import Json, canonical_json
from holdfast.repo.repository import Repository, count_threads
from holdfast.repo.snapshots import (
    MAX_METADATA_BYTES,
    NameState,
    Snapshot,
    commit_snapshot,
    read_name,
    withdraw_snapshot,
)
from holdfast.repo.source import Piece, Source, cut_sources
from holdfast.store.protocol import ObjectStore
from holdfast.store.settle import create_settled

_REWRITES: Final = 8
"""How often a save writes anew what collectors have marked meanwhile, before it gives up."""


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What a save did."""

    name: str
    digest: Digest
    generation: int
    logical_bytes: int
    new_bytes: int
    """Bytes that the store did not hold before."""
    seconds: float
    existed: bool = False
    """The name held exactly this already; nothing was written."""

    @property
    def reused_bytes(self) -> int:
        """Bytes that the store held before."""
        return self.logical_bytes - self.new_bytes


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be saved, and how."""

    name: str
    sources: Sequence[Source]
    spec: Json = None
    """The snapshot's own spec: part of the content."""
    metadata: Mapping[str, Json] = field(default_factory=dict)
    overwrite: bool = False
    verify_reuse: bool = True
    """Read every chunk that is reused, and write it anew if it is rotten. Without, only its presence is checked."""


def save(repo: Repository, request: Request, *, progress: Progress | None = None) -> SaveResult:
    """Save all sources as one snapshot: visible as a whole, and durable, once this returns.

    Raises:
        NameInUse: before any byte is written, or at the commit if somebody else was first.
        CommitUnknown: the commit was sent and nobody can tell whether it arrived.
        HoldfastError: anything else; the name holds what it held before.
    """
    started = time.monotonic()
    progress = progress or Silent()
    request = _verify_request(request)
    pieces = cut_sources(request.sources)
    state = read_name(repo.store, request.name)
    logical_bytes = sum(source.size_bytes for source in request.sources)
    with ThreadPoolExecutor(count_threads(), "holdfast-hash") as pool:
        if state.snapshot and not request.overwrite:
            same = _find_same(repo, request, pieces, state.snapshot, pool)
            if same:
                return replace(same, seconds=time.monotonic() - started)
        _verify_room(repo, request, pieces, pool)
        repo.verify_may_write()
        progress.begin(f"save {request.name}", logical_bytes)
        try:
            return _Save(repo, request, state, pool).run(pieces, progress, started)
        finally:
            progress.end()


def _verify_request(request: Request) -> Request:
    """Refuse what could not be read back, before anything is touched."""
    names = [_verify_entry_name(source.name, request.name) for source in request.sources]
    if len(set(names)) != len(names):
        ((twice, _),) = Counter(names).most_common(1)
        raise BadName(f"two entries of {request.name!r} would have the name {twice[:80]!r}")
    _verify_json(f"the spec of {request.name!r}", request.spec)
    for source in request.sources:
        _verify_json(f"the spec or note of entry {source.name!r} of {request.name!r}", [source.spec, source.note])
    size = _verify_json(f"the metadata of {request.name!r}", dict(request.metadata))
    if size > MAX_METADATA_BYTES:
        raise TooLarge(
            f"the metadata of {request.name!r} has {size} bytes, more than {MAX_METADATA_BYTES}; save it as an entry"
        )
    return replace(request, name=verify_name(request.name), metadata=dict(request.metadata))


def _verify_json(what: str, value: Json) -> int:
    """Return the size of `value` in JSON, or raise Unsupported."""
    try:
        return len(canonical_json(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise Unsupported(f"{what} is not plain JSON: {error}") from error


def _verify_entry_name(name: str, snapshot_name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise BadName(
            f"an entry of {snapshot_name!r} has the name {name[:80]!r}, which is not valid Unicode"
        ) from error
    return name


def _find_same(
    repo: Repository, request: Request, pieces: Sequence[Piece], held: Snapshot, pool: ThreadPoolExecutor
) -> SaveResult | None:
    """Accept a repeated save of the same content and metadata; refuse any other before a byte is written.

    Returns None if the name holds the same, but it has rotted: then it has to be saved anew.
    """
    refs = list(iter_digests(pieces, pool))
    digest = digest_snapshot(request.spec, _build_entries(request.sources, pieces, refs))
    if digest != held.digest or canonical_json(request.metadata) != canonical_json(held.metadata):
        raise NameInUse(
            f"{request.name!r} is in use and holds other content; nothing was written."
            " Choose another name, or overwrite it (--overwrite, overwrite=True)",
            name=request.name,
        )
    if request.verify_reuse and not _is_readable(repo, held):
        return None
    return SaveResult(request.name, digest, held.generation, held.logical_bytes, 0, 0.0, existed=True)


def _is_readable(repo: Repository, snapshot: Snapshot) -> bool:
    """Read all of a snapshot and tell whether it is what it was."""
    try:
        with SnapshotReader(repo, snapshot) as reader:
            for entry in reader.manifest.iter_entries():
                for _ in reader.iter_entry(entry):
                    pass
    except (NotFound, Corrupt, StoreError):
        return False
    return True


def _verify_room(repo: Repository, request: Request, pieces: Sequence[Piece], pool: ThreadPoolExecutor) -> None:
    """Raise StoreFull before writing if the new bytes cannot fit; hashes everything only if there is doubt."""
    free = repo.store.find_free_bytes()
    if free is None or sum(source.size_bytes for source in request.sources) <= free:
        return
    holdings = Holdings(repo, read_bases(repo.store, [find_base(repo, request.name)]), avoid=frozenset())
    new: dict[Digest, int] = {}
    for ref in iter_digests(pieces, pool):
        if ref.size_bytes <= INLINE_BYTES or not (ref.digest in new or holdings.find(ref.digest, ref.size_bytes)):
            new[ref.digest] = ref.size_bytes
    needed = sum(new.values())
    if needed > free:
        raise StoreFull(
            f"saving {request.name!r} needs {needed} bytes, {repo.store.url} has {free} free; nothing was written."
            " Free some space, or save elsewhere",
            needed_bytes=needed,
            free_bytes=free,
        )


def _build_entries(sources: Sequence[Source], pieces: Sequence[Piece], refs: Sequence[ChunkRef]) -> list[Entry]:
    chunks: list[list[ChunkRef]] = [[] for _ in sources]
    for piece, ref in zip(pieces, refs, strict=True):
        chunks[piece.position].append(ref)
    return [
        Entry(source.name, source.size_bytes, tuple(own), source.spec, source.note)
        for source, own in zip(sources, chunks, strict=True)
    ]


class _Save:
    """One transaction under one lease; the order of its steps is what makes it safe beside collectors."""

    def __init__(self, repo: Repository, request: Request, state: NameState, pool: ThreadPoolExecutor) -> None:
        self._repo = repo
        self._store: ObjectStore = repo.store
        self._request = request
        self._state = state
        self._pool = pool

    def run(self, pieces: Sequence[Piece], progress: Progress, started: float) -> SaveResult:
        request = self._request
        self._lease = Lease(self._store, purpose=f"save {request.name!r}")
        self._packer = Packer(self._store, self._lease)
        try:
            filler = self._prepare_filler()
            refs = filler.fill(pieces, progress)
            self._packer.seal()
            entries, manifest = self._write_manifest(pieces, refs, filler)
            snapshot = self._commit(entries, manifest)
            self._end(snapshot, entries)
        except CommitUnknown:
            raise  # the lease is left to expire: the commit may still arrive
        except BaseException:
            self._give_up()
            raise
        self._repo.recent.remember(snapshot)
        seconds = time.monotonic() - started
        size = snapshot.logical_bytes
        return SaveResult(request.name, snapshot.digest, snapshot.generation, size, filler.new_bytes, seconds)

    def _prepare_filler(self) -> Filler:
        # Marks are listed after the lease was taken: a collector that marks later will wait for us.
        avoid = read_marked(self._store) | read_bad_packs(self._store)
        bases = read_bases(self._store, [self._state.snapshot, find_base(self._repo, self._request.name)])
        holdings = Holdings(self._repo, bases, avoid=avoid)
        # Batches are read ahead, hashed and written: a handful is in memory at any time.
        batch_bytes = min(UNIT_BYTES, self._repo.budget_bytes // 8)
        verify_reuse = self._request.verify_reuse
        return Filler(holdings, self._packer, self._pool, verify_reuse=verify_reuse, batch_bytes=batch_bytes)

    def _write_manifest(
        self, pieces: Sequence[Piece], refs: list[ChunkRef], filler: Filler
    ) -> tuple[list[Entry], ManifestRef]:
        """Write the manifest, then make sure that nothing it relies on has been marked meanwhile."""
        for _ in range(_REWRITES):
            entries = _build_entries(self._request.sources, pieces, refs)
            data = encode_manifest(self._request.spec, entries)
            manifest = ManifestRef(new_file_id(self._lease.lease_id), hash_bytes(data), len(data))
            create_settled(self._store, manifest_key(manifest.manifest_id), data)
            self._lease.renew()
            marked = read_marked(self._store)
            stale = [i for i, ref in enumerate(refs) if self._is_stale(ref, marked)]
            if not stale:
                return entries, manifest
            again = filler.rewrite([pieces[i] for i in stale], [refs[i] for i in stale])
            self._packer.seal()
            for i, ref in zip(stale, again, strict=True):
                refs[i] = ref
        raise LeaseLost(f"save {self._request.name!r}: collectors keep marking what it uses; save again")

    def _is_stale(self, ref: ChunkRef, marked: frozenset[str]) -> bool:
        # Whoever renewed the lease just now still owns what was written under it.
        if ref.location is None or ref.location.pack_id.startswith(self._lease.lease_id):
            return False
        return pack_key(ref.location.pack_id) in marked

    def _commit(self, entries: Sequence[Entry], manifest: ManifestRef) -> Snapshot:
        snapshot = Snapshot(
            name=self._request.name,
            manifest=manifest,
            digest=digest_snapshot(self._request.spec, entries),
            time_s=self._store.clock(),
            num_entries=len(entries),
            logical_bytes=sum(entry.size_bytes for entry in entries),
            metadata=dict(self._request.metadata),
            lease_id=self._lease.lease_id,
            generation=self._state.next_generation,
            write_id=new_write_id(),
        )
        commit_snapshot(self._store, snapshot)
        return snapshot

    def _end(self, snapshot: Snapshot, entries: Sequence[Entry]) -> None:
        """Release the lease; only then may the save return. Fenced: the snapshot stands only if all it uses does."""
        try:
            self._release_or_withdraw(snapshot, entries)
        except (StoreError, Corrupt) as error:
            raise CommitUnknown(
                f"{snapshot.name!r} was committed, but then the store failed, so it is not known whether a collector"
                f" had given up on it: {error}. Check it with `holdfast check`, or save again",
                name=snapshot.name,
            ) from error
        # What follows is housekeeping: the save is done, and others do it if we cannot.
        with suppress(StoreError, Corrupt):
            merge_tiers(self._store)
        self._lease.forget()

    def _release_or_withdraw(self, snapshot: Snapshot, entries: Sequence[Entry]) -> None:
        with suppress(LeaseLost):
            self._lease.release()
            return
        used = {pack_key(chunk.location.pack_id) for entry in entries for chunk in entry.chunks if chunk.location}
        used.add(manifest_key(snapshot.manifest.manifest_id))
        if used & read_marked(self._store) or not all(map(self._is_present, used)):
            with suppress(NameInUse):  # somebody has overwritten it already
                withdraw_snapshot(self._store, snapshot, self._state.snapshot)
            raise LeaseLost(
                f"save {snapshot.name!r} was taken for dead by a collector, which removed bytes that it used;"
                " the snapshot was withdrawn. Save again"
            )

    def _is_present(self, key: str) -> bool:
        try:
            self._store.stat(key)
        except NotFound:
            return False
        return True

    def _give_up(self) -> None:
        """Leave as little behind as possible; what cannot be removed is for a collector."""
        self._packer.abort()
        with suppress(StoreError, LeaseLost):
            self._lease.release()
        # Nothing counts that was done under it, so it may vanish unreleased: on a full store it has to, for
        # otherwise a collector that is to make room would wait for it.
        self._lease.forget()
