"""The raw filesystem calls of a local store, a seam where tests count, refuse and lose power; no link is followed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, Protocol

SEARCH: Final = getattr(os, "O_PATH", os.O_RDONLY)
"""Flags to open a directory only to look up names in it, which needs no permission to read the directory."""

_DIRECTORY: Final = os.O_DIRECTORY | os.O_NOFOLLOW


def open_directory(inside: str, path: str, access: int = SEARCH) -> int:
    """Return a handle to the directory `path`; `inside` is the root, with a slash at the end.

    Raises the OSError of `link_error` if a component below the root is a symbolic link.
    """
    if not path.startswith(inside):
        return os.open(path, access | os.O_DIRECTORY)  # the root or a directory above it
    end = path.find("/", len(inside))
    if end < 0:
        return _open_component(path, None, path, access)
    handle = _open_component(path[:end], None, path[:end], SEARCH)
    while end >= 0:
        start, end = end + 1, path.find("/", end + 1)
        component = path if end < 0 else path[:end]
        parent = handle
        try:
            handle = _open_component(component[start:], parent, component, access if end < 0 else SEARCH)
        finally:
            os.close(parent)
    return handle


def link_error(path: str) -> OSError:
    """Return the error to raise for a symbolic link at `path`, below the root of a store."""
    text = (
        f"{path} is a symbolic link, and links inside a store are never followed;"
        " replace it by its target, or remove it"
    )
    return OSError(errno.ELOOP, text, path)


def _open_component(name: str, parent: int | None, path: str, access: int) -> int:
    try:
        return os.open(name, access | _DIRECTORY, dir_fd=parent)
    except OSError as error:
        # Linux returns ENOTDIR for a link, as for a file; POSIX specifies ELOOP.
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and _is_link(name, parent):
            raise link_error(path) from None
        raise OSError(error.errno, error.strerror, path) from None


def _is_link(name: str, parent: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:
        return False  # it was removed in the meantime


_MEMORY: Final = "/proc/meminfo"
_GROUPS: Final = "/proc/self/cgroup"
_GROUP_ROOT: Final = "/sys/fs/cgroup"
_SHARE: Final = 4
"""A reader may use a quarter of the available memory: the tensors that it fills need as much again, and the rest stays
with what others have in the page cache."""


class CacheShare:
    """The bytes that one reader may still bring into the page cache. Thread-safe."""

    def __init__(self, find_available: Callable[[], int | None]) -> None:
        """Read the available memory when the first bytes are taken; if it is unknown, there is no room."""
        self._find_available = find_available
        self._left_bytes: int | None = None
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        """Reserve room for bytes, and return whether there is any."""
        with self._lock:
            if self._left_bytes is None:
                self._left_bytes = (self._find_available() or 0) // _SHARE
            if size_bytes > self._left_bytes:
                # Nothing smaller may follow: the end of a large state would replace its beginning in the cache.
                self._left_bytes = 0
                return False
            self._left_bytes -= size_bytes
            return True


def find_available_memory(memory: str = _MEMORY, groups: str = _GROUPS, group_root: str = _GROUP_ROOT) -> int | None:
    """Return how many bytes this process could still use without swapping, by all its control groups; None if unknown.

    The page cache counts as available: the kernel drops it when memory is needed.
    """
    found = _read_numbers(memory).get("MemAvailable:")
    limits = [] if found is None else [found << 10, *_list_group_limits(groups, group_root)]
    return max(0, min(limits)) if limits else None


def _list_group_limits(groups: str, root: str) -> list[int]:
    """Return what each limited control group of this process leaves, in version 2 and in version 1 of the hierarchy."""
    limits = []
    for line in _read_text(groups).splitlines():
        number, controllers, name = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            limits += _list_parent_limits(root, name.strip("/"), "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            folder, total = os.path.join(root, "memory"), "total_"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            limits += _list_parent_limits(folder, name.strip("/"), *names, total)
    return limits


def _list_parent_limits(root: str, name: str, limit: str, usage: str, prefix: str) -> list[int]:
    """Return what a group and the groups above it leave; a container may not see all of them."""
    found = []
    while True:
        folder = os.path.join(root, name)
        most, used = _read_text(os.path.join(folder, limit)), _read_text(os.path.join(folder, usage))
        if most.isdecimal() and used.isdecimal():
            counts = _read_numbers(os.path.join(folder, "memory.stat"))
            cached = sum(counts.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            found.append(int(most) - int(used) + cached)
        if not name:
            return found
        name = os.path.dirname(name)


def _read_numbers(path: str) -> dict[str, int]:
    """Return the numbers of a file that has a name and a number in each line."""
    fields = [line.split() for line in _read_text(path).splitlines()]
    return {each[0]: int(each[1]) for each in fields if len(each) > 1 and each[1].isdecimal()}


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


# From linux/fs.h and fcntl.h.
_RENAME_NOREPLACE: Final = 1

# If the path is a pipe, opening it must not block; if it is a terminal, it must not become our controlling terminal.
_CALM: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY

FileKind = Literal["file", "directory", "link", "other"]
_KINDS: Final[dict[int, FileKind]] = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}


@dataclass(frozen=True, slots=True)
class FileStat:
    """What the filesystem knows about one path."""

    kind: FileKind
    size_bytes: int
    modified_s: float
    identity: tuple[int, int]
    """Device and inode: equal for two names of one file."""
    num_names: int = 1
    """The number of hard links to the file; some may be outside the store."""
    version: str = ""
    """Device, inode, modification and change time: differs if the file was replaced or written to. May be empty."""


class Files(Protocol):
    """The filesystem calls of a local store, each as atomic and durable as POSIX makes it; they raise plain OSErrors.

    No call follows a symbolic link below the root of the store, in any component of a path. It raises the OSError of
    `link_error`, or acts on the link itself.
    """

    def create_file(self, path: str) -> int:
        """Create a file, which must not exist, and return a handle for writing."""

    def open_file(self, path: str) -> int:
        """Return a handle for reading `path`."""

    def close(self, handle: int) -> None:
        """Close a handle. On a network filesystem this may raise the error of an earlier write."""

    def write_at(self, handle: int, start: int, buffer: memoryview) -> int:
        """Write at byte `start` and return how many bytes were written, perhaps not all; safe in any thread."""

    def read_into(self, handle: int, start: int, buffer: memoryview) -> int:
        """Read from byte `start` into `buffer` and return how many bytes were read; 0 at the end of the file."""

    def set_direct(self, handle: int, *, direct: bool) -> bool:
        """Switch direct I/O, which bypasses the page cache, on or off for a handle; return whether it is on.

        Direct I/O needs memory, offsets and lengths that are multiples of a page. Bytes written directly still need
        `sync_file` to be durable.
        """

    def is_cached(self, handle: int, start: int) -> bool:
        """Return whether the page with byte `start` is in the page cache, so that reading it is only a copy."""

    def find_available_memory(self) -> int | None:
        """Return how many bytes of memory this process could still use, the page cache included; None if unknown."""

    def sync_file(self, handle: int) -> None:
        """Make the bytes and the size of a file durable; its name needs `sync_directory`."""

    def sync_directory(self, path: str) -> None:
        """Make the entries of a directory durable."""

    def stat(self, path: str) -> FileStat:
        """Return the status of `path`; of a symbolic link itself, unless it is the root."""

    def stat_names(self, path: str, names: Sequence[str]) -> list[FileStat | None]:
        """Return the status of each name in a directory, as `stat` does; None for a name that does not exist."""

    def stat_handle(self, handle: int) -> FileStat:
        """Return the status of an open file."""

    def list_directory(self, path: str) -> list[str]:
        """Return the names in a directory, in no order."""

    def list_kinds(self, path: str) -> dict[str, FileKind]:
        """Return the names in a directory, in no order, each with its kind."""

    def link(self, source: str, target: str) -> None:
        """Create a hard link `target` to `source`; raises FileExistsError if `target` exists."""

    def rename_noreplace(self, source: str, target: str) -> None:
        """Rename a file; raises FileExistsError if `target` exists."""

    def rename(self, source: str, target: str) -> None:
        """Rename a file; replaces `target` if it exists."""

    def unlink(self, path: str) -> None:
        """Delete a name of a file."""

    def make_directory(self, path: str) -> None:
        """Create one directory; its parent must exist."""

    def lock(self, path: str, *, exclusive: bool) -> int | None:
        """Lock a file, created if it is missing, until `unlock` or the end of the process; None if it is locked.

        Does not wait. The handle can be read and written. A forked child does not inherit the lock.
        """

    def unlock(self, handle: int) -> None:
        """Unlock and close a file that this process has locked."""

    def read_free_bytes(self, path: str) -> int:
        """Return how many bytes an unprivileged user can still write below `path`."""

    def read_filesystem_type(self, path: str) -> str:
        """Return the type of the filesystem that contains `path`, which need not exist; empty if unknown."""


class PosixFiles:
    """The real filesystem calls."""

    _inside = "/"

    def __init__(self, root: str = "/") -> None:
        """Follow no symbolic link below `root`, an absolute path; `root` itself may be reached through links."""
        self._inside = root.rstrip("/") + "/"

    def create_file(self, path: str) -> int:
        # Not 0o666: objects never change, so no group needs write permission, even if the umask allows it.
        with self._entering(path) as (directory, name):
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=directory)

    def open_file(self, path: str) -> int:
        return self._open(path, os.O_RDONLY)

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
            return False  # the filesystem has no direct I/O
        return direct and flag != 0

    def is_cached(self, handle: int, start: int) -> bool:
        try:
            # One byte only: if pages are missing, the kernel starts to read as many as were requested.
            return os.preadv(handle, [bytearray(1)], start, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False
        except (AttributeError, OSError):
            return True  # this system cannot tell: read through the cache

    def find_available_memory(self) -> int | None:
        return find_available_memory()

    def sync_file(self, handle: int) -> None:
        if sys.platform == "darwin":
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(handle)

    def sync_directory(self, path: str) -> None:
        handle = open_directory(self._inside, path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def stat(self, path: str) -> FileStat:
        if not path.startswith(self._inside):
            return _describe(os.stat(path))
        with self._entering(path) as (directory, name):
            return _describe(os.stat(name, dir_fd=directory, follow_symlinks=False))

    def stat_names(self, path: str, names: Sequence[str]) -> list[FileStat | None]:
        # Open the directory once for all names: opening it takes as long as one stat.
        directory = open_directory(self._inside, path)
        try:
            return [_describe_name(directory, name) for name in names]
        finally:
            os.close(directory)

    def stat_handle(self, handle: int) -> FileStat:
        return _describe(os.fstat(handle))

    def list_directory(self, path: str) -> list[str]:
        handle = open_directory(self._inside, path, os.O_RDONLY)
        try:
            return os.listdir(handle)
        finally:
            os.close(handle)

    def list_kinds(self, path: str) -> dict[str, FileKind]:
        handle = open_directory(self._inside, path, os.O_RDONLY)
        try:
            with os.scandir(handle) as entries:
                return {entry.name: _find_kind(entry) for entry in entries}
        finally:
            os.close(handle)

    def link(self, source: str, target: str) -> None:
        with self._entering(source) as (old, name), self._entering(target) as (new, new_name):
            os.link(name, new_name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)

    def rename_noreplace(self, source: str, target: str) -> None:
        try:
            renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
        except AttributeError:
            raise OSError(errno.ENOSYS, "this system has no renameat2", source) from None
        with self._entering(source) as (old, name), self._entering(target) as (new, new_name):
            if renameat2(old, os.fsencode(name), new, os.fsencode(new_name), _RENAME_NOREPLACE):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), source, None, target)

    def rename(self, source: str, target: str) -> None:
        with self._entering(source) as (old, name), self._entering(target) as (new, new_name):
            os.rename(name, new_name, src_dir_fd=old, dst_dir_fd=new)

    def unlink(self, path: str) -> None:
        with self._entering(path) as (directory, name):
            os.unlink(name, dir_fd=directory)

    def make_directory(self, path: str) -> None:
        with self._entering(path) as (directory, name):
            os.mkdir(name, dir_fd=directory)

    def lock(self, path: str, *, exclusive: bool) -> int | None:
        return PROCESS_LOCKS.take(lambda: self._open(path, os.O_RDWR | os.O_CREAT), exclusive=exclusive)

    def unlock(self, handle: int) -> None:
        PROCESS_LOCKS.release(handle)

    def read_free_bytes(self, path: str) -> int:
        handle = open_directory(self._inside, path)
        try:
            status = os.fstatvfs(handle)
        finally:
            os.close(handle)
        return status.f_bavail * status.f_frsize

    def read_filesystem_type(self, path: str) -> str:
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
                return find_mount_type(lines.read(), os.path.realpath(path))
        except FileNotFoundError:
            return ""

    def _open(self, path: str, flags: int) -> int:
        with self._entering(path) as (directory, name):
            try:
                return os.open(name, flags | _CALM, 0o666, dir_fd=directory)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise link_error(path) from None
                raise

    def _entering(self, path: str) -> _Entering:
        return _Entering(self._inside, path)


class _Entering:
    """Opens the directory of a path for a `with` block; yields its handle and the last component of the path."""

    __slots__ = ("_handle", "_inside", "_path")

    def __init__(self, inside: str, path: str) -> None:
        self._inside = inside
        self._path = path

    def __enter__(self) -> tuple[int, str]:
        directory, _, name = self._path.rpartition("/")
        self._handle = open_directory(self._inside, directory or "/")
        return self._handle, name

    def __exit__(self, *_error: object) -> None:
        os.close(self._handle)


def find_mount_type(mountinfo: str, path: str) -> str:
    """Return the type of the mount that contains the absolute path `path`; empty if none does."""
    deepest, found = -1, ""
    for line in mountinfo.rstrip("\n").split("\n"):
        mount, _, source = line.partition(" - ")
        point = _unescape(mount.split(" ")[4]).rstrip("/")
        # A later mount on the same directory hides the earlier one.
        if len(point) >= deepest and (path == point or path.startswith(point + "/")):
            deepest, found = len(point), source.split(" ")[0]
    return found


def _unescape(field: str) -> str:
    """Undo the kernel's octal escapes of space, tab, newline and backslash."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field


