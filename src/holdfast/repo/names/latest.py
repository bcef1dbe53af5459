"""Finds the snapshot that was committed last; in a bucket without reading the records that cannot be it."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final

from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import natural_order
from holdfast.repo.names.listed import Listed, ListedName, is_listed, list_wanted, read_names, read_wanted
from holdfast.repo.names.record_cache import RecordCache
from holdfast.repo.names.snapshots import CommittedSnapshot

MAX_AHEAD_S: Final = 900.0
"""How far the time in a record may be ahead of the time at which the server stored it. S3 and Azure refuse a request
whose sender has a clock that is wrong by more."""
_DELAY_S: Final = 60.0
"""A record is mostly stored within this time after its commit time was taken. If not, a second batch is read."""
_FIRST: Final = 16
"""The fewest records that are read first: the last ones may be of deleted names."""
_GROWTH: Final = 8
"""A batch in which all names are deleted is followed by one so many times larger."""


def read_latest(store: ObjectStore, prefix: str, cache: RecordCache) -> CommittedSnapshot | None:
    """Return the user's snapshot with the latest commit time whose name begins with `prefix`, or None."""
    prefix = unicodedata.normalize("NFC", prefix)
    return read_latest_of(store, prefix, list_wanted(store, prefix, cache), cache)


def read_latest_of(
    store: ObjectStore, prefix: str, names: Sequence[ListedName], cache: RecordCache
) -> CommittedSnapshot | None:
    """Return the one of these names that was committed last and begins with `prefix`, which is in NFC."""
    if not store.traits.reliable_times:
        return find_latest(read_wanted(store, prefix, names, cache))
    search = _Search(store, prefix, cache)
    search.run(names)
    return search.latest


def find_order(snapshot: CommittedSnapshot) -> tuple[float, tuple[tuple[int, int, str], ...]]:
    """Return the sort key of snapshots from the first committed to the last: by time, then by name."""
    return snapshot.time_s, natural_order(snapshot.name)


def find_latest(found: Iterable[Listed | None]) -> CommittedSnapshot | None:
    """Return the snapshot with the latest commit time, of equal ones the last in natural order of their names."""
    snapshots = (each for each in found if isinstance(each, CommittedSnapshot))
    return max(snapshots, key=find_order, default=None)


class _Search:
    """Reads records from the most recently stored to the oldest, until no other can have a later commit time.

    The commit time of a record is at most MAX_AHEAD_S later than the time at which the server stored the record. So
    once a snapshot is known, all records that were stored longer than that before its commit time are older. If a
    record that was read breaks this rule, some clock is wrong, and all records are read.
    """

    def __init__(self, store: ObjectStore, prefix: str, cache: RecordCache) -> None:
        self.latest: CommittedSnapshot | None = None
        self._store = store
        self._prefix = prefix
        self._cache = cache
        self._has_wrong_clock = False

    def run(self, names: Sequence[ListedName]) -> None:
        known = [self._cache.find(each.highest) for each in names]
        self._add(names, [record.snapshot if record else None for record in known])
        unread = [each for each, record in zip(names, known, strict=True) if record is None]
        unread.sort(key=lambda each: each.modified_s, reverse=True)
        size = max(_FIRST, _count_recent(unread))
        while unread and self._may_be_later(unread[0]):
            if self.latest:
                size = sum(map(self._may_be_later, unread))
            batch, unread = unread[:size], unread[size:]
            self._add(batch, read_names(self._store, batch, self._cache))
            size *= _GROWTH

    def _may_be_later(self, name: ListedName) -> bool:
        if self.latest is None or self._has_wrong_clock:
            return True
        return name.modified_s >= self.latest.time_s - MAX_AHEAD_S

    def _add(self, names: Sequence[ListedName], found: Sequence[Listed | None]) -> None:
        for name, each in zip(names, found, strict=True):
            if isinstance(each, CommittedSnapshot):
                self._has_wrong_clock |= each.time_s > name.modified_s + MAX_AHEAD_S
                if is_listed(each.name, self._prefix):
                    self.latest = find_latest((self.latest, each))


def _count_recent(unread: Sequence[ListedName]) -> int:
    """Return how many records are left to be read if the one that was stored last has the latest commit time."""
    newest_s = unread[0].modified_s if unread else 0.0
    return sum(each.modified_s >= newest_s - MAX_AHEAD_S - _DELAY_S for each in unread)
