"""Finds snapshots that were committed since the last look, for few requests, and waits for them."""

from __future__ import annotations

import logging
import math
import threading
import unicodedata
from collections.abc import Callable
from time import monotonic
from typing import Final

from holdfast.errors import StoreError
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import SHELVES, SNAPSHOTS
from holdfast.repo.names.latest import find_order, read_latest_of
from holdfast.repo.names.listed import ListedName, list_wanted, read_wanted
from holdfast.repo.names.record_cache import RecordCache
from holdfast.repo.names.snapshots import CommittedSnapshot

_log = logging.getLogger(__name__)

_FASTEST: Final = 5
"""After a new snapshot, pauses begin at this part of the longest, because the next one may follow soon."""
_GROWTH: Final = 1.5
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
            self._pause_s = min(self._longest_s, self._pause_s * _GROWTH)
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
