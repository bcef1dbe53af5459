"""Commits one snapshot under one lease, in an order of steps that is safe beside collectors and other writers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple

from typing_extensions import Self

from holdfast.digest import Digest, hash_bytes
from holdfast.errors import (
    CommitUnknown,
    Corrupt,
    LeaseLost,
    NameInUse,
    NotFound,
    NotShared,
    RankError,
    StoreError,
    StoreFull,
    StoreGone,
)
from holdfast.json_text import Json
from holdfast.objects.settle import create_settled
from holdfast.objects.together import EagerCall
from holdfast.repo.format.chunk import ChunkRef, Location, iter_places
from holdfast.repo.format.entry import Entry, EntryRows, count_bytes, digest_parts, digest_snapshot
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
from holdfast.repo.format.manifest import encode_manifest, read_manifest
from holdfast.repo.handle.index import apply_merge, merge_tiers, plan_merge
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.generations import list_generations
from holdfast.repo.names.leases import Lease, kept_alive, read_bad_packs, read_marked, read_marks
from holdfast.repo.names.roots import RollbackTarget, is_present, iter_needed, read_rollback_target
from holdfast.repo.names.snapshots import CommittedSnapshot, NameState, commit_snapshot, withdraw_snapshot
from holdfast.repo.write.packing import Packer, plan_shares
from holdfast.repo.write.world import SINGLE_PROCESS, Ranks

_log = logging.getLogger(__name__)

_SEALS: Final = 8
"""How often a commit seals its content, because a collector has marked chunks of it since, before it gives up."""

_REFUSALS: Final = frozenset(kind.__name__ for kind in (NameInUse, LeaseLost, StoreError, StoreFull, StoreGone))
"""Type names of the errors that the coordinator raises only before it commits; any other may follow the commit."""


class ManifestPart(NamedTuple):
    """The content of one manifest: a whole snapshot, or one rank's part of it."""

    spec: Json
    entries: Sequence[Entry]
    since_whole: int = 0
    """See `Manifest.since_whole`."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The fields of a snapshot record that do not follow from its parts."""

    state: NameState
    """The name's current snapshot, and the generation that this commit will create."""
    metadata: Mapping[str, Json] = field(default_factory=dict)
    environment: Mapping[str, Json] = field(default_factory=dict)
    time_s: float | None = None
    """When the original was committed, if this is a copy; None: the time of this commit."""
    after_s: float = -math.inf
    """The time of this commit is later than this, whatever the clock says: that of the one before it in a series."""


@dataclass(slots=True)
class SnapshotContent:
    """What a transaction commits: the parts of this rank, and what is known of them once they are sealed."""

    draft: Draft | None = None
    """None if another process commits."""
    root: ManifestPart | None = None
    """The whole of several parts: entries without chunks. None if there is a single part, which is the whole."""
    others: Sequence[PartRef] = ()
    """Parts of the root that other processes have written (see `part_writer`)."""
    parts: Sequence[ManifestPart] = ()
    """The content of this rank's manifests."""
    refs: Sequence[PartRef] = ()
    """The manifests of `parts`, once they are written."""
    whole: PartRef | None = None
    """The manifest of the whole snapshot, once it is written."""
    stale: Sequence[ChunkRef] = ()
    """Chunks of the parts that a collector has marked: they have to be written into the transaction's own packs."""
    is_stale: bool = False
    """Whether any rank has such chunks, so that all ranks have to seal again."""
    times_sealed: int = 0

    def move(self, written: Iterable[ChunkRef]) -> None:
        """Let the parts refer to the new locations of chunks."""
        moved = {ref.digest: ref.location for ref in written}
        if moved:
            self.parts = [part._replace(entries=[_move_chunks(e, moved) for e in part.entries]) for part in self.parts]


