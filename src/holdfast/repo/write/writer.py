"""Saves a request: refuses what could not be read back, reuses stored chunks, writes the others, commits last."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from holdfast.digest import Digest, short_hex
from holdfast.display.markup import Bar, Card, render_card
from holdfast.errors import (
    BadName,
    NameInUse,
    RankError,
    StoreFull,
    TooLarge,
    Unsupported,
)
from holdfast.json_text import EncodedJson, Json, canonical_json
from holdfast.objects.protocol import ObjectInfo
from holdfast.progress import Progress, Silent
from holdfast.repo.engine import Engine
from holdfast.repo.format.chunk import INLINE_BYTES, ChunkRef
from holdfast.repo.format.codec import CodecLevel
from holdfast.repo.format.entry import NO_RANK, ChunkRows, Entry, EntryRows, digest_parts, digest_snapshot, repeat_rows
from holdfast.repo.format.layout import find_shelf, verify_name
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.format.source import Source, SourceChunk, SourceChunks
from holdfast.repo.handle.compression import (
    Compression,
    DeltaChoice,
    find_delta_run,
    verify_compression,
    verify_delta,
)
from holdfast.repo.handle.config import Config
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.roots import is_settled
from holdfast.repo.names.snapshots import (
    MAX_METADATA_BYTES,
    CommittedSnapshot,
    NameState,
    read_listed_name,
    read_name,
    read_snapshot,
)
from holdfast.repo.write.encoding import ChunkEncoder, DeltaEncoder
from holdfast.repo.write.existing import ExistingChunks, is_whole, list_names, read_base, read_bases
from holdfast.repo.write.fill import Filler, Hasher
from holdfast.repo.write.packing import plan_shares
from holdfast.repo.write.transaction import (
    CommitPhase,
    Draft,
    ManifestPart,
    SnapshotContent,
    Transaction,
    make_memory_unknown,
)
from holdfast.repo.write.world import SINGLE_PROCESS, Ranks
from holdfast.texts import count, format_bytes, list_some

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What a save did."""

    name: str
    digest: Digest
    generation: int
    logical_bytes: int
    """Bytes of the content, each value counted once."""
    new_bytes: int
    """Bytes that were written: chunks that the store lacked, and small values that are stored in a manifest."""
    reused_bytes: int
    """Bytes that were not written, because they were already present or occur twice in this save.

    `new_bytes` and `reused_bytes` add up to all bytes that were saved. That is `logical_bytes`, or more with several
    ranks: a value that differs by rank counts once for each rank.
    """
    seconds: float
    existed: bool = False
    """The name already had exactly this content; nothing was written."""
    divergent: tuple[str, ...] = ()
    """Leaves that differed between ranks without being declared per-rank; every rank's value was saved."""
    stored_bytes: int = 0
    """What `new_bytes` take in the store: fewer if chunks were compressed."""

    def __repr__(self) -> str:
        """Show name, digest, size, how much of it was new, and the time."""
        differ = f", {count(len(self.divergent), 'leaf')} differ between ranks" if self.divergent else ""
        return f"<SaveResult {self.name!r} {short_hex(self.digest)}: {self._describe_bytes()}{differ}>"

    def _repr_html_(self) -> str:
        """Return the same as a card for notebooks."""
        facts = [("digest", short_hex(self.digest)), ("size", format_bytes(self.logical_bytes))]
        facts += [("time", f"{self.seconds:.2f} s"), ("generation", str(self.generation))]
        share = self.new_bytes / max(self.new_bytes + self.reused_bytes, 1)
        new = f"{self.describe_new()}, {format_bytes(self.reused_bytes)} already present"
        note = f"differs between ranks: {list_some(self.divergent, 5)}" if self.divergent else ""
        return render_card(Card("Saved", self.name, facts, Bar(share, new), note=note))

    def _describe_bytes(self) -> str:
        size = format_bytes(self.logical_bytes)
        if self.existed:
            return f"{size}, the same content was already present"
        return f"{size}, {self.describe_new()}, in {self.seconds:.2f} s"

    def describe_new(self) -> str:
        """Return how much was new and, if it was compressed, how much was stored: "3.0 GB new, stored in 2.2 GB"."""
        return describe_new(self.new_bytes, self.stored_bytes)


