"""What is alive: the snapshot records that count, and the packs and manifests that they lead to."""

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
from holdfast.repo.names.snapshots import Snapshot, parse_snapshot

_RELISTS: Final = 8


@dataclass(frozen=True, slots=True)
class LeaseView:
    """What the files of one lease say."""

    lease_id: str
    generations: tuple[int, ...]
    standing: LeaseStanding
    shown_s: float
    """When its newest generation appeared, by the store's clock."""
    purpose: str = ""
    host: str = ""

    @property
    def is_live(self) -> bool:
        """Tell whether its save may be at work; one that cannot be read counts as live."""
        return self.standing == "live"

    @property
    def is_exhausted(self) -> bool:
        """Tell whether its numbers are used up: nobody can fence it, so if it is live it stays so."""
        return self.generations[-1] >= MAX_GENERATION


@dataclass(frozen=True, slots=True)
class DeadRecords:
    """Generations of one stem that do not count any more, lowest first."""

    stem: str
    generations: tuple[int, ...]


@dataclass(slots=True)
class Live:
    """All that some snapshot needs, and the records that nothing needs any more."""

    current: list[Snapshot] = field(default_factory=list)
    superseded: list[Snapshot] = field(default_factory=list)
    """Replaced, but by a commit that is not settled and may be withdrawn."""
    needs: dict[str, list[Snapshot]] = field(default_factory=dict)
    """Keys of packs and manifests, and who needs them."""
    dead_records: list[DeadRecords] = field(default_factory=list)
    committed_under: set[str] = field(default_factory=set)
    """Leases that some record names."""


class _Moved(Exception):
    """Somebody changed or collected what we were following."""


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
            continue  # it was released, and is being removed
        except (Corrupt, NewerFormat):
            pass
        leases[lease_id] = LeaseView(lease_id, tuple(generations), standing, shown_s, purpose, host)
    return leases


def read_live(store: ObjectStore) -> Live:
    """Read every root and follow it; raises Corrupt if one cannot be read, for then nothing may be deleted."""
    for _ in range(_RELISTS):
        try:
            return _read_live(store)
        except _Moved:
            continue
    raise Corrupt(f"{store.url}: snapshots keep vanishing while they are read; try again when less is going on")


def _read_live(store: ObjectStore) -> Live:
    chains = [
        (stem, generations, _read_chain(store, stem, generations))
        for prefix in (SNAPSHOTS, TAGS)
        for stem, generations in iter_stems(store, prefix)
    ]
    # Leases after records: whoever committed a record seen above and is not among the leases was released.
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
    """Read the generations of a stem that are not torn, highest first; damage in the highest is an error."""
    chain: _Chain = []
    for generation in reversed(generations):
        try:
            fields = read_record(store, generation_key(stem, generation))
            if fields:
                _verify_own(fields, stem, generation)
        except NotFound as error:
            raise _Moved from error
        except (Corrupt, NewerFormat):
            if not chain:
                raise
            continue
        if fields:
            chain.append((generation, fields))
    return chain


def _verify_own(fields: Fields, stem: str, generation: int) -> None:
    """Raise Corrupt for a record in another's place or in a state that is not known: it may hide a root."""
    is_snapshot = stem.startswith(SNAPSHOTS)
    fields.expect(kind="snapshot" if is_snapshot else "tag", generation=generation)
    name = fields.text("name")
    if (snapshot_stem(name) if is_snapshot else tag_stem(name)) != stem:
        raise Corrupt(f"record {fields.key} holds a name that belongs elsewhere", key=fields.key)
    state = fields.text("state")
    if state not in ("live", "deleted"):
        raise Corrupt(f"record {fields.key} is in the unknown state {state[:40]!r}", key=fields.key)


def _keep_roots(chain: _Chain, leases: dict[str, LeaseView], live: Live) -> set[int]:
    """Add the roots of one name, from the newest record down to the first settled one; return their generations."""
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
    store: ObjectStore, snapshot: Snapshot, leases: dict[str, LeaseView], superseded: Sequence[Snapshot]
) -> list[str]:
    needed = list(iter_needed(store, snapshot))
    lease = leases.get(snapshot.lease_id)
    # A fenced save that died before it could withdraw: its record is broken, those below it are followed as well.
    if needed or (lease and lease.standing == "fenced"):
        return needed
    stem = snapshot_stem(snapshot.name)
    if read_newest(store, stem).generation != snapshot.generation:
        if snapshot in superseded and is_present(store, generation_key(stem, snapshot.generation)):
            # A loss of power has brought back its record, or the lease above it, but not its bytes.
            return needed
        raise _Moved
    raise Corrupt(
        f"snapshot {snapshot.name!r} has lost its manifest, so nobody can tell which packs it needs;"
        " nothing was deleted. Restore it from a copy, or delete the snapshot first",
        key=manifest_key(snapshot.manifest.manifest_id),
    )
