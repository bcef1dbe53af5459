"""The raw filesystem calls that a local store makes: a seam where tests count, refuse and lose power."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import sys
from dataclasses import dataclass
from typing import Final, Literal, Protocol

# From linux/fs.h and fcntl.h.
_RENAME_NOREPLACE: Final = 1
_AT_FDCWD: Final = -100

FileKind = Literal["file", "directory", "other"]


@dataclass(frozen=True, slots=True)
class FileStat:
    """What the filesystem knows about one path."""

    kind: FileKind
    size_bytes: int
    modified_s: float
    identity: tuple[int, int]
    """Device and inode: equal for two names of one file."""


class Files(Protocol):
    """The calls, each as atomic and as durable as POSIX makes it; failures are plain OSErrors."""

    def create_file(self, path: str) -> int:
        """Make a file that is not there yet and return a handle to write it."""

    def open_file(self, path: str) -> int:
        """Return a handle to read `path`."""

    def close(self, handle: int) -> None:
        """Close a handle; a network filesystem may report only here that a write failed."""

    def write_at(self, handle: int, start: int, buffer: memoryview) -> int:
        """Write from byte `start` on and return how many bytes were taken, perhaps not all; safe in any thread."""

    def read_into(self, handle: int, start: int, buffer: memoryview) -> int:
        """Read from byte `start` into `buffer` and return how many bytes came; 0 is the end of the file."""

    def set_direct(self, handle: int, *, direct: bool) -> bool:
        """Let reads and writes go around the page cache, or through it again; tell whether they go around it.

        Around it, memory, offsets and lengths must be whole pages, and what is written is on the disk, though not
        yet safe there.
        """

    def is_cached(self, handle: int, start: int) -> bool:
        """Tell whether the page of a file that holds byte `start` is in memory, so that reading it costs a copy."""

    def sync_file(self, handle: int) -> None:
        """Make the bytes and the size of a file durable; its name is the directory's."""

    def sync_directory(self, path: str) -> None:
        """Make the entries of a directory durable."""

    def stat(self, path: str) -> FileStat:
        """Describe what `path` leads to."""

    def stat_handle(self, handle: int) -> FileStat:
        """Describe an open file."""

    def list_directory(self, path: str) -> list[str]:
        """Return the names in a directory, in no order."""

    def list_subdirectories(self, path: str) -> list[str]:
        """Return the names of the directories in a directory, in no order."""

    def link(self, source: str, target: str) -> None:
        """Give a file a second name, if that name is free."""

    def rename_noreplace(self, source: str, target: str) -> None:
        """Give a file another name, if that name is free."""

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, replacing what had it."""

    def unlink(self, path: str) -> None:
        """Remove a file's name."""

    def make_directory(self, path: str) -> None:
        """Make one directory whose parent is there."""

    def lock(self, path: str, *, exclusive: bool) -> int | None:
        """Lock a file, made if need be, until its handle is closed or its process ends.

        A shared lock is waited for; an exclusive one is None at once if somebody holds the file.
        """

    def read_free_bytes(self, path: str) -> int:
        """Return how many bytes an ordinary user may still write below `path`."""

    def read_filesystem_type(self, path: str) -> str:
        """Return the type of the filesystem that holds `path`, which need not exist; empty if not known."""


class PosixFiles:
    """The calls of this machine's kernel."""

    def create_file(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def open_file(self, path: str) -> int:
        # A pipe that stands where an object should be must not make us wait for its writer.
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def close(self, handle: int) -> None:
        os.close(handle)

    def write_at(self, handle: int, start: int, buffer: memoryview) -> int:
        return os.pwrite(handle, buffer, start)

    def read_into(self, handle: int, start: int, buffer: memoryview) -> int:
        return os.preadv(handle, [buffer], start)

    def set_direct(self, handle: int, *, direct: bool) -> bool:
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(handle, fcntl.F_SETFL, flags | flag if direct else flags & ~flag)
        except OSError:
            return False  # a filesystem that has no such way
        return direct and flag != 0

    def is_cached(self, handle: int, start: int) -> bool:
        try:
            # Of a page that is not there the kernel begins to read at least as much as is asked for.
            return os.preadv(handle, [bytearray(1)], start, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False
        except (AttributeError, OSError):
            return True  # no way to ask: read through the cache

    def sync_file(self, handle: int) -> None:
        if sys.platform == "darwin":
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(handle)

    def sync_directory(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def stat(self, path: str) -> FileStat:
        return _describe(os.stat(path))

    def stat_handle(self, handle: int) -> FileStat:
        return _describe(os.fstat(handle))

    def list_directory(self, path: str) -> list[str]:
        return os.listdir(path)

    def list_subdirectories(self, path: str) -> list[str]:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def rename_noreplace(self, source: str, target: str) -> None:
        try:
            renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
        except AttributeError:
            raise OSError(errno.ENOSYS, "this system has no renameat2", source) from None
        if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), source, None, target)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def make_directory(self, path: str) -> None:
        os.mkdir(path)

    def lock(self, path: str, *, exclusive: bool) -> int | None:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
        except OSError as error:
            os.close(handle)
            if exclusive and error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise
        return handle

    def read_free_bytes(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def read_filesystem_type(self, path: str) -> str:
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
                return find_mount_type(lines.read(), os.path.realpath(path))
        except FileNotFoundError:
            return ""


def find_mount_type(mountinfo: str, path: str) -> str:
    """Return the type of the mount that holds `path`, an absolute one; empty if none does."""
    deepest, found = -1, ""
    for line in mountinfo.rstrip("\n").split("\n"):
        mount, _, source = line.partition(" - ")
        point = _unescape(mount.split(" ")[4]).rstrip("/")
        # Of two mounts at one point the later hides the earlier.
        if len(point) >= deepest and (path == point or path.startswith(point + "/")):
            deepest, found = len(point), source.split(" ")[0]
    return found


def _unescape(field: str) -> str:
    """Undo the kernel's octal escapes of space, tab, newline and backslash."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field


def _describe(status: os.stat_result) -> FileStat:
    kind: FileKind = "other"
    if stat.S_ISREG(status.st_mode):
        kind = "file"
    elif stat.S_ISDIR(status.st_mode):
        kind = "directory"
    return FileStat(
        kind=kind,
        size_bytes=status.st_size,
        modified_s=status.st_mtime,
        identity=(status.st_dev, status.st_ino),
    )