def describe_new(new_bytes: int, stored_bytes: int) -> str:
    """Return how much was new and, if it was compressed, how much was stored."""
    stored = f", stored in {format_bytes(stored_bytes)}" if stored_bytes < new_bytes else ""
    return f"{format_bytes(new_bytes)} new{stored}"


class Placement(NamedTuple):
    """The position of a source's bytes in an entry to which several ranks contribute."""

    size_bytes: int
    """Size of the whole entry."""
    dims: int
    boxes: Sequence[tuple[int, ...]]
    """The box of each chunk: starts, then sizes."""
    rank: int = NO_RANK
    """The rank, if the value belongs to one rank only; it is then no part of a shared entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How a snapshot is written, whether it is a tree, files or an imported checkpoint."""

    overwrite: bool = False
    """Replace what the name has; without it, other content raises NameInUse."""
    metadata: Mapping[str, Json] = field(default_factory=dict)
    """Facts to find the snapshot by. Of many ranks, those of rank 0 are stored."""
    base: str | None = None
    """The name of a snapshot with similar content, whose chunks are reused; by default the latest with this prefix."""
    compression: Compression = "default"
    """How new chunks are stored; "default": as the repository was opened."""
    delta: DeltaChoice | None = None
    """Whether new chunks are stored as deltas on the base; None: as the repository was opened."""
    after_s: float = -math.inf
    """The commit time is later than this, whatever the clock says: a series whose names are numbered stays in order."""
    environment: Mapping[str, Json] = field(default_factory=dict)
    """The machine and the versions used; unlike metadata, it may differ when a save is repeated."""
    verify_reuse: bool = True
    """Read every chunk that is reused, and write it again if it is damaged. If False, or if the store checks what it is
    sent (`checked_uploads`), check only that it is present."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to save (this rank's share, if there are several ranks), and how."""

    name: str
    sources: Sequence[Source]
    spec: Json = None
    """The snapshot's own spec: part of the content. None for a rank whose spec is that of the root."""
    places: Mapping[int, Placement] = field(default_factory=dict)
    """By position in `sources`: the placement of each source that is part of an entry, or belongs to one rank."""
    root: ManifestPart | None = None
    """The whole of all ranks' parts, if there are several ranks; equal on every rank."""
    runs: Mapping[int, Container[int]] = field(default_factory=dict)
    """By position in `sources`: the offsets at which tensors begin in a file; they are aligned in the pack."""
    repeats: Mapping[int, int] = field(default_factory=dict)
    """By position in `sources`: the position of an earlier source with the same bytes and cuts. They are read once."""
    options: WriteOptions = field(default_factory=WriteOptions)
    digests: Mapping[int, Sequence[Digest | None]] = field(default_factory=dict)
    """By position in `sources`: the digest of each chunk, computed on the device that has the bytes; None for a chunk
    that has to be read. Of the others, only those that the store lacks are read, and hashed again."""
    note_missing: Callable[[Sequence[SourceChunk]], None] | None = None
    """Called once, under the lease of the save, with the chunks that have a digest and will be read."""
    watch: Callable[[Sequence[Entry]], None] | None = None
    """Called with the entries of this process when all their bytes have been read, perhaps more than once. The entries
    are valid during the call."""


