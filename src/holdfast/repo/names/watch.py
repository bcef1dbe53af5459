"""Finds snapshots that were committed since the last look, for few requests."""

from __future__ import annotations

import unicodedata
from time import monotonic
from typing import Final

from holdfast.objects.protocol import ObjectStore, WatchedStore
from holdfast.repo.format.layout import SHELVES, SNAPSHOTS
from holdfast.repo.names.latest import find_order, read_latest_of
from holdfast.repo.names.listed import ListedName, list_wanted, read_wanted
from holdfast.repo.names.record_cache import RecordCache
from holdfast.repo.names.snapshots import CommittedSnapshot

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
        self._watched = store if isinstance(store, WatchedStore) else None
        self._state = ""
        self._listed_s = -_RELIST_S
        self._seen: frozenset[tuple[str, str]] | None = None
        self._is_slow = False

    def read_newer(self) -> list[CommittedSnapshot]:
        """Return the snapshots that are newer than the last one returned, the oldest first.

        Without `every`, at most one; the first time also with `every`, unless there was a `since`.
        """
        # Read before the names are listed: a change after that shows as another state the next time.
        state = self._watched.read_folder_state(SNAPSHOTS, _SHELF_NAMES) if self._watched else ""
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
