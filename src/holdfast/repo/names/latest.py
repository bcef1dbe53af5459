"""Finds the snapshot that was committed last, and those committed since the last look, with few requests."""

from __future__ import annotations

import logging
import math
import threading
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Final

from holdfast.errors import StoreError
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import SHELVES, SNAPSHOTS, natural_order
from holdfast.repo.names.listed import Listed, ListedName, RecordCache, is_listed, list_wanted, read_names, read_wanted
from holdfast.repo.names.snapshots import CommittedSnapshot

MAX_AHEAD_S: Final = 900.0
"""How far the time in a record may be ahead of the time at which the server stored it. S3 and Azure refuse a request
whose sender has a clock that is wrong by more."""
_DELAY_S: Final = 60.0
"""A record is mostly stored within this time after its commit time was taken. If not, a second batch is read."""
_FIRST: Final = 16
"""The fewest records that are read first: the last ones may be of deleted names."""
_BATCH_GROWTH: Final = 8
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
            size *= _BATCH_GROWTH

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


_log = logging.getLogger(__name__)

_FASTEST: Final = 5
"""After a new snapshot, pauses begin at this part of the longest, because the next one may follow soon."""
_PAUSE_GROWTH: Final = 1.5
_PATIENCE_S: Final = 300.0
"""How long a store may fail before its error is raised."""
_RELIST_S: Final = 60.0
"""After this time the names are listed although the times of the directories are unchanged."""
_SLOW_S: Final = 2.0
"""If a listing takes longer, the next ones are made by shelf, with many requests at once."""
_SHELF_NAMES: Final = tuple(shelf[len(SNAPSHOTS) :].rstrip("/") for shelf in SHELVES)


class NameWatch:
    """The snapshots under a prefix, as they are committed. `latest` and this have the same order: time, then name.

    A snapshot that was deleted stays seen: an older one is never found after it. A name that was overwritten with
    other content is found again; one that was only repacked is not.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        cache: RecordCache,
        *,
        since: CommittedSnapshot | None = None,
        every: bool = False,
    ) -> None:
        """Look for snapshots newer than `since`; with `every`, for all of them and not only the newest."""
        self._store = store
        self._prefix = unicodedata.normalize("NFC", prefix)
        self._cache = cache
        self._last = since
        self._every = every
        self._state = ""
        self._listed_s = -_RELIST_S
        self._seen: frozenset[tuple[str, str]] | None = None
        self._is_slow = False

    def read_newer(self) -> list[CommittedSnapshot]:
        """Return the snapshots that are newer than the last one returned, the oldest first.

        Without `every`, at most one; the first time also with `every`, unless there was a `since`.
        """
        # Read before the names are listed: a change after that shows as another state the next time.
        state = self._store.read_folder_state(SNAPSHOTS, _SHELF_NAMES)
        if state and state == self._state and monotonic() - self._listed_s < _RELIST_S:
            return []
        names = self._list()
        self._state, self._listed_s = state, monotonic()
        seen = frozenset((each.highest.key, each.highest.version) for each in names)
        if seen == self._seen:
            return []
        found = self._read(names)
        # Not before the records were read: if that fails, the next call reads them again.
        self._seen = seen
        newer = sorted((each for each in found if self._is_newer(each)), key=find_order)
        if self._last is None or not self._every:
            newer = newer[-1:]
        self._last = newer[-1] if newer else self._last
        return newer

    def _list(self) -> list[ListedName]:
        began_s = monotonic()
        names = list_wanted(self._store, self._prefix, self._cache, in_sequence=not self._is_slow)
        self._is_slow = self._is_slow or monotonic() - began_s > _SLOW_S
        return names

    def _read(self, names: list[ListedName]) -> list[CommittedSnapshot]:
        if not self._every:
            latest = read_latest_of(self._store, self._prefix, names, self._cache)
            return [] if latest is None else [latest]
        read = read_wanted(self._store, self._prefix, names, self._cache)
        return [each for each in read if isinstance(each, CommittedSnapshot)]

    def _is_newer(self, snapshot: CommittedSnapshot) -> bool:
        last = self._last
        if last is None or find_order(snapshot) > find_order(last):
            return True
        is_overwritten = snapshot.name == last.name and snapshot.generation > last.generation
        return is_overwritten and snapshot.digest != last.digest


class NameWaiter:
    """Waits for the snapshots of a watch: looks at the store again and again, with pauses that grow up to a limit."""

    def __init__(
        self, store: ObjectStore, watch: NameWatch, *, poll_s: float | None = None, timeout_s: float | None = None
    ) -> None:
        """Pause for at most `poll_s` between two looks; give up after `timeout_s` without a new snapshot."""
        for name, value in (("poll_s", poll_s), ("timeout_s", timeout_s)):
            if value is not None and not value >= 0:
                raise ValueError(f"{name}= is a time in seconds, not {value!r}")
        poll_s = store.traits.poll_s if poll_s is None else poll_s
        self._watch = watch
        self._longest_s = poll_s
        self._pause_s = poll_s / _FASTEST
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._found: list[CommittedSnapshot] = []
        self._failing_since_s: float | None = None
        self._closed = threading.Event()

    @property
    def is_closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed.is_set()

    def close(self) -> None:
        """End the wait, at once, and all later ones. May be called from any thread, and more than once."""
        self._closed.set()

    def wait(self, beat: Callable[[], None] = lambda: None) -> CommittedSnapshot | None:
        """Return the next snapshot when there is one; None if closed, or if the time is up. Calls `beat` often."""
        stop_s = monotonic() + self._timeout_s
        while not self.is_closed:
            found = self.take()
            left_s = stop_s - monotonic()
            if found is not None or left_s <= 0:
                return found
            self._closed.wait(min(self._pause_s, left_s))
            self._pause_s = min(self._longest_s, self._pause_s * _PAUSE_GROWTH)
            beat()
        return None

    def take(self) -> CommittedSnapshot | None:
        """Return the next snapshot if it is there now; looks at the store if none was found before."""
        if not self._found:
            self._found = self._read_newer()
            if self._found:
                self._pause_s = self._longest_s / _FASTEST
        return self._found.pop(0) if self._found else None

    def _read_newer(self) -> list[CommittedSnapshot]:
        """Return new snapshots; a store that fails is asked again for a while."""
        try:
            found = self._watch.read_newer()
        except StoreError as error:
            now_s = monotonic()
            self._failing_since_s = now_s if self._failing_since_s is None else self._failing_since_s
            if now_s - self._failing_since_s >= _PATIENCE_S:
                raise
            _log.warning("cannot look for new snapshots, trying again: %s", error)
            return []
        self._failing_since_s = None
        return found