def save(
    repo: Repository, request: Request, *, ranks: Ranks = SINGLE_PROCESS, progress: Progress | None = None
) -> SaveResult:
    """Save all sources as one snapshot. It becomes visible as a whole, and is durable when this returns.

    Raises:
        NameInUse: the name has other content. Raised before any byte is written, or at the commit if another writer
            was first.
        CommitUnknown: the store failed or memory ran out during the commit, or a rank failed or was lost once the
            coordinator could have committed. The name has its previous content or the new one.
        RankError: a rank failed or was lost before that. The name has its previous content.
        HoldfastError: any other error. The name has its previous content.
    """
    started = time.monotonic()
    progress = progress or Silent()
    transaction = Transaction(repo, purpose=f"save {request.name!r}", ranks=ranks)
    try:
        with make_hasher(repo, request.options.compression) as hasher:
            job = _prepare(repo, request, ranks, hasher)
            result = _hash_and_compare(job)
            if result is None:
                _open_store(job)
                result = _write(job, transaction, progress)
        return replace(result, seconds=time.monotonic() - started)
    except MemoryError as error:
        if transaction.phase is CommitPhase.COMMITTED:
            raise make_memory_unknown(request.name) from error
        raise


@contextmanager
def make_hasher(repo: Repository, compression: Compression = "default") -> Iterator[Hasher]:
    """Yield a hasher with threads and memory for one save."""
    verify_compression(compression)
    choice = repo.compression if compression == "default" else compression
    shares = plan_shares(repo.store.traits, repo.budget_bytes)
    with Engine("holdfast-hash", budget_bytes=shares.hash_bytes, waits=False) as engine:
        yield Hasher(
            engine,
            repo.counters.stages,
            batch_bytes=shares.batch_bytes,
            staged_bytes=shares.staged_bytes,
            huge_pages=shares.huge_pages,
            hints=repo.hints,
            encoder=ChunkEncoder(choice, repo.speeds, repo.counters.stages),
        )


def hash_request(repo: Repository, request: Request) -> Sequence[Entry]:
    """Return the entries that a save of this request would store; their chunks have digests, and no locations.

    Nothing is written. The data must not change until this returns.
    """
    request, refs = _verify_request(request), ChunkRows()
    with make_hasher(repo) as hasher:
        refs.extend(hasher.iter_digests(SourceChunks(request.sources, request.runs, request.repeats, request.digests)))
    return _build_entries(request, refs)


@dataclass(frozen=True, slots=True)
class _NameFacts:
    """What was read of the name of a save; only the coordinator reads it all."""

    state: NameState
    listed: Sequence[ObjectInfo] | None = None
    """All names with the same prefix, if listing them cost no further request."""
    config: Config | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    """One save, on one of its ranks: what is known before anything is written."""

    repo: Repository
    request: Request
    ranks: Ranks
    hasher: Hasher
    name: _NameFacts
    is_in_use: bool
    chunks: SourceChunks
    own_bytes: int
    """The bytes of this rank's sources."""

    @property
    def delta_run(self) -> int:
        """How many saves in a row may store deltas; 0 for none."""
        repo, options = self.repo, self.request.options
        compression = repo.compression if options.compression == "default" else options.compression
        return find_delta_run(repo.delta if options.delta is None else options.delta, compression)


def _prepare(repo: Repository, request: Request, ranks: Ranks, hasher: Hasher) -> _Job:
    """Verify the request on every rank before anything is written, and read the current state of the name."""
    with ranks.gathering("prepare"):
        request = _verify_request(request)
        chunks = SourceChunks(request.sources, request.runs, request.repeats, request.digests)
    name = None
    with ranks.gathering("name") as gathering:
        if ranks.is_coordinator:
            name = _read_name(repo, request.name)
            gathering.given = name.state.snapshot is not None, name.state.next_generation
    is_in_use, next_generation = gathering.values[ranks.coordinator]
    if name is None:
        name = _NameFacts(NameState(request.name, None, next_generation))
    own_bytes = sum([source.size_bytes for source in request.sources])
    return _Job(repo, request, ranks, hasher, name, is_in_use, chunks, own_bytes)


def _read_name(repo: Repository, name: str) -> _NameFacts:
    """Read the state of a name and the store's config at the same time."""
    with repo.store.begin(partial(_read_listed_name, repo, name)) as read:
        config = repo.read_same()
        state, listed = read.result()
    return _NameFacts(state, listed, config)


