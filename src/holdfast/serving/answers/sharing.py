"""Answers about space: what each snapshot takes, what series and snapshots share, what gc would free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from holdfast.errors import NotFound
from holdfast.json_text import Json
from holdfast.query.facts import Facts
from holdfast.repo.format.layout import RESERVED, natural_order, split_prefix
from holdfast.repo.format.rank_manifests import Manifests, iter_manifests, take_read
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.upkeep.collect import CollectPlan, plan_collect
from holdfast.repo.upkeep.usage import Usage, iter_positions, read_pack_usage
from holdfast.serving.answer import choose_sort
from holdfast.texts import format_utc

Column = np.ndarray[Any, Any]

MAX_USES: Final = 1 << 22
"""Uses of chunks by snapshots that are kept; of more, only those of every second chunk, every fourth, and so on."""
MAX_GROUPS: Final = 64
"""Groups of snapshots that can be compared with each other at once."""
_OFFSET_BITS: Final = 40
_MOST: Final = (1 << 32) - 1
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_BLOCK: Final = 1 << 14


class _Used(NamedTuple):
    """The chunks that one snapshot uses."""

    keys: Column
    """The pack, as a number, and the offset in it; sorted, each once."""
    stored: Column
    raw: Column
    manifest_bytes: int


class LedgerReader:
    """Reads the chunks that snapshots use, each manifest once; for one thread at a time."""

    def __init__(self, repo: Repository, *, max_uses: int = MAX_USES) -> None:
        """Read nothing yet."""
        self._repo = repo
        self._max_uses = max_uses
        self._packs: dict[str, int] = {}
        self._used: dict[str, _Used] = {}
        self._rate = 1

    def read(self, snapshots: Sequence[CommittedSnapshot]) -> ChunkLedger:
        """Return the ledger of all current snapshots; reads the manifests that were not read before."""
        current = {snapshot.manifest.manifest_id: snapshot.manifest for snapshot in snapshots}
        self._used = {key: used for key, used in self._used.items() if key in current}
        kept = sum(len(used.keys) for used in self._used.values())
        if self._rate > 1 and 2 * kept * self._rate <= self._max_uses:
            # So many snapshots were deleted that every chunk can be kept again.
            self._used, self._rate, kept = {}, 1, 0
        missing = [ref for key, ref in current.items() if key not in self._used]
        found = iter_manifests(self._repo.store, missing)
        for ref, manifests in zip(missing, found, strict=True):
            if isinstance(manifests, NotFound):  # deleted and collected after it was listed
                continue
            used = self._thin(self._find_used(take_read(manifests)))
            self._used[ref.manifest_id] = used
            kept += len(used.keys)
            while kept > self._max_uses:
                self._rate *= 2
                self._used = {key: self._thin(each) for key, each in self._used.items()}
                kept = sum(len(each.keys) for each in self._used.values())
        return self._join([snapshot for snapshot in snapshots if snapshot.manifest.manifest_id in self._used])

    def _find_used(self, manifests: Manifests) -> _Used:
        positions = dict(iter_positions(manifests))
        packs, mask = self._packs, (1 << _OFFSET_BITS) - 1
        keys = np.fromiter(
            (packs.setdefault(pack, len(packs)) << _OFFSET_BITS | offset & mask for pack, offset in positions),
            np.uint64,
            len(positions),
        )
        order = np.argsort(keys)
        sizes = [
            np.fromiter((min(size, _MOST) for size in column), np.uint32, len(positions))[order]
            for column in (
                (size.stored_bytes for size in positions.values()),
                (size.raw_bytes for size in positions.values()),
            )
        ]
        return _Used(keys[order], sizes[0], sizes[1], manifests.size_bytes)

    def _thin(self, used: _Used) -> _Used:
        """Return every n-th of the chunks, by their position: the same ones of all snapshots."""
        if self._rate == 1:
            return used
        chosen = (used.keys * _MIX >> np.uint64(40)) % np.uint64(self._rate) == 0
        return _Used(used.keys[chosen], used.stored[chosen], used.raw[chosen], used.manifest_bytes)

    def _join(self, snapshots: Sequence[CommittedSnapshot]) -> ChunkLedger:
        used = [self._used[snapshot.manifest.manifest_id] for snapshot in snapshots]
        keys = np.concatenate([each.keys for each in used]) if used else np.zeros(0, np.uint64)
        unique, first, chunks, users = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        stored, raw = (
            np.concatenate([getattr(each, name) for each in used])[first].astype(np.int64)
            if used
            else np.zeros(0, np.int64)
            for name in ("stored", "raw")
        )
        return ChunkLedger(
            tuple(snapshots),
            np.array([each.manifest_bytes for each in used], np.int64),
            np.cumsum([0, *(len(each.keys) for each in used)]),
            chunks.astype(np.int32).reshape(-1),
            users.astype(np.int32),
            stored,
            raw,
            (unique >> np.uint64(_OFFSET_BITS)).astype(np.int64),
            tuple(self._packs),
            self._rate,
        )


@dataclass(frozen=True)
class ChunkLedger:
    """The chunks that each snapshot uses, by number. Sizes are estimates if only every n-th chunk was kept."""

    snapshots: tuple[CommittedSnapshot, ...]
    manifest_bytes: Column
    """Of each snapshot."""
    ends: Column
    """Snapshot n uses the chunks from `ends[n]` to `ends[n + 1]`."""
    chunks: Column
    users: Column
    """Of each chunk, by how many snapshots it is used."""
    stored: Column
    """The size of each chunk in its pack."""
    raw: Column
    """The same before it was compressed."""
    pack: Column
    """The pack of each chunk, by number."""
    packs: tuple[str, ...]
    rate: int
    """1 if all chunks were kept; else every n-th was, and all sums are multiplied by n."""

    def find_chunks(self, at: int) -> Column:
        """Return the chunks that a snapshot uses."""
        found: Column = self.chunks[self.ends[at] : self.ends[at + 1]]
        return found

    def _sum_by_snapshot(self, sizes: Column) -> Column:
        """Add up a size for each use of a chunk, by snapshot."""
        total = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        sums: Column = self.rate * (total[self.ends[1:]] - total[self.ends[:-1]])
        return sums

    def sum_stored(self) -> Column:
        """Return the bytes of each snapshot, each chunk counted once, with its manifests."""
        return self._sum_by_snapshot(self.stored[self.chunks]) + self.manifest_bytes

    def sum_own(self) -> Column:
        """Return the bytes of each snapshot that no other one uses: what deleting it can free."""
        own = np.where(self.users == 1, self.stored, 0)
        return self._sum_by_snapshot(own[self.chunks]) + self.manifest_bytes

    def sum_shared_with(self, at: int) -> Column:
        """Return the bytes of chunks that each snapshot shares with one of them."""
        shared = np.zeros_like(self.stored)
        chunks = self.find_chunks(at)
        shared[chunks] = self.stored[chunks]
        return self._sum_by_snapshot(shared[self.chunks])

    def sum_freed(self, doomed: Sequence[int]) -> int:
        """Return the bytes that only these snapshots use, and those of their manifests."""
        uses = np.zeros_like(self.users)
        for at in doomed:
            uses[self.find_chunks(at)] += 1
        freed = int(self.stored[(uses > 0) & (uses == self.users)].sum())
        return self.rate * freed + int(self.manifest_bytes[list(doomed)].sum())

    def sum_saved(self) -> int:
        """Return how much smaller compression makes the chunks that snapshots use."""
        return self.rate * int((self.raw - self.stored).sum())

    def sum_live(self) -> dict[str, int]:
        """Return the bytes of each pack that snapshots use."""
        sums: Any = np.bincount(self.pack, weights=self.stored, minlength=len(self.packs)) if len(self.pack) else []
        return {pack: self.rate * int(size) for pack, size in zip(self.packs, sums, strict=False)}

    def compare(self, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the bytes that each two of at most 64 groups of snapshots share; in the diagonal, all of one."""
        assert len(groups) <= MAX_GROUPS
        bits = np.zeros(len(self.stored), np.uint64)
        for number, group in enumerate(groups):
            for at in group:
                bits[self.find_chunks(at)] |= np.uint64(1 << number)
        # Chunks that the same groups use are counted together: there are few such sets.
        sets, places = np.unique(bits, return_inverse=True)
        sizes = np.bincount(places.reshape(-1), weights=self.stored, minlength=len(sets))
        total = np.zeros((len(groups), len(groups)))
        shifts = np.arange(len(groups), dtype=np.uint64)
        for start in range(0, len(sets), _BLOCK):
            part = slice(start, start + _BLOCK)
            members = (sets[part, None] >> shifts & np.uint64(1)).astype(np.float64)
            total += (members * sizes[part, None]).T @ members
        return [[self.rate * int(size) for size in row] for row in total]


