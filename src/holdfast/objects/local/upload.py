"""Writes one object of a local store: fills a temporary file, makes it durable, and gives it its name."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final

from holdfast.digest import Buffer
from holdfast.errors import ObjectExists, ReadOnlyStore, StoreError, StoreFull
from holdfast.objects.blocks import LentBlock
from holdfast.objects.local.block_io import BlockWriter
from holdfast.objects.local.files import FileKind, Files, link_error
from holdfast.objects.protocol import Upload

TEMP_PREFIX: Final = ".tmp-"
"""Prefix of temporary files. No key has a component that starts with a dot, so they are never listed."""

# link() fails with EPERM if there are no hard links; renameat2() with EINVAL if its flag is unknown.
UNSUPPORTED: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EMLINK})

# An attempt fails if another process removed the directory, while it was empty, after we created it.
_DIRECTORY_ATTEMPTS: Final = 16


class Naming(Enum):
    """How a file gets a name that is not in use, best first."""

    LINK = "link"
    RENAME = "rename without replacement"
    CHECKED_RENAME = "check, then rename: safe for a single writer only"


class FileNamer:
    """Creates temporary files and directories, and gives files their final names; raises plain OSErrors."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._naming: Naming | None = None
        self._naming_lock = threading.Lock()
        self._rename_lock = threading.Lock()
        # Directories in which we created a directory, and that were not synced since.
        self._unsynced: set[str] = set()
        self._unsynced_lock = threading.Lock()

    def create_temp(self, directory: str) -> tuple[str, int]:
        """Create a file with a unique name in `directory`, created if missing; return its path and handle."""
        path = _temp_path(directory)
        for _ in range(_DIRECTORY_ATTEMPTS):
            try:
                return path, self._files.create_file(path)
            except FileNotFoundError:
                self._make_directory(directory)
        return path, self._files.create_file(path)

    def read_naming(self, directory: str) -> Naming:
        """Return the best way of naming that works in `directory`; the first call tests it with scratch files."""
        with self._naming_lock:
            if self._naming is None:
                self._naming = self._probe(directory)
            return self._naming

    def give_name(self, temp: str, target: str, identity: tuple[int, int]) -> None:
        """Give the file `temp`, with this identity, the name `target`; raises FileExistsError if that is in use.

        The caller removes `temp` if it still exists.
        """
        self._give(self._call(self.read_naming(os.path.dirname(target))), temp, target, identity)

    def discard(self, temp: str) -> None:
        """Remove a temporary file if it exists; ignores errors."""
        with suppress(OSError):
            self._files.unlink(temp)

    def make_directories(self, paths: Sequence[str]) -> None:
        """Create directories and make their names durable, also of existing ones: their creator may have died."""
        for path in paths:
            self._make_directory(path)
            if self._files.stat(path).kind == "link":
                raise link_error(path)
        for path in paths:
            self.sync_new_directories(path)

    def sync_new_directories(self, directory: str) -> None:
        """Make the names of `directory` and its parents durable, if we created them."""
        if not self._unsynced:
            return
        # Locked while syncing: a thread that finds nothing to sync relies on the sync being complete.
        with self._unsynced_lock:
            while (parent := os.path.dirname(directory)) != directory:
                if parent in self._unsynced:
                    self._files.sync_directory(parent)
                    self._unsynced.discard(parent)
                directory = parent

    def _make_directory(self, path: str) -> None:
        parent = os.path.dirname(path)
        # Also if another process has just created it: it may not be durable yet.
        with self._unsynced_lock:
            self._unsynced.add(parent)
        try:
            self._files.make_directory(path)
        except FileExistsError:
            return
        except FileNotFoundError:
            if parent == path:
                raise
            self._make_directory(parent)
            with suppress(FileExistsError):
                self._files.make_directory(path)

    def _probe(self, directory: str) -> Naming:
        for naming in (Naming.LINK, Naming.RENAME):
            if self._is_exclusive(naming, directory):
                return naming
        return Naming.CHECKED_RENAME

    def _is_exclusive(self, naming: Naming, directory: str) -> bool:
        """Return whether `naming` works here and refuses a name in use; some filesystems only claim to."""
        call = self._call(naming)
        target = _temp_path(directory)
        sources: list[str] = []
        try:
            for _ in range(2):
                sources.append(_temp_path(directory))
                self._files.close(self._files.create_file(sources[-1]))
                self._give(call, sources[-1], target, self._files.stat(sources[-1]).identity)
        except FileExistsError:
            return len(sources) == 2
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
        finally:
            for path in (*sources, target):
                self.discard(path)
        return False

    def _give(self, call: Callable[[str, str], None], temp: str, target: str, identity: tuple[int, int]) -> None:
        try:
            call(temp, target)
        except OSError:
            # If a reply is lost, the request is sent again: NFS then answers EEXIST (to a link) or ENOENT
            # (to a rename) although our first request succeeded.
            if not self._is_file(target, identity):
                raise

    def _call(self, naming: Naming) -> Callable[[str, str], None]:
        if naming is Naming.LINK:
            return self._files.link
        if naming is Naming.RENAME:
            return self._files.rename_noreplace
        return self._rename_if_free

    def _rename_if_free(self, temp: str, target: str) -> None:
        with self._rename_lock:
            try:
                self._files.stat(target)
            except FileNotFoundError:
                self._files.rename(temp, target)
                return
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)

    def _is_file(self, path: str, identity: tuple[int, int]) -> bool:
        try:
            return self._files.stat(path).identity == identity
        except OSError:
            return False


