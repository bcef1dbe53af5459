"""Writes one object of a local store: fills a temporary file, makes it durable, and gives it its name."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from holdfast.digest import Buffer
from holdfast.errors import ObjectExists, ReadOnlyStore, StoreError, StoreFull
from holdfast.objects.blocks import LentBlock
from holdfast.objects.local.block_io import BlockWriter
from holdfast.objects.local.files import FileKind, Files
from holdfast.objects.local.naming import UNSUPPORTED, FileNamer, Naming
from holdfast.objects.local.nofollow import link_error
from holdfast.objects.protocol import Upload

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