MAX_SERIES: Final = 24
"""Series in the map of shared bytes; of more, those with the most snapshots."""
MAX_PAIRED: Final = MAX_GROUPS
"""Snapshots that are compared with each other in one answer."""


class SpaceRow(NamedTuple):
    """The space that one snapshot takes."""

    name: str
    logical_bytes: int
    stored_bytes: int
    shared_bytes: int
    own_bytes: int


@dataclass(frozen=True)
class StoreSpace:
    """What was read about the space of a whole store, at one moment."""

    ledger: ChunkLedger
    usage: Usage
    """Without snapshots, which are in the ledger."""
    collectable: CollectPlan
    read_s: float

    @cached_property
    def rows(self) -> tuple[SpaceRow, ...]:
        """The space of each snapshot."""
        stored, own = self.ledger.sum_stored().tolist(), self.ledger.sum_own().tolist()
        return tuple(
            SpaceRow(snapshot.name, snapshot.logical_bytes, size, size - alone, alone)
            for snapshot, size, alone in zip(self.ledger.snapshots, stored, own, strict=True)
        )

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The place of each snapshot in the ledger, by name."""
        return {snapshot.name: at for at, snapshot in enumerate(self.ledger.snapshots)}

    @cached_property
    def series(self) -> tuple[list[str], list[list[int]]]:
        """Series of names, and the bytes that each two of them share."""
        groups: dict[str, list[int]] = {}
        for at, snapshot in enumerate(self.ledger.snapshots):
            groups.setdefault(_find_series(snapshot), []).append(at)
        names = sorted(sorted(groups, key=lambda name: -len(groups[name]))[:MAX_SERIES], key=natural_order)
        return names, self.ledger.compare([groups[name] for name in names])


def read_space(repo: Repository, reader: LedgerReader) -> StoreSpace:
    """Read the manifests that `reader` has not read yet, the footers of packs, and what gc would delete."""
    current = sorted(read_live(repo.store).current, key=lambda snapshot: natural_order(snapshot.name))
    ledger = reader.read(current)
    packs, manifest_bytes = read_pack_usage(repo.store, ledger.sum_live())
    usage = Usage((), packs, manifest_bytes, int(ledger.manifest_bytes.sum()), ledger.sum_saved())
    return StoreSpace(ledger, usage, plan_collect(repo.store, min_age_s=0.0), repo.store.clock())


def _find_series(snapshot: CommittedSnapshot) -> str:
    if snapshot.name.startswith(RESERVED):
        return snapshot.name.partition("/")[0] + "/"  # all recorded runs, or all compiled graphs
    return split_prefix(snapshot.name) or snapshot.name


_USAGE_SORTS: Final = ("own_bytes", "shared_bytes", "stored_bytes", "logical_bytes", "name")


def describe_usage(space: StoreSpace, sort: str, offset: int, limit: int) -> dict[str, Json]:
    """Return the totals of `holdfast du --json`, a part of its snapshots, shared bytes of series, and what gc frees."""
    names, shared = space.series
    by = choose_sort(sort, _USAGE_SORTS)
    rows = sorted(
        space.rows,
        key=lambda row: natural_order(row.name) if by == "name" else getattr(row, by),
        reverse=sort.startswith("-"),
    )
    usage, plan = space.usage, space.collectable
    return {
        "computed": format_utc(space.read_s),
        "sampled": space.ledger.rate,
        "total": len(rows),
        "offset": offset,
        "snapshots": [row._asdict() for row in rows[offset : offset + limit]],
        "logical_bytes": sum(row.logical_bytes for row in rows),
        "stored_bytes": usage.stored_bytes,
        # What is dead in a pack is the difference of large numbers, which an estimate would not find.
        "reclaimable_bytes": usage.reclaimable_bytes if space.ledger.rate == 1 else None,
        "compression_saved_bytes": usage.saved_bytes,
        "gc": {"files": len(plan.dead), "dead_bytes": plan.dead_bytes, "live_bytes": plan.live_bytes},
        "series": names,
        "shared": shared,
    }


def describe_pairs(space: StoreSpace, found: Sequence[Facts], offset: int, limit: int) -> dict[str, Json]:
    """Return the bytes that each two of some snapshots share; all bytes that one uses in the diagonal."""
    known = [each.snapshot.name for each in found if each.snapshot.name in space.places]
    shown = known[offset : offset + min(limit, MAX_PAIRED)]
    return {
        "computed": format_utc(space.read_s),
        "sampled": space.ledger.rate,
        "total": len(known),
        "offset": offset,
        "names": shown,
        "shared": space.ledger.compare([[space.places[name]] for name in shown]),
    }


_SHARES_SORTS: Final = ("shared_bytes", "stored_bytes", "name")


def describe_shares(space: StoreSpace, name: str, sort: str, offset: int, limit: int) -> dict[str, Json]:
    """Return the other snapshots that share bytes with one, those that share most first; raises NotFound."""
    at = space.places.get(name)
    if at is None:
        raise NotFound(f"{name!r} was saved after the space of the store was read; ask again", name=name)
    by = choose_sort(sort, _SHARES_SORTS)
    shared = space.ledger.sum_shared_with(at).tolist()
    rows = [
        {"name": row.name, "shared_bytes": size, "stored_bytes": row.stored_bytes}
        for place, (row, size) in enumerate(zip(space.rows, shared, strict=True))
        if size and place != at and not row.name.startswith(RESERVED)
    ]
    rows.sort(key=lambda row: natural_order(row["name"]) if by == "name" else row[by], reverse=sort.startswith("-"))
    return {
        "name": name,
        "uses_bytes": shared[at],
        "own_bytes": space.rows[at].own_bytes,
        "sampled": space.ledger.rate,
        "total": len(rows),
        "offset": offset,
        "snapshots": rows[offset : offset + limit],
    }
