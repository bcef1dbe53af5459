"""A cache of the most recently used values, within a limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """The most recently used values, whose sizes add up to at most `limit`; for one thread, or under a lock.

    The value that was put last is always kept, even if it alone is larger than the limit.
    """

    def __init__(
        self,
        limit: int,
        *,
        size_of: Callable[[Value], int] = lambda _: 1,
        on_drop: Callable[[Value], object] = lambda _: None,
    ) -> None:
        """Count values; with `size_of`, add up their sizes instead, which must not change.

        `on_drop` is called with each value that leaves the cache.
        """
        self._limit = limit
        self._size_of = size_of
        self._on_drop = on_drop
        self.size = 0
        """The sizes of all values, added up."""
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """Return a value, which is now the most recently used one; None if it is not in the cache."""
        found = self._values.get(key)
        if found is not None:
            self._values.move_to_end(key)
        return found

    def put(self, key: Key, value: Value) -> None:
        """Add or replace a value, and drop those that were not used for longest if the limit is exceeded."""
        if key in self._values:
            self._drop(self._values.pop(key))
        self._values[key] = value
        self.size += self._size_of(value)
        while self.size > self._limit and len(self._values) > 1:
            self._drop(self._values.popitem(last=False)[1])

    def clear(self) -> None:
        """Drop all values."""
        while self._values:
            self._drop(self._values.popitem()[1])

    def _drop(self, value: Value) -> None:
        self.size -= self._size_of(value)
        self._on_drop(value)
