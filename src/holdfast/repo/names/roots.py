"""Reads what is live: the snapshot records that count, the files they need, and which commits can still be undone.

A fenced save may withdraw its commit. The snapshot that it replaced is therefore kept until the commit is settled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Literal

from holdfast.errors import Corrupt, HoldfastError, NewerFormat, NotFound
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.repo.format.layout import (
    LEASES,
    MAX_GENERATION,
    SNAPSHOTS,
    TAGS,
    generation_key,
    lease_stem,
    manifest_key,
    pack_key,
    snapshot_stem,
    tag_stem,
)
from holdfast.repo.format.rank_manifests import Needs, iter_needs
from holdfast.repo.format.record import Fields
from holdfast.repo.names.generations import (
    RELISTS,
    Newest,
    ReadRecord,
    iter_records,
    iter_stem_objects,
    iter_stems,
    list_generations,
    read_newest,
    read_record,
)
from holdfast.repo.names.leases import LeaseState, read_marked
from holdfast.repo.names.snapshots import CommittedSnapshot, NameState, parse_snapshot


@dataclass(frozen=True, slots=True)
class LeaseView:
    """The state of one lease, as read from its files."""

    lease_id: str
    generations: tuple[int, ...]
    state: LeaseState
    renewed_s: float
    """When its newest generation was created, by the store's clock."""
    purpose: str = ""
    host: str = ""

    @property
    def is_live(self) -> bool:
        """Whether its save may be running; a lease that cannot be read counts as live."""
        return self.state == "live"

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
    stems = list(iter_stem_objects(store, LEASES))
    records = iter_records(store, (infos[max(infos)].key for _, infos in stems))
    views = (_view_lease(stem, infos, record) for (stem, infos), record in zip(stems, records, strict=True))
    return {view.lease_id: view for view in views if view}


def _view_lease(stem: str, infos: Mapping[int, ObjectInfo], highest: ReadRecord) -> LeaseView | None:
    """Return the state of a lease; None if it was released, and is being deleted."""
    if isinstance(highest.error, NotFound):
        return None
    if not isinstance(highest.error, Corrupt | NewerFormat | None):
        raise highest.error
    state: LeaseState = "live"
    purpose = host = ""
    generations = tuple(infos)
    try:
        if highest.fields:
            state = classify_lease(highest.fields.text("state"), lowest=generations[0])
            purpose, host = highest.fields.text("purpose"), highest.fields.text("host")
    except Corrupt:
        pass
    return LeaseView(stem.removeprefix(LEASES), generations, state, infos[generations[-1]].modified_s, purpose, host)


def read_live(store: ObjectStore) -> Live:
    """Read every root and the files it needs; raises Corrupt if one cannot be read: then nothing may be deleted."""
    for _ in range(RELISTS):
        try:
            return _read_live(store)
        except _Changed:
            continue
    raise Corrupt(f"{store.url}: snapshots keep changing while they are read; try again when fewer processes write")


def _read_live(store: ObjectStore) -> Live:
    stems = [each for prefix in (SNAPSHOTS, TAGS) for each in iter_stems(store, prefix)]
    keys = (generation_key(stem, number) for stem, generations in stems for number in reversed(generations))
    with closing(iter_records(store, keys)) as records:
        chains = [(*each, _read_chain(*each, records)) for each in stems]
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
    snapshots = [*live.current, *live.superseded]
    with closing(iter_needs(store, [snapshot.manifest for snapshot in snapshots])) as found:
        for snapshot, needs in zip(snapshots, found, strict=True):
            live.committed_under.add(snapshot.lease_id)
            for key in _verify_needed(store, snapshot, _list_needed(needs), leases, live.superseded):
                live.needs.setdefault(key, []).append(snapshot)
    return live


def _read_chain(stem: str, generations: list[int], records: Iterator[ReadRecord]) -> _Chain:
    """Return the generations of a stem that are not torn, highest first; raises if the highest is damaged."""
    chain: _Chain = []
    for generation in reversed(generations):
        try:
            fields = next(records).take_fields()
            if fields:
                verify_record(fields, stem, generation)
        except NotFound as error:
            raise _Changed from error
        except (Corrupt, NewerFormat):
            if not chain:
                raise
            continue
        if fields:
            chain.append((generation, fields))
    return chain


def verify_record(fields: Fields, stem: str, generation: int) -> None:
    """Raise Corrupt if the record of a snapshot or tag has the wrong key or an unknown state: it may hide a root."""
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
        if fields.text("kind") != "snapshot":
            break
        if fields.text("state") != "live":
            # Kept with the record below it: a fenced lease shows that a save withdrew its commit (`read_deleted`).
            live.committed_under |= {str(below.values.get("lease")) for _, below in chain[position + 1 : position + 2]}
            break
        snapshot = parse_snapshot(fields)
        (live.superseded if position else live.current).append(snapshot)
        lease = leases.get(snapshot.lease_id)
        if lease is None or lease.state == "released":
            break
    return kept


