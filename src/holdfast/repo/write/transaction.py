"""One commit under one lease: the order of its steps is what makes it safe beside collectors and other writers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from holdfast.digest import Digest, hash_bytes
from holdfast.errors import (
    CommitUnknown,
    Corrupt,
    LeaseLost,
    NameInUse,
    NotShared,
    RankError,
    StoreError,
    StoreFull,
    StoreGone,
)
from holdfast.objects.settle import create_settled
from holdfast.repo.format.chunk import ChunkRef, Location
from holdfast.repo.format.entry import Entry, digest_parts, digest_snapshot
from holdfast.repo.format.layout import (
    ManifestRef,
    PartRef,
    lease_stem,
    manifest_key,
    new_file_id,
    new_write_id,
    pack_key,
    parse_part,
)
from holdfast.repo.format.manifest import read_manifest
from holdfast.repo.format.manifest_encoding import encode_manifest
from holdfast.repo.format.record import Json
from holdfast.repo.format.rows import EntryRows, count_bytes
from holdfast.repo.handle.index import merge_tiers
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.generations import list_generations
from holdfast.repo.names.leases import Lease, kept_alive
from holdfast.repo.names.marks import find_abandoned, read_bad_packs, read_marked
from holdfast.repo.names.rollback import Before, find_before, is_present, iter_needed
from holdfast.repo.names.snapshots import NameState, Snapshot, commit_snapshot, withdraw_snapshot
from holdfast.repo.write.packing import Packer
from holdfast.repo.write.world import ALONE, Ranks

_log = logging.getLogger(__name__)

_REWRITES: Final = 8
"""How often a commit writes anew what collectors have marked meanwhile, before it gives up."""

_COORDINATOR: Final = 0
_REFUSALS: Final = frozenset(kind.__name__ for kind in (NameInUse, LeaseLost, StoreError, StoreFull, StoreGone))
"""What the coordinator raises, as a failure's type name, when it has not committed; all else may come afterwards."""

MakeParts = Callable[[], Sequence["Part"]]
"""Writes chunks that are not held, and says what the manifests of this rank hold."""
Rewrite = Callable[[Sequence[ChunkRef]], list[ChunkRef]]
"""Writes chunks into the transaction's own packs, wherever else they may be, and says where."""


class Part(NamedTuple):
    """What one manifest holds: all of a snapshot, or what one rank has of it."""

    spec: Json
    entries: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class Draft:
    """What a snapshot record will say, but for what follows from its parts."""

    state: NameState
    """What the name holds now, and which generation this commit will be."""
    metadata: Mapping[str, Json] = field(default_factory=dict)
    environment: Mapping[str, Json] = field(default_factory=dict)
    time_s: float | None = None
    """When it was first committed, if this is a copy of it."""
    root: Part | None = None
    """What parts make up as a whole: entries without chunks. None if there is only one part, which is all."""


