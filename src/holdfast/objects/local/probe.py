"""Finds what a directory offers a store, from its metadata or by tests with scratch files."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from holdfast.errors import StoreError
from holdfast.objects.local.files import Files, PosixFiles
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.local.upload import UNSUPPORTED, FileNamer, new_temp_name

_SYNCS: Final = 5
_BLOCK_BYTES: Final = 4096
_REFUSALS: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """Facts about a directory; None if something was not tested or could not be."""

    path: str
    filesystem: str
    """The filesystem's type as the kernel names it; empty if unknown."""
    network: bool
    """Other hosts may use it."""
    durable: bool
    """It survives a reboot."""
    free_bytes: int
    writable: bool
    """Files were created in it; if nothing was tested, permissions and filesystem allow that."""
    tried: bool = False
    """It was tested with scratch files."""
    refusal: str = ""
    """Why it cannot be written to."""
    hard_links: bool | None = None
    """link() works, and refuses a name in use."""
    rename_noreplace: bool | None = None
    """renameat2(RENAME_NOREPLACE) works, and refuses a name in use."""
    direct_io: bool | None = None
    """Files can be written without the page cache (O_DIRECT)."""
    case_sensitive: bool | None = None
    sync_ms: float | None = None
    """Median time to make a small write durable."""


def probe_directory(path: str | os.PathLike[str], *, write: bool = False, files: Files | None = None) -> DirectoryFacts:
    """Return facts about the directory `path`, which must exist; raises StoreError if it cannot be used at all.

    With `write`, also test what only a write can show, with scratch files that are removed again.
    """
    root = os.path.abspath(path)
    calls = PosixFiles(root) if files is None else files
    try:
        if calls.stat(root).kind != "directory":
            raise StoreError(f"{root} is not a directory", code=errno.ENOTDIR)
        free_bytes = calls.read_free_bytes(root)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"cannot inspect {root}: {error.strerror}", code=error.errno) from error
    # Read-only, so that reading the traits writes nothing: the tests are done here.
    traits = LocalStore(root, read_only=True, files=calls).traits
    known = DirectoryFacts(
        path=root,
        filesystem=calls.read_filesystem_type(root),
        network=traits.shared_by_hosts,
        durable=traits.durable,
        free_bytes=free_bytes,
        writable=False,
        tried=write,
    )
    if not write:
        may_write = os.access(root, os.W_OK | os.X_OK)
        return replace(known, writable=may_write, refusal="" if may_write else _explain_refusal(root))
    with _Scratch(root, calls) as scratch:
        return _test_writes(known, scratch)


def locate_nearest_directory(path: str | os.PathLike[str]) -> str:
    """Return the directory `path`, or the nearest existing one above it."""
    directory = os.path.abspath(path)
    while not os.path.isdir(directory) and directory != os.path.dirname(directory):
        directory = os.path.dirname(directory)
    return directory


def _explain_refusal(root: str) -> str:
    is_read_only = os.statvfs(root).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if is_read_only else errno.EACCES)


class _Scratch:
    """Creates scratch files in one directory, and removes them at the end."""

    def __init__(self, root: str, files: Files) -> None:
        self.files = files
        self._root = root
        self._namer = FileNamer(files)
        self._paths: list[str] = []

    def __enter__(self) -> _Scratch:
        return self

    def __exit__(self, *_error: object) -> None:
        for path in self._paths:
            self._namer.discard(path)

    def new_path(self) -> str:
        """Return an unused path; a file created there is removed at the end."""
        self._paths.append(os.path.join(self._root, new_temp_name()))
        return self._paths[-1]

    def make_file(self) -> tuple[str, int]:
        """Create a file; return its path and handle."""
        path = self.new_path()
        return path, self.files.create_file(path)

    def make_empty(self) -> str:
        """Create an empty file and return its path."""
        path, handle = self.make_file()
        self.files.close(handle)
        return path


def _test_writes(known: DirectoryFacts, scratch: _Scratch) -> DirectoryFacts:
    try:
        sync_ms = _measure_sync(scratch)
        return replace(
            known,
            writable=True,
            hard_links=_is_exclusive(scratch, scratch.files.link),
            rename_noreplace=_is_exclusive(scratch, scratch.files.rename_noreplace),
            direct_io=_has_direct_io(scratch),
            case_sensitive=_is_case_sensitive(scratch),
            sync_ms=sync_ms,
        )
    except OSError as error:
        if error.errno in _REFUSALS:
            return replace(known, refusal=error.strerror or str(error))
        raise StoreError(f"cannot test {known.path}: {error.strerror}", code=error.errno) from error


def _measure_sync(scratch: _Scratch) -> float:
    block = memoryview(bytes(_BLOCK_BYTES))
    _, handle = scratch.make_file()
    times_s = []
    try:
        for number in range(_SYNCS):
            scratch.files.write_at(handle, number * _BLOCK_BYTES, block)
            started = time.perf_counter()
            scratch.files.sync_file(handle)
            times_s.append(time.perf_counter() - started)
    finally:
        scratch.files.close(handle)
    return 1000 * sorted(times_s)[_SYNCS // 2]


def _is_exclusive(scratch: _Scratch, give_name: Callable[[str, str], None]) -> bool:
    """Return whether a way of naming works for an unused name and refuses one in use; some only claim to."""
    target = scratch.new_path()
    try:
        give_name(scratch.make_empty(), target)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    second = scratch.make_empty()
    try:
        give_name(second, target)
    except FileExistsError:
        return True
    return False


def _has_direct_io(scratch: _Scratch) -> bool:
    path = scratch.make_empty()
    handle = -1
    try:
        handle = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW)
        # A memory map is page-aligned, as direct I/O requires.
        with mmap.mmap(-1, _BLOCK_BYTES) as block:
            return os.write(handle, block) == _BLOCK_BYTES
    except (OSError, AttributeError):
        # The filesystem refused it, or this system has no O_DIRECT.
        return False
    finally:
        with suppress(OSError):
            os.close(handle)


def _is_case_sensitive(scratch: _Scratch) -> bool:
    path = scratch.make_empty()
    folder, name = os.path.split(path)
    try:
        scratch.files.stat(os.path.join(folder, name.upper()))
    except FileNotFoundError:
        return True
    return False
