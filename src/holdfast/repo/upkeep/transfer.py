"""Commits a snapshot again in a target, referring to chunks that are present and copying the others to new packs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from holdfast.digest import Digest
from holdfast.errors import DigestMismatch
from holdfast.progress import Progress
from holdfast.repo.engine import Engine
from holdfast.repo.format.chunk import CHUNK_BYTES, ChunkRef, Location
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import manifest_key, pack_key
from holdfast.repo.format.pack import NewChunk, choose_alignment
from holdfast.repo.format.rank_manifests import Manifests, read_manifests
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, NameState
from holdfast.repo.read.reader import SnapshotReader
from holdfast.repo.write.existing import ExistingChunks, read_bases
from holdfast.repo.write.packing import Packer
from holdfast.repo.write.transaction import Draft, ManifestPart, Transaction

_WINDOW: Final = 8
"""The number of chunks that are looked up and read at the same time."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Keeps = Callable[[Location], bool]
"""Returns whether the new manifest may refer to this location in the target."""


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


def transfer_snapshot(job: Job, progress: Progress) -> Transferred:
    """Commit a snapshot in the target with the same time, metadata and content digest."""
    snapshot = job.snapshot
    origin = "" if job.source is job.target else f" from {job.source.store.url}"
    progress.begin(f"{job.verb} {snapshot.name}", snapshot.logical_bytes)
    try:
        with (
            Transaction(job.target, purpose=f"{job.verb} {snapshot.name!r}{origin}") as transaction,
            SnapshotReader(job.source, snapshot) as reader,
            Engine(f"holdfast-{job.verb}", budget_bytes=job.target.budget_bytes, waits=True) as engine,
        ):
            manifests = _read_stated(reader, job.source)
            avoid = transaction.avoid | {pack_key(pack_id) for pack_id in job.victims or ()}
            holdings = ExistingChunks(job.target, read_bases(job.target.store, job.bases), avoid=avoid)
            transfer = Transfer(reader, holdings, transaction.packer, engine)
            draft = Draft(
                job.state,
                snapshot.metadata,
                snapshot.environment,
                time_s=snapshot.time_s,
                root=ManifestPart(manifests.root.spec, list(manifests.root.iter_entries()))
                if manifests.parts
                else None,
            )

            def move() -> list[ManifestPart]:
                parts = [ManifestPart(each.spec, list(each.iter_entries())) for each in manifests.with_chunks]
                return transfer.move(parts, progress, keeps=lambda at: job.keeps(at, avoid))

            copied = transaction.commit(draft, move, rewrite=transfer.rewrite)
            new_bytes = transfer.moved_bytes + transfer.inline_bytes
            return Transferred(copied, new_bytes, manifests.content_bytes - new_bytes)
    finally:
        progress.end()


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

    def __init__(self, reader: SnapshotReader, holdings: ExistingChunks, packer: Packer, engine: Engine) -> None:
        """Read from `reader`, find present chunks in `holdings`, write to `packer`."""
        self.moved_bytes = 0
        self.inline_bytes = 0
        """Bytes of values in manifests, which every copy writes again."""
        self._reader = reader
        self._holdings = holdings
        self._packer = packer
        self._engine = engine
        self._known: dict[Digest, Location] = {}
        self._last: _Step | None = None
        self._entries: list[Entry] = []

    def move(self, parts: Sequence[ManifestPart], progress: Progress, *, keeps: Keeps) -> list[ManifestPart]:
        """Return `parts` with locations in the target for all their chunks; inline chunks are verified."""
        steps = []
        self._entries = [entry for part in parts for entry in part.entries]
        for step in (step for entry in self._entries for step in _iter_steps(entry)):
            if step.ref.location:
                steps.append(step)
            else:
                self._read(step)
                self.inline_bytes += step.ref.size_bytes
        for first in range(0, len(steps), _WINDOW):
            window = steps[first : first + _WINDOW]
            self._settle(window, keeps)
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
            self._append(step, self._read(step))
        return [ref._replace(location=self._known[ref.digest]) for ref in refs]

    def _settle(self, window: Sequence[_Step], keeps: Keeps) -> None:
        """Find each chunk of the window in the target, or write it there."""
        unknown: dict[Digest, _Step] = {}
        for step in window:
            at = step.ref.location
            if step.ref.digest in self._known or at is None:
                continue
            if keeps(at):
                self._known[step.ref.digest] = at
            else:
                unknown.setdefault(step.ref.digest, step)
        asked = [(step, self._holdings.find(step.ref.digest, step.ref.size_bytes)) for step in unknown.values()]
        missing = []
        for (step, _), found in zip(asked, self._work(self._choose_intact, asked), strict=True):
            if found:
                self._known[step.ref.digest] = found
            else:
                missing.append(step)
        for step, data in zip(missing, self._work(self._read, missing), strict=True):
            self._append(step, data)

    def _work(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        # A window is small enough for all its chunks to be in memory at the same time.
        return self._engine.iter_results(work, ((item, CHUNK_BYTES) for item in items))

    def _choose_intact(self, asked: tuple[_Step, Sequence[Location]]) -> Location | None:
        step, candidates = asked
        return next((at for at in candidates if self._holdings.is_copy(at, step.ref.digest)), None)

    def _read(self, step: _Step) -> memoryview:
        return self._reader.read_chunk(step.entry, step.position)

    def _append(self, step: _Step, data: memoryview) -> None:
        last = self._last
        is_next = last is not None and last.entry is step.entry and last.position + 1 == step.position
        alignment = 1 if is_next else choose_alignment(step.entry.size_bytes - step.start)
        (location,) = self._packer.append([NewChunk(step.ref.digest, data, alignment)])
        self._known[step.ref.digest] = location
        self._last = step
        self.moved_bytes += data.nbytes


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
