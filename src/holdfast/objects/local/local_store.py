"""The object store in a directory: key `k` is the file `root/k`, created with link() and made durable; and its lock."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from typing import Final, TypeVar

from holdfast.digest import Buffer
from holdfast.errors import Corrupt, NotFound, ReadOnlyStore, StoreError
from holdfast.objects.local.block_io import DIRECT_BYTES, DirectReads
from holdfast.objects.local.files import CacheShare, FileKind, Files, FileStat, PosixFiles, link_error
from holdfast.objects.local.upload import (
    FileNamer,
    LocalUpload,
    WriteTarget,
    begin_upload,
    explain_write_error,
    flatten,
    remove_debris,
)
from holdfast.objects.protocol import (
    PAGE_LIMIT,
    ObjectInfo,
    ObjectStore,
    PageCacheReads,
    ReadInto,
    StoreTraits,
    is_key,
    verify_key,
    verify_prefix,
)

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.05
_HOLDER_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class LockWait:
    """How long a writer waits for a collector that has the exclusive lock."""

    limit_s: float = 10.0
    """The limit for each collector. A collector needs the lock for well under a second, unless it is stopped."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class StoreLock:
    """A file with a shared lock for writers and an exclusive lock for a collector. Thread-safe."""

    def __init__(self, files: Files, path: str, wait: LockWait) -> None:
        """Use the lock file at `path`, which the first holder creates."""
        self._files = files
        self._path = path
        self._wait = wait
        self._overdue: bytes | None = None
        """A holder that did not release the lock in time: later saves do not wait for it again."""

    @contextmanager
    def hold(self, *, exclusive: bool) -> Iterator[bool]:
        """Acquire the lock; yields False if another lock conflicts, for a shared lock after the waiting time."""
        owner = os.getpid()
        handle = self._lock_exclusive() if exclusive else self._lock_shared()
        try:
            yield handle is not None
        finally:
            # A forked child has closed its copy of the handle; the number may refer to another file there by now.
            if handle is not None and os.getpid() == owner:
                self._files.unlock(handle)

    def _lock_exclusive(self) -> int | None:
        handle = self._files.lock(self._path, exclusive=True)
        if handle is not None and self._may_write_holder(handle):
            since = datetime.now(timezone.utc).isoformat()
            holder = f"pid {os.getpid()} on {socket.gethostname()} since {since}".encode()
            with suppress(OSError):  # a full disk: the lock is valid, but its holder is not named
                self._files.write_at(handle, 0, memoryview(holder[:_HOLDER_BYTES].ljust(_HOLDER_BYTES)))
        return handle

    def _may_write_holder(self, handle: int) -> bool:
        """Return whether writing into the lock file is safe: it is a regular file with one name only."""
        with suppress(OSError):
            status = self._files.stat_handle(handle)
            return status.kind == "file" and status.num_names == 1
        return False

    def _lock_shared(self) -> int | None:
        watched: bytes | None = None
        deadline_s = 0.0
        while True:
            handle = self._files.lock(self._path, exclusive=False)
            if handle is not None:
                self._overdue = None
                return handle
            holder = self._read_holder()
            if holder == self._overdue:
                return None
            now_s = self._wait.clock()
            if holder != watched:
                # Each holder gets the full waiting time: a collector relies on all writers waiting for it. A writer
                # that was stopped during its sleep may find another holder than before.
                watched, deadline_s = holder, now_s + self._wait.limit_s
            if now_s >= deadline_s:
                self._overdue = holder or None  # holders without a text cannot be distinguished
                self._report(holder)
                return None
            self._wait.sleep(_POLL_S)

    def _read_holder(self) -> bytes:
        text = bytearray(_HOLDER_BYTES)
        with suppress(OSError):
            handle = self._files.open_file(self._path)
            try:
                count = self._files.read_into(handle, 0, memoryview(text))
                return bytes(text[:count]).strip()
            finally:
                self._files.close(handle)
        return b""

    def _report(self, holder: bytes) -> None:
        _log.warning(
            "%s: a garbage collection (%s) has kept this store locked for more than %g s. This process continues"
            " without the lock, which is safe; the next collections may free less. If that process is stopped, continue"
            " or end it",
            os.path.dirname(self._path),
            holder.decode("ascii", "backslashreplace") or "an unknown process",
            self._wait.limit_s,
        )