class CommitPhase(Enum):
    """How far a transaction has come."""

    OPEN = "open"
    """Nothing is visible."""
    GONE = "gone"
    """The store has vanished; nothing is visible, and nothing may be written at its path."""
    OVERTAKEN = "overtaken"
    """Another writer was first. This record may exist below that of the other writer, without effect."""
    COMMITTED = "committed"
    """The record exists, or may exist or still appear."""
    HANDED_OVER = "handed over"
    """Another process commits what was written, and needs the lease until then."""


class Transaction:
    """One commit and its lease. Use it in a `with`: an exception before the commit leaves nothing visible.

    In the `with`: write chunks with `packer`, seal the content, write stale chunks again and seal again as long as
    there are any, then `commit` it or `hand_over` it.
    """

    def __init__(self, repo: Repository, *, purpose: str, ranks: Ranks = SINGLE_PROCESS, is_part: bool = False) -> None:
        """Prepare a save, without touching the store; `purpose` describes it in the lease and in errors.

        With `is_part`, another process commits, and this one hands its part over.
        """
        self._repo = repo
        self._store = repo.store
        self._stages = repo.counters.stages
        self._purpose = purpose
        self._ranks = ranks
        self._is_part = is_part
        self._stack = ExitStack()
        self._lease: Lease | None = None
        self.lease_id = ""
        shares = plan_shares(self._store.traits, repo.budget_bytes)
        self.packer = Packer(
            repo.index, self, shares, proven=repo.proven, speeds=repo.speeds, declare_codec=repo.declare_codec
        )
        self._draft: Draft | None = None
        # Before the commit, on the coordinator: the store is still the same, and what a withdrawal would restore.
        self._before_commit: tuple[EagerCall[None], EagerCall[RollbackTarget]] | None = None
        self.phase = CommitPhase.OPEN
        """Changes on the coordinator only: no other rank has the lease."""

    def __enter__(self) -> Self:
        """Create the lease, then read the marks and the index: a collector that marks later waits for this lease."""
        with ExitStack() as stack:
            # The store's lock, released last: by then this save writes nothing more.
            locks = stack.enter_context(ExitStack())
            stack.push(self._leave)
            # The index is a cache. It may be listed before the marks: a pack that it names is looked for after them.
            with self._store.begin(self._list_index) as index:
                self.lease_id, avoid = self._ranks.broadcast("begin", lambda: self._begin(locks))
                # While the coordinator waits for other ranks, or for an upload, nothing else would renew the lease.
                if self._lease is not None and (self._ranks.world_size > 1 or self._store.traits.upload_bytes):
                    stack.enter_context(kept_alive(self._lease))
                with self._ranks.gathering("share") if self._ranks.world_size > 1 else nullcontext():
                    self._verify_shared(locks)
                    index.result()
                self.avoid = frozenset(avoid)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abandon an uncommitted save; raises CommitUnknown if memory ran out when the record may already exist."""
        shortage = error
        try:
            self._stack.__exit__(kind, error, trace)
        except MemoryError as late:
            if self.phase is not CommitPhase.COMMITTED:
                raise
            shortage = late
        if self.phase is CommitPhase.COMMITTED and self._draft and isinstance(shortage, MemoryError):
            raise make_memory_unknown(self._draft.state.name) from shortage

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After the commit, only a released lease may be deleted: others read a lease without files as released.
        if self.phase not in (CommitPhase.COMMITTED, CommitPhase.HANDED_OVER):
            self._give_up()

    def _begin(self, locks: ExitStack) -> tuple[str, list[str]]:
        is_locked = locks.enter_context(self._store.hold(exclusive=False))
        self._lease = Lease(self._store, purpose=self._purpose, is_locked=is_locked)
        with self._store.begin(lambda: read_bad_packs(self._store)) as bad:
            marks = read_marks(self._store)
            avoid = marks.keys | bad.result()
        # The process that commits warns, once for all parts.
        for key in [] if self._is_part else marks.abandoned:
            _log.warning("%s: a garbage collection was given up (%s); run it again", self._store.url, key)
        return self._lease.lease_id, sorted(avoid)

    def _list_index(self) -> None:
        """List the index, unless that saves a request: this handle has found all chunks without it so far."""
        if self._store.traits.cheap_listings or self._repo.index.is_wanted:
            self._repo.index.relist()
        else:
            self._repo.index.expire()

    def _verify_shared(self, locks: ExitStack) -> None:
        """Raise NotShared unless this rank sees the lease that the coordinator has created."""
        if self._lease is not None:
            return  # this is the coordinator
        # Before anything is written: a directory that is local to this node must stay as it is.
        with self._store.begin(lambda: self._repo.identity.read_config(self._store)) as config:
            if not list_generations(self._store, lease_stem(self.lease_id)):
                raise NotShared(
                    f"rank {self._ranks.rank} does not see in {self._store.url} what rank {self._ranks.coordinator}"
                    " wrote there: the path is local to each node. Use one that all ranks share, or save with"
                    " collective=False"
                )
            self._repo.prepare_write(config.result())
        # Every process that writes has the shared lock: a collector that gets the exclusive one deletes at once.
        locks.enter_context(self._store.hold(exclusive=False))

    def keep_alive(self) -> None:
        """Renew the lease if it is due, show other ranks that this one is alive, and raise if one failed; cheap."""
        self._ranks.beat()
        self._ranks.check_failures()
        if self._lease is not None:
            self._lease.keep_alive()

    @contextmanager
    def sealing(self, content: SnapshotContent) -> Iterator[None]:
        """At the end of the `with`, write packs and manifests, and find the chunks that a collector has marked since.

        The body of the `with` sets `content.parts`, or moves its stale chunks. It is part of a step of all ranks: an
        error in it reaches all of them. Raises CommitUnknown if this rank does not know whether the coordinator went on
        to commit.
        """
        self._draft = content.draft
        content.times_sealed += 1
        if content.times_sealed > _SEALS:
            raise LeaseLost(f"{self._purpose}: garbage collections keep marking chunks that it uses; save again")
        with self._ranks.gathering("write") as gathering:
            yield
            if content.stale or not content.refs:  # otherwise, only other ranks write again
                with self._stages.time("commit"):
                    # Packs before manifests, so that no manifest refers to a pack that may still not be written.
                    self.packer.seal()
                    renews = not content.root and self._ranks.world_size == 1
                    content.refs = self._write_manifests(content.parts, renews=renews)
            gathering.given = [ref.to_json() for ref in content.refs]
        refs = [*content.others, *(parse_part(ref, where="a rank") for own in gathering.values for ref in own)]
        whole, marked = self._ranks.broadcast("marks", partial(self._renew, content.root, refs))
        content.whole = parse_part(whole, where="the coordinator")
        self._find_stale(content, frozenset(marked))

    def commit(self, content: SnapshotContent) -> CommittedSnapshot:
        """Commit sealed content under the name of its draft; when this returns, no collector can delete it."""
        assert not content.is_stale, "stale chunks are written and sealed again first"
        try:
            with self._stages.time("commit"):
                fields = self._ranks.broadcast("commit", lambda: self._commit(content))
        except RankError as error:
            if self.phase is CommitPhase.COMMITTED or not _is_refused(error, self._ranks):
                raise self._make_unknown(error) from error
            raise
        snapshot = _parse_committed(fields)
        self._repo.recent.remember(snapshot)
        if self._ranks.is_coordinator:
            self._repo.commits.note(snapshot)
        return snapshot

    def hand_over(self) -> None:
        """Keep the lease after the `with`: another process commits the part that was sealed.

        That process must create its own lease before this one, and keep it until it has committed: collectors wait for
        that lease. The lease of the part only shows that its files belong to a save in progress.
        """
        self.phase = CommitPhase.HANDED_OVER

    def _find_stale(self, content: SnapshotContent, marked: frozenset[str]) -> None:
        """Find this rank's stale chunks, and whether any rank has some; if none has, the coordinator commits next.

        The coordinator may commit as soon as all ranks have arrived here. A rank that has arrived and loses the
        coordinator before it reads the answer does not know whether the snapshot was committed: CommitUnknown.
        """
        has_arrived = False
        try:
            with self._ranks.gathering("stale") as gathering:
                content.stale = self._read_stale(content, marked)
                gathering.given = bool(content.stale)
                has_arrived = True
        except RankError as error:
            if has_arrived and not _is_ended_on_all(error, self._ranks):
                raise self._make_unknown(error) from error
            raise
        content.is_stale = any(gathering.values)

    def _read_stale(self, content: SnapshotContent, marked: frozenset[str]) -> list[ChunkRef]:
        """Return the chunks in marked packs that the parts use; reads the entries of parts back if any are marked."""
        if not marked:  # the usual case; going over all chunks takes long
            return []
        content.parts = [
            part._replace(entries=self._read_entries(part, ref))
            for part, ref in zip(content.parts, content.refs, strict=True)
        ]
        chunks = (chunk for part in content.parts for entry in part.entries for chunk in entry.chunks)
        return [chunk for chunk in chunks if self._is_stale(chunk, marked)]

    def _write_manifests(self, parts: Sequence[ManifestPart], *, renews: bool) -> list[PartRef]:
        """Write the index and the manifests, at once if the store wants that; with `renews`, renew the lease as well.

        Nothing refers to any of them yet, so their order does not matter: the marks are read when all are done.
        """
        works: list[Callable[[], PartRef | None]] = [partial(self._write_manifest, part) for part in parts]
        if renews:
            works.append(self._renew_lease)
        _, *refs = self._store.run_together([self.packer.write_index, *works])
        return [ref for ref in refs if ref is not None]

    def _renew_lease(self) -> None:
        assert self._lease is not None, "the coordinator has created it"
        self._lease.renew()

    def _write_manifest(self, part: ManifestPart) -> PartRef:
        digest = digest_snapshot(part.spec, part.entries)
        return PartRef(
            self._create_manifest(encode_manifest(part.spec, part.entries, since_whole=part.since_whole)), digest
        )

    def _read_entries(self, part: ManifestPart, ref: PartRef) -> Sequence[Entry]:
        """Return the entries of a part after its manifest was written; writing empties rows, so these are read back."""
        if not isinstance(part.entries, EntryRows):
            return part.entries
        try:
            return list(read_manifest(self._store, ref.manifest).iter_entries())
        except NotFound as error:  # only a collector that has fenced the lease removes it
            raise LeaseLost(f"{self._purpose}: a garbage collection has removed what it wrote; save again") from error

    def _create_root(self, root: ManifestPart, refs: Sequence[PartRef]) -> ManifestRef:
        return self._create_manifest(encode_manifest(root.spec, root.entries, refs))

    def _create_manifest(self, data: bytes) -> ManifestRef:
        ref = ManifestRef(new_file_id(self.lease_id), hash_bytes(data), len(data))
        create_settled(self._store, manifest_key(ref.manifest_id), data)
        return ref

    def _renew(self, root: ManifestPart | None, refs: Sequence[PartRef]) -> tuple[Json, list[str]]:
        """Write the root manifest, if there is one; renew the lease; return the snapshot's manifest and all marks."""
        whole = refs[0]
        # Renew before reading marks. The renewal proves that no collector has fenced this save. A mark that is not
        # seen now is published later, so its collector finds this lease alive and waits for it.
        if root:
            digest = digest_parts(root.spec, root.entries, [ref.digest for ref in refs])
            works: list[Callable[[], ManifestRef | None]] = [partial(self._create_root, root, refs), self._renew_lease]
            manifest, _ = self._store.run_together(works)
            assert manifest is not None, "created just now"
            whole = PartRef(manifest, digest)
        elif self._ranks.world_size > 1:
            self._renew_lease()
        if not self._is_part:
            self._prepare_commit()
        return whole.to_json(), sorted(read_marked(self._store))

    def _prepare_commit(self) -> None:
        """Begin the reads that the commit needs."""
        assert self._draft is not None, "set by `sealing`"
        state = self._draft.state

        def read_before() -> RollbackTarget:
            return read_rollback_target(self._store, state) if state.snapshot else None

        same = self._stack.enter_context(self._store.begin(self._verify_same))
        before = self._stack.enter_context(self._store.begin(read_before))
        self._before_commit = same, before

    def _make_unknown(self, error: RankError) -> CommitUnknown:
        name = self._draft.state.name if self._draft else ""
        return CommitUnknown(
            f"a rank failed or was lost while {name!r} was being committed, so this rank does not know whether it was;"
            f" check what {name!r} contains, or save again: {error}",
            name=name,
        )

    def _is_stale(self, ref: ChunkRef, marked: frozenset[str]) -> bool:
        # The lease was renewed just now, so collectors still spare all that was written under it.
        packs = [at.pack_id for at in iter_places(ref.location)] if ref.location else []
        return any(not pack_id.startswith(self.lease_id) and pack_key(pack_id) in marked for pack_id in packs)

    def _find_time(self, draft: Draft) -> float:
        if draft.time_s is not None:
            return draft.time_s
        # A microsecond: what a record keeps of a time, and people see of it.
        return max(self._store.clock(), draft.after_s + 1e-6)

    def _commit(self, content: SnapshotContent) -> dict[str, Any]:
        """Create the snapshot record and release the lease; on the coordinator."""
        root = content.root or content.parts[0]
        draft, whole = content.draft, content.whole
        assert draft is not None, "only the process that commits calls this"
        assert whole is not None, "set when the content is sealed"
        assert self._before_commit is not None, "set with the marks"
        same, rollback = self._before_commit
        before = rollback.result()
        snapshot = CommittedSnapshot(
            name=draft.state.name,
            manifest=whole.manifest,
            digest=whole.digest,
            time_s=self._find_time(draft),
            num_entries=len(root.entries),
            logical_bytes=count_bytes(root.entries),
            metadata=dict(draft.metadata),
            environment=dict(draft.environment),
            lease_id=self.lease_id,
            generation=draft.state.next_generation,
            write_id=new_write_id(),
        )
        same.result()
        # Set before the attempt: unless the errors below prove otherwise, the record may exist, or still appear.
        self.phase = CommitPhase.COMMITTED
        try:
            commit_snapshot(self._store, snapshot)
        except NameInUse:
            self.phase = CommitPhase.OVERTAKEN
            raise
        except StoreError:
            self.phase = CommitPhase.OPEN
            raise
        self._end(snapshot, draft.state, before)
        return _describe_committed(snapshot)

    def _end(self, snapshot: CommittedSnapshot, state: NameState, before: RollbackTarget) -> None:
        """Release the lease; if it was fenced, withdraw the snapshot unless all that it uses is still there."""
        assert self._lease is not None, "the coordinator has created it"
        try:
            self._release_or_withdraw(self._lease, snapshot, state, before)
        except (StoreError, Corrupt, StoreGone) as error:
            raise CommitUnknown(
                f"{snapshot.name!r} was committed, but then the store failed, so it is not known whether a garbage"
                f" collection removed bytes that it uses: {error}. Run `holdfast check`, or save again",
                name=snapshot.name,
            ) from error
        # The commit is done. The rest is cleanup, which later saves and collectors do if this fails.
        self._store.run_together([self._merge_index, self._lease.forget])

    def _merge_index(self) -> None:
        store = self._store
        with suppress(StoreError, Corrupt):
            if store.traits.cheap_listings:
                merge_tiers(store)
            elif plan := plan_merge(self._repo.index.listed):
                # Without another listing. If two processes merge the same fragments, both write the same one; what
                # other ranks have written for this save is merged by a later one.
                apply_merge(store, plan)

    def _release_or_withdraw(
        self, lease: Lease, snapshot: CommittedSnapshot, state: NameState, before: RollbackTarget
    ) -> None:
        with suppress(LeaseLost):
            # Again: the store may have vanished while the record was being created.
            self._store.run_together([self._verify_same, lease.release])
            return
        # Fenced: collectors no longer wait for this save, so what they have marked counts as deleted.
        used = frozenset(iter_needed(self._store, snapshot))
        if used and not used & read_marked(self._store) and all(is_present(self._store, key) for key in used):
            return
        try:
            if before == "undecided":
                before = read_rollback_target(self._store, state)
            if before == "undecided":
                raise NameInUse(f"the previous content of {snapshot.name!r} may be withdrawn too", name=snapshot.name)
            withdraw_snapshot(self._store, snapshot, before)
        except NameInUse as error:
            raise CommitUnknown(
                f"{self._purpose}: a garbage collection considered this save dead and removed bytes that it used,"
                f" and the snapshot could not be withdrawn ({error}); check what {snapshot.name!r} contains, then"
                " save again",
                name=snapshot.name,
            ) from error
        raise LeaseLost(
            f"{self._purpose}: a garbage collection considered this save dead and removed bytes that it used;"
            " the snapshot was withdrawn. Save again"
        )

    def _verify_same(self) -> None:
        try:
            self._repo.verify_same()
        except StoreGone:
            if self.phase is CommitPhase.OPEN:
                self.phase = CommitPhase.GONE
            raise

    def _give_up(self) -> None:
        """Remove what an uncommitted save has written, as far as possible; a collector removes the rest."""
        self.packer.abort()
        # If the store has vanished, write nothing at its path: that would look like a damaged store.
        if self._lease is None or self.phase is CommitPhase.GONE:
            return
        try:
            self._lease.release()
        except (StoreError, LeaseLost):
            # Our record may exist below the one that overtook it. With its lease deleted, it would count as settled.
            if self.phase is CommitPhase.OVERTAKEN:
                return
        # Nothing was committed, so collectors need not wait for this lease, whether or not it could be released.
        self._lease.forget()


