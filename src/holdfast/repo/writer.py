"""Saving: refuse what cannot be read back, find what is held already, write the rest, commit last."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.digest import Digest
from holdfast.errors import (
    BadName,
    NameInUse,
    StoreFull,
    TooLarge,
    Unsupported,
)
from holdfast.progress import Progress, Silent
from holdfast.repo.chunk import INLINE_BYTES, UNIT_BYTES, ChunkRef
from holdfast.repo.engine import Engine
from holdfast.repo.fill import Filler, Hasher
from holdfast.repo.holdings import Holdings, find_base, read_bases
from holdfast.repo.layout import find_shelf, verify_name
from holdfast.repo.manifest import Entry, digest_snapshot
from holdfast.repo.reader import is_readable
from holdfast.repo.record import EncodedJson, Json, canonical_json
from holdfast.repo.repository import Repository
from holdfast.repo.settled import is_settled
from holdfast.repo.snapshots import MAX_METADATA_BYTES, NameState, Snapshot, read_name, read_snapshot
from holdfast.repo.source import Piece, Source, cut_sources
from holdfast.repo.transaction import Draft, Transaction


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
    environment: Mapping[str, Json] = field(default_factory=dict)
    """Where and with what it was saved; unlike the metadata, it may differ when a save is repeated."""
    base: str | None = None
    """The name of a snapshot to build upon, if another than the one before is closest."""
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
    logical_bytes = sum([source.size_bytes for source in request.sources])
    stages = repo.counters.stages
    with Engine("holdfast-hash", budget_bytes=repo.budget_bytes // 2, waits=False) as engine:
        batch_bytes = min(UNIT_BYTES, repo.budget_bytes // 8)
        hasher = Hasher(engine, stages, batch_bytes=batch_bytes, hints=repo.hints)
        if state.snapshot and not request.overwrite:
            same = _find_same(repo, request, pieces, state.snapshot, hasher)
            if same:
                return replace(same, seconds=time.monotonic() - started)
        _verify_room(repo, request, pieces, hasher, logical_bytes)
        repo.verify_may_write()
        progress.begin(f"save {request.name}", logical_bytes)
        try:
            result = _run(repo, request, pieces, state, hasher, progress)
        finally:
            progress.end()
    return replace(result, seconds=time.monotonic() - started)


def _verify_request(request: Request) -> Request:
    """Refuse what could not be read back, before anything is touched."""
    names = [source.name for source in request.sources]
    if not "".join(names).isascii():
        for name in names:
            _verify_entry_name(name, request.name)
    if len(set(names)) != len(names):
        ((twice, _),) = Counter(names).most_common(1)
        raise BadName(f"two entries of {request.name!r} would have the name {twice[:80]!r}")
    # In a manifest it is a part of the head, and those of entries are parts of lists in it.
    spec = EncodedJson(_verify_json(f"the spec of {request.name!r}", request.spec, depth=1))
    described = [(source.spec, source.note) for source in request.sources]
    # Many entries have one and the same spec, and need one look; all are held, so no two share an identity by chance.
    distinct = {(id(spec), id(note)): number for number, (spec, note) in enumerate(described)}
    for number in distinct.values():
        _verify_json(f"the spec or note of entry {names[number]!r} of {request.name!r}", [*described[number]], depth=1)
    size = len(_verify_json(f"the metadata of {request.name!r}", [dict(request.metadata), dict(request.environment)]))
    if size > MAX_METADATA_BYTES:
        raise TooLarge(
            f"the metadata of {request.name!r} has {size} bytes, more than {MAX_METADATA_BYTES}; save it as an entry"
        )
    return replace(request, name=verify_name(request.name), spec=spec, metadata=dict(request.metadata))


def _verify_json(what: str, value: Json, *, depth: int = 0) -> bytes:
    """Return `value` in JSON, or raise Unsupported."""
    try:
        return canonical_json(value, depth=depth)
    except (TypeError, ValueError, RecursionError) as error:
        raise Unsupported(f"{what} is not plain JSON: {error}") from error


def _verify_entry_name(name: str, snapshot_name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise BadName(
            f"an entry of {snapshot_name!r} has the name {name[:80]!r}, which is not valid Unicode"
        ) from error


def _find_same(
    repo: Repository, request: Request, pieces: Sequence[Piece], held: Snapshot, hasher: Hasher
) -> SaveResult | None:
    """Accept a repeated save of the same content and metadata; refuse any other before a byte is written.

    Returns None if the name holds the same, but cannot be relied on: then it has to be saved anew.
    """
    refs = list(hasher.iter_digests(pieces))
    digest = digest_snapshot(request.spec, _build_entries(request.sources, pieces, refs))
    if digest != held.digest or canonical_json(request.metadata) != canonical_json(held.metadata):
        raise NameInUse(
            f"{request.name!r} is in use and holds other content; nothing was written."
            " Choose another name, or overwrite it (--overwrite, overwrite=True)",
            name=request.name,
        )
    # Not settled: its save may still withdraw it, and then nothing would be there.
    if not is_settled(repo.store, held) or (request.verify_reuse and not is_readable(repo, held)):
        return None
    repo.store.sync(find_shelf(request.name))
    return SaveResult(request.name, digest, held.generation, held.logical_bytes, 0, 0.0, existed=True)


def _verify_room(
    repo: Repository, request: Request, pieces: Sequence[Piece], hasher: Hasher, logical_bytes: int
) -> None:
    """Raise StoreFull before writing if the new bytes cannot fit; hashes everything only if there is doubt."""
    free = repo.store.find_free_bytes()
    if free is None or logical_bytes <= free:
        return
    repo.index.refresh()
    holdings = Holdings(repo, read_bases(repo.store, [find_base(repo, request.name)]), avoid=frozenset())
    new: dict[Digest, int] = {}
    for ref in hasher.iter_digests(pieces):
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
        Entry(source.name, source.size_bytes, tuple(own), source.spec, source.note, 0, source.alias)
        for source, own in zip(sources, chunks, strict=True)
    ]


def _run(
    repo: Repository,
    request: Request,
    pieces: Sequence[Piece],
    state: NameState,
    hasher: Hasher,
    progress: Progress,
) -> SaveResult:
    """Write what is not held and commit."""
    stages = repo.counters.stages
    with Transaction(repo, purpose=f"save {request.name!r}") as transaction:
        base = read_snapshot(repo.store, request.base) if request.base else find_base(repo, request.name)
        bases = read_bases(repo.store, [state.snapshot, base])
        holdings = Holdings(repo, bases, avoid=transaction.avoid)
        filler = Filler(hasher, holdings, transaction.packer, stages, verify_reuse=request.verify_reuse)
        refs = filler.fill(pieces, progress)

        def rewrite(stale: Sequence[ChunkRef]) -> list[ChunkRef]:
            homes = {ref.digest: piece for piece, ref in zip(pieces, refs, strict=True)}
            distinct = list({ref.digest: ref for ref in stale}.values())
            return filler.rewrite([homes[ref.digest] for ref in distinct], distinct)

        entries = _build_entries(request.sources, pieces, refs)
        draft = Draft(state, request.spec, request.metadata, request.environment)
        with stages.time("commit"):
            snapshot = transaction.commit(draft, entries, rewrite=rewrite)
    new_bytes = filler.new_bytes
    return SaveResult(request.name, snapshot.digest, snapshot.generation, snapshot.logical_bytes, new_bytes, 0.0)
