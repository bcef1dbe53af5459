"""Writes one part of a snapshot that another process commits: packs and a manifest, under a lease of its own.

The committing process must create its lease before this begins, and keep it until it has committed: collectors wait
for that lease. The lease created here only shows that the files belong to a save in progress, so that collectors do
not mark them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from holdfast.digest import Digest, hash_bytes
from holdfast.errors import LeaseLost, StoreError
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.settle import create_settled
from holdfast.progress import Silent
from holdfast.repo.engine import Engine
from holdfast.repo.format.chunk import UNIT_BYTES, ChunkRef
from holdfast.repo.format.entry import Entry, digest_snapshot
from holdfast.repo.format.layout import (
    ManifestRef,
    PartRef,
    generation_key,
    lease_stem,
    manifest_key,
    new_file_id,
    pack_key,
)
from holdfast.repo.format.manifest_encoding import encode_manifest
from holdfast.repo.format.source import Source, SourceChunk, cut_sources
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.generations import list_generations
from holdfast.repo.names.leases import Lease
from holdfast.repo.names.marks import read_bad_packs, read_marked
from holdfast.repo.names.snapshots import read_name
from holdfast.repo.write.existing import ExistingChunks, read_base, read_bases
from holdfast.repo.write.fill import Filler, Hasher
from holdfast.repo.write.packing import Packer
from holdfast.repo.write.writer import Placement

_REWRITES: Final = 8
"""How often chunks that a collector has marked since are rewritten, before this gives up."""


class PlacedSource(NamedTuple):
    """The bytes of an entry, or of a part of it, and their position in the entry."""

    source: Source
    place: Placement


MakeSources = Callable[[], Sequence[PlacedSource]]
"""Creates some of the sources; MUST return the same bytes if it is called again."""


class WrittenPart(NamedTuple):
    """What the committing process needs."""

    ref: PartRef
    lease_id: str
    """The part's lease, still live; pass it to `end_lease` after the commit."""
    new_bytes: int


def write_part(repo: Repository, name: str, groups: Sequence[MakeSources], *, purpose: str) -> WrittenPart:
    """Write all sources, a group at a time, and their manifest; none of it is visible before the commit."""
    with repo.store.hold(exclusive=False) as is_locked:
        lease = Lease(repo.store, purpose=purpose, is_locked=is_locked)
        packer = Packer(repo.store, lease, proven=repo.proven)
        try:
            return _write_part(repo, name, groups, lease, packer)
        except BaseException:
            packer.abort()
            _release(lease)
            raise


def end_lease(store: ObjectStore, lease_id: str) -> None:
    """Delete the lease of a part, after the snapshot that uses the part was committed."""
    with suppress(StoreError):  # a collector deletes it once it has expired
        for generation in list_generations(store, lease_stem(lease_id)):
            store.delete(generation_key(lease_stem(lease_id), generation))


def _write_part(
    repo: Repository, name: str, groups: Sequence[MakeSources], lease: Lease, packer: Packer
) -> WrittenPart:
    # After both leases, this one and that of the committing process: a collector that marks later waits for them.
    avoid = read_marked(repo.store) | read_bad_packs(repo.store)
    repo.index.refresh()
    stages = repo.counters.stages
    with Engine("holdfast-hash", budget_bytes=repo.budget_bytes // 2, waits=False) as engine:
        hasher = Hasher(engine, stages, batch_bytes=min(UNIT_BYTES, repo.budget_bytes // 8), hints=repo.hints)
        bases = read_bases(repo.store, [read_name(repo.store, name).snapshot, read_base(repo, name)])
        filler = Filler(hasher, ExistingChunks(repo, bases, avoid=avoid), packer, stages, verify_reuse=True)
        written = [_write_group(make, filler) for make in groups]
        for _ in range(_REWRITES):
            packer.seal()
            lease.renew()
            stale = _find_stale(written, lease.lease_id, read_marked(repo.store)) | filler.lost
            if not stale:
                return _write_manifest(repo.store, lease, written, filler.new_bytes)
            for group in written:
                _rewrite_group(group, stale, filler)
    raise LeaseLost(
        f"save {name!r}: garbage collections keep marking chunks that it uses; nothing was committed. Save again"
    )


def _release(lease: Lease) -> None:
    with suppress(StoreError, LeaseLost):
        lease.release()
    # Nothing was committed under this lease, so collectors need not wait for it.
    lease.forget()


@dataclass(slots=True)
class _Group:
    """Sources that were written together; `make` creates them again if they have to be rewritten."""

    make: MakeSources
    heads: list[tuple[str, Json, Json, Placement]]
    """Name, spec, note and placement of each source. The sources are not kept, so that their memory is freed."""
    positions: list[int]
    """For each chunk, the position of its source."""
    refs: list[ChunkRef]


def _write_group(make: MakeSources, filler: Filler) -> _Group:
    placed = make()
    pieces = cut_sources([each.source for each in placed])
    refs = list(filler.fill(pieces, Silent()))
    heads = [(source.name, source.spec, source.note, place) for source, place in placed]
    return _Group(make, heads, [piece.position for piece in pieces], refs)


def _find_stale(groups: Sequence[_Group], lease_id: str, marked: frozenset[str]) -> set[Digest]:
    """Return the chunks in other writers' packs that a collector has marked."""
    return {
        ref.digest
        for group in groups
        for ref in group.refs
        if ref.location and not ref.location.pack_id.startswith(lease_id) and pack_key(ref.location.pack_id) in marked
    }


def _rewrite_group(group: _Group, stale: set[Digest], filler: Filler) -> None:
    """Write the stale chunks of a group into our own packs."""
    numbers = [number for number, ref in enumerate(group.refs) if ref.digest in stale]
    if not numbers:
        return
    pieces = cut_sources([each.source for each in group.make()])
    wanted: dict[Digest, SourceChunk] = {group.refs[number].digest: pieces[number] for number in numbers}
    expected = {ref.digest: ref for ref in group.refs if ref.digest in wanted}
    moved = filler.rewrite(list(wanted.values()), [expected[digest] for digest in wanted])
    places = {ref.digest: ref.location for ref in moved}
    group.refs[:] = [ref._replace(location=places[ref.digest]) if ref.digest in places else ref for ref in group.refs]


def _write_manifest(store: ObjectStore, lease: Lease, groups: Sequence[_Group], new_bytes: int) -> WrittenPart:
    entries = [entry for group in groups for entry in _build_entries(group)]
    data = encode_manifest(None, entries)
    ref = ManifestRef(new_file_id(lease.lease_id), hash_bytes(data), len(data))
    create_settled(store, manifest_key(ref.manifest_id), data)
    return WrittenPart(PartRef(ref, digest_snapshot(None, entries)), lease.lease_id, new_bytes)


def _build_entries(group: _Group) -> list[Entry]:
    chunks: list[list[ChunkRef]] = [[] for _ in group.heads]
    for position, ref in zip(group.positions, group.refs, strict=True):
        chunks[position].append(ref)
    entries = []
    for (name, spec, note, place), own in zip(group.heads, chunks, strict=True):
        placed = tuple(ref._replace(box=box) for ref, box in zip(own, place.boxes, strict=True))
        entries.append(Entry(name, place.size_bytes, placed, spec, note, place.dims, 0, place.rank))
    return entries
