"""Computes the space that snapshots and packs take: logical, stored, shared and reclaimable bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.errors import Corrupt, HoldfastError, NewerFormat, NotFound
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import MANIFESTS, PACKS, pack_key
from holdfast.repo.format.manifest import ChunkPlace
from holdfast.repo.format.pack import Footer, iter_pack_footers, parse_pack_key
from holdfast.repo.format.rank_manifests import Manifests, iter_manifests, take_read
from holdfast.repo.names.snapshots import CommittedSnapshot

PackPosition = tuple[str, int]
"""Pack id and offset of a stored chunk."""


class ChunkSize(NamedTuple):
    """The size of a stored chunk."""

    stored_bytes: int
    raw_bytes: int
    """Before it was compressed."""


@dataclass(frozen=True, slots=True)
class SnapshotUsage:
    """The space that one snapshot takes."""

    snapshot: CommittedSnapshot
    stored_bytes: int
    """Bytes of its chunks and manifests, each chunk counted once."""
    own_bytes: int
    """Bytes that no other snapshot uses: what deleting it can free."""
    raw_bytes: int
    """What `stored_bytes` would be if no chunk were compressed."""

    @property
    def shared_bytes(self) -> int:
        """Bytes that other snapshots use as well."""
        return self.stored_bytes - self.own_bytes


@dataclass(frozen=True, slots=True)
class PackUsage:
    """How much of a pack is in use."""

    pack_id: str
    size_bytes: int
    live_bytes: int
    """Bytes of its chunks that some snapshot uses."""
    dead_bytes: int
    """Bytes that collecting or repacking can free: its unused chunks, or the whole pack if all are unused."""

    @property
    def dead_share(self) -> float:
        """The dead bytes as a share of the bytes of all its chunks."""
        chunk_bytes = self.live_bytes + self.dead_bytes
        return self.dead_bytes / chunk_bytes if chunk_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """The space that the whole store takes."""

    snapshots: tuple[SnapshotUsage, ...]
    packs: tuple[PackUsage, ...]
    manifest_bytes: int
    live_manifest_bytes: int
    saved_bytes: int
    """How much smaller compression makes the chunks that snapshots use."""

    @property
    def logical_bytes(self) -> int:
        """The bytes that all snapshots would take without sharing."""
        return sum(usage.snapshot.logical_bytes for usage in self.snapshots)

    @property
    def stored_bytes(self) -> int:
        """The bytes of all packs and manifests."""
        return sum(pack.size_bytes for pack in self.packs) + self.manifest_bytes

    @property
    def live_bytes(self) -> int:
        """The stored bytes that are needed, with headers, padding and footers of packs."""
        return self.stored_bytes - self.reclaimable_bytes

    @property
    def reclaimable_bytes(self) -> int:
        """The bytes that collecting, and repacking packs that are partly dead, can free."""
        dead_manifest_bytes = self.manifest_bytes - self.live_manifest_bytes
        return sum(pack.dead_bytes for pack in self.packs) + dead_manifest_bytes


def find_leases(snapshot: CommittedSnapshot, manifests: Manifests) -> frozenset[str]:
    """Return the leases under which a snapshot was written: each rank of a DCP save has its own.

    The id of every pack and manifest begins with the lease of its writer.
    """
    return frozenset(file_id.partition("-")[0] for file_id in (snapshot.manifest.manifest_id, *manifests.ids))


def find_new_bytes(leases: Collection[str], entries: Iterable[Entry]) -> list[int]:
    """Return, for each entry, how many of its bytes were written under `leases`.

    These are values in the manifest, and chunks in packs of these leases. A chunk that several entries use counts for
    the first of them.
    """
    seen: set[PackPosition] = set()
    found = []
    for entry in entries:
        new_bytes = 0
        for chunk in entry.chunks:
            if chunk.location is None:
                new_bytes += chunk.size_bytes
                continue
            position = (chunk.location.pack_id, chunk.location.offset)
            if position not in seen and chunk.location.pack_id.partition("-")[0] in leases:
                seen.add(position)
                new_bytes += chunk.size_bytes
        found.append(new_bytes)
    return found


def sum_new_bytes(leases: Collection[str], manifests: Manifests) -> int:
    """Return the sum of `find_new_bytes` over the entries of all parts, without creating them."""
    seen: set[PackPosition] = set()
    total_bytes = 0
    own = {pack for pack in manifests.packs if pack.partition("-")[0] in leases}
    for pack_id, offset, _, size_bytes, _ in manifests.iter_places():
        if pack_id:
            if pack_id not in own or (pack_id, offset) in seen:
                continue
            seen.add((pack_id, offset))
        total_bytes += size_bytes
    return total_bytes


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The bytes that one snapshot takes in the store, by place."""

    packed_bytes: int
    """Its chunks in packs, each counted once; without the bases of deltas."""
    raw_bytes: int
    """The same chunks before they were compressed."""
    deltas: int
    """How many of these chunks are deltas."""
    base_bytes: int
    """The bases of these deltas, as stored: chunks of earlier snapshots, which are kept as long as the deltas."""
    manifest_bytes: int
    """Its manifests: names, specs, the tree with its plain values, and small values that are stored inline."""
    inline_bytes: int
    """Small values that are stored in the manifests instead of in a pack; before the manifests are compressed."""

    @property
    def total_bytes(self) -> int:
        """All of them: inline values are part of the manifests."""
        return self.packed_bytes + self.base_bytes + self.manifest_bytes