def new_temp_name() -> str:
    """Return a random name for a temporary file."""
    return TEMP_PREFIX + os.urandom(12).hex()


def _temp_path(directory: str) -> str:
    return os.path.join(directory, new_temp_name())


def remove_debris(
    files: Files,
    namer: FileNamer,
    root: str,
    directories: Iterable[tuple[str, dict[str, FileKind]]],
    *,
    older_than_s: float,
) -> int:
    """Remove temporary files of killed saves that are older than this, by the filesystem's clock; return how many.

    With 0, all are removed, whatever their time. A negative age also removes files with a time that far in the future.
    `directories` are paths relative to `root`, each with the names in it.
    """
    removed = 0
    now_s = _read_file_time(files, namer, root) if older_than_s else inf
    for directory, kinds in directories:
        for name in kinds:
            path = os.path.join(root, directory, name)
            if name.startswith(TEMP_PREFIX) and _is_older(files, path, now_s - older_than_s):
                namer.discard(path)
                removed += 1
    return removed


def _read_file_time(files: Files, namer: FileNamer, root: str) -> float:
    """Return the time that the filesystem gives to a new file; this host's clock may differ by hours."""
    try:
        path, handle = namer.create_temp(root)
    except OSError:
        return 0.0  # the time is unknown, so no file counts as old
    try:
        return files.stat_handle(handle).modified_s
    finally:
        files.close(handle)
        namer.discard(path)


def _is_older(files: Files, path: str, time_s: float) -> bool:
    try:
        return files.stat(path).modified_s <= time_s
    except OSError:
        return False  # its writer has removed or renamed it


_GATHERED_BYTES: Final = 64 << 10
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORBIDDEN: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
# Errors that a filesystem returns before it changes anything. After any other error, the file may have got its name.
_REFUSALS: Final = (
    _FULL
    | _FORBIDDEN
    | UNSUPPORTED
    | {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
    }
)


@dataclass(frozen=True, slots=True)
class WriteTarget:
    """The path of an object to be created, and what is needed to create it."""

    files: Files
    namer: FileNamer
    key: str
    path: str
    may_be_direct: bool = False
    """On this filesystem, bypassing the page cache is faster."""

    @property
    def directory(self) -> str:
        return os.path.dirname(self.path)

    def explain(self, error: OSError, *, needed_bytes: int = 0) -> StoreError:
        """Return the error to raise for a failure before anything was created."""
        free_bytes = 0
        if error.errno in _FULL:
            with suppress(OSError):
                free_bytes = self.files.read_free_bytes(self.directory)
        return explain_write_error(
            error, key=self.key, path=self.path, needed_bytes=needed_bytes, free_bytes=free_bytes
        )


def explain_write_error(
    error: OSError, *, key: str, path: str, needed_bytes: int = 0, free_bytes: int = 0
) -> StoreError:
    """Return the error to raise for a write to `path` that failed and changed nothing."""
    text = f"cannot write {path}: {error.strerror}"
    if error.errno in _FULL:
        text += f" ({needed_bytes} bytes needed, {free_bytes} free); free some space or raise the quota"
        return StoreFull(text, key=key, needed_bytes=needed_bytes, free_bytes=free_bytes)
    if error.errno in _FORBIDDEN:
        text += "; let this user write there, or open the store with read_only=True"
        return ReadOnlyStore(text, key=key, code=error.errno)
    return StoreError(text, key=key, code=error.errno)


def begin_upload(target: WriteTarget, *, durable: bool, single_writer: bool) -> LocalUpload:
    """Create the temporary file and its directories; raises StoreError if it could not be given a name safely."""
    try:
        temp, handle = target.namer.create_temp(target.directory)
    except OSError as error:
        raise target.explain(error) from error
    upload = LocalUpload(target, temp=temp, handle=handle, durable=durable)
    try:
        if durable:
            # Immediately: another process that finds the directory assumes that it is durable.
            target.namer.sync_new_directories(target.directory)
        naming = target.namer.read_naming(target.directory)
    except OSError as error:
        upload.abort()
        raise target.explain(error) from error
    if naming is Naming.CHECKED_RENAME and not single_writer:
        upload.abort()
        raise StoreError(
            f"cannot create {target.path} safely: this filesystem has neither hard links nor rename without"
            " replacement, so two writers could overwrite each other; pass single_writer=True if there is only one",
            key=target.key,
            code=errno.EOPNOTSUPP,
        )
    return upload


