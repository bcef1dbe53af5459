"""Values that are expensive to compute, kept within a limit; threads that ask for one value compute it once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic

from holdfast.lru import Key, LruCache, Value


class RememberedValues(Generic[Key, Value]):
    """The most recently used values, whose sizes add up to at most `limit`. Safe in any thread."""

    def __init__(self, limit: int, *, size_of: Callable[[Value], int] = lambda _: 1) -> None:
        """Count values; with `size_of`, add up their sizes instead, which must not change."""
        self._lock = threading.Lock()
        self._values: LruCache[Key, Value] = LruCache(limit, size_of=size_of)
        self._computing: dict[Key, threading.Event] = {}

    @property
    def size(self) -> int:
        """The sizes of all values, added up."""
        with self._lock:
            return self._values.size

    def find(self, key: Key) -> Value | None:
        """Return a value if it is known."""
        with self._lock:
            return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        """Add or replace a value."""
        with self._lock:
            self._values.put(key, value)

    def find_or_compute(self, key: Key, compute: Callable[[], Value]) -> Value:
        """Return a value; if it is not known, compute it. If that raises in one thread, the next one tries again."""
        while (other := self._begin(key)) is not None:
            other.wait()
        try:
            found = self.find(key)
            if found is None:
                found = compute()
                self.put(key, found)
            return found
        finally:
            with self._lock:
                self._computing.pop(key).set()

    def _begin(self, key: Key) -> threading.Event | None:
        """Return what to wait for if another thread computes the value; otherwise, others wait for this thread."""
        with self._lock:
            other = self._computing.get(key)
            if other is None:
                self._computing[key] = threading.Event()
            return other