# Errors that mean that there is no object. ELOOP is not one of them: a symbolic link is not followed, so the records
# below it are unknown. If they counted as absent, a collector would delete the files that they need.
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
# Filesystems of any other type may be shared with other hosts.
_LOCAL_TYPES: Final = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "zfs", "f2fs", "jfs", "reiserfs", "overlay", "tmpfs"}
    | {"ramfs", "vfat", "exfat", "ntfs", "ntfs3", "fuseblk", "apfs", "hfs", "simulated"}
)
_VOLATILE_TYPES: Final = frozenset({"tmpfs", "ramfs"})

# Errors of filesystems without locks; then only leases show which saves are running.
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_LOCK_NAME: Final = ".lock"
_SETTLED_S: Final = 2.0
"""A change of a directory may have the same time as one before it: by the clock of the filesystem, whose steps are 10
ms, or 2 s with FAT."""

T = TypeVar("T")
# Inside the class `list` is its method.
_Names = list[str]
FindNames = Callable[[str], Sequence[str]]
"""Returns the requested keys in a directory; the argument is empty or ends in a slash."""
FindStats = Callable[[str, Sequence[str]], Mapping[str, FileStat | None]]
"""Returns the status of keys in a directory; None for keys to skip."""


class LocalStore(ObjectStore):
    """Objects as files below `root`, which the first write creates.

    The root may be a symbolic link, or be reached through links. Below it no link is followed: an operation that meets
    one raises StoreError with errno ELOOP. It changes nothing and reads nothing that the link leads to.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        read_only: bool = False,
        single_writer: bool = False,
        files: Files | None = None,
        lock_wait: LockWait | None = None,
    ) -> None:
        self._root = os.path.abspath(root)
        self._read_only = read_only
        self._single_writer = single_writer
        self._files: Files = PosixFiles(self._root) if files is None else files
        self._skips_links = False
        self._namer = FileNamer(self._files)
        self._direct = DirectReads(self._files)
        self._lock = StoreLock(self._files, self._path(_LOCK_NAME), lock_wait or LockWait())
        self._filesystem_type = ""
        self._traits: StoreTraits | None = None

    def __repr__(self) -> str:
        """Show the URL."""
        return f"<LocalStore {self.url}>"

    @property
    def url(self) -> str:
        """The absolute path of the root."""
        return self._root

    @property
    def traits(self) -> StoreTraits:
        """Properties of the filesystem, known from its type."""
        if self._traits is None:
            self._traits = StoreTraits(
                durable=self._find_type() not in _VOLATILE_TYPES,
                shared_by_hosts=self.is_network,
                # The clients of network filesystems cache directories.
                stale_listings=self.is_network,
            )
        return self._traits

    @property
    def is_network(self) -> bool:
        """Whether other hosts may use the filesystem."""
        return self._find_type() not in _LOCAL_TYPES

    def is_bare(self) -> bool:
        """Return whether the root is an empty directory."""
        try:
            return not self._files.list_directory(self._root)
        except OSError:
            return False

    def prepare(self, prefixes: Sequence[str]) -> None:
        """Create a directory for each prefix, and make it and its parents durable even if they exist."""
        for prefix in prefixes:
            self._verify_writable(prefix.rstrip("/"))
        try:
            self._namer.make_directories([self._root, *(self._path(prefix.rstrip("/")) for prefix in prefixes)])
        except OSError as error:
            raise explain_write_error(error, key="", path=self._root) from error

    def sync(self, prefix: str) -> None:
        """Fsync the directory of `prefix`, if it exists."""
        path = self._path(verify_prefix(prefix).rstrip("/"))
        try:
            self._files.sync_directory(path)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise StoreError(f"cannot make {path} durable: {error.strerror}", code=error.errno) from error

    def create(self, key: str, data: Buffer, *, durable: bool = True) -> None:
        """Create the file of `key`; without `durable` nothing is fsynced."""
        with self._begin(key, durable=durable) as upload:
            upload.append(data)
            upload.commit()

    def upload(self, key: str) -> LocalUpload:
        """Begin a durable create that streams into a temporary file."""
        return self._begin(key, durable=True)

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        """Return the whole object."""
        return self._reopening(lambda: self._read_once(key, limit_bytes))

    def _read_once(self, key: str, limit_bytes: int) -> bytes:
        handle = self._open(key)
        try:
            status = self._files.stat_handle(handle)
            if status.kind != "file":
                raise self._not_found(key)
            if status.size_bytes > limit_bytes:
                raise Corrupt(
                    f"{self._path(key)} has {status.size_bytes} bytes, more than the limit of {limit_bytes}; run check",
                    key=key,
                )
            data = bytearray(status.size_bytes)
            self._fill(key, handle, 0, memoryview(data))
            return bytes(data)
        except OSError as error:
            raise self._read_error(error, key) from error
        finally:
            self._files.close(handle)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `start` on."""
        self._reopening(lambda: self._read_into_once(key, start, buffer))

    def _read_into_once(self, key: str, start: int, buffer: memoryview) -> None:
        handle = self._open(key)
        try:
            target = flatten(buffer)
            if target.nbytes >= DIRECT_BYTES and self._may_be_direct():
                # The rest is read through the page cache, which also reports bytes that are missing.
                done = self._direct.read(handle, start, target)
                start, target = start + done, target[done:]
            self._fill(key, handle, start, target)
        except OSError as error:
            raise self._read_error(error, key) from error
        finally:
            self._files.close(handle)

    def keep_reads(self) -> LocalReads:
        """Begin reads through the page cache, up to a share of the available memory."""
        share = CacheShare(self._files.find_available_memory) if self._may_be_direct() else None
        return LocalReads(self, share)

    def map(self, key: str, start: int, size_bytes: int) -> memoryview:
        """Map the file of `key` privately: pages are copied when they are written to."""
        handle = self._open(key)
        try:
            status = self._files.stat_handle(handle)
            # Touching memory beyond the end of the file would kill the process (SIGBUS).
            if status.kind != "file" or start + size_bytes > status.size_bytes:
                raise Corrupt(f"{self._path(key)} ends before byte {start + size_bytes}; run check", key=key)
            page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            whole = mmap.mmap(handle, start - page + size_bytes, access=mmap.ACCESS_COPY, offset=page)
            return memoryview(whole)[start - page :]
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot map {self._path(key)}: {error}", key=key) from error
        finally:
            self._files.close(handle)

    def list(self, prefix: str, *, after: str = "", limit: int = PAGE_LIMIT) -> list[ObjectInfo]:
        """Return one page; reads the status of no more names than needed."""
        base = verify_prefix(prefix)[: prefix.rfind("/") + 1]
        find_names = partial(self._find_names, prefix=prefix, after=after)
        page: list[ObjectInfo] = []
        if limit < 1:
            return page
        for key, status in iter_in_key_order(base, find_names, self._find_stats, batch=limit):
            if status.kind == "link" and not self._skips_links:
                raise self._read_error(link_error(self._path(key)), key)
            if status.kind == "file" and key > after:
                page.append(ObjectInfo(key, status.size_bytes, status.modified_s, status.version))
                if len(page) == limit:
                    break
        return page

    def delete(self, key: str) -> None:
        """Delete the file of `key` if it exists."""
        self._verify_writable(key)
        path = self._path(key)
        try:
            self._files.unlink(path)
        except OSError as error:
            if error.errno in _ABSENT:
                return
            raise explain_write_error(error, key=key, path=path) from error

    @contextmanager
    def hold(self, *, exclusive: bool) -> Iterator[bool]:
        """Lock the lock file. It proves nothing about other hosts, so network filesystems have no exclusive lock."""
        if exclusive and self.traits.shared_by_hosts:
            yield False
            return
        with ExitStack() as stack:
            try:
                is_locked = stack.enter_context(self._lock.hold(exclusive=exclusive))
            except OSError as error:
                if not exclusive and error.errno not in _NO_LOCKS:
                    raise explain_write_error(error, key=_LOCK_NAME, path=self._path(_LOCK_NAME)) from error
                is_locked = not exclusive
            yield is_locked

    def remove_debris(self, *, older_than_s: float) -> int:
        """Remove temporary files of killed saves; their age is measured by the filesystem's clock."""
        directories = self._iter_directories("")
        return remove_debris(self._files, self._namer, self._root, directories, older_than_s=older_than_s)

    def iter_links(self) -> Iterator[str]:
        """Yield the path, relative to the root, of each symbolic link in a directory that can contain objects."""
        for directory, kinds in self._iter_directories(""):
            yield from sorted(directory + name for name, kind in kinds.items() if kind == "link")

    def skipping_links(self) -> LocalStore:
        """Return a view of the store whose listings skip links instead of raising."""
        store = copy(self)
        store._skips_links = True
        return store

    def stat(self, key: str) -> ObjectInfo:
        """Return the size and time of the file of `key`."""
        verify_key(key)
        status = self._find_stat(key)
        if status is not None and status.kind == "link":
            raise self._read_error(link_error(self._path(key)), key)
        if status is None or status.kind != "file":
            raise self._not_found(key)
        return ObjectInfo(key, status.size_bytes, status.modified_s, status.version)

    def read_folder_state(self, folder: str, names: Sequence[str]) -> str:
        """Return the times of the directories; "" on a network filesystem, whose clients cache them."""
        if self.is_network:
            return ""
        try:
            found = self._files.stat_names(self._directory(folder), names)
        except OSError as error:
            if error.errno in _ABSENT:
                return ""
            raise self._read_error(error, folder) from error
        latest_s = self.clock() - _SETTLED_S
        if any(status is not None and status.modified_s > latest_s for status in found):
            return ""
        return " ".join("-" if status is None else status.version for status in found)

    def clock(self) -> float:
        """Return this host's time."""
        return time.time()

    def find_free_bytes(self) -> int | None:
        """Return the free bytes of the filesystem; before the first write, of the nearest existing parent's."""
        path = self._root
        while True:
            try:
                return self._files.read_free_bytes(path)
            except FileNotFoundError:
                path = os.path.dirname(path)
            except OSError as error:
                raise StoreError(f"cannot read the free space of {path}: {error.strerror}", code=error.errno) from error

    def _iter_directories(self, base: str) -> Iterator[tuple[str, dict[str, FileKind]]]:
        """Yield `base` (empty, or ending in "/") and all directories below it that can contain objects, with names."""
        try:
            kinds = self._files.list_kinds(self._directory(base))
        except OSError as error:
            if error.errno in _ABSENT:
                return
            raise self._read_error(error, base) from error
        yield base, kinds
        for name, kind in kinds.items():
            if kind == "directory" and is_key(base + name):
                yield from self._iter_directories(f"{base}{name}/")

    def _list_names(self, directory: str) -> _Names:
        try:
            return self._files.list_directory(self._directory(directory))
        except OSError as error:
            if error.errno in _ABSENT or (error.errno == errno.ELOOP and self._skips_links):
                return []
            raise self._read_error(error, directory) from error

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key)

    def _directory(self, base: str) -> str:
        return self._path(base.rstrip("/")) if base else self._root

    def _verify_writable(self, key: str) -> None:
        verify_key(key)
        if self._read_only:
            raise ReadOnlyStore(
                f"cannot write {self._path(key)}: the store was opened read-only; open it without read_only=True",
                key=key,
                code=errno.EROFS,
            )

    def _begin(self, key: str, *, durable: bool) -> LocalUpload:
        self._verify_writable(key)
        target = WriteTarget(
            self._files, self._namer, key=key, path=self._path(key), may_be_direct=self._may_be_direct()
        )
        return begin_upload(target, durable=durable, single_writer=self._single_writer)

    def _find_type(self) -> str:
        if not self._filesystem_type:
            self._filesystem_type = self._files.read_filesystem_type(self._root)
        return self._filesystem_type

    def _may_be_direct(self) -> bool:
        return can_bypass_cache(self._find_type())

    def _open(self, key: str) -> int:
        verify_key(key)
        try:
            return self._files.open_file(self._path(key))
        except OSError as error:
            raise self._read_error(error, key) from error

    def _fill(self, key: str, handle: int, start: int, buffer: memoryview) -> None:
        filled = 0
        while filled < buffer.nbytes:
            count = self._files.read_into(handle, start + filled, buffer[filled:])
            if not count:
                raise Corrupt(
                    f"{self._path(key)} ends at byte {self._files.stat_handle(handle).size_bytes},"
                    f" before the {buffer.nbytes} bytes at {start} that it should contain; run check",
                    key=key,
                )
            filled += count

    def _find_names(self, base: str, prefix: str, after: str) -> _Names:
        """Return the names in the directory `base` (empty, or ending in "/") that are or may contain a wanted key."""
        names = self._list_names(base)
        start = prefix[len(base) :]
        keys = [base + name for name in names if name.startswith(start)]
        # "0" follows "/" in ASCII, so every key below the directory `k` is less than `k0`.
        return [key for key in keys if key + "0" > after] if after else keys

    def _find_stats(self, base: str, keys: Sequence[str]) -> dict[str, FileStat | None]:
        """Return the status of keys in the directory `base`; None for one that is absent or not a valid key."""
        valid = [key for key in keys if is_key(key)]
        found: dict[str, FileStat | None] = dict.fromkeys(keys)
        try:
            names = [key[len(base) :] for key in valid]
            found.update(zip(valid, self._files.stat_names(self._directory(base), names), strict=True))
        except OSError as error:
            if error.errno not in _ABSENT:
                raise self._read_error(error, base) from error
        return found

    def _find_stat(self, key: str) -> FileStat | None:
        try:
            return self._files.stat(self._path(key))
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise self._read_error(error, key) from error

    def _reopening(self, read: Callable[[], T]) -> T:
        """Call `read`, and again if the file handle was stale: on NFS, another host removed or replaced the file.

        When it is opened again, the file exists or not. A stale listing stays an error: it must not look empty.
        """
        try:
            return read()
        except StoreError as error:
            if error.errno != errno.ESTALE:
                raise
            return read()

    def _not_found(self, key: str) -> NotFound:
        return NotFound(f"no object {key} in {self._root}", name=key)

    def _read_error(self, error: OSError, key: str) -> NotFound | StoreError:
        if error.errno in _ABSENT:
            return self._not_found(key)
        return StoreError(f"cannot read {self._path(key)}: {error.strerror}", key=key, code=error.errno)