def _describe_committed(snapshot: CommittedSnapshot) -> dict[str, Any]:
    """Return a snapshot as plain data, for other ranks."""
    part = PartRef(snapshot.manifest, snapshot.digest)
    fields = {key.name: getattr(snapshot, key.name) for key in dataclass_fields(snapshot)}
    return fields | {"manifest": part.to_json(), "digest": None}


def _parse_committed(fields: Mapping[str, Any]) -> CommittedSnapshot:
    part = parse_part(fields["manifest"], where="the coordinator")
    return CommittedSnapshot(**(dict(fields) | {"manifest": part.manifest, "digest": part.digest}))


def _is_ended_on_all(error: RankError, ranks: Ranks) -> bool:
    """Return whether the step has certainly failed on the coordinator too, which then commits nothing.

    The coordinator itself knows. Another rank knows if the step failed because of other ranks: such a failure ends the
    step on all ranks. It does not know if it lost its connection, or failed itself after it had arrived.
    """
    return ranks.is_coordinator or (bool(error.failures) and ranks.rank not in error.failures)


def _is_refused(error: RankError, ranks: Ranks) -> bool:
    """Return whether certainly nothing was committed: the coordinator reported so, or is this rank."""
    reported = error.failures.get(ranks.coordinator)
    return reported is not None and (ranks.is_coordinator or reported.type_name.rpartition(".")[2] in _REFUSALS)


def make_memory_unknown(name: str) -> CommitUnknown:
    """Return the error of a save that ran out of memory when its record may already exist."""
    return CommitUnknown(
        f"memory ran out while {name!r} was being committed, so it is not known whether it was;"
        f" check what {name!r} contains, or save again",
        name=name,
    )


def _move_chunks(entry: Entry, moved: Mapping[Digest, Location | None]) -> Entry:
    """Return `entry` with the new locations of the chunks that were rewritten."""
    chunks = tuple(
        chunk._replace(location=moved[chunk.digest]) if chunk.digest in moved else chunk for chunk in entry.chunks
    )
    return entry._replace(chunks=chunks)