class LocalUpload(Upload):
    """An object that is being written: a temporary file in the directory of its final name."""

    def __init__(self, target: WriteTarget, *, temp: str, handle: int, durable: bool) -> None:
        self._target = target
        self._files = target.files
        self._temp = temp
        self._handle: int | None = handle
        self._durable = durable
        self._ended = False
        self._writer = BlockWriter(target.files, handle, may_be_direct=durable and target.may_be_direct)
        self._size_bytes = 0

    def append(self, *buffers: Buffer) -> None:
        """Append `buffers`; a failure ends the upload."""
        self._verify_open()
        with self._ending_by_failure():
            for view in _iter_gathered(buffers):
                self._size_bytes += view.nbytes
                self._writer.append(view)

    def append_block(self, block: LentBlock) -> None:
        """Append a block without copying it; a failure ends the upload."""
        try:
            self._verify_open()
        except StoreError:
            block.release()
            raise
        with self._ending_by_failure():
            self._size_bytes += block.memory.nbytes
            self._writer.append_block(block)

    def commit(self) -> None:
        """Give the file its name; any failure ends the upload."""
        handle = self._verify_open()
        try:
            identity = self._seal(handle)
            self._give_name(identity)
        finally:
            self.abort()
        if self._durable:
            self._sync_name()

    def abort(self) -> None:
        """Remove the temporary file."""
        if self._ended:
            return
        self._ended = True
        self._writer.stop()
        if self._handle is not None:
            with suppress(OSError):
                self._files.close(self._handle)
        self._target.namer.discard(self._temp)

    def _verify_open(self) -> int:
        if self._ended or self._handle is None:
            raise StoreError(f"the upload of {self._target.path} has ended; begin a new one", key=self._target.key)
        return self._handle

    @contextmanager
    def _ending_by_failure(self) -> Iterator[None]:
        """Abort the upload if writing fails: it is unknown how much was written, so it must not be committed."""
        try:
            yield
        except OSError as error:
            self.abort()
            raise self._target.explain(error, needed_bytes=self._size_bytes) from error
        except BaseException:
            self.abort()
            raise

    def _seal(self, handle: int) -> tuple[int, int]:
        """Write the rest, sync and close the temporary file; return its identity."""
        try:
            self._writer.finish()
            if self._durable:
                self._files.sync_file(handle)
            identity = self._files.stat_handle(handle).identity
            # Before closing: even if that fails, the number may already refer to another file.
            self._handle = None
            self._files.close(handle)
        except OSError as error:
            raise self._target.explain(error, needed_bytes=self._size_bytes) from error
        return identity

    def _give_name(self, identity: tuple[int, int]) -> None:
        key, path = self._target.key, self._target.path
        try:
            self._target.namer.give_name(self._temp, path, identity)
        except FileExistsError as error:
            kind = self._find_kind(path)
            if kind == "directory":
                text = f"cannot create {path}: it is a directory; choose a key that is not the start of another"
                raise StoreError(text, key=key, code=errno.EISDIR) from error
            if kind == "link":
                raise self._target.explain(link_error(path)) from error
            raise ObjectExists(f"{path} exists already", key=key, code=errno.EEXIST) from error
        except OSError as error:
            if error.errno in _REFUSALS:
                raise self._target.explain(error) from error
            text = f"it is unknown whether {path} was created: {error.strerror}; check whether it exists"
            raise StoreError(text, key=key, fate="unknown", code=error.errno) from error

    def _find_kind(self, path: str) -> FileKind:
        try:
            return self._files.stat(path).kind
        except OSError:
            return "other"

    def _sync_name(self) -> None:
        try:
            self._files.sync_directory(self._target.directory)
        except OSError as error:
            raise StoreError(
                f"{self._target.path} exists, but its directory could not be made durable: {error.strerror};"
                " the disk may be failing, and a retry cannot repair this",
                key=self._target.key,
                fate="volatile",
                code=error.errno,
            ) from error


def _iter_gathered(buffers: Sequence[Buffer]) -> Iterator[memoryview]:
    """Yield all bytes in order; adjacent small buffers are joined, because a copy costs less than another step."""
    small: list[Buffer] = []
    gathered_bytes = 0
    for buffer in buffers:
        size_bytes = buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
        if gathered_bytes + size_bytes > _GATHERED_BYTES:
            yield flatten(b"".join(small))
            small, gathered_bytes = [], 0
        if size_bytes > _GATHERED_BYTES:
            yield flatten(buffer)
        else:
            small.append(buffer)
            gathered_bytes += size_bytes
    yield flatten(small[0] if len(small) == 1 else b"".join(small))


def flatten(buffer: Buffer) -> memoryview:
    """Return `buffer` as a one-dimensional view of bytes; handles shapes with a zero, which cannot be cast."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")
