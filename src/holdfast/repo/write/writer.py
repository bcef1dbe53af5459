"""Saves a request: refuses what could not be read back, reuses stored chunks, writes the others, commits last."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
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
from holdfast.objects.ahead import Ahead
from holdfast.objects.protocol import ObjectInfo
from holdfast.progress import Progress, Silent
from holdfast.repo.engine import Engine
from holdfast.repo.format.chunk import INLINE_BYTES, ChunkRef
from holdfast.repo.format.codecs.codec import CodecLevel
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
from holdfast.repo.write.deltas import DeltaEncoder
from holdfast.repo.write.encoding import ChunkEncoder
from holdfast.repo.write.existing import ExistingChunks, is_whole, list_names, read_base, read_bases
from holdfast.repo.write.fill import Filler, Hasher
from holdfast.repo.write.shares import share_budget
from holdfast.repo.write.transaction import Draft, ManifestPart, Transaction, make_memory_unknown
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
    metadata: Mapping[str, Json] = field(default_factory=dict)
    environment: Mapping[str, Json] = field(default_factory=dict)
    """The machine and the versions used; unlike metadata, it may differ when a save is repeated."""
    base: str | None = None
    """The name of a snapshot with similar content, whose chunks are reused; by default the latest with this prefix."""
    overwrite: bool = False
    after_s: float = -math.inf
    """The commit time is later than this, whatever the clock says."""
    verify_reuse: bool = True
    """Read every chunk that is reused, and write it again if it is damaged. If False, or if the store checks what it is
    sent (`checked_uploads`), check only that it is present."""
    compression: Compression = "default"
    """How new chunks are stored; "default": as the repository was opened."""
    delta: DeltaChoice | None = None
    """Whether new chunks are stored as deltas on the base; None: as the repository was opened."""
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
    saving: _Saving | None = None
    try:
        with make_hasher(repo, request.compression) as hasher:
            saving = _Saving(repo, request, ranks, hasher, progress)
            result = saving.find_same() or saving.run()
        return replace(result, seconds=time.monotonic() - started)
    except MemoryError as error:
        if saving is not None and saving.is_committed:
            raise make_memory_unknown(request.name) from error
        raise


@contextmanager
def make_hasher(repo: Repository, compression: Compression = "default") -> Iterator[Hasher]:
    """Yield a hasher with threads and memory for one save."""
    verify_compression(compression)
    choice = repo.compression if compression == "default" else compression
    shares = share_budget(repo.store, repo.budget_bytes)
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


class _Saving:
    """One save in progress, on one of its ranks."""

    def __init__(self, repo: Repository, request: Request, ranks: Ranks, hasher: Hasher, progress: Progress) -> None:
        """Verify the request on every rank before anything is written, and read the current state of the name."""
        self.is_committed = False
        self._repo = repo
        self._request = request
        self._ranks = ranks
        self._hasher = hasher
        self._progress = progress
        self._chunks: Iterable[SourceChunk] = ()
        self._entries: Sequence[Entry] = ()
        self._listed: Sequence[ObjectInfo] | None = None
        self._config: Config | None = None
        self._since_whole = 0
        ranks.all_gather("prepare", self._prepare)
        state = ranks.broadcast("name", self._read_state)
        self._is_in_use, self._next_generation = state

    def _prepare(self) -> None:
        request = self._request = _verify_request(self._request)
        self._chunks = SourceChunks(request.sources, request.runs, request.repeats, request.digests)
        self._own_bytes = sum([source.size_bytes for source in self._request.sources])

    def _read_state(self) -> tuple[bool, int]:
        repo, name = self._repo, self._request.name
        with Ahead(repo.store, partial(self._read_listed_name, name)) as state:
            self._config = repo.read_same()
            self._state = state.result()
        return self._state.snapshot is not None, self._state.next_generation

    def _read_listed_name(self, name: str) -> NameState:
        """Read the state of the name, and list all names if that costs no further request."""
        store = self._repo.store
        self._listed = list_names(self._repo, name)
        if self._listed is None:
            return read_name(store, name)
        return read_listed_name(store, name, self._listed)

    def find_same(self) -> SaveResult | None:
        """Return the result of an earlier save of the same content and metadata; raise NameInUse if they differ.

        Returns None if the save has to run: the name is free or may be overwritten, or its snapshot has the same
        content but is damaged or not settled.
        """
        request = self._request
        if not self._is_in_use or request.overwrite:
            return None

        def digest_own() -> tuple[bytes, int]:
            refs = ChunkRows()
            refs.extend(self._hasher.iter_digests(self._chunks))
            return digest_snapshot(request.spec, _build_entries(request, refs)), self._own_bytes

        gathered = self._ranks.all_gather("compare", digest_own)
        digests = [Digest(digest) for digest, _ in gathered]
        found = self._ranks.broadcast("same", lambda: self._compare(digests))
        if found is None:
            return None
        digest, generation, logical_bytes = found
        reused = sum(size for _, size in gathered)
        return SaveResult(request.name, Digest(digest), generation, logical_bytes, 0, reused, 0.0, existed=True)

    def _compare(self, digests: Sequence[Digest]) -> tuple[bytes, int, int] | None:
        """Compare the content of all ranks with the name's current snapshot; on the coordinator."""
        request, current, store = self._request, self._state.snapshot, self._repo.store
        assert current is not None, "the name is in use"
        digest = digest_parts(request.root.spec, request.root.entries, digests) if request.root else digests[0]
        if digest != current.digest or canonical_json(request.metadata) != canonical_json(current.metadata):
            raise NameInUse(
                f"{request.name!r} is in use and holds other content; nothing was written."
                " Choose another name, or overwrite it (--overwrite, overwrite=True)",
                name=request.name,
            )
        # Not settled: its own save may still withdraw it, and the name would be empty although we reported success.
        if not is_settled(store, current) or (request.verify_reuse and not is_whole(self._repo, current)):
            return None
        # The record may be visible but not durable yet.
        store.sync(find_shelf(request.name))
        return digest, current.generation, current.logical_bytes

    def run(self) -> SaveResult:
        """Write the chunks that the store lacks, and commit."""
        repo, request, ranks = self._repo, self._request, self._ranks
        ranks.all_gather("room", self._verify_room)
        # Only on the coordinator, because this may create the store. Other ranks call it once they see the
        # coordinator's lease: on a path that is local to each node, every rank would create a store of its own.
        ranks.broadcast("open", lambda: bool(repo.prepare_write(self._config)))
        self._progress.begin(f"save {request.name}", self._own_bytes)
        try:
            with (
                Ahead(repo.store, self._read_bases) as bases,
                Transaction(repo, purpose=f"save {request.name!r}", ranks=ranks) as transaction,
            ):
                filler = self._make_filler(transaction, bases)
                state = self._state if ranks.is_coordinator else NameState(request.name, None, self._next_generation)
                draft = Draft(state, request.metadata, request.environment, after_s=request.after_s, root=request.root)
                refs: list[ChunkRows] = []

                def write() -> list[ManifestPart]:
                    refs[:] = [self._fill(filler())]
                    self._progress.advance(sum(request.sources[position].size_bytes for position in request.repeats))
                    return [ManifestPart(request.spec, _build_entries(request, refs[0]), self._since_whole)]

                def rewrite(stale: Sequence[ChunkRef]) -> list[ChunkRef]:
                    by_digest = dict(zip(refs[0].iter_digests(), self._chunks, strict=True))
                    distinct = list({ref.digest: ref for ref in stale}.values())
                    return filler().rewrite([by_digest[ref.digest] for ref in distinct], distinct)

                snapshot = transaction.commit(draft, write, rewrite=rewrite)
                self.is_committed = True
        finally:
            self._progress.end()
        new, reused, stored = self._add_up(filler())
        sizes = (snapshot.logical_bytes, new, reused, 0.0)
        return SaveResult(request.name, snapshot.digest, snapshot.generation, *sizes, stored_bytes=stored)

    def _fill(self, filler: Filler) -> ChunkRows:
        request = self._request
        if not request.digests:
            return filler.fill(self._chunks, self._progress)
        return filler.fill_digested(self._chunks, self._progress, request.note_missing)

    def _add_up(self, filler: Filler) -> tuple[int, int, int]:
        """Return the bytes that all ranks wrote, reused and stored; only this rank's, if not all ranks answer."""
        own = (filler.new_bytes, self._own_bytes - filler.new_bytes, filler.stored_bytes)
        try:
            gathered = self._ranks.all_gather("done", lambda: own)
        except RankError as error:
            # The snapshot is committed, so this is no error. The next collective call reports the failed rank.
            _log.warning("%r was saved, but not all ranks answered afterwards: %s", self._request.name, error)
            return own
        new, reused, stored = (sum(each) for each in zip(*gathered, strict=True))
        return new, reused, stored

    def _read_bases(self) -> list[Manifest]:
        """Read the manifests whose chunks this save probably reuses.

        They may be read before the lease exists: a pack that they name is looked for after the marks were read.
        """
        repo, request = self._repo, self._request
        if request.base:
            base: CommittedSnapshot | None = read_snapshot(repo.store, request.base)
        else:
            # Ranks that have not read the state of the name have not listed the names.
            listed = self._listed if self._ranks.is_coordinator else list_names(repo, request.name)
            base = read_base(repo, request.name, listed=listed, is_needed=self._delta_run > 0)
        current = self._state.snapshot if self._ranks.is_coordinator else None
        return read_bases(repo.store, [current, base])

    def _make_filler(self, transaction: Transaction, bases: Ahead[list[Manifest]]) -> Callable[[], Filler]:
        """Return a function that creates the filler at its first call.

        That call is inside a collective step, so an error in it reaches all ranks.
        """
        repo, request = self._repo, self._request

        @functools.cache
        def make() -> Filler:
            manifests, avoid, stages = bases.result(), transaction.avoid, repo.counters.stages
            self._allow_deltas(manifests, avoid)
            existing = ExistingChunks(repo, manifests, avoid=avoid)
            return Filler(self._hasher, existing, transaction.packer, stages, verify_reuse=request.verify_reuse)

        return make

    @property
    def _delta_run(self) -> int:
        """How many saves in a row may store deltas; 0 for none."""
        repo, request = self._repo, self._request
        compression = repo.compression if request.compression == "default" else request.compression
        return find_delta_run(repo.delta if request.delta is None else request.delta, compression)

    def _allow_deltas(self, manifests: Sequence[Manifest], avoid: frozenset[str]) -> None:
        """Let new chunks be stored as deltas on the snapshot with these manifests, unless this save has to be whole."""
        encoder = self._hasher.encoder
        since_whole = 1 + max([manifest.since_whole for manifest in manifests], default=self._delta_run)
        if encoder is None or since_whole > self._delta_run:
            return
        boxes = {position: place.boxes for position, place in self._request.places.items() if place.dims}
        level: CodecLevel = "fast" if encoder.choice == "fast" else "small"
        repo, self._since_whole = self._repo, since_whole
        encoder.deltas = DeltaEncoder(
            repo.store, manifests, repo.counters.stages, avoid=avoid, level=level, boxes=boxes
        )

    def _verify_room(self) -> None:
        """Raise StoreFull before writing if the new bytes do not fit; hashes everything only if that is uncertain."""
        repo, request = self._repo, self._request
        free = repo.store.find_free_bytes()
        if free is None or self._own_bytes <= free or self._hasher.encodes:
            return  # what is compressed may fit all the same; if it does not, the write fails
        repo.index.refresh()
        existing = ExistingChunks(repo, read_bases(repo.store, [read_base(repo, request.name)]), avoid=frozenset())
        new: dict[Digest, int] = {}
        for ref in self._hasher.iter_digests(self._chunks):
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
    if request.delta is not None:
        verify_delta(request.delta)
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
    metadata = _spell_metrics(request.metadata)
    size = len(_verify_json(f"the metadata of {request.name!r}", [metadata, dict(request.environment)]))
    if size > MAX_METADATA_BYTES:
        raise TooLarge(
            f"the metadata of {request.name!r} has {size} bytes, more than {MAX_METADATA_BYTES}; save it as an entry"
        )
    return replace(request, name=verify_name(request.name), spec=spec, metadata=metadata)


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