class LocalReads(PageCacheReads):
    """Reads that leave their bytes in the page cache, and bypass it when their share of the memory is used up."""

    def __init__(self, store: LocalStore, share: CacheShare | None) -> None:
        """Without a share, all reads go through the page cache."""
        super().__init__(store.read_into)
        self._store = store
        self._share = share

    @contextmanager
    def run(self) -> Iterator[ReadInto]:
        """Yield a function that keeps the file of the last read open."""
        run = _Run(self._store, self._share)
        try:
            yield run.read_into
        finally:
            run.close()


class _Run:
    """Reads by one thread, which mostly follow each other.

    The kernel recognises a sequence by the open file. It then reads ahead, into large pages, which takes no more CPU
    time than bypassing the page cache. If each read opens the file, it takes half as much again.
    """

    def __init__(self, store: LocalStore, share: CacheShare | None) -> None:
        self._store = store
        self._share = share
        self._key = ""
        self._handle: int | None = None

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `key` from `start` on."""
        if self._share is None or self._share.take(buffer.nbytes):
            self._store._reopening(lambda: self._read_once(key, start, flatten(buffer)))
        else:
            self._store.read_into(key, start, buffer)

    def close(self) -> None:
        """Close the file."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._store._files.close(handle)

    def _read_once(self, key: str, start: int, target: memoryview) -> None:
        if key != self._key:
            self.close()
        if self._handle is None:
            self._handle, self._key = self._store._open(key), key
        try:
            self._store._fill(key, self._handle, start, target)
        except OSError as error:
            self.close()
            raise self._store._read_error(error, key) from error


