"""Creates temporary files and their directories, gives finished files their names, and removes leftover ones."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum
from math import inf
from typing import Final

from holdfast.objects.local.files import FileKind, Files
from holdfast.objects.local.nofollow import link_error

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
