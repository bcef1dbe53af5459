"""Transfers snapshots: copies them to another repository, or their live chunks out of mostly dead packs (repack).

Only chunks that the target lacks are copied; they are verified on both sides. The snapshot is then committed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

from holdfast.digest import Digest
from holdfast.errors import DigestMismatch, NameInUse, NotFound
from holdfast.json_text import canonical_json
from holdfast.progress import Progress, Silent
from holdfast.repo.engine import Engine
from holdfast.repo.format.chunk import BLOSC2, CHUNK_BYTES, DELTA, RAW, Base, ChunkRef, Location, iter_places
from holdfast.repo.format.codec import encode, find_base_digest, find_item_bytes
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import find_shelf, manifest_key, pack_key
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.format.pack import NewChunk, choose_alignment
from holdfast.repo.format.rank_manifests import Manifests, read_manifests, read_needs
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.roots import is_settled
from holdfast.repo.names.snapshots import CommittedSnapshot, NameState, read_name
from holdfast.repo.read.any_copy import StoredChunk
from holdfast.repo.read.reader import SnapshotReader
from holdfast.repo.upkeep.usage import read_usage
from holdfast.repo.write.existing import ExistingChunks, WantedChunk, is_whole, read_base, read_bases
from holdfast.repo.write.packing import Packer
from holdfast.repo.write.transaction import Draft, ManifestPart, SnapshotContent, Transaction
from holdfast.repo.write.writer import SaveResult

_WINDOW: Final = 8
"""The least number of chunks that are looked up and read at the same time."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Keeps = Callable[[Location], bool]
"""Returns whether the new manifest may refer to this location in the target."""
MayReplace = Callable[[CommittedSnapshot], bool]
"""Returns whether a copy may replace the snapshot that has its name in the target."""
DEAD_SHARE: Final = 0.5
"""A pack with a larger share of dead bytes than this is repacked."""
SLACK_SHARE: Final = 0.1
"""The dead bytes that a thorough repack may leave, as a share of the live bytes."""


@dataclass(frozen=True, slots=True)
class Job:
    """A snapshot whose bytes will be stored elsewhere: in another repository, or in other packs of its own."""

    verb: str
    source: Repository
    snapshot: CommittedSnapshot
    target: Repository
    state: NameState
    """The state of the name in the target."""
    bases: tuple[CommittedSnapshot | None, ...] = ()
    """Snapshots of the target that are likely to share many chunks."""
    victims: frozenset[str] | None = None
    """Within one repository, the packs to empty: chunks in all others are kept. None for a copy, which keeps none."""
    damaged: CommittedSnapshot | None = None
    """A snapshot of the target whose intact chunks are read there, even in packs that are listed as bad."""

    def keeps(self, location: Location, avoid: frozenset[str]) -> bool:
        """Return whether the new manifest may refer to this location."""
        return self.victims is not None and pack_key(location.pack_id) not in avoid


class Transferred(NamedTuple):
    """A snapshot in its target, and how many of its bytes were written or reused there."""

    snapshot: CommittedSnapshot
    new_bytes: int
    """Bytes of chunks that were copied, and of values in the new manifests."""
    reused_bytes: int
    """Bytes of chunks that were already present in the target."""
    stored_bytes: int
    """What the new bytes take in the target."""


