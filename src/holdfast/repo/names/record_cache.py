"""Remembers snapshot records that were read, by the key, size and version of their file: no record ever changes."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.objects.protocol import ObjectInfo
from holdfast.repo.names.snapshots import CommittedSnapshot

MAX_CACHED_BYTES: Final = 64 << 20
"""Records are remembered up to this sum of their sizes; others are read each time."""


@dataclass(frozen=True, slots=True)
class CachedRecord:
    """The highest record of a name, as it was when its file had this size and version."""

    size_bytes: int
    version: str
    snapshot: CommittedSnapshot | None
    """None for a deleted name."""


class RecordCache:
    """Records by key. Safe in any thread. It may be emptied at any time: what it lacks is read again."""

    def __init__(self, *, limit_bytes: int = MAX_CACHED_BYTES) -> None:
        """Remember nothing yet."""
        self._limit_bytes = limit_bytes
        self._records: dict[str, CachedRecord] = {}
        self._size_bytes = 0
        self.num_new = 0
        """How many records were added by `put`, and not by `put_records`."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many records are remembered."""
        return len(self._records)

    def find(self, info: ObjectInfo) -> CachedRecord | None:
        """Return the record of an object if that is remembered and the object is still the same."""
        found = self._records.get(info.key)
        is_same = found is not None and (found.size_bytes, found.version) == (info.size_bytes, info.version)
        return found if is_same else None

    def put(self, info: ObjectInfo, snapshot: CommittedSnapshot | None) -> None:
        """Remember the record of an object, if there is room and the store tells when an object was replaced."""
        if info.version:
            record = CachedRecord(info.size_bytes, info.version, snapshot)
            self.num_new += self.put_records({info.key: record})

    def put_records(self, records: Mapping[str, CachedRecord]) -> int:
        """Remember records by their keys; return for how many there was room."""
        num_put = 0
        with self._lock:
            for key, record in records.items():
                self._drop(key)
                if self._size_bytes + record.size_bytes <= self._limit_bytes:
                    self._records[key] = record
                    self._size_bytes += record.size_bytes
                    num_put += 1
        return num_put

    def keep_only(self, keys: Collection[str]) -> None:
        """Forget the records of all other keys."""
        with self._lock:
            for key in self._records.keys() - keys:
                self._drop(key)

    def iter_records(self) -> Iterator[tuple[str, CachedRecord]]:
        """Yield every record with its key."""
        with self._lock:
            return iter(list(self._records.items()))

    def _drop(self, key: str) -> None:
        dropped = self._records.pop(key, None)
        self._size_bytes -= dropped.size_bytes if dropped else 0