def _find_kind(entry: os.DirEntry[str]) -> FileKind:
    if entry.is_file(follow_symlinks=False):
        return "file"
    if entry.is_dir(follow_symlinks=False):
        return "directory"
    return "link" if entry.is_symlink() else "other"


def _describe_name(directory: int, name: str) -> FileStat | None:
    try:
        return _describe(os.stat(name, dir_fd=directory, follow_symlinks=False))
    except FileNotFoundError:
        return None


def _describe(status: os.stat_result) -> FileStat:
    return FileStat(
        kind=_KINDS.get(stat.S_IFMT(status.st_mode), "other"),
        size_bytes=status.st_size,
        modified_s=status.st_mtime,
        identity=(status.st_dev, status.st_ino),
        num_names=status.st_nlink,
        version=f"{status.st_dev}-{status.st_ino}-{status.st_mtime_ns}-{status.st_ctime_ns}",
    )


class ForkSafeLocks:
    """The file locks of this process. Thread-safe.

    A lock belongs to the open file, and a forked child shares the open files of its parent. So a child closes its
    copies, which leaves the lock with the parent. The parent unlocks explicitly, which releases the lock even if a
    child has kept a copy.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler that forks may run while its own thread is opening a lock file.
        self._mutex = threading.RLock()
        self._handles: dict[int, bool] = {}
        """Open lock files; the value is whether the lock is exclusive."""
        self._is_registered = False

    def take(self, open_file: Callable[[], int], *, exclusive: bool) -> int | None:
        """Lock the file that `open_file` opens, without waiting; None if another lock conflicts."""
        # A fork waits for this mutex, so the child knows every handle that it inherits.
        with self._mutex:
            self._register()
            handle = open_file()
            self._handles[handle] = exclusive
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:
            self._close(handle)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise
        return handle

    def release(self, handle: int) -> None:
        """Unlock and close; an exclusive holder's description of itself is removed from the file."""
        # A file with a second name may not be ours, and no holder has written into it.
        if self._handles[handle] and os.fstat(handle).st_nlink == 1:
            with suppress(OSError):  # the next holder overwrites it
                os.ftruncate(handle, 0)
        try:
            fcntl.flock(handle, fcntl.LOCK_UN)
        finally:
            self._close(handle)

    def _close(self, handle: int) -> None:
        with self._mutex:
            del self._handles[handle]
            os.close(handle)

    def _register(self) -> None:
        if not self._is_registered:
            self._is_registered = True
            os.register_at_fork(
                before=self._mutex.acquire, after_in_parent=self._mutex.release, after_in_child=self._close_inherited
            )

    def _close_inherited(self) -> None:
        """Close the parent's lock files in a child; unlocking would release the locks of the parent."""
        for handle in self._handles:
            os.close(handle)
        self._handles.clear()
        self._mutex.release()


PROCESS_LOCKS: Final = ForkSafeLocks()
"""One object per process, because fork handlers cannot be unregistered."""
