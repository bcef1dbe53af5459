"""A store in memory with a lock that nobody waits for: whoever finds it taken goes on without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.objects.memory import MemoryStore


class LockedMemoryStore(MemoryStore):
    """A MemoryStore whose `hold` is a real lock, as on a local disk, for actors of which one moves at a time."""

    def __init__(self, inner: MemoryStore | None = None) -> None:
        """Begin empty, or with the objects of `inner`."""
        super().__init__()
        if inner is not None:
            self._objects = inner._objects
            self._clock = inner._clock
        self._writers = 0
        self._is_alone = False
        self.refused = 0
        """How often a writer went on without the lock."""

    def clone(self, *, read_only: bool = False) -> LockedMemoryStore:
        return LockedMemoryStore(super().clone(read_only=read_only))

    @contextmanager
    def hold(self, *, exclusive: bool) -> Iterator[bool]:
        if self._is_alone or (exclusive and self._writers):
            self.refused += not exclusive
            yield False
            return
        self._is_alone = exclusive
        self._writers += not exclusive
        try:
            yield True
        finally:
            self._is_alone = self._is_alone and not exclusive
            self._writers -= not exclusive
