"""Answers about space: what each snapshot takes, which series and which snapshots share bytes, what gc would free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from holdfast.errors import NotFound
from holdfast.json_text import Json
from holdfast.query.facts import Facts
from holdfast.repo.format.layout import RESERVED, natural_order, split_prefix
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.upkeep.collect import CollectPlan, plan_collect
from holdfast.repo.upkeep.usage import Usage, read_pack_usage
from holdfast.serving.answers.ledger import MAX_GROUPS, ChunkLedger, LedgerReader
from holdfast.serving.request import choose_sort
from holdfast.texts import format_utc

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
