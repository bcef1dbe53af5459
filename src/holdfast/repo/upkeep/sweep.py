"""Marks and sweeps: tell writers what is about to go, wait for whoever might not have heard, then delete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.errors import Corrupt, NotFound, ObjectExists
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.objects.settle import create_settled
from holdfast.repo.format.layout import MARKS, generation_key, lease_stem, new_lease_id, new_write_id, parse_file_key
from holdfast.repo.format.record import Fields, Json, encode_record
from holdfast.repo.names.generations import create_generation, iter_stems, list_generations, read_record
from holdfast.repo.names.rollback import is_present
from holdfast.repo.names.roots import LeaseView, Live, read_leases

MARK_KEYS: Final = 60_000
"""How many files one mark names at most: 54 bytes each, which fits into a record."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A published intention to delete."""

    stem: str
    keys: tuple[str, ...]
    published_s: float
    """By the store's clock."""


def iter_marks(store: ObjectStore) -> Iterable[Mark]:
    """Yield every mark that can be read; a torn one never counted, a damaged one is for check."""
    for stem, _ in iter_stems(store, MARKS):
        key = generation_key(stem, 0)
        try:
            published_s = store.stat(key).modified_s
            fields = read_record(store, key)
        except (NotFound, Corrupt):
            continue
        mark = _parse_mark(stem, fields, published_s) if fields else None
        if mark:
            yield mark


def _parse_mark(stem: str, fields: Fields, published_s: float) -> Mark | None:
    """Return a mark with those of its keys that may be swept; None if it is no mark."""
    try:
        fields.expect(kind="mark")
        named = fields.texts("keys")
    except Corrupt:
        return None
    # Whatever else a mark names, by mistake or malice, is not a collector's to delete.
    return Mark(stem, tuple(key for key in named if parse_file_key(key)), published_s)


def publish_marks(store: ObjectStore, dead: Sequence[ObjectInfo]) -> list[str]:
    """Tell all writers that `dead` is about to go, by as many marks as it takes."""
    return [publish_mark(store, dead[first : first + MARK_KEYS]) for first in range(0, len(dead), MARK_KEYS)]


def publish_mark(store: ObjectStore, dead: Sequence[ObjectInfo]) -> str:
    """Tell all writers that `dead` is about to go: from now on, whoever starts treats it as absent."""
    stem = MARKS + new_lease_id()
    keys: list[Json] = [info.key for info in dead]
    fields = {"kind": "mark", "write_id": new_write_id(), "generation": 0, "keys": keys, "leases": []}
    # Not looked at again: its name is its own, and another collector may have gone on with it, or be done.
    create_settled(store, generation_key(stem, 0), encode_record(fields), durable=False)
    return stem


def read_waiting(store: ObjectStore, stem: str) -> frozenset[str]:
    """Return the leases that a mark has to wait for: those found alive after it was published.

    They are written down once, as the mark's next generation, so that a later collection goes on waiting for
    the same ones: newer saves have seen the mark and do not hold it up.
    """
    fields = _read_mark(store, generation_key(stem, 1))
    if fields is not None:
        return fields
    alive = sorted(lease.lease_id for lease in read_leases(store).values() if lease.is_live)
    record = {"kind": "mark", "write_id": new_write_id(), "keys": [], "leases": alive}
    try:
        create_generation(store, stem, 1, record, durable=False)
    except ObjectExists:
        # Another collector was first; its list was made after the mark, too, so either will do.
        return _read_mark(store, generation_key(stem, 1)) or frozenset(alive)
    return frozenset(alive)


def _read_mark(store: ObjectStore, key: str) -> frozenset[str] | None:
    try:
        fields = read_record(store, key)
    except (NotFound, Corrupt):
        return None  # a spoilt list is as good as none: whoever is alive now is waited for
    return frozenset(fields.texts("leases")) if fields else None


def find_blockers(store: ObjectStore, waiting: Iterable[str], *, expire_s: float) -> list[LeaseView]:
    """Return the leases still to be waited for, fencing those that have shown nothing new for `expire_s`."""
    leases = read_leases(store)
    blockers = []
    for lease_id in waiting:
        lease = leases.get(lease_id)
        if lease is None or not lease.is_live:
            continue
        if store.clock() - lease.shown_s < expire_s or not fence(store, lease):
            blockers.append(lease)
    return blockers


def fence(store: ObjectStore, lease: LeaseView) -> bool:
    """Take the next generation of a lease, so that its owner cannot renew it; tell whether that worked."""
    if lease.is_exhausted:
        return False
    fields = {
        "kind": "lease",
        "lease": lease.lease_id,
        "state": "fenced",
        "write_id": new_write_id(),
        "purpose": lease.purpose,
        # Kept: on its own host a lock tells whether its owner is dead, elsewhere nothing does.
        "host": lease.host,
        "pid": 0,
        "time": store.clock(),
    }
    stem, generation = lease_stem(lease.lease_id), lease.generations[-1] + 1
    try:
        create_generation(store, stem, generation, fields)
    except ObjectExists:
        return False  # it is alive after all, or has just ended: look again
    if list_generations(store, stem) == [generation]:
        # It was released and removed meanwhile: our fence stands alone, and would look like a save that was fenced.
        store.delete(generation_key(stem, generation))
    return True


def sweep(store: ObjectStore, mark: Mark, live: Live) -> list[str]:
    """Delete what was marked and is not needed; returns what was deleted.

    The mark goes when nothing that it names is there any more, and not before: while it stands nobody begins to
    rely on what it names, so another collector that sweeps it at the same time cannot take anything away.
    """
    deleted = []
    for key in mark.keys:
        if key not in live.needs and is_present(store, key):
            store.delete(key)
            deleted.append(key)
    if not any(is_present(store, key) for key in mark.keys):
        remove_mark(store, mark)
    return deleted


def is_standing(store: ObjectStore, mark: Mark) -> bool:
    """Tell whether nobody has removed a mark since it was read."""
    return is_present(store, generation_key(mark.stem, 0))


def remove_mark(store: ObjectStore, mark: Mark) -> None:
    """Remove a mark; only when nothing that it names is there, or nobody else is at work."""
    # The list of leases first: a mark without it is only waited for anew, a list without its mark means nothing.
    for generation in (1, 0):
        store.delete(generation_key(mark.stem, generation))


def read_idle_marks(store: ObjectStore, live: Live) -> list[str]:
    """Return the stems of marks that have nothing to delete: all that is left of what they name is needed again."""
    idle = []
    for mark in iter_marks(store):
        left = [key for key in mark.keys if is_present(store, key)]
        if left and all(key in live.needs for key in left):
            idle.append(mark.stem)
    return idle