def _verify_needed(
    store: ObjectStore,
    snapshot: CommittedSnapshot,
    needed: list[str],
    leases: dict[str, LeaseView],
    superseded: Sequence[CommittedSnapshot],
) -> list[str]:
    """Return the files that a root needs, as read from its manifests; raises if these must exist and do not."""
    lease = leases.get(snapshot.lease_id)
    # A fenced save may have died before it withdrew its record. Its files may be gone; older records are roots as well.
    if needed or (lease and lease.state == "fenced"):
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


def classify_lease(state: str, *, lowest: int) -> LeaseState:
    """Return the state of a lease from the state of its highest generation and the number of its lowest.

    A fence without the generations below it was created while the owner, which had released the lease, was deleting
    its files.
    """
    if state == "fenced":
        return "released" if lowest else "fenced"
    return "released" if state == "released" else "live"


def read_lease_state(store: ObjectStore, lease_id: str) -> LeaseState | Literal["gone"]:
    """Return the state of a lease. Only released leases lose their files, so "gone" means that it was released."""
    if not lease_id:
        return "gone"
    stem = lease_stem(lease_id)
    generations = list_generations(store, stem)
    for generation in reversed(generations):
        try:
            fields = read_record(store, generation_key(stem, generation))
        except NotFound:
            return read_lease_state(store, lease_id)  # it is being deleted: read again
        except (Corrupt, NewerFormat):
            return "live"
        if fields is None:
            return "live"  # torn by a power loss: its state is unknown, so collectors wait for it
        return classify_lease(fields.text("state"), lowest=generations[0])
    return "gone"


def is_settled(store: ObjectStore, snapshot: CommittedSnapshot) -> bool:
    """Return whether the lease of `snapshot` was released: then its save cannot withdraw it any more."""
    return read_lease_state(store, snapshot.lease_id) in ("gone", "released")


RollbackTarget = CommittedSnapshot | Literal["undecided"] | None
"""What a withdrawal restores: a snapshot; nothing (None); or "undecided" while that cannot be decided."""


def read_rollback_target(store: ObjectStore, state: NameState) -> RollbackTarget:
    """Return what to restore if an overwrite of the name, which was in `state`, is withdrawn.

    It is not always the newest record: the save that wrote that may be fenced, have lost its files, and withdraw it.
    """
    stem = snapshot_stem(state.name)
    for generation in reversed(list_generations(store, stem)):
        fields = _read_below(store, stem, generation) if generation < state.next_generation else None
        if fields is None:
            continue
        if fields.text("state") != "live":
            return None
        snapshot = parse_snapshot(fields)
        if is_settled(store, snapshot):
            return snapshot
        # Marks are read after the record: a collector that publishes a mark later has read this record as a root.
        marked = read_marked(store)
        needed = list(iter_needed(store, snapshot))
        if needed and len(store.stat_many(needed)) == len(needed):
            return "undecided" if marked.intersection(needed) else snapshot
    return None


def _read_below(store: ObjectStore, stem: str, generation: int) -> Fields | None:
    try:
        return read_record(store, generation_key(stem, generation))
    except NotFound:
        return None  # collected, so a higher one is settled: the name has changed, and the commit will fail


def read_deleted(store: ObjectStore, deletion: Newest) -> CommittedSnapshot | None:
    """Return the snapshot that a user deleted with the newest record of a name; None if the store cannot tell.

    It cannot if the record below was collected, and if a save may have withdrawn that one: no user deleted it then.
    """
    for generation in range(deletion.generation - 1, -1, -1):
        try:
            fields = read_record(store, generation_key(deletion.stem, generation))
            if fields is None:
                continue  # torn: it never counted
            verify_record(fields, deletion.stem, generation)
            snapshot = parse_snapshot(fields) if fields.text("state") == "live" else None
        except (NotFound, Corrupt, NewerFormat):
            return None
        return snapshot if snapshot and is_settled(store, snapshot) else None
    return None


def iter_needed(store: ObjectStore, snapshot: CommittedSnapshot) -> Iterator[str]:
    """Yield the keys of the manifests and packs of a snapshot; nothing if a manifest is missing."""
    yield from _list_needed(next(iter_needs(store, [snapshot.manifest])))


def _list_needed(needs: Needs | HoldfastError) -> list[str]:
    if isinstance(needs, NotFound):
        return []
    if isinstance(needs, HoldfastError):
        raise needs
    return [*map(manifest_key, needs.manifests), *map(pack_key, needs.packs)]


def is_present(store: ObjectStore, key: str) -> bool:
    """Return whether an object exists."""
    try:
        store.stat(key)
    except NotFound:
        return False
    return True