def _read_listed_name(repo: Repository, name: str) -> tuple[NameState, Sequence[ObjectInfo] | None]:
    """Read the state of a name, and list all names if that costs no further request."""
    listed = list_names(repo, name)
    state = read_name(repo.store, name) if listed is None else read_listed_name(repo.store, name, listed)
    return state, listed


def _hash_and_compare(job: _Job) -> SaveResult | None:
    """Return the result of an earlier save of the same content and metadata; raise NameInUse if they differ.

    Returns None if the save has to run: the name is free or may be overwritten, or its snapshot has the same content
    but is damaged or not settled.
    """
    if not job.is_in_use or job.request.options.overwrite:
        return None
    with job.ranks.gathering("compare") as gathering:
        refs = ChunkRows()
        refs.extend(job.hasher.iter_digests(job.chunks))
        own_digest = digest_snapshot(job.request.spec, _build_entries(job.request, refs))
        gathering.given = own_digest, job.own_bytes
    digests = [Digest(digest) for digest, _ in gathering.values]
    found = job.ranks.broadcast("same", lambda: _compare(job, digests))
    if found is None:
        return None
    digest, generation, logical_bytes = found
    reused = sum(size for _, size in gathering.values)
    return SaveResult(job.request.name, Digest(digest), generation, logical_bytes, 0, reused, 0.0, existed=True)


def _compare(job: _Job, digests: Sequence[Digest]) -> tuple[bytes, int, int] | None:
    """Compare the content of all ranks with the name's current snapshot; on the coordinator."""
    request, current, store = job.request, job.name.state.snapshot, job.repo.store
    assert current is not None, "the name is in use"
    digest = digest_parts(request.root.spec, request.root.entries, digests) if request.root else digests[0]
    if digest != current.digest or canonical_json(request.options.metadata) != canonical_json(current.metadata):
        raise NameInUse(
            f"{request.name!r} is in use and holds other content; nothing was written."
            " Choose another name, or overwrite it (--overwrite, overwrite=True)",
            name=request.name,
        )
    # Not settled: its own save may still withdraw it, and the name would be empty although we reported success.
    if not is_settled(store, current) or (request.options.verify_reuse and not is_whole(job.repo, current)):
        return None
    # The record may be visible but not durable yet.
    store.sync(find_shelf(request.name))
    return digest, current.generation, current.logical_bytes


def _open_store(job: _Job) -> None:
    """Verify that the bytes of every rank have room; create the store if there is none."""
    with job.ranks.gathering("room"):
        _verify_room(job)
    # Only on the coordinator, because this may create the store. Other ranks call it once they see the coordinator's
    # lease: on a path that is local to each node, every rank would create a store of its own.
    job.ranks.broadcast("open", lambda: bool(job.repo.prepare_write(job.name.config)))


def _write(job: _Job, transaction: Transaction, progress: Progress) -> SaveResult:
    """Write the chunks that the store lacks, and commit."""
    request, options = job.request, job.request.options
    draft = Draft(job.name.state, options.metadata, options.environment, after_s=options.after_s)
    content = SnapshotContent(draft, root=request.root)
    progress.begin(f"save {request.name}", job.own_bytes)
    try:
        with job.repo.store.begin(partial(_read_bases, job)) as bases, transaction:
            with transaction.sealing(content):
                manifests = bases.result()
                since_whole = _allow_deltas(job, manifests, transaction.avoid)
                existing = ExistingChunks(job.repo, manifests, avoid=transaction.avoid)
                stages = job.repo.counters.stages
                filler = Filler(job.hasher, existing, transaction.packer, stages, verify_reuse=options.verify_reuse)
                refs = _fill(job, filler, progress)
                content.parts = [ManifestPart(request.spec, _build_entries(request, refs), since_whole)]
            while content.is_stale:
                with transaction.sealing(content):
                    content.move(_rewrite(job, filler, refs, content.stale))
            snapshot = transaction.commit(content)
    finally:
        progress.end()
    new, reused, stored = _add_up(job, filler)
    sizes = (snapshot.logical_bytes, new, reused, 0.0)
    return SaveResult(request.name, snapshot.digest, snapshot.generation, *sizes, stored_bytes=stored)


