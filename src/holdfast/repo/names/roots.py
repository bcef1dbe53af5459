"""Reads what is live: the snapshot records that count, and the packs and manifests that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.errors import Corrupt, NewerFormat, NotFound
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import (
    LEASES,
    MAX_GENERATION,
    SNAPSHOTS,
    TAGS,
    generation_key,
    manifest_key,
    snapshot_stem,
    tag_stem,
)
from holdfast.repo.format.record import Fields
from holdfast.repo.names.generations import iter_stems, read_newest, read_record
from holdfast.repo.names.rollback import LeaseStanding, is_present, iter_needed, judge_standing
from holdfast.repo.names.snapshots import CommittedSnapshot, parse_snapshot

_RELISTS: Final = 8


@dataclass(frozen=True, slots=True)
class LeaseView:
    """The state of one lease, as read from its files."""

    lease_id: str
    generations: tuple[int, ...]
    standing: LeaseStanding
    shown_s: float
    """When its newest generation was created, by the store's clock."""
    purpose: str = ""
    host: str = ""

    @property
    def is_live(self) -> bool:
        """Whether its save may be running; a lease that cannot be read counts as live."""
        return self.standing == "live"

    @property
    def is_exhausted(self) -> bool:
        """Whether its generation numbers are exhausted: it cannot be fenced, so a live one stays live."""
        return self.generations[-1] >= MAX_GENERATION


@dataclass(frozen=True, slots=True)
class DeadRecords:
    """Generations of one stem that can be deleted, lowest first."""

    stem: str
    generations: tuple[int, ...]


@dataclass(slots=True)
class Live:
    """All files that some snapshot needs, and the records that can be deleted."""

    current: list[CommittedSnapshot] = field(default_factory=list)
    superseded: list[CommittedSnapshot] = field(default_factory=list)
    """Replaced by a commit that is not settled, and so may still be withdrawn."""
    needs: dict[str, list[CommittedSnapshot]] = field(default_factory=dict)
    """Keys of packs and manifests, and the snapshots that need them."""
    dead_records: list[DeadRecords] = field(default_factory=list)
    committed_under: set[str] = field(default_factory=set)
    """Leases that some record names."""


class _Changed(Exception):
    """A record was changed or collected while its files were being followed."""


_Chain = list[tuple[int, Fields]]


def read_leases(store: ObjectStore) -> dict[str, LeaseView]:
    """Read the state of every lease."""
    leases = {}
    for stem, generations in iter_stems(store, LEASES):
        lease_id = stem.removeprefix(LEASES)
        key = generation_key(stem, generations[-1])
        standing: LeaseStanding = "live"
        purpose = host = ""
        shown_s = store.clock()
        try:
            shown_s = store.stat(key).modified_s
            fields = read_record(store, key)
            if fields:
                standing = judge_standing(fields.text("state"), lowest=generations[0])
                purpose, host = fields.text("purpose"), fields.text("host")
        except NotFound:
            continue  # it was released, and is being deleted
        except (Corrupt, NewerFormat):
            pass
        leases[lease_id] = LeaseView(lease_id, tuple(generations), standing, shown_s, purpose, host)
    return leases


def read_live(store: ObjectStore) -> Live:
    """Read every root and the files it needs; raises Corrupt if one cannot be read: then nothing may be deleted."""
    for _ in range(_RELISTS):
        try:
            return _read_live(store)
        except _Changed:
            continue
    raise Corrupt(f"{store.url}: snapshots keep changing while they are read; try again when fewer processes write")


def _read_live(store: ObjectStore) -> Live:
    chains = [
        (stem, generations, _read_chain(store, stem, generations))
        for prefix in (SNAPSHOTS, TAGS)
        for stem, generations in iter_stems(store, prefix)
    ]
    # Leases after records: if the lease of a record read above is missing now, it was released.
    leases = read_leases(store)
    live = Live()
    for stem, generations, chain in chains:
        kept = _keep_roots(chain, leases, live)
        # A torn record never counted. A tombstone stays, and so does whatever is highest: were a number free again,
        # two writers could take different ones for the next, and both would win.
        top = chain[0][0] if chain else generations[-1]
        dead = tuple(generation for generation in generations if generation not in kept and generation < top)
        if dead:
            live.dead_records.append(DeadRecords(stem, dead))
    for snapshot in [*live.current, *live.superseded]:
        live.committed_under.add(snapshot.lease_id)
        for key in _find_needed(store, snapshot, leases, live.superseded):
            live.needs.setdefault(key, []).append(snapshot)
    return live


def _read_chain(store: ObjectStore, stem: str, generations: list[int]) -> _Chain:
    """Read the generations of a stem that are not torn, highest first; raises if the highest is damaged."""
    chain: _Chain = []
    for generation in reversed(generations):
        try:
            fields = read_record(store, generation_key(stem, generation))
            if fields:
                _verify_own(fields, stem, generation)
        except NotFound as error:
            raise _Changed from error
        except (Corrupt, NewerFormat):
            if not chain:
                raise
            continue
        if fields:
            chain.append((generation, fields))
    return chain


def _verify_own(fields: Fields, stem: str, generation: int) -> None:
    """Raise Corrupt for a record under a wrong key or in an unknown state: it may hide a root."""
    is_snapshot = stem.startswith(SNAPSHOTS)
    fields.expect(kind="snapshot" if is_snapshot else "tag", generation=generation)
    name = fields.text("name")
    if (snapshot_stem(name) if is_snapshot else tag_stem(name)) != stem:
        raise Corrupt(f"record {fields.key} has a name that belongs to another key", key=fields.key)
    state = fields.text("state")
    if state not in ("live", "deleted"):
        raise Corrupt(f"record {fields.key} is in the unknown state {state[:40]!r}", key=fields.key)


def _keep_roots(chain: _Chain, leases: dict[str, LeaseView], live: Live) -> set[int]:
    """Add the roots of one name to `live`: the newest record down to the first settled one; return their numbers."""
    kept = set()
    for position, (generation, fields) in enumerate(chain):
        kept.add(generation)
        if fields.text("kind") != "snapshot" or fields.text("state") != "live":
            break
        snapshot = parse_snapshot(fields)
        (live.superseded if position else live.current).append(snapshot)
        lease = leases.get(snapshot.lease_id)
        if lease is None or lease.standing == "released":
            break
    return kept


def _find_needed(
    store: ObjectStore,
    snapshot: CommittedSnapshot,
    leases: dict[str, LeaseView],
    superseded: Sequence[CommittedSnapshot],
) -> list[str]:
    needed = list(iter_needed(store, snapshot))
    lease = leases.get(snapshot.lease_id)
    # A fenced save may have died before it withdrew its record. Its files may be gone; older records are roots as well.
    if needed or (lease and lease.standing == "fenced"):
        return needed
    stem = snapshot_stem(snapshot.name)
    if read_newest(store, stem).generation != snapshot.generation:
        if snapshot in superseded and is_present(store, generation_key(stem, snapshot.generation)):
            # After a power loss its record, or the lease of the record above, reappeared, but its files did not.
            return needed
        raise _Changed
    raise Corrupt(
        f"the manifest of snapshot {snapshot.name!r} is missing, so it is unknown which packs it needs;"
        " nothing was deleted. Restore it from a copy, or delete the snapshot first",
        key=manifest_key(snapshot.manifest.manifest_id),
    )
