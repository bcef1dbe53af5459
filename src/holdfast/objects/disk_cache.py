"""A cache of objects that never change, in a local directory: bounded, shared by processes, removable at any time.

Each object has a sparse file: the bytes of the object that were read so far, at the same offsets. Nothing says whether
they are right. A caller knows the digest of what it reads, verifies it, and reads from the store what is not right. So
crashes, damage, hostile files and other processes can make the cache useless, but never wrong; it needs neither locks
nor renames nor a sync.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from holdfast.digest import Buffer
from holdfast.display.markup import readable_repr

_log = logging.getLogger(__name__)

CACHE_BYTES: Final = 10 << 30
_FOLDER: Final = "holdfast-cache-1"
"""A folder of its own: the directory may also contain other files, or even be a store."""
_KINDS: Final = ("manifests", "packs")
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SEEK_HOLE: Final[int | None] = getattr(os, "SEEK_HOLE", None)
_BLOCK_BYTES: Final = 512
"""The unit of `st_blocks`."""
_SHARE: Final = 8
"""After writing this fraction of the limit, a process measures the cache again: others may have written, too."""
_TOUCH_S: Final = 60.0
"""How long the time of last use may be wrong."""


@dataclass(frozen=True, slots=True)
class ReadCacheStatistics:
    """What a cache has done for one handle."""

    hit_bytes: int
    """Bytes that were read from the cache, and were right."""
    missed_bytes: int
    """Bytes that were read from the store."""

    __repr__ = readable_repr


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """What a cache contains, for all processes and stores."""

    files: int
    size_bytes: int
    """The space that its files take."""


class DiskCache:
    """Parts of objects in files. Safe in any thread and process; never raises for what is wrong with its files."""

    def __init__(self, directory: str, *, limit_bytes: int = CACHE_BYTES) -> None:
        """Use a folder of its own below `directory`, created with the first write; raises ValueError for a bad limit.

        Each process may exceed the limit by an eighth for a moment.
        """
        if limit_bytes <= 0:
            raise ValueError(f"a cache must have room for at least one byte, not {limit_bytes}")
        self.directory = os.path.abspath(directory)
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._room_bytes = 0
        self._hit_bytes = 0
        self._missed_bytes = 0
        self._is_full = False
        self._has_warned = False

    def __repr__(self) -> str:
        """Show the directory and the limit."""
        return f"DiskCache({self.directory!r}, limit_bytes={self.limit_bytes})"

    def __reduce__(self) -> tuple[object, ...]:
        """Open the same directory in another process."""
        return _open_again, (self.directory, self.limit_bytes)

    @contextmanager
    def open(self, key: str) -> Iterator[CachedObject | None]:
        """Open what is cached of an object, for a `with`; None if that is nothing."""
        handle = self._open_to_read(key)
        if handle is None:
            yield None
            return
        try:
            yield CachedObject(handle)
        finally:
            os.close(handle)

    def write(self, key: str, start: int, data: Buffer) -> None:
        """Keep bytes of an object, unless the disk is full or the directory cannot be used."""
        if self._is_full:
            return
        view = memoryview(data).cast("B")
        try:
            self._make_room(view.nbytes)
            handle = self._open_to_write(key)
            try:
                while view:
                    count = os.pwrite(handle, view, start)
                    view, start = view[count:], start + count
            finally:
                os.close(handle)
        except FileNotFoundError:
            pass  # the directory is being removed
        except OSError as error:
            self._is_full = True
            self._warn(f"nothing more is cached in {self.directory}", error)

    def count_use(self, *, hit_bytes: int = 0, missed_bytes: int = 0) -> None:
        """Count bytes that a caller has read and found to be right."""
        with self._lock:
            self._hit_bytes += hit_bytes
            self._missed_bytes += missed_bytes

    def find_statistics(self) -> ReadCacheStatistics:
        """Return what was read so far."""
        with self._lock:
            return ReadCacheStatistics(self._hit_bytes, self._missed_bytes)

    def read_usage(self) -> CacheUsage:
        """Return what the cache contains now."""
        sizes = [size_bytes for _, size_bytes, _, _ in self._iter_files()]
        return CacheUsage(len(sizes), sum(sizes))

    def clear(self) -> None:
        """Delete all files; processes that are reading them continue from the store."""
        self._remove(0)

    def _open_to_read(self, key: str) -> int | None:
        try:
            kind, _, name = key.partition("/")
            with self._open_folder(kind) as folder:
                handle = os.open(name, _READ, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"the cache in {self.directory} is not used", error)
            return None
        found = os.fstat(handle)
        if _is_plain(found):
            if time.time() - found.st_mtime > _TOUCH_S:
                with suppress(OSError):  # a read-only filesystem
                    os.utime(handle)
            return handle
        os.close(handle)
        return None

    def _open_to_write(self, key: str) -> int:
        kind, _, name = key.partition("/")
        with self._open_folder(kind, create=True) as folder:
            handle = os.open(name, _WRITE, 0o600, dir_fd=folder)
        found = os.fstat(handle)
        if _is_plain(found):
            return handle
        os.close(handle)
        raise OSError(errno.EPERM, f"{key} is not a plain file of this user")

    @contextmanager
    def _open_folder(self, kind: str, *, create: bool = False) -> Iterator[int]:
        """Open the folder of one kind of objects; no link below the directory is followed."""
        if create:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
        outer = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            middle = _open_private(outer, _FOLDER, create=create)
        finally:
            os.close(outer)
        try:
            inner = _open_private(middle, kind, create=create)
        finally:
            os.close(middle)
        try:
            yield inner
        finally:
            os.close(inner)

    def _make_room(self, size_bytes: int) -> None:
        with self._lock:
            self._room_bytes -= size_bytes
            if self._room_bytes >= 0:
                return
            self._room_bytes = self.limit_bytes // _SHARE  # other threads need not wait
        # A little more than is needed, so that the files are not measured for each write.
        left_bytes = self._remove(max(0, self.limit_bytes - self.limit_bytes // _SHARE - size_bytes))
        with self._lock:
            self._room_bytes = min(self.limit_bytes - left_bytes - size_bytes, self.limit_bytes // _SHARE)

    def _remove(self, most_bytes: int) -> int:
        """Delete the files that were not used for longest, until the others take at most so much; return how much."""
        files = sorted(self._iter_files())
        left_bytes = sum(size_bytes for _, size_bytes, _, _ in files)
        for _, size_bytes, kind, name in files:
            if left_bytes <= most_bytes:
                break
            with suppress(OSError), self._open_folder(kind) as folder:
                os.unlink(name, dir_fd=folder)
                left_bytes -= size_bytes
        return left_bytes

    def _iter_files(self) -> Iterator[tuple[float, int, str, str]]:
        """Yield the time of last use, the size, the kind and the name of each file."""
        for kind in _KINDS:
            with suppress(OSError), self._open_folder(kind) as folder:
                for name in os.listdir(folder):
                    with suppress(FileNotFoundError):
                        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        yield found.st_mtime, found.st_blocks * _BLOCK_BYTES, kind, name

    def _warn(self, what: str, error: OSError) -> None:
        with self._lock:
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            _log.warning("%s: %s; bytes come from the store instead", what, error.strerror or error)


class CachedObject:
    """What is cached of one object."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def read(self, start: int, size_bytes: int) -> memoryview | None:
        """Return bytes, which may be wrong; None if some of them were never written."""
        try:
            if self._has_hole(start, size_bytes):
                return None
            data = os.pread(self._handle, size_bytes, start)
            return memoryview(data) if len(data) == size_bytes else None
        except OSError:
            return None

    def _has_hole(self, start: int, size_bytes: int) -> bool:
        if _SEEK_HOLE is None:
            return os.fstat(self._handle).st_size < start + size_bytes
        try:
            return os.lseek(self._handle, start, _SEEK_HOLE) < start + size_bytes
        except OSError as error:
            if error.errno == errno.ENXIO:
                return True  # the file ends before
            raise


def _open_again(directory: str, limit_bytes: int) -> DiskCache:
    return DiskCache(directory, limit_bytes=limit_bytes)


def _open_private(parent: int, name: str, *, create: bool) -> int:
    """Open a folder that only this user can use; raises OSError for a link, or if others can use it."""
    if create:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    found = os.fstat(handle)
    if _is_own(found) and not stat.S_IMODE(found.st_mode) & 0o077:
        return handle
    os.close(handle)
    raise OSError(errno.EPERM, f"its folder {name} can be used by others; remove it, or run chmod 700 on it")


def _is_plain(found: os.stat_result) -> bool:
    """Return whether this is a file of the cache alone; it has no name any more if it was just deleted."""
    # A second name may be outside the cache, where nothing may be written.
    return _is_own(found) and stat.S_ISREG(found.st_mode) and found.st_nlink <= 1


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid()
