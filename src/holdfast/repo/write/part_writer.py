"""Writes one part of a snapshot that another process commits: packs and a manifest, under a lease of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from holdfast.digest import Digest
from holdfast.errors import StoreError
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
from holdfast.progress import Silent
from holdfast.repo.format.chunk import ChunkRef
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import PartRef, lease_stem
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.format.source import Source, SourceChunks, cut_sources
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.generations import list_generations
from holdfast.repo.names.leases import delete_lease
from holdfast.repo.names.snapshots import read_listed_name, read_name
from holdfast.repo.write.existing import ExistingChunks, list_names, read_base, read_bases
from holdfast.repo.write.fill import Filler
from holdfast.repo.write.transaction import ManifestPart, SnapshotContent, Transaction
from holdfast.repo.write.writer import Placement, make_hasher


class PlacedSource(NamedTuple):
    """The bytes of an entry, or of a part of it, and their position in the entry."""

    source: Source
    place: Placement


MakeSources = Callable[[], Sequence[PlacedSource]]
"""Creates some of the sources; MUST return the same bytes if it is called again."""
FindDigests = Callable[[Sequence[Source]], Mapping[int, Sequence[Digest | None]]]
"""Returns the digests of the sources that are on devices, as in `Request.digests`."""


class WrittenPart(NamedTuple):
    """What the committing process needs."""

    ref: PartRef
    lease_id: str
    """The part's lease, still live; pass it to `end_lease` after the commit."""
    new_bytes: int


def _find_no_digests(_: object) -> dict[int, Sequence[Digest | None]]:
    return {}


def write_part(
    repo: Repository,
    name: str,
    groups: Sequence[MakeSources],
    *,
    purpose: str,
    find_digests: FindDigests = _find_no_digests,
) -> WrittenPart:
    """Write all sources, a group at a time, and their manifest; none of it is visible before the commit."""
    with (
        repo.store.begin(partial(_read_bases, repo, name)) as bases,
        Transaction(repo, purpose=purpose, is_part=True) as transaction,
        make_hasher(repo) as hasher,
    ):
        # Marks are read, and packs looked for, after both leases exist, this one and that of the committing process: a
        # collector that marks a chunk later waits for them.
        existing = ExistingChunks(repo, bases.result(), avoid=transaction.avoid)
        filler = Filler(hasher, existing, transaction.packer, repo.counters.stages, verify_reuse=True)
        part = _Part(groups, filler, find_digests)
        # Each group is created, written and dropped before the next, so the memory of one group suffices.
        content = SnapshotContent()
        with transaction.sealing(content):
            content.parts = part.write()
        while content.is_stale:
            with transaction.sealing(content):
                content.move(part.rewrite(content.stale))
        transaction.hand_over()
        return WrittenPart(content.refs[0], transaction.lease_id, filler.new_bytes)


def _read_bases(repo: Repository, name: str) -> list[Manifest]:
    listed = list_names(repo, name)
    state = read_name(repo.store, name) if listed is None else read_listed_name(repo.store, name, listed)
    return read_bases(repo.store, [state.snapshot, read_base(repo, name, listed=listed)])


def end_lease(store: ObjectStore, lease_id: str) -> None:
    """Delete the lease of a part, after the snapshot that uses the part was committed."""
    with suppress(StoreError):  # not needed any more; a collector deletes it once it has expired
        delete_lease(store, lease_id, list_generations(store, lease_stem(lease_id)))


class _Group(NamedTuple):
    """Sources that were written together. The sources themselves are not kept, so that their memory is freed."""

    heads: list[tuple[str, Json, Json, Placement]]
    """Name, spec, note and placement of each source."""
    positions: list[int]
    """For each chunk, the position of its source."""
    refs: list[ChunkRef]


class _Part:
    """Writes the groups of one part, and chunks of them again; used by one thread."""

    def __init__(self, groups: Sequence[MakeSources], filler: Filler, find_digests: FindDigests) -> None:
        self._groups = groups
        self._filler = filler
        self._find_digests = find_digests
        self._digests: list[list[Digest]] = []
        """The digests of the chunks of each group. Only they are kept, to find the group of a chunk to rewrite."""

    def write(self) -> list[ManifestPart]:
        """Write all groups; return the content of the part's manifest."""
        self._digests.clear()
        groups = [self._write_group(make) for make in self._groups]
        # A copy that an earlier group has reused may be found damaged only by a later group.
        lost = [ref for group in groups for ref in group.refs if ref.digest in self._filler.lost]
        moved = {ref.digest: ref for ref in self.rewrite(lost)}
        return [ManifestPart(None, [entry for group in groups for entry in _build_entries(group, moved)])]

    def _write_group(self, make: MakeSources) -> _Group:
        placed = make()
        sources = [each.source for each in placed]
        digests = self._find_digests(sources)
        pieces = list(SourceChunks(sources, digests=digests))
        fill = self._filler.fill_digested if digests else self._filler.fill
        refs = list(fill(pieces, Silent()))
        self._digests.append([ref.digest for ref in refs])
        heads = [(source.name, source.spec, source.note, place) for source, place in placed]
        return _Group(heads, [piece.position for piece in pieces], refs)

    def rewrite(self, stale: Sequence[ChunkRef]) -> list[ChunkRef]:
        """Write stale chunks into the transaction's own packs, each once; return their new references."""
        expected = {ref.digest: ref for ref in stale}
        moved: list[ChunkRef] = []
        for make, digests in zip(self._groups, self._digests, strict=True):
            numbers = {digest: number for number, digest in enumerate(digests) if digest in expected}
            if numbers:
                # The same bytes again: the filler raises SourceChanged if a digest differs.
                pieces = cut_sources([each.source for each in make()])
                wanted = [pieces[number] for number in numbers.values()]
                moved += self._filler.rewrite(wanted, [expected.pop(digest) for digest in numbers])
        return moved


def _build_entries(group: _Group, moved: Mapping[Digest, ChunkRef]) -> list[Entry]:
    chunks: list[list[ChunkRef]] = [[] for _ in group.heads]
    for position, ref in zip(group.positions, group.refs, strict=True):
        chunks[position].append(moved.get(ref.digest, ref))
    entries = []
    for (name, spec, note, place), own in zip(group.heads, chunks, strict=True):
        placed = tuple(ref._replace(box=box) for ref, box in zip(own, place.boxes, strict=True))
        entries.append(Entry(name, place.size_bytes, placed, spec, note, place.dims, 0, place.rank))
    return entries
