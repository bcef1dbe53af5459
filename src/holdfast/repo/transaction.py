"""One commit under one lease: the order of its steps is what makes it safe beside collectors and other writers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from holdfast.digest import Digest, hash_bytes
from holdfast.errors import CommitUnknown, Corrupt, LeaseLost, NameInUse, StoreError
from holdfast.repo.chunk import ChunkRef, Location
from holdfast.repo.index import merge_tiers
from holdfast.repo.layout import ManifestRef, manifest_key, new_file_id, new_write_id, pack_key
from holdfast.repo.leases import Lease
from holdfast.repo.manifest import Entry, digest_snapshot, encode_manifest
from holdfast.repo.marks import find_abandoned, read_bad_packs, read_marked
from holdfast.repo.packing import Packer
from holdfast.repo.record import Json
from holdfast.repo.repository import Repository
from holdfast.repo.settled import Before, find_before, is_present
from holdfast.repo.snapshots import NameState, Snapshot, commit_snapshot, withdraw_snapshot
from holdfast.store.settle import create_settled

_log = logging.getLogger(__name__)

_REWRITES: Final = 8
"""How often a commit writes anew what collectors have marked meanwhile, before it gives up."""

Rewrite = Callable[[Sequence[ChunkRef]], list[ChunkRef]]
"""Writes chunks into the transaction's own packs, wherever else they may be, and says where."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a snapshot record will say, but for what follows from its entries."""

    state: NameState
    """What the name holds now, and which generation this commit will be."""
    spec: Json = None
    metadata: Mapping[str, Json] = field(default_factory=dict)
    environment: Mapping[str, Json] = field(default_factory=dict)
    time_s: float | None = None
    """When it was first committed, if this is a copy of it."""


