"""The digest of a stream whose pieces arrive from several threads and out of order, computed in one pass."""

from __future__ import annotations

import threading
from typing import Final, Protocol

from holdfast.digest import Digest

_WAITING_BYTES: Final = 32 << 20
"""Pieces that wait for an earlier one may take this much memory, in all streams of a group."""


class StreamHasher(Protocol):
    """Digests bytes that are passed in order."""

    def update(self, data: memoryview, /) -> object:
        """Add the next bytes."""

    def digest(self) -> bytes:
        """Return the digest of all bytes."""


class WaitingRoom:
    """Limits the memory of pieces that wait, for a group of streams that one save reads."""

    def __init__(self, limit_bytes: int = _WAITING_BYTES) -> None:
        self.changed = threading.Condition()
        self.limit_bytes = limit_bytes
        self.waiting_bytes = 0


class StreamDigest:
    """Digests the bytes [0, size) of a stream; a piece that was digested before is ignored.

    Pieces must not overlap in part. The caller reads them in order, a few at a time: the first that is missing is
    always being read, so that waiting for it ends.
    """

    def __init__(self, size_bytes: int, room: WaitingRoom, hasher: StreamHasher) -> None:
        self._size_bytes = size_bytes
        self._room = room
        self._hasher = hasher
        self._next = 0
        self._waiting: dict[int, memoryview] = {}
        self._is_hashing = False

    def add(self, start: int, data: memoryview) -> None:
        """Digest a piece, now or once the pieces before it have arrived; keeps `data` until then."""
        room = self._room
        with room.changed:
            room.changed.wait_for(lambda: start <= self._next or room.waiting_bytes <= room.limit_bytes)
            if start < self._next or start in self._waiting or not data:
                return
            self._waiting[start] = data
            room.waiting_bytes += len(data)
            if self._is_hashing:
                return
            self._is_hashing = True
        self._hash_arrived()

    def _hash_arrived(self) -> None:
        """Hash the pieces that are next, on this thread; other threads only leave theirs meanwhile."""
        room, done_bytes = self._room, 0
        while True:
            with room.changed:
                self._next += done_bytes
                room.waiting_bytes -= done_bytes
                data = self._waiting.pop(self._next, None)
                room.changed.notify_all()
                if data is None:
                    self._is_hashing = False
                    return
            self._hasher.update(data)
            done_bytes = len(data)

    def finish(self) -> Digest | None:
        """Return the digest; None if not every byte has arrived."""
        with self._room.changed:
            return Digest(self._hasher.digest()) if self._next == self._size_bytes else None