def find_stored_bytes(manifests: Manifests) -> StoredBytes:
    """Return the bytes that a snapshot takes in the store."""
    own: dict[PackPosition, ChunkPlace] = {}
    inline_bytes = 0
    for place in manifests.iter_places():
        if place.pack_id:
            own[place.pack_id, place.offset] = place
        else:
            inline_bytes += place.size_bytes
    bases = {(place.base.pack_id, place.base.offset): place.base for place in own.values() if place.base}
    return StoredBytes(
        packed_bytes=sum(place.stored_bytes for place in own.values()),
        raw_bytes=sum(place.size_bytes for place in own.values()),
        deltas=sum(place.base is not None for place in own.values()),
        base_bytes=sum(at.stored_bytes for position, at in bases.items() if position not in own),
        manifest_bytes=manifests.size_bytes,
        inline_bytes=inline_bytes,
    )


def iter_positions(manifests: Manifests) -> Iterator[tuple[PackPosition, ChunkSize]]:
    """Yield the pack id, offset and size of every chunk that a snapshot needs; repeated ones repeatedly.

    The bases of its deltas are among them.
    """
    for pack_id, offset, stored_bytes, size_bytes, base in manifests.iter_places():
        if pack_id:
            yield (pack_id, offset), ChunkSize(stored_bytes, size_bytes)
        if base:
            yield (base.pack_id, base.offset), ChunkSize(base.stored_bytes, size_bytes)


def read_usage(store: ObjectStore, snapshots: Sequence[CommittedSnapshot]) -> Usage:
    """Read the manifests of `snapshots`, all current ones of a store, and return the space they take."""
    users: dict[PackPosition, int] = {}
    sizes: dict[PackPosition, ChunkSize] = {}
    used: list[set[PackPosition]] = []
    manifest_bytes: list[int] = []
    for manifests in iter_manifests(store, [snapshot.manifest for snapshot in snapshots]):
        positions: dict[PackPosition, ChunkSize] = {}
        manifest_bytes.append(0)
        if not isinstance(manifests, NotFound):  # else it was deleted and collected after it was listed
            read = take_read(manifests)
            positions = dict(iter_positions(read))
            manifest_bytes[-1] = read.size_bytes
        sizes.update(positions)
        used.append(set(positions))
        for position in positions:
            users[position] = users.get(position, 0) + 1
    usages = []
    for snapshot, positions_used, own_manifest in zip(snapshots, used, manifest_bytes, strict=True):
        own = sum(sizes[position].stored_bytes for position in positions_used if users[position] == 1)
        stored = sum(sizes[position].stored_bytes for position in positions_used)
        raw = sum(sizes[position].raw_bytes for position in positions_used)
        usages.append(SnapshotUsage(snapshot, stored + own_manifest, own + own_manifest, raw + own_manifest))
    live: dict[str, int] = {}
    for (pack_id, _), size in sizes.items():
        live[pack_id] = live.get(pack_id, 0) + size.stored_bytes
    saved_bytes = sum(size.raw_bytes - size.stored_bytes for size in sizes.values())
    packs, all_manifest_bytes = read_pack_usage(store, live)
    return Usage(tuple(usages), packs, all_manifest_bytes, sum(manifest_bytes), saved_bytes)


def read_pack_usage(store: ObjectStore, live: Mapping[str, int]) -> tuple[tuple[PackUsage, ...], int]:
    """Return how much of each pack is in use, and the size of all manifests; `live` has the bytes in use by pack id."""
    packs, manifests = store.list_together((PACKS, MANIFESTS))
    by_key = {pack_key(pack_id): size_bytes for pack_id, size_bytes in live.items()}
    return tuple(_iter_measured(store, packs, by_key)), sum(info.size_bytes for info in manifests)


def _iter_measured(store: ObjectStore, packs: Sequence[ObjectInfo], live: Mapping[str, int]) -> Iterator[PackUsage]:
    """Yield how much of each pack is in use; reads the footers of those that are."""
    used = [info for info in packs if live.get(info.key) and parse_pack_key(info.key)]
    ids = [(info.key.removeprefix(PACKS), info.size_bytes) for info in used]
    footers = {
        info.key: _count_chunk_bytes(footer) for info, footer in zip(used, iter_pack_footers(store, ids), strict=True)
    }
    for info in packs:
        live_bytes = live.get(info.key, 0)
        dead_bytes = 0 if live_bytes else info.size_bytes
        # Not everything that is not live is dead: header, padding and footer may be as large as a small chunk.
        dead_bytes = max(footers.get(info.key, 0) - live_bytes, dead_bytes)
        yield PackUsage(info.key.removeprefix(PACKS), info.size_bytes, live_bytes, dead_bytes)


def _count_chunk_bytes(footer: Footer | HoldfastError) -> int:
    """Return the stored bytes of all chunks of a pack; 0 if that is unknown."""
    if isinstance(footer, NotFound | Corrupt | NewerFormat):
        return 0
    return sum(row.location.stored_bytes for row in take_read(footer).chunks)


def read_freed_bytes(
    store: ObjectStore, current: Sequence[CommittedSnapshot], doomed: Sequence[CommittedSnapshot]
) -> int:
    """Return the bytes that only the snapshots `doomed` use, which deleting them can free."""
    names = {snapshot.name for snapshot in doomed}
    positions: dict[PackPosition, ChunkSize] = {}
    manifest_bytes = 0
    for manifests in map(take_read, iter_manifests(store, [snapshot.manifest for snapshot in doomed])):
        manifest_bytes += manifests.size_bytes
        positions.update(iter_positions(manifests))
    others = [snapshot.manifest for snapshot in current if snapshot.name not in names]
    for manifests in map(take_read, iter_manifests(store, others)):
        for position, _ in iter_positions(manifests):
            positions.pop(position, None)
    return sum(size.stored_bytes for size in positions.values()) + manifest_bytes