class Transaction:
    """Use it in a `with`: leaving by an exception before the commit leaves nothing visible."""

    def __init__(self, repo: Repository, *, purpose: str) -> None:
        """Remember what this is for; nothing happens before the `with`."""
        self._repo = repo
        self._store = repo.store
        self._purpose = purpose
        self._stack = ExitStack()
        self._is_committed = False
        self._is_overtaken = False

    def __enter__(self) -> Self:
        """Take the lease, then look at the marks and the index: a collector that marks later will wait for us."""
        with ExitStack() as stack:
            stack.enter_context(self._store.hold(exclusive=False))
            self.lease = Lease(self._store, purpose=self._purpose)
            self.packer = Packer(self._store, self.lease, proven=self._repo.proven)
            stack.push(self._leave)
            self.avoid = read_marked(self._store) | read_bad_packs(self._store)
            self._repo.index.refresh()
            for key in find_abandoned(self._store):
                _log.warning("%s: a garbage collection was given up (%s); run it again", self._store.url, key)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up whatever was not committed."""
        self._stack.__exit__(kind, error, trace)

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Once it is committed only a lease that was released may vanish: one without files has ended well.
        if not self._is_committed:
            self._give_up()

    def commit(self, draft: Draft, entries: Sequence[Entry], *, rewrite: Rewrite) -> Snapshot:
        """Make `entries` the content of the name, and return only when no collector can take it away any more."""
        self.packer.seal()
        before = find_before(self._store, draft.state) if draft.state.snapshot else None
        entries, manifest = self._write_manifest(draft, entries, rewrite)
        snapshot = Snapshot(
            name=draft.state.name,
            manifest=manifest,
            digest=digest_snapshot(draft.spec, entries),
            time_s=self._store.clock() if draft.time_s is None else draft.time_s,
            num_entries=len(entries),
            logical_bytes=sum(entry.size_bytes for entry in entries),
            metadata=dict(draft.metadata),
            environment=dict(draft.environment),
            lease_id=self.lease.lease_id,
            generation=draft.state.next_generation,
            write_id=new_write_id(),
        )
        try:
            commit_snapshot(self._store, snapshot)
            self._is_committed = True
        except NameInUse:
            self._is_overtaken = True  # or it was never there
            raise
        except CommitUnknown:
            self._is_committed = True  # it may still arrive
            raise
        self._end(snapshot, entries, draft.state, before)
        self._repo.recent.remember(snapshot)
        return snapshot

    def _write_manifest(
        self, draft: Draft, entries: Sequence[Entry], rewrite: Rewrite
    ) -> tuple[Sequence[Entry], ManifestRef]:
        """Write the manifest, then make sure that nothing it relies on has been marked meanwhile."""
        for _ in range(_REWRITES):
            data = encode_manifest(draft.spec, entries)
            manifest = ManifestRef(new_file_id(self.lease.lease_id), hash_bytes(data), len(data))
            create_settled(self._store, manifest_key(manifest.manifest_id), data)
            self.lease.renew()
            marked = read_marked(self._store)
            stale = [chunk for entry in entries for chunk in entry.chunks if self._is_stale(chunk, marked)]
            if not stale:
                return entries, manifest
            again = {ref.digest: ref.location for ref in rewrite(stale)}
            self.packer.seal()
            entries = [_move_chunks(entry, again) for entry in entries]
        raise LeaseLost(f"{self._purpose}: collectors keep marking what it uses; try again")

    def _is_stale(self, ref: ChunkRef, marked: frozenset[str]) -> bool:
        # Whoever renewed the lease just now still owns what was written under it.
        if ref.location is None or ref.location.pack_id.startswith(self.lease.lease_id):
            return False
        return pack_key(ref.location.pack_id) in marked

    def _end(self, snapshot: Snapshot, entries: Sequence[Entry], state: NameState, before: Before) -> None:
        """Release the lease. Fenced: the snapshot stands only if all it uses does."""
        try:
            self._release_or_withdraw(snapshot, entries, state, before)
        except (StoreError, Corrupt) as error:
            raise CommitUnknown(
                f"{snapshot.name!r} was committed, but then the store failed, so it is not known whether a collector"
                f" had given up on it: {error}. Check it with `holdfast check`, or save again",
                name=snapshot.name,
            ) from error
        # What follows is housekeeping: the commit is done, and others do this if we cannot.
        with suppress(StoreError, Corrupt):
            merge_tiers(self._store)
        self.lease.forget()

    def _release_or_withdraw(
        self, snapshot: Snapshot, entries: Sequence[Entry], state: NameState, before: Before
    ) -> None:
        with suppress(LeaseLost):
            self.lease.release()
            return
        used = {pack_key(chunk.location.pack_id) for entry in entries for chunk in entry.chunks if chunk.location}
        used.add(manifest_key(snapshot.manifest.manifest_id))
        if not used & read_marked(self._store) and all(is_present(self._store, key) for key in used):
            return
        try:
            if before == "open":
                before = find_before(self._store, state)
            if before == "open":
                raise NameInUse(f"what {snapshot.name!r} held before may be withdrawn itself", name=snapshot.name)
            withdraw_snapshot(self._store, snapshot, before)
        except NameInUse as error:
            raise CommitUnknown(
                f"{self._purpose}: a collector took it for dead and removed bytes that it used, and it could not be"
                f" withdrawn ({error}); look what {snapshot.name!r} holds now, and save again",
                name=snapshot.name,
            ) from error
        raise LeaseLost(
            f"{self._purpose}: a collector took it for dead and removed bytes that it used;"
            " the snapshot was withdrawn. Save again"
        )

    def _give_up(self) -> None:
        """Leave as little behind as possible; what cannot be removed is for a collector."""
        self.packer.abort()
        try:
            self.lease.release()
        except (StoreError, LeaseLost):
            # A record that was overtaken stands below another: without its fence it would pass for settled.
            if self._is_overtaken:
                return
        # Nothing counts that was done under it, so nobody need wait for it, whether or not it could be released.
        self.lease.forget()


def _move_chunks(entry: Entry, moved: Mapping[Digest, Location | None]) -> Entry:
    """Return `entry` with new places for the chunks that have moved."""
    chunks = tuple(
        chunk._replace(location=moved[chunk.digest]) if chunk.digest in moved else chunk for chunk in entry.chunks
    )
    return entry._replace(chunks=chunks)
