"""Reads parts of entries one after the other: from a server, more at a time than is asked for."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.repo.format.entry import Entry
from holdfast.repo.read.reader import SnapshotReader


class ReadAhead:
    """Keeps entries that were announced, and a window of the last entry. From a disk, it reads exactly what is asked.

    For one thread.
    """

    def __init__(self, reader: SnapshotReader) -> None:
        self._reader = reader
        self.limit_bytes = reader.ahead_bytes // 4
        """How much it keeps at a time; 0 if it reads exactly what is asked."""
        self._held: dict[str, memoryview] = {}
        self._entry_name = ""
        self._start = 0
        self._window = memoryview(b"")

    def announce(self, entries: Iterable[Entry]) -> None:
        """Read entries that will be needed next, with few requests; those that were announced before are dropped.

        Only as many as fit into `limit_bytes` are read, so that memory stays bounded.
        """
        self._held = {}
        if not self.limit_bytes:
            return
        left, chosen = self.limit_bytes, []
        for entry in entries:
            if entry.size_bytes <= left:
                left -= entry.size_bytes
                chosen.append((entry, memoryview(bytearray(entry.size_bytes))))
        self._reader.read_all(chosen)
        self._held = {entry.name: data for entry, data in chosen}

    def read(self, entry: Entry, start: int, stop: int) -> bytearray:
        """Return the verified bytes of an entry from `start` to `stop`."""
        data = bytearray(stop - start)
        if not self.limit_bytes:
            self._reader.read_into(entry, start, memoryview(data))
            return data
        held = self._held.get(entry.name)
        if held is not None:
            data[:] = held[start:stop]
            return data
        if entry.name != self._entry_name or not self._start <= start <= stop <= self._start + self._window.nbytes:
            self._read_window(entry, start, stop)
        data[:] = self._window[start - self._start : stop - self._start]
        return data

    def _read_window(self, entry: Entry, start: int, stop: int) -> None:
        size_bytes = max(stop - start, min(self.limit_bytes, entry.size_bytes - start))
        self._window = memoryview(b"")  # freed before the next one is allocated
        window = memoryview(bytearray(size_bytes))
        self._reader.read_into(entry, start, window)
        self._entry_name, self._start, self._window = entry.name, start, window
