"""An object store in memory; other stores are tested against its behaviour."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from holdfast.digest import Buffer
from holdfast.errors import Corrupt, NotFound, ObjectExists, ReadOnlyStore, StoreError, StoreFull
from holdfast.objects.protocol import (
    PAGE_LIMIT,
    ObjectInfo,
    ObjectStore,
    StoreTraits,
    Upload,
    verify_key,
    verify_prefix,
)

_TRAITS: Final = StoreTraits(
    durable=False,
    shared_by_hosts=False,
    stale_listings=False,
)


class Clock(Protocol):
    """A source of the time, in seconds since 1970."""

    def now(self) -> float:
        """Return the time."""


class VirtualClock:
    """A clock that moves only by `advance`."""

    def __init__(self, *, start_s: float = 1_000_000_000.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the time."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward by `seconds`."""
        self._now_s += seconds


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    modified_s: float
    version: str


class MemoryStore(ObjectStore):
    """Keeps objects in a dict."""

    def __init__(
        self,
        url: str = "memory://",
        *,
        clock: Clock | None = None,
        read_only: bool = False,
        capacity_bytes: int | None = None,
    ) -> None:
        self._url = url
        self._clock: Clock = VirtualClock() if clock is None else clock
        self._read_only = read_only
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._last_version = 0

    def __repr__(self) -> str:
        """Show the URL."""
        return f"<MemoryStore {self.url}>"

    @property
    def url(self) -> str:
        return self._url

    @property
    def traits(self) -> StoreTraits:
        return _TRAITS

    def clone(self, *, read_only: bool = False) -> MemoryStore:
        """Return an independent store with the same objects and the same clock."""
        copy = MemoryStore(self._url, clock=self._clock, read_only=read_only, capacity_bytes=self._capacity_bytes)
        with self._lock:
            copy._objects = dict(self._objects)
            copy._last_version = self._last_version
        return copy

    def contents(self) -> dict[str, bytes]:
        """Return a copy of all keys and their bytes."""
        with self._lock:
            return {key: found.data for key, found in self._objects.items()}

    def prepare(self, prefixes: Sequence[str]) -> None:
        """Do nothing: a dict is ready for any key."""
        for prefix in prefixes:
            self._verify_writable(prefix.rstrip("/"))

    def sync(self, prefix: str) -> None:
        """Do nothing: memory is never durable."""
        verify_prefix(prefix)

    def create(self, key: str, data: Buffer, *, durable: bool = True) -> None:
        """Create `key` with `data`; `durable` has no effect in memory."""
        self._verify_writable(key)
        self._add(key, bytes(data))

    def upload(self, key: str) -> MemoryUpload:
        """Begin an upload."""
        self._verify_writable(key)
        return MemoryUpload(key, commit=self._add, reserve=self._verify_room)

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        """Return the whole object."""
        data = self._find(key).data
        if len(data) > limit_bytes:
            raise Corrupt(f"{key} has {len(data)} bytes, more than the limit of {limit_bytes}", key=key)
        return data

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `start` on."""
        assert start >= 0
        data = self._find(key).data
        if not buffer.nbytes:
            return
        if start + buffer.nbytes > len(data):
            raise Corrupt(f"{key} ends at byte {len(data)}, before {start}+{buffer.nbytes}", key=key)
        buffer.cast("B")[:] = memoryview(data)[start : start + buffer.nbytes]

    def list(self, prefix: str, *, after: str = "", limit: int = PAGE_LIMIT) -> list[ObjectInfo]:
        """Return one page of objects, ordered by key."""
        verify_prefix(prefix)
        with self._lock:
            keys = sorted(key for key in self._objects if key.startswith(prefix) and key > after)
            return [_describe(key, self._objects[key]) for key in keys[: max(limit, 0)]]

    def delete(self, key: str) -> None:
        """Delete `key` if it is there."""
        self._verify_writable(key)
        with self._lock:
            self._objects.pop(key, None)

    @contextmanager
    def hold(self, *, exclusive: bool) -> Iterator[bool]:
        """Yield False to a collector: another thread may be saving."""
        yield not exclusive

    def remove_debris(self, *, older_than_s: float) -> int:
        """Return 0: interrupted uploads leave nothing behind."""
        return 0

    def stat(self, key: str) -> ObjectInfo:
        """Return size, time and version of `key`."""
        return _describe(key, self._find(key))

    def clock(self) -> float:
        """Return the time of the clock that sets `modified_s`."""
        return self._clock.now()

    def find_free_bytes(self) -> int | None:
        """Return the free capacity, or None if there is no limit."""
        with self._lock:
            return self._count_free()

    def _verify_writable(self, key: str) -> None:
        verify_key(key)
        if self._read_only:
            raise ReadOnlyStore(
                f"cannot write {key}: {self._url} was opened read-only; open it without read_only=True", key=key
            )

    def _find(self, key: str) -> _Object:
        verify_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise NotFound(f"no object {key} in {self._url}", name=key)
        return found

    def _add(self, key: str, data: bytes) -> None:
        with self._lock:
            if key in self._objects:
                raise ObjectExists(f"{key} is already in {self._url}", key=key)
            self._verify_room_locked(key, len(data))
            self._last_version += 1
            self._objects[key] = _Object(data, self._clock.now(), version=str(self._last_version))

    def _verify_room(self, key: str, needed_bytes: int) -> None:
        with self._lock:
            self._verify_room_locked(key, needed_bytes)

    def _verify_room_locked(self, key: str, needed_bytes: int) -> None:
        free_bytes = self._count_free()
        if free_bytes is not None and needed_bytes > free_bytes:
            raise StoreFull(
                f"no room for {key} in {self._url}: {needed_bytes} bytes needed, {free_bytes} free; delete some",
                key=key,
                needed_bytes=needed_bytes,
                free_bytes=free_bytes,
            )

    def _count_free(self) -> int | None:
        if self._capacity_bytes is None:
            return None
        return max(self._capacity_bytes - sum(len(found.data) for found in self._objects.values()), 0)


class MemoryUpload(Upload):
    """An upload that collects its bytes in a bytearray until it is committed."""

    def __init__(self, key: str, *, commit: Callable[[str, bytes], None], reserve: Callable[[str, int], None]) -> None:
        self._key = key
        self._commit = commit
        self._reserve = reserve
        self._data: bytearray | None = bytearray()

    def append(self, *buffers: Buffer) -> None:
        """Append copies of `buffers`; a failure ends the upload."""
        data = self._verify_open()
        try:
            self._reserve(self._key, len(data) + sum(memoryview(buffer).nbytes for buffer in buffers))
        except StoreError:
            self.abort()
            raise
        for buffer in buffers:
            data += bytes(buffer)

    def commit(self) -> None:
        """Make the object visible."""
        data = self._verify_open()
        self.abort()
        self._commit(self._key, bytes(data))

    def abort(self) -> None:
        """Drop what was appended."""
        self._data = None

    def _verify_open(self) -> bytearray:
        if self._data is None:
            raise StoreError(f"the upload of {self._key} has ended; begin a new one", key=self._key)
        return self._data


def _describe(key: str, found: _Object) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=len(found.data), modified_s=found.modified_s, version=found.version)