def transfer_snapshot(job: Job, progress: Progress) -> Transferred:
    """Commit a snapshot in the target with the same time, metadata and content digest."""
    snapshot = job.snapshot
    origin = "" if job.source is job.target else f" from {job.source.store.url}"
    progress.begin(f"{job.verb} {snapshot.name}", snapshot.logical_bytes)
    try:
        with (
            Transaction(job.target, purpose=f"{job.verb} {snapshot.name!r}{origin}") as transaction,
            SnapshotReader(job.source, snapshot) as reader,
            _start_engine(job) as engine,
        ):
            manifests = _read_stated(reader, job.source)
            avoid = transaction.avoid | {pack_key(pack_id) for pack_id in job.victims or ()}
            existing = ExistingChunks(job.target, read_bases(job.target.store, job.bases), avoid=avoid)
            transfer = Transfer(reader, existing, transaction.packer, engine, Stores.of(job))
            transfer.keeps = lambda at: job.keeps(at, avoid)
            transfer.moves_bases = job.victims is not None
            if job.damaged:
                bases = read_bases(job.target.store, [job.damaged])
                transfer.salvage = ExistingChunks(job.target, bases, avoid=frozenset())
            content = SnapshotContent(Draft(job.state, snapshot.metadata, snapshot.environment, time_s=snapshot.time_s))
            if manifests.parts:
                content.root = _list_part(manifests.root)
            with transaction.sealing(content):
                content.parts = transfer.move([_list_part(each) for each in manifests.with_chunks], progress)
            while content.is_stale:
                with transaction.sealing(content):
                    content.move(transfer.rewrite(content.stale))
            copied = transaction.commit(content)
            new_bytes = transfer.moved_bytes + transfer.inline_bytes
            stored_bytes = transfer.stored_bytes + transfer.inline_bytes
            return Transferred(copied, new_bytes, manifests.content_bytes - new_bytes, stored_bytes)
    finally:
        progress.end()


def _list_part(manifest: Manifest) -> ManifestPart:
    return ManifestPart(manifest.spec, list(manifest.iter_entries()), manifest.since_whole)


def _start_engine(job: Job) -> Engine:
    requests = job.source.store.traits.reads_at_once
    return Engine(f"holdfast-{job.verb}", budget_bytes=job.target.budget_bytes, waits=True, requests=requests)


def _read_stated(reader: SnapshotReader, source: Repository) -> Manifests:
    """Read the manifests of a snapshot; raises DigestMismatch if they differ from its record; a copy would hide it."""
    snapshot = reader.snapshot
    manifests = read_manifests(source.store, snapshot.manifest)
    if manifests.digest() != snapshot.digest:
        raise DigestMismatch(
            f"{snapshot.name!r} in {source.store.url} does not have the content that its record states;"
            " run `holdfast check` there, and save it again or restore it from a copy",
            key=manifest_key(snapshot.manifest.manifest_id),
        )
    return manifests


@dataclass(frozen=True, slots=True)
class Stores:
    """What a transfer needs to know about the stores at its ends."""

    window: int = _WINDOW
    """The number of chunks that are looked up and read at the same time."""
    reads_back: bool = True
    """Whether copies in the target are read before they are reused."""

    @classmethod
    def of(cls, job: Job) -> Stores:
        """Return what a job needs: as many requests at once as a store answers best, within half of the budget."""
        target = job.target.store.traits
        best = max(job.source.store.traits.requests_at_once, target.requests_at_once)
        room = job.target.budget_bytes // 2 // CHUNK_BYTES
        return cls(max(_WINDOW, min(best, room)), reads_back=not target.checked_uploads)


@dataclass(frozen=True, slots=True)
class _Step:
    """One chunk of one entry: its index, and its offset in the entry."""

    entry: Entry
    position: int
    start: int

    @property
    def ref(self) -> ChunkRef:
        return self.entry.chunks[self.position]


