"""Decides which commits can still be undone: a fenced save may withdraw, so the snapshot it replaced is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from holdfast.errors import Corrupt, NewerFormat, NotFound
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import generation_key, lease_stem, manifest_key, pack_key, snapshot_stem
from holdfast.repo.format.rank_manifests import read_needs
from holdfast.repo.format.record import Fields
from holdfast.repo.names.generations import list_generations, read_record
from holdfast.repo.names.marks import read_marked
from holdfast.repo.names.snapshots import CommittedSnapshot, NameState, parse_snapshot

LeaseStanding = Literal["gone", "live", "released", "fenced"]


def judge_standing(state: str, *, lowest: int) -> LeaseStanding:
    """Return the standing of a lease from the state of its highest generation and the number of its lowest.

    A fence without the generations below it was created while the owner, which had released the lease, was deleting
    its files.
    """
    if state == "fenced":
        return "released" if lowest else "fenced"
    return "released" if state == "released" else "live"


def read_standing(store: ObjectStore, lease_id: str) -> LeaseStanding:
    """Return the standing of a lease. Only released leases lose their files, so "gone" means that it was released."""
    if not lease_id:
        return "gone"
    stem = lease_stem(lease_id)
    generations = list_generations(store, stem)
    for generation in reversed(generations):
        try:
            fields = read_record(store, generation_key(stem, generation))
        except NotFound:
            return read_standing(store, lease_id)  # it is being deleted: read again
        except (Corrupt, NewerFormat):
            return "live"
        if fields is None:
            return "live"  # torn by a power loss: its state is unknown, so collectors wait for it
        return judge_standing(fields.text("state"), lowest=generations[0])
    return "gone"


def is_settled(store: ObjectStore, snapshot: CommittedSnapshot) -> bool:
    """Return whether the lease of `snapshot` was released: then its save cannot withdraw it any more."""
    return read_standing(store, snapshot.lease_id) in ("gone", "released")


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
        if needed and all(is_present(store, key) for key in needed):
            return "undecided" if marked.intersection(needed) else snapshot
    return None


def _read_below(store: ObjectStore, stem: str, generation: int) -> Fields | None:
    try:
        return read_record(store, generation_key(stem, generation))
    except NotFound:
        return None  # collected, so a higher one is settled: the name has changed, and the commit will fail


def iter_needed(store: ObjectStore, snapshot: CommittedSnapshot) -> Iterator[str]:
    """Yield the keys of the manifests and packs of a snapshot; nothing if a manifest is missing."""
    try:
        needs = read_needs(store, snapshot.manifest)
    except NotFound:
        return
    yield from map(manifest_key, needs.manifests)
    yield from map(pack_key, needs.packs)


def is_present(store: ObjectStore, key: str) -> bool:
    """Return whether an object exists."""
    try:
        store.stat(key)
    except NotFound:
        return False
    return True
