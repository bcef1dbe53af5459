"""Where an export is written: under a temporary name beside the destination, which appears whole or not at all."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from contextlib import suppress
from types import TracebackType
from typing import Final

from typing_extensions import Self

from holdfast.errors import BadFile, BadName, NameInUse, StoreFull
from holdfast.formats.receipt import read_receipt
from holdfast.objects.blocks import LentBlock
from holdfast.objects.local.block_io import BlockWriter
from holdfast.objects.local.files import Files
from holdfast.objects.local.local_store import can_bypass_cache
from holdfast.objects.local.upload import UNSUPPORTED
from holdfast.texts import list_some

RECEIPT_NAME: Final = "holdfast-receipt.json"
"""The name of the receipt in a folder that was exported."""
RECEIPT_SUFFIX: Final = ".receipt.json"
"""What the receipt of a single file has after the name of the file."""
_TEMP: Final = ".holdfast-export-"
_OLD: Final = ".holdfast-replaced-"
_UNLISTED: Final = re.compile(
    rf"{re.escape(RECEIPT_NAME)}|\.metadata|__[0-9]+_[0-9]+\.distcp|model\.safetensors\.index\.json"
)
"""Names of files that an export writes although its receipt may not list them."""
_MAX_NAMED: Final = 10


class ExportFile:
    """One file of an export, written from start to end; use it in a `with`, which makes it durable.

    Writes go past the page cache where that is faster. What is written before the end of the file is kept, and written
    last: it must be short.
    """

    def __init__(self, files: Files, path: str, *, may_be_direct: bool) -> None:
        """Create a file, which must not exist."""
        self._files = files
        self._handle = files.create_file(path)
        self._writer = BlockWriter(files, self._handle, may_be_direct=may_be_direct)
        self._size_bytes = 0
        self._patches: list[tuple[int, memoryview]] = []

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is left and sync the file; after an error, only close it."""
        try:
            if kind is None:
                self._finish()
        finally:
            self._writer.stop()
            self._files.close(self._handle)

    def write_at(self, start: int, data: memoryview) -> None:
        """Write all of `data` at byte `start`; bytes between the end of the file and `start` are zeros."""
        if start < self._size_bytes:
            self._patches.append((start, data))
            return
        self._append_zeros(start)
        self._writer.append(data)
        self._size_bytes += data.nbytes

    def append_block(self, start: int, block: LentBlock) -> None:
        """Write page-aligned memory at byte `start`, which is not before the end of the file, and release it."""
        self._append_zeros(start)
        self._writer.append_block(block)
        self._size_bytes += block.memory.nbytes

    def _append_zeros(self, start: int) -> None:
        self._writer.append(memoryview(bytes(start - self._size_bytes)))
        self._size_bytes = start

    def _finish(self) -> None:
        self._writer.finish()
        for start, data in self._patches:
            self._write_all(start, data)
        self._files.sync_file(self._handle)

    def _write_all(self, start: int, data: memoryview) -> None:
        while data.nbytes:
            count = self._files.write_at(self._handle, start, data)
            data, start = data[count:], start + count