class Transfer:
    """Copies missing chunks, each once, verified when read; for use by one thread."""

    def __init__(
        self, reader: SnapshotReader, existing: ExistingChunks, packer: Packer, engine: Engine, stores: Stores
    ) -> None:
        """Read from `reader`, find present chunks in `existing`, write to `packer`."""
        self.salvage: ExistingChunks | None = None
        """Finds chunks that are intact in packs of the target to which the new manifest must not refer."""
        self.keeps: Keeps = lambda location: False
        """Whether the new manifest may refer to a location in the old one."""
        self.moves_bases = False
        """Whether the base of a delta is moved with it. Otherwise a delta whose base is not there is stored whole."""
        self._stores = stores
        self.moved_bytes = 0
        self.stored_bytes = 0
        """What the moved bytes take in packs."""
        self.inline_bytes = 0
        """Bytes of values in manifests, which every copy writes again."""
        self._reader = reader
        self._existing = existing
        self._packer = packer
        self._engine = engine
        self._known: dict[Digest, Location] = {}
        self._last: _Step | None = None
        self._entries: list[Entry] = []

    def move(self, parts: Sequence[ManifestPart], progress: Progress) -> list[ManifestPart]:
        """Return `parts` with locations in the target for all their chunks; inline chunks are verified."""
        steps = []
        self._entries = [entry for part in parts for entry in part.entries]
        for step in (step for entry in self._entries for step in _iter_steps(entry)):
            if step.ref.location:
                steps.append(step)
            else:
                self._read(step)
                self.inline_bytes += step.ref.size_bytes
        for first in range(0, len(steps), self._stores.window):
            window = steps[first : first + self._stores.window]
            self._settle(window)
            progress.advance(sum(step.ref.size_bytes for step in window))
        return [part._replace(entries=[_relocate(entry, self._known) for entry in part.entries]) for part in parts]

    def rewrite(self, refs: Sequence[ChunkRef]) -> list[ChunkRef]:
        """Write chunks into packs of this transfer, even if they are present elsewhere."""
        wanted = {ref.digest for ref in refs}
        steps: dict[Digest, _Step] = {}
        for entry in self._entries:
            for step in _iter_steps(entry):
                if step.ref.digest in wanted:
                    steps.setdefault(step.ref.digest, step)
        for step in steps.values():
            self._append(step, _make_whole(self._read(step)))
        return [ref._replace(location=self._known[ref.digest]) for ref in refs]

    def _settle(self, window: Sequence[_Step]) -> None:
        """Find each chunk of the window in the target, or write it there."""
        unknown: dict[Digest, _Step] = {}
        for step in window:
            at = step.ref.location
            if step.ref.digest in self._known or at is None:
                continue
            if all(map(self.keeps, iter_places(at))):
                self._known[step.ref.digest] = at
            else:
                unknown.setdefault(step.ref.digest, step)
        self._existing.read_packs(WantedChunk(step.ref.digest, step.ref.size_bytes) for step in unknown.values())
        asked = [(step, self._existing.find(step.ref.digest, step.ref.size_bytes)) for step in unknown.values()]
        missing = []
        for (step, _), found in zip(asked, self._work(self._choose_intact, asked), strict=True):
            if found:
                self._known[step.ref.digest] = found
            else:
                missing.append(step)
        for step, chunk in zip(missing, self._read_missing(missing), strict=True):
            self._append(step, chunk)

    def _settle_base(self, step: _Step, chunk: StoredChunk) -> Base | None:
        """Return the base of a delta in the target, moved there if that is wanted; None if the target lacks it."""
        digest = find_base_digest(chunk.stored)
        at = self._find_base(digest, len(chunk.raw))
        if at is None and self.moves_bases:
            base = _make_whole(self._reader.read_base(step.entry, step.position, digest))
            new = NewChunk(digest, base.stored, choose_alignment(0), None, base.codec, len(base.raw))
            at = self._known[digest] = self._write(new)
        return None if at is None else Base(digest, at)

    def _find_base(self, digest: Digest, size_bytes: int) -> Location | None:
        """Return an intact copy of a base in the target, to which the new manifest may refer; None if it has none."""
        known = self._known.get(digest)
        if known is not None and known.codec != DELTA:
            return known
        copies = (at for at in self._existing.iter_copies(digest, size_bytes) if at.codec != DELTA)
        reads_back = self._stores.reads_back
        return next((at for at in copies if not reads_back or self._existing.is_copy(at, digest, size_bytes)), None)

    def _read_missing(self, missing: Sequence[_Step]) -> Iterable[StoredChunk]:
        if self.salvage:
            found = [(step, self.salvage.find(step.ref.digest, step.ref.size_bytes)) for step in missing]
            return self._work(self._read_salvaged, found)
        return self._work(self._read, missing)

    def _work(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        # A window is small enough for all its chunks to be in memory at the same time.
        return self._engine.iter_results(work, ((item, CHUNK_BYTES) for item in items))

    def _choose_intact(self, asked: tuple[_Step, Sequence[Location]]) -> Location | None:
        step, candidates = asked
        identity = step.ref.digest, step.ref.size_bytes
        reads_back = self._stores.reads_back
        return next((at for at in candidates if not reads_back or self._existing.is_copy(at, *identity)), None)

    def _read_salvaged(self, found: tuple[_Step, Sequence[Location]]) -> StoredChunk:
        step, candidates = found
        assert self.salvage is not None
        intact = (self.salvage.read_copy(at, step.ref.digest, step.ref.size_bytes) for at in candidates)
        return next((chunk for chunk in intact if chunk is not None), None) or self._read(step)

    def _read(self, step: _Step) -> StoredChunk:
        return self._reader.read_stored(step.entry, step.position)

    def _append(self, step: _Step, chunk: StoredChunk) -> None:
        """Append a chunk as it is stored in the source: verified, but not encoded again.

        A delta stays one if the target has its base; otherwise it is stored whole.
        """
        base = self._settle_base(step, chunk) if chunk.codec == DELTA else None
        at = step.ref.location
        if base is not None and at is not None and at.base and at.base.digest == base.digest and self.keeps(at):
            self._known[step.ref.digest] = at._replace(base=base)  # only the base has to be elsewhere
            return
        chunk = chunk if base is not None else _make_whole(chunk)
        last = self._last
        is_next = last is not None and last.entry is step.entry and last.position + 1 == step.position
        is_raw = chunk.codec == RAW
        alignment = 1 if is_next else choose_alignment(step.entry.size_bytes - step.start if is_raw else 0)
        new = NewChunk(step.ref.digest, chunk.stored, alignment, None, chunk.codec, len(chunk.raw))
        self._known[step.ref.digest] = self._write(new)._replace(base=base)
        self._last = step
        self.moved_bytes += len(chunk.raw)

    def _write(self, new: NewChunk) -> Location:
        (location,) = self._packer.append([new])
        # Each pack when it is durable, not all of them at the end: a copy that was cut off is continued where it was.
        self._packer.write_index()
        self.stored_bytes += location.stored_bytes
        return location


def _make_whole(chunk: StoredChunk) -> StoredChunk:
    """Return a chunk as it is stored without a base: encoded if that makes it smaller."""
    if chunk.codec != DELTA:
        return chunk
    encoded = encode(chunk.raw, "small", find_item_bytes(chunk.stored))
    if encoded is None:
        return StoredChunk(chunk.raw, chunk.raw, RAW)
    return StoredChunk(chunk.raw, memoryview(encoded), BLOSC2)


def _iter_steps(entry: Entry) -> list[_Step]:
    steps = []
    start = 0
    for position, ref in enumerate(entry.chunks):
        steps.append(_Step(entry, position, start))
        start += ref.size_bytes
    return steps


def _relocate(entry: Entry, locations: dict[Digest, Location]) -> Entry:
    chunks = tuple(
        ref._replace(location=locations[ref.digest]) if ref.location is not None else ref for ref in entry.chunks
    )
    return entry._replace(chunks=chunks)


def copy_snapshot(
    source: Repository,
    snapshot: CommittedSnapshot,
    target: Repository,
    *,
    name: str | None = None,
    overwrite: bool = False,
    may_replace: MayReplace = lambda current: False,
    progress: Progress | None = None,
) -> SaveResult:
    """Copy one snapshot, under its name or another, with its commit time, metadata and content digest.

    After an interruption, repeat the copy: packs that were completed are found by the index and not copied again.
    Raises NameInUse if the name has other content in the target, unless `overwrite` or `may_replace`.
    """
    started = time.monotonic()
    name = snapshot.name if name is None else name
    state = read_name(target.verify_same(), name)
    current = state.snapshot
    is_copied = current is not None and is_same(current, snapshot)
    if current and is_copied and is_settled(target.store, current) and is_whole(target, current):
        target.store.sync(find_shelf(name))
        reused = read_manifests(target.store, current.manifest).content_bytes
        seconds = time.monotonic() - started
        sizes = (current.logical_bytes, 0, reused)
        return SaveResult(name, current.digest, current.generation, *sizes, seconds, existed=True)
    if current and not is_copied and not (overwrite or may_replace(current)):
        raise NameInUse(
            f"{name!r} is in use in {target.store.url} and holds other content; nothing was copied."
            " Overwrite it (--overwrite, overwrite=True) or delete it there first",
            name=name,
        )
    target.verify_may_write()
    target.index.refresh()
    bases = (current, read_base(target, name))
    done = transfer_snapshot(Job("copy", source, snapshot, target, state, bases), progress or Silent())
    copied, seconds = done.snapshot, time.monotonic() - started
    sizes = (copied.logical_bytes, done.new_bytes, done.reused_bytes)
    stored_bytes = done.stored_bytes
    return SaveResult(copied.name, copied.digest, copied.generation, *sizes, seconds, stored_bytes=stored_bytes)


def restore_snapshot(
    source: Repository, donor: CommittedSnapshot, target: Repository, damaged: CommittedSnapshot, progress: Progress
) -> CommittedSnapshot:
    """Commit a damaged snapshot of the target again, with the chunks that it lost from one of equal content.

    Raises NameInUse if the name was changed after `damaged` was read.
    """
    state = read_name(target.store, damaged.name)
    if state.snapshot is None or state.snapshot.write_id != damaged.write_id:
        raise NameInUse(f"{damaged.name!r} was changed while it was being repaired; repair again", name=damaged.name)
    target.index.refresh()
    facts = replace(damaged, manifest=donor.manifest)
    return transfer_snapshot(Job("restore", source, facts, target, state, damaged=damaged), progress).snapshot


def is_same(current: CommittedSnapshot, snapshot: CommittedSnapshot) -> bool:
    """Return whether two records of one name describe the same content and metadata."""
    return current.digest == snapshot.digest and canonical_json(current.metadata) == canonical_json(snapshot.metadata)


@dataclass(frozen=True, slots=True)
class RepackPlan:
    """Packs to be emptied, and the snapshots that use them."""

    victims: frozenset[str]
    """Pack ids."""
    snapshots: tuple[CommittedSnapshot, ...]
    live_bytes: int
    """Bytes to be copied."""
    freed_bytes: int
    """Bytes that collecting the victims will free, less those copied."""


def plan_repack(
    repo: Repository,
    snapshots: Sequence[CommittedSnapshot],
    *,
    dead_share: float = DEAD_SHARE,
    slack_share: float | None = None,
) -> RepackPlan:
    """Choose the packs that are still used and whose dead share is more than `dead_share`. Reads only.

    With `slack_share`, also choose the next most dead packs, until the dead bytes in all others are at most that share
    of the live bytes.
    """
    used = [pack for pack in read_usage(repo.store, snapshots).packs if pack.live_bytes]
    left = sum(pack.dead_bytes for pack in used)
    allowed = left if slack_share is None else slack_share * sum(pack.live_bytes for pack in used)
    chosen = []
    for pack in sorted(used, key=lambda pack: pack.dead_share, reverse=True):
        if pack.dead_share > dead_share or (pack.dead_bytes and left > allowed):
            chosen.append(pack)
            left -= pack.dead_bytes
    victims = frozenset(pack.pack_id for pack in chosen)
    concerned = tuple(snapshot for snapshot in snapshots if victims.intersection(_find_packs(repo, snapshot)))
    live = sum(pack.live_bytes for pack in chosen)
    return RepackPlan(victims, concerned, live, sum(pack.dead_bytes for pack in chosen))


def _find_packs(repo: Repository, snapshot: CommittedSnapshot) -> list[str]:
    try:
        return read_needs(repo.store, snapshot.manifest).packs
    except NotFound:
        return []  # it was deleted and collected after it was listed


def apply_repack(repo: Repository, plan: RepackPlan, *, progress: Progress | None = None) -> list[CommittedSnapshot]:
    """Commit a new generation of each snapshot that needs none of the victims; return the moved snapshots.

    Content digest, commit time and metadata are kept. A name that was changed after the plan was made is skipped.
    """
    progress = progress or Silent()
    repo.verify_may_write()
    moved = []
    for snapshot in plan.snapshots:
        state = read_name(repo.store, snapshot.name)
        if state.snapshot is None or state.snapshot.write_id != snapshot.write_id:
            continue
        try:
            moved.append(move_snapshot(repo, state, snapshot, plan.victims, progress))
        except NameInUse:
            continue
        except NotFound:
            if read_name(repo.store, snapshot.name).next_generation == state.next_generation:
                raise  # it was not deleted, so its files are lost
    return moved


def move_snapshot(
    repo: Repository, state: NameState, snapshot: CommittedSnapshot, victims: frozenset[str], progress: Progress
) -> CommittedSnapshot:
    """Commit a new generation of `snapshot` that has no chunks in the packs `victims`."""
    return transfer_snapshot(Job("repack", repo, snapshot, repo, state, victims=victims), progress).snapshot