class Transaction:
    """Use it in a `with`: leaving by an exception before the commit leaves nothing visible."""

    def __init__(self, repo: Repository, *, purpose: str, ranks: Ranks = ALONE) -> None:
        """Remember what this is for; nothing happens before the `with`."""
        self._repo = repo
        self._store = repo.store
        self._stages = repo.counters.stages
        self._purpose = purpose
        self._ranks = ranks
        self._stack = ExitStack()
        self._lease: Lease | None = None
        self.lease_id = ""
        self.packer = Packer(self._store, self, proven=repo.proven)
        self._name = ""
        # On the coordinator, which alone has the lease.
        self._is_committed = False
        self._is_overtaken = False
        self._is_gone = False

    def __enter__(self) -> Self:
        """Take the lease, then look at the marks and the index: a collector that marks later will wait for us."""
        with ExitStack() as stack:
            # Given back last, when nothing is written any more.
            held = stack.enter_context(ExitStack())
            stack.push(self._leave)
            self.lease_id, avoid = self._ranks.broadcast("begin", lambda: self._begin(held))
            if self._ranks.world_size > 1:
                if self._lease is not None:
                    stack.enter_context(kept_alive(self._lease))
                self._ranks.all_gather("share", lambda: self._verify_shared(held))
            self.avoid = frozenset(avoid)
            self._repo.index.refresh()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up whatever was not committed; raises CommitUnknown if memory ran out when the record may be there."""
        shortage = error
        try:
            self._stack.__exit__(kind, error, trace)
        except MemoryError as late:
            if not self._is_committed:
                raise
            shortage = late
        if self._is_committed and isinstance(shortage, MemoryError):
            raise lose_memory(self._name) from shortage

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Once it is committed only a lease that was released may vanish: one without files has ended well.
        if not self._is_committed:
            self._give_up()

    def _begin(self, held: ExitStack) -> tuple[str, list[str]]:
        is_locked = held.enter_context(self._store.hold(exclusive=False))
        self._lease = Lease(self._store, purpose=self._purpose, is_locked=is_locked)
        avoid = read_marked(self._store) | read_bad_packs(self._store)
        for key in find_abandoned(self._store):
            _log.warning("%s: a garbage collection was given up (%s); run it again", self._store.url, key)
        return self._lease.lease_id, sorted(avoid)

    def _verify_shared(self, held: ExitStack) -> None:
        """Raise NotShared unless this rank sees the lease that the coordinator has taken."""
        # Before anything is touched: what belongs to one node only is left as it is.
        if not list_generations(self._store, lease_stem(self.lease_id)):
            raise NotShared(
                f"rank {self._ranks.rank} does not find in {self._store.url} what rank 0 has written there: the path"
                " is local to each node. Use one that all ranks share, or save with collective=False"
            )
        self._repo.verify_may_write()
        if self._lease is None:
            held.enter_context(self._store.hold(exclusive=False))

    def keep_alive(self) -> None:
        """Show collectors and other ranks that this save lives, and look whether the others do; cheap."""
        self._ranks.beat()
        self._ranks.check_failures()
        if self._lease is not None:
            self._lease.keep_alive()

    def commit(self, draft: Draft, make_parts: MakeParts, *, rewrite: Rewrite) -> Snapshot:
        """Make what `make_parts` writes the content of the name; return only when no collector can take it away."""
        self._name = draft.state.name
        written = self._write(make_parts, rewrite, draft)
        try:
            with self._stages.time("commit"):
                fields = self._ranks.broadcast("commit", lambda: self._commit(draft, written))
        except RankError as error:
            if self._is_committed or not _is_refused(error, self._ranks):
                raise _lose_track(error, draft.state.name) from error
            raise
        snapshot = _parse_committed(fields)
        self._repo.recent.remember(snapshot)
        return snapshot

    def _write(self, make_parts: MakeParts, rewrite: Rewrite, draft: Draft) -> _Written:
        """Write packs and manifests, and make sure that nothing they rely on has been marked meanwhile.

        Raises CommitUnknown if this rank cannot tell whether the coordinator has gone on to commit.
        """
        parts: list[Part] = []
        own: list[PartRef] = []
        stale: list[ChunkRef] = []

        def write() -> list[Json]:
            if stale:
                moved = {ref.digest: ref.location for ref in rewrite(stale)}
                parts[:] = [part._replace(entries=[_move_chunks(e, moved) for e in part.entries]) for part in parts]
            else:
                parts[:] = make_parts()
            with self._stages.time("commit"):
                self.packer.seal()
                own[:] = [self._write_manifest(part) for part in parts]
                return [ref.to_json() for ref in own]

        for _ in range(_REWRITES):
            gathered = self._ranks.all_gather("write", write)
            refs = [parse_part(ref, where="a rank") for own in gathered for ref in own]
            whole, marked = self._ranks.broadcast("marks", partial(self._renew, draft, refs))
            written = _Written(parts, parse_part(whole, where="the coordinator"))
            # Mostly nothing is marked, and to go over all chunks takes long.
            if marked:
                read = zip(parts, own, strict=True)
                parts[:] = [part._replace(entries=self._read_entries(part, ref)) for part, ref in read]
            chunks = (chunk for part in parts if marked for entry in part.entries for chunk in entry.chunks)
            stale[:] = [chunk for chunk in chunks if self._is_stale(chunk, frozenset(marked))]
            if not self._is_any_stale(bool(stale), draft.state.name):
                return written
        raise LeaseLost(f"{self._purpose}: collectors keep marking what it uses; try again")

    def _is_any_stale(self, is_stale: bool, name: str) -> bool:
        """Tell whether any rank has to write again; if none has, the coordinator commits next.

        It may commit as soon as all ranks have arrived here. So a rank that has arrived and loses the coordinator
        before it has read the answer does not know whether the snapshot was committed: that is CommitUnknown.
        """
        has_arrived = False

        def arrive() -> bool:
            nonlocal has_arrived
            has_arrived = True
            return is_stale

        try:
            return any(self._ranks.all_gather("stale", arrive))
        except RankError as error:
            if has_arrived and not _is_ended_on_all(error, self._ranks):
                raise _lose_track(error, name) from error
            raise

    def _write_manifest(self, part: Part) -> PartRef:
        digest = digest_snapshot(part.spec, part.entries)
        return PartRef(self._create_manifest(encode_manifest(part.spec, part.entries)), digest)

    def _read_entries(self, part: Part, ref: PartRef) -> Sequence[Entry]:
        """Return the entries of a part whose manifest was written, which has used them up if they were rows."""
        if not isinstance(part.entries, EntryRows):
            return part.entries
        return list(read_manifest(self._store, ref.manifest).iter_entries())

    def _create_manifest(self, data: bytes) -> ManifestRef:
        ref = ManifestRef(new_file_id(self.lease_id), hash_bytes(data), len(data))
        create_settled(self._store, manifest_key(ref.manifest_id), data)
        return ref

    def _renew(self, draft: Draft, refs: Sequence[PartRef]) -> tuple[Json, list[str]]:
        """Write the root, if there is one; then show that the save lives. Returns what is whole, and what is marked."""
        assert self._lease is not None, "the coordinator has taken it"
        whole = refs[0]
        if draft.root:
            digest = digest_parts(*draft.root, [ref.digest for ref in refs])
            whole = PartRef(self._create_manifest(encode_manifest(*draft.root, refs)), digest)
        self._lease.renew()
        return whole.to_json(), sorted(read_marked(self._store))

    def _is_stale(self, ref: ChunkRef, marked: frozenset[str]) -> bool:
        # Whoever renewed the lease just now still owns what was written under it.
        if ref.location is None or ref.location.pack_id.startswith(self.lease_id):
            return False
        return pack_key(ref.location.pack_id) in marked

    def _commit(self, draft: Draft, written: _Written) -> dict[str, Any]:
        """Create the record, and end the lease; on the coordinator."""
        content = draft.root or written.parts[0]
        before = find_before(self._store, draft.state) if draft.state.snapshot else None
        snapshot = Snapshot(
            name=draft.state.name,
            manifest=written.whole.manifest,
            digest=written.whole.digest,
            time_s=self._store.clock() if draft.time_s is None else draft.time_s,
            num_entries=len(content.entries),
            logical_bytes=count_bytes(content.entries),
            metadata=dict(draft.metadata),
            environment=dict(draft.environment),
            lease_id=self.lease_id,
            generation=draft.state.next_generation,
            write_id=new_write_id(),
        )
        self._verify_same()
        # Whatever else is raised, the record may be there, or may still arrive.
        self._is_committed = True
        try:
            commit_snapshot(self._store, snapshot)
        except NameInUse:
            self._is_committed, self._is_overtaken = False, True  # or it was never there
            raise
        except StoreError:
            self._is_committed = False
            raise
        self._end(snapshot, draft.state, before)
        return _describe_committed(snapshot)

    def _end(self, snapshot: Snapshot, state: NameState, before: Before) -> None:
        """Release the lease. Fenced: the snapshot stands only if all it uses does."""
        assert self._lease is not None, "the coordinator has taken it"
        try:
            # Once more, because the store may have vanished while the record was being created.
            self._verify_same()
            self._release_or_withdraw(self._lease, snapshot, state, before)
        except (StoreError, Corrupt, StoreGone) as error:
            raise CommitUnknown(
                f"{snapshot.name!r} was committed, but then the store failed, so it is not known whether a collector"
                f" had given up on it: {error}. Check it with `holdfast check`, or save again",
                name=snapshot.name,
            ) from error
        # What follows is housekeeping: the commit is done, and others do this if we cannot.
        with suppress(StoreError, Corrupt):
            merge_tiers(self._store)
        self._lease.forget()

    def _release_or_withdraw(self, lease: Lease, snapshot: Snapshot, state: NameState, before: Before) -> None:
        with suppress(LeaseLost):
            lease.release()
            return
        used = frozenset(iter_needed(self._store, snapshot))
        if used and not used & read_marked(self._store) and all(is_present(self._store, key) for key in used):
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

    def _verify_same(self) -> None:
        try:
            self._repo.verify_same()
        except StoreGone:
            self._is_gone = True
            raise

    def _give_up(self) -> None:
        """Leave as little behind as possible; what cannot be removed is for a collector."""
        self.packer.abort()
        # Where the store was, nothing is written: that would look like a damaged store.
        if self._lease is None or self._is_gone:
            return
        try:
            self._lease.release()
        except (StoreError, LeaseLost):
            # A record that was overtaken stands below another: without its fence it would pass for settled.
            if self._is_overtaken:
                return
        # Nothing counts that was done under it, so nobody need wait for it, whether or not it could be released.
        self._lease.forget()


class _Written(NamedTuple):
    """What a commit is made of: the parts of this rank, and where the whole is."""

    parts: Sequence[Part]
    whole: PartRef


def _describe_committed(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as plain data, for other ranks."""
    part = PartRef(snapshot.manifest, snapshot.digest)
    fields = {key.name: getattr(snapshot, key.name) for key in dataclass_fields(snapshot)}
    return fields | {"manifest": part.to_json(), "digest": None}