def can_bypass_cache(filesystem_type: str) -> bool:
    """Return whether direct I/O makes sense on a filesystem: it is local, and not in memory."""
    return filesystem_type in _LOCAL_TYPES - _VOLATILE_TYPES


def iter_in_key_order(
    base: str, find_names: FindNames, find_stats: FindStats, *, batch: int
) -> Iterator[tuple[str, FileStat]]:
    """Yield each key below `base` that is not a directory, in order, with its status; reads `batch` of them at once."""
    names: list[str] = []
    ahead: dict[str, Iterator[str]] = {}
    known: dict[str, FileStat | None] = {}

    def enter(directory: str) -> None:
        keys = sorted(find_names(directory))
        ahead[directory] = iter(keys)
        for key in keys:
            heappush(names, key)

    # Every key below the directory `k` is greater than `k`. So popping the least name, and pushing the names in it if
    # it is a directory, yields keys in order, however deep directories nest.
    enter(base)
    while names:
        key = heappop(names)
        if key not in known:
            # The keys of one directory are popped in order, so the following ones are needed next.
            directory = key[: key.rfind("/") + 1]
            known.update(find_stats(directory, list(islice(ahead[directory], batch))))
        status = known.pop(key)
        if status is None:
            continue
        if status.kind == "directory":
            enter(key + "/")
        else:
            yield key, status