class ExportTarget:
    """The destination of one export: a file, or a folder of files. Use it in a `with`; `commit` makes it visible.

    Without a commit, nothing is left. A killed process leaves a folder or file whose name begins with a dot; the next
    export to the same destination removes it.
    """

    def __init__(self, files: Files, path: str, *, is_folder: bool, replace: bool) -> None:
        """Write to `path`, which must not exist; with `replace`, it may be a file, or a folder of an older export.

        Such a folder is not replaced if it contains files that the older export has not written.
        """
        self._files = files
        self._path = os.path.abspath(path)
        self._parent, self._name = os.path.split(self._path)
        self._is_folder = is_folder
        self._replace = replace
        self._temp = self._beside(_TEMP)
        self._lock: int | None = None
        self._is_committed = False
        self._folders: set[str] = set()
        self._may_be_direct = can_bypass_cache(files.read_filesystem_type(self._parent))

    def _beside(self, kind: str) -> str:
        return os.path.join(self._parent, f".{self._name}{kind}{os.urandom(8).hex()}")

    def __enter__(self) -> Self:
        """Check the destination, and remove what killed exports to it have left; raises NameInUse, BadName, OSError."""
        self._verify_free()
        _remove_leftovers(self._parent, self._name)
        if self._is_folder:
            self._files.make_directory(self._temp)
            self._lock = _lock(self._temp)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove everything that was written, unless it was committed."""
        if not self._is_committed:
            _remove(self._temp)
        if self._lock is not None:
            os.close(self._lock)

    def verify_room(self, needed_bytes: int) -> None:
        """Raise StoreFull if the filesystem has less free space than the export needs."""
        free_bytes = self._files.read_free_bytes(self._parent)
        if needed_bytes > free_bytes:
            raise StoreFull(
                f"the export needs {needed_bytes} bytes, and {self._parent} has {free_bytes} free; nothing was written",
                needed_bytes=needed_bytes,
                free_bytes=free_bytes,
            )

    def create(self, name: str = "") -> ExportFile:
        """Create a file: `name` in the folder, or the only file of an export that is a file."""
        if not self._is_folder:
            created = ExportFile(self._files, self._temp, may_be_direct=self._may_be_direct)
            self._lock = _lock(self._temp)
            return created
        for folder in _list_parents(name):
            with suppress(FileExistsError):
                self._files.make_directory(os.path.join(self._temp, folder))
            self._folders.add(folder)
        return ExportFile(self._files, os.path.join(self._temp, name), may_be_direct=self._may_be_direct)

    def find_path(self, name: str) -> str:
        """Return the temporary path of a file in the folder, before the commit."""
        return os.path.join(self._temp, name)

    def commit(self) -> None:
        """Give the export its name; it is durable when this returns."""
        if self._is_folder:
            for folder in sorted(self._folders, reverse=True):
                self._files.sync_directory(os.path.join(self._temp, folder))
            self._files.sync_directory(self._temp)
        if self._replace and os.path.lexists(self._path):
            self._exchange()
        else:
            self._rename_if_free()
        self._is_committed = True
        self._files.sync_directory(self._parent)

    def _exchange(self) -> None:
        """Replace the old export; a file in one step, a folder in two."""
        if not self._is_folder:
            self._files.rename(self._temp, self._path)
            return
        old = self._beside(_OLD)
        self._files.rename(self._path, old)
        try:
            self._verify_nothing_added(old)
            self._files.rename(self._temp, self._path)
        except BaseException:
            self._files.rename(old, self._path)
            raise
        _remove(old)

    def _rename_if_free(self) -> None:
        try:
            self._files.rename_noreplace(self._temp, self._path)
        except FileExistsError:
            raise self._in_use() from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            # This filesystem cannot do both in one step.
            if os.path.lexists(self._path):
                raise self._in_use() from None
            self._files.rename(self._temp, self._path)

    def _verify_free(self) -> None:
        if not self._name:
            raise BadName(f"{self._path} cannot be the destination of an export; name a file or folder in it")
        if not os.path.isdir(self._parent):
            raise BadName(f"the folder {self._parent} does not exist; create it, or choose another destination")
        if not os.path.lexists(self._path):
            return
        if not self._replace:
            raise self._in_use()
        mode = os.lstat(self._path).st_mode
        if not self._is_folder and not stat.S_ISREG(mode):
            raise NameInUse(f"{self._path} is not a file, so it is not replaced; choose another path", name=self._path)
        if self._is_folder and not (stat.S_ISDIR(mode) and _is_export(self._path)):
            raise NameInUse(
                f"{self._path} is not a folder of an earlier export (it has no {RECEIPT_NAME}), so it is not replaced;"
                " choose another path",
                name=self._path,
            )
        if self._is_folder:
            self._verify_nothing_added(self._path)

    def _verify_nothing_added(self, folder: str) -> None:
        added = _list_added(folder)
        if added:
            raise NameInUse(
                f"{self._path} contains files that were added since it was exported, so it is not replaced:"
                f" {list_some(added, _MAX_NAMED)}; move them elsewhere, or choose another path",
                name=self._path,
            )

    def _in_use(self) -> NameInUse:
        return NameInUse(
            f"{self._path} exists already; choose another path, or replace it (--force, replace=True)", name=self._path
        )


def _list_parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _is_export(folder: str) -> bool:
    names = os.listdir(folder)
    return not names or RECEIPT_NAME in names


def _list_added(folder: str) -> list[str]:
    """Return the files of an exported folder that neither its receipt nor its format accounts for."""
    try:
        receipt = read_receipt(os.path.join(folder, RECEIPT_NAME))
        written = {tensor.file for tensor in receipt.tensors} | {file.path for file in receipt.files}
    except (OSError, BadFile):
        written = set()
    found = []
    for top, folders, names in os.walk(folder, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(top, name))]
        found += [os.path.relpath(os.path.join(top, name), folder) for name in (*names, *links)]
    return sorted(name for name in found if name not in written and not _UNLISTED.fullmatch(name))


def _raise(error: OSError) -> None:
    raise error


def _lock(path: str) -> int | None:
    """Lock a temporary file or folder until the process ends; None if the filesystem has no such locks."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _remove_leftovers(parent: str, name: str) -> None:
    """Remove what exports to this destination have left when they were killed; those that are running are locked."""
    for found in os.listdir(parent):
        if found.startswith((f".{name}{_TEMP}", f".{name}{_OLD}")):
            path = os.path.join(parent, found)
            with suppress(OSError):
                lock = _lock(path)
                if lock is not None:
                    _remove(path)
                    os.close(lock)


def _remove(path: str) -> None:
    """Remove a file or folder, if it exists; ignores errors, because another error is being raised."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(path)