def _fill(job: _Job, filler: Filler, progress: Progress) -> ChunkRows:
    request = job.request
    if request.digests:
        refs = filler.fill_digested(job.chunks, progress, request.note_missing)
    else:
        refs = filler.fill(job.chunks, progress)
    progress.advance(sum(request.sources[position].size_bytes for position in request.repeats))
    return refs


def _rewrite(job: _Job, filler: Filler, refs: ChunkRows, stale: Sequence[ChunkRef]) -> list[ChunkRef]:
    """Write stale chunks into the save's own packs, even if other copies exist; return their new references."""
    if not stale:
        return []
    by_digest = dict(zip(refs.iter_digests(), job.chunks, strict=True))
    distinct = list({ref.digest: ref for ref in stale}.values())
    return filler.rewrite([by_digest[ref.digest] for ref in distinct], distinct)


def _add_up(job: _Job, filler: Filler) -> tuple[int, int, int]:
    """Return the bytes that all ranks wrote, reused and stored; only this rank's, if not all ranks answer."""
    own = (filler.new_bytes, job.own_bytes - filler.new_bytes, filler.stored_bytes)
    try:
        with job.ranks.gathering("done") as gathering:
            gathering.given = own
    except RankError as error:
        # The snapshot is committed, so this is no error. The next collective call reports the failed rank.
        _log.warning("%r was saved, but not all ranks answered afterwards: %s", job.request.name, error)
        return own
    new, reused, stored = (sum(each) for each in zip(*gathering.values, strict=True))
    return new, reused, stored


def _read_bases(job: _Job) -> list[Manifest]:
    """Read the manifests whose chunks this save probably reuses.

    They may be read before the lease exists: a pack that they name is looked for after the marks were read.
    """
    repo, request = job.repo, job.request
    if request.options.base:
        base: CommittedSnapshot | None = read_snapshot(repo.store, request.options.base)
    else:
        # Ranks that have not read the state of the name have not listed the names.
        listed = job.name.listed if job.ranks.is_coordinator else list_names(repo, request.name)
        base = read_base(repo, request.name, listed=listed, is_needed=job.delta_run > 0)
    return read_bases(repo.store, [job.name.state.snapshot, base])


def _allow_deltas(job: _Job, manifests: Sequence[Manifest], avoid: frozenset[str]) -> int:
    """Let new chunks be stored as deltas on these manifests, unless this save has to be whole; return `since_whole`."""
    repo, encoder = job.repo, job.hasher.encoder
    since_whole = 1 + max([manifest.since_whole for manifest in manifests], default=job.delta_run)
    if encoder is None or since_whole > job.delta_run:
        return 0
    boxes = {position: place.boxes for position, place in job.request.places.items() if place.dims}
    level: CodecLevel = "fast" if encoder.choice == "fast" else "small"
    encoder.deltas = DeltaEncoder(repo.store, manifests, repo.counters.stages, avoid=avoid, level=level, boxes=boxes)
    return since_whole


def _verify_room(job: _Job) -> None:
    """Raise StoreFull before writing if the new bytes do not fit; hashes everything only if that is uncertain."""
    repo, request = job.repo, job.request
    free = repo.store.find_free_bytes()
    if free is None or job.own_bytes <= free or job.hasher.encodes:
        return  # what is compressed may fit all the same; if it does not, the write fails
    repo.index.refresh()
    existing = ExistingChunks(repo, read_bases(repo.store, [read_base(repo, request.name)]), avoid=frozenset())
    new: dict[Digest, int] = {}
    for ref in job.hasher.iter_digests(job.chunks):
        if ref.size_bytes <= INLINE_BYTES or not (ref.digest in new or existing.find(ref.digest, ref.size_bytes)):
            new[ref.digest] = ref.size_bytes
    needed = sum(new.values())
    if needed > free:
        raise StoreFull(
            f"saving {request.name!r} needs {needed} bytes, {repo.store.url} has {free} free; nothing was written."
            " Free some space, or save elsewhere",
            needed_bytes=needed,
            free_bytes=free,
        )


