"""Marks and sweeps: publish which files will be deleted, wait for saves that may not have read that, then delete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.errors import Corrupt, NotFound, ObjectExists
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.objects.settle import create_settled
from holdfast.repo.format.layout import MARKS, generation_key, lease_stem, new_lease_id, new_write_id, parse_file_key
from holdfast.repo.format.record import Fields, encode_record
from holdfast.repo.names.generations import (
    create_generation,
    iter_records,
    iter_stem_objects,
    list_generations,
    read_record,
)
from holdfast.repo.names.roots import LeaseView, Live, is_present, read_leases

MARK_KEYS: Final = 60_000
"""The most files that one mark names: at 54 bytes each, they fit into a record."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A collector's announcement of files that it will delete."""

    stem: str
    keys: tuple[str, ...]
    published_s: float
    """By the store's clock."""


def iter_marks(store: ObjectStore) -> Iterator[Mark]:
    """Yield every mark that can be read. A torn mark never counted; `check` reports a damaged one."""
    listed = [(stem, infos[0]) for stem, infos in iter_stem_objects(store, MARKS) if 0 in infos]
    records = iter_records(store, (info.key for _, info in listed))
    for (stem, info), record in zip(listed, records, strict=True):
        if isinstance(record.error, NotFound | Corrupt):
            continue
        fields = record.take_fields()
        mark = _parse_mark(stem, fields, info.modified_s) if fields else None
        if mark:
            yield mark


def _parse_mark(stem: str, fields: Fields, published_s: float) -> Mark | None:
    """Return a mark with those of its keys that may be swept; None if the record is not a mark."""
    try:
        fields.expect(kind="mark")
        named = fields.texts("keys")
    except Corrupt:
        return None
    # A collector deletes only packs and manifests, whatever else a mark names by mistake or malice.
    return Mark(stem, tuple(key for key in named if parse_file_key(key)), published_s)


def publish_marks(store: ObjectStore, dead: Sequence[ObjectInfo]) -> list[str]:
    """Announce to all writers that `dead` will be deleted, with as many marks as needed; return their stems."""
    return [publish_mark(store, dead[first : first + MARK_KEYS]) for first in range(0, len(dead), MARK_KEYS)]


def publish_mark(store: ObjectStore, dead: Sequence[ObjectInfo]) -> str:
    """Announce that `dead` will be deleted: every save that starts from now on treats it as absent. Return the stem."""
    stem = MARKS + new_lease_id()
    keys: list[Json] = [info.key for info in dead]
    fields = {"kind": "mark", "write_id": new_write_id(), "generation": 0, "keys": keys, "leases": []}
    # Not `create_generation`, which lists again: the name is unique, and another collector may have swept it already.
    create_settled(store, generation_key(stem, 0), encode_record(fields), durable=False)
    return stem


def read_waiting(store: ObjectStore, stem: str) -> frozenset[str]:
    """Return the leases that a mark has to wait for: those that were live after it was published.

    The list is stored once, as the mark's next generation, so that a later collection waits for the same leases.
    Newer saves have read the mark and need not be waited for.
    """
    fields = _read_mark(store, generation_key(stem, 1))
    if fields is not None:
        return fields
    alive = sorted(lease.lease_id for lease in read_leases(store).values() if lease.is_live)
    record = {"kind": "mark", "write_id": new_write_id(), "keys": [], "leases": alive}
    try:
        create_generation(store, stem, 1, record, durable=False)
    except ObjectExists:
        # Another collector was first. Its list was also made after the mark, so both are valid.
        return _read_mark(store, generation_key(stem, 1)) or frozenset(alive)
    return frozenset(alive)


def _read_mark(store: ObjectStore, key: str) -> frozenset[str] | None:
    try:
        fields = read_record(store, key)
    except (NotFound, Corrupt):
        return None  # a damaged list counts as missing: a new one names the leases that are live now
    return frozenset(fields.texts("leases")) if fields else None


def fence_stale_leases(store: ObjectStore, waiting: Iterable[str], *, expire_s: float) -> list[LeaseView]:
    """Return the leases that must still be waited for; fence those that were not renewed for `expire_s`."""
    leases = read_leases(store)
    blockers = []
    for lease_id in waiting:
        lease = leases.get(lease_id)
        if lease is None or not lease.is_live:
            continue
        if store.clock() - lease.renewed_s < expire_s or not fence(store, lease):
            blockers.append(lease)
    return blockers


def fence(store: ObjectStore, lease: LeaseView) -> bool:
    """Create the next generation of a lease, so that its owner cannot renew it; return whether that succeeded."""
    if lease.is_exhausted:
        return False
    fields = {
        "kind": "lease",
        "lease": lease.lease_id,
        "state": "fenced",
        "write_id": new_write_id(),
        "purpose": lease.purpose,
        # Kept, because only on its own host does the lock show whether the owner is dead.
        "host": lease.host,
        "pid": 0,
        "time": store.clock(),
    }
    stem, generation = lease_stem(lease.lease_id), lease.generations[-1] + 1
    try:
        create_generation(store, stem, generation, fields)
    except ObjectExists:
        return False  # it was renewed or released at the same time: the caller reads it again
    if list_generations(store, stem) == [generation]:
        # It was released and deleted at the same time: our fence is alone, and would look like that of a fenced save.
        store.delete(generation_key(stem, generation))
    return True


def sweep(store: ObjectStore, mark: Mark, live: Live) -> list[str]:
    """Delete marked files that are not needed; return their keys.

    The mark is deleted only when none of its files exists any more. While it exists, no new save relies on them, so
    another collector that sweeps the same mark cannot delete a file in use.
    """
    present = store.stat_many(mark.keys)
    deleted = [key for key in mark.keys if key in present and key not in live.needs]
    store.delete_many(deleted)
    if not store.stat_many(mark.keys):
        remove_mark(store, mark)
    return deleted


def is_mark_present(store: ObjectStore, mark: Mark) -> bool:
    """Return whether a mark still exists."""
    return is_present(store, generation_key(mark.stem, 0))


def remove_mark(store: ObjectStore, mark: Mark) -> None:
    """Delete a mark; call it only if none of its files exists, or with the exclusive lock."""
    # The list of leases first: without it a mark only waits again, but a list without its mark is useless.
    for generation in (1, 0):
        store.delete(generation_key(mark.stem, generation))


def read_idle_marks(store: ObjectStore, live: Live) -> list[str]:
    """Return the stems of marks with nothing to delete: all of their remaining files are needed again."""
    idle = []
    for mark in iter_marks(store):
        left = store.stat_many(mark.keys)
        if left and all(key in live.needs for key in left):
            idle.append(mark.stem)
    return idle