def _parse_committed(fields: Mapping[str, Any]) -> Snapshot:
    part = parse_part(fields["manifest"], where="the coordinator")
    return Snapshot(**(dict(fields) | {"manifest": part.manifest, "digest": part.digest}))


def _is_ended_on_all(error: RankError, ranks: Ranks) -> bool:
    """Tell whether it is certain that the step has failed on the coordinator, too, which then commits nothing.

    The coordinator knows. Another rank knows it if the step has failed because of others: that verdict is one for all
    ranks. It does not if it has lost its connection, or has failed itself after it had arrived.
    """
    return ranks.is_coordinator or (bool(error.failures) and ranks.rank not in error.failures)


def _is_refused(error: RankError, ranks: Ranks) -> bool:
    """Tell whether it is certain that nothing was committed: the coordinator says so, or is the one who asks."""
    told = error.failures.get(_COORDINATOR)
    return told is not None and (ranks.is_coordinator or told.type_name.rpartition(".")[2] in _REFUSALS)


def lose_memory(name: str) -> CommitUnknown:
    """Return the error of a save that gets no more memory when its record may be there."""
    return CommitUnknown(
        f"memory ran out while {name!r} was being committed, so it is not known whether it was;"
        f" look what {name!r} holds, or save again",
        name=name,
    )


def _lose_track(error: RankError, name: str) -> CommitUnknown:
    return CommitUnknown(
        f"a rank failed or was lost while {name!r} was being committed, so this rank does not know whether it was;"
        f" look what {name!r} holds, or save again: {error}",
        name=name,
    )


def _move_chunks(entry: Entry, moved: Mapping[Digest, Location | None]) -> Entry:
    """Return `entry` with new places for the chunks that have moved."""
    chunks = tuple(
        chunk._replace(location=moved[chunk.digest]) if chunk.digest in moved else chunk for chunk in entry.chunks
    )
    return entry._replace(chunks=chunks)