def _verify_request(request: Request) -> Request:
    """Raise if the request could not be read back; return it with a normalized name and an encoded spec."""
    options = request.options
    if options.delta is not None:
        verify_delta(options.delta)
    names = _verify_sources(request)
    for name in names:
        if not name.isascii():
            _verify_entry_name(name, request.name)
    names.sort()  # in place, where a set would take five times the memory of the list
    twice = next((name for name, following in pairwise(names) if name == following), None)
    if twice is not None:
        raise BadName(f"two entries of {request.name!r} would have the name {twice[:80]!r}")
    # The depths passed here and in `_verify_sources` allow for the nesting in the head of a manifest.
    spec = encode_spec(request.name, request.spec)
    metadata = _spell_metrics(options.metadata)
    size = len(_verify_json(f"the metadata of {request.name!r}", [metadata, dict(options.environment)]))
    if size > MAX_METADATA_BYTES:
        raise TooLarge(
            f"the metadata of {request.name!r} has {size} bytes, more than {MAX_METADATA_BYTES}; save it as an entry"
        )
    options = replace(options, metadata=metadata)
    return replace(request, name=verify_name(request.name), spec=spec, options=options)


def _spell_metrics(metadata: Mapping[str, Json]) -> dict[str, Json]:
    """Return metadata in which metrics that are NaN or infinite are texts: JSON has no such numbers.

    A run whose loss becomes NaN has to be saved as well.
    """
    metrics = metadata.get("metrics")
    if not isinstance(metrics, dict):
        return dict(metadata)
    spelled = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }
    return {**metadata, "metrics": spelled}


def _verify_sources(request: Request) -> list[str]:
    """Return the names of all sources; raise Unsupported if a spec or note is not plain JSON."""
    names: list[str] = []
    # Many entries share one spec object, which is checked once. Checked objects are kept alive, so that no later
    # object can get the same id.
    checked: dict[int, Json] = {}
    for source in request.sources:
        names.append(source.name)
        for value in (source.spec, source.note):
            if id(value) not in checked:
                checked[id(value)] = value
                _verify_json(f"the spec or note of entry {names[-1]!r} of {request.name!r}", [value], depth=1)
    return names


def encode_spec(name: str, spec: Json) -> EncodedJson:
    """Return the spec of a snapshot as encoded in a manifest; raises Unsupported."""
    return EncodedJson(_verify_json(f"the spec of {name!r}", spec, depth=1))


def _verify_json(what: str, value: Json, *, depth: int = 0) -> bytes:
    """Return `value` as canonical JSON, or raise Unsupported."""
    try:
        return canonical_json(value, depth=depth)
    except (TypeError, ValueError) as error:
        raise Unsupported(f"{what} is not plain JSON: {error}") from error


def _verify_entry_name(name: str, snapshot_name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise BadName(
            f"an entry of {snapshot_name!r} has the name {name[:80]!r}, which is not valid Unicode"
        ) from error


def _build_entries(request: Request, refs: ChunkRows) -> Sequence[Entry]:
    rows = EntryRows(request.sources, repeat_rows(request.sources, refs, request.repeats))
    if request.watch:
        request.watch(rows)
    if not request.places:
        return rows
    entries = list(rows)
    for position, place in request.places.items():
        own = entries[position].chunks
        if place.dims:
            own = tuple(ref._replace(box=box) for ref, box in zip(own, place.boxes, strict=True))
        entries[position] = entries[position]._replace(
            size_bytes=place.size_bytes, chunks=own, dims=place.dims, rank=place.rank
        )
    return entries
