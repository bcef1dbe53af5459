"""How a finished file gets its name: without taking another's, and together with the directories that lead to it."""

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
"""How the names of files under way begin: no key has such a component, so none is ever listed."""

# link() answers EPERM where there are no hard links; renameat2() EINVAL where its flag is not known.
UNSUPPORTED: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EMLINK})

# Each try that finds no directory means that somebody removed it, being empty, since we made it.
_DIRECTORY_ATTEMPTS: Final = 16


class Naming(Enum):
    """The ways to give a name that is free."""

    LINK = "link"
    RENAME = "rename without replacement"
    CHECKED_RENAME = "look, then rename: safe for a single writer only"


class FileNamer:
    """Makes temporary files, their directories, and then their final names; raises plain OSErrors."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._naming: Naming | None = None
        self._naming_lock = threading.Lock()
        self._rename_lock = threading.Lock()
        # Directories that hold a directory which we made and that were not fsynced since.
        self._unsynced: set[str] = set()
        self._unsynced_lock = threading.Lock()

    def create_temp(self, directory: str) -> tuple[str, int]:
        """Make a file of a unique name in `directory`, and that directory if need be; return path and handle."""
        path = _temp_path(directory)
        for _ in range(_DIRECTORY_ATTEMPTS):
            try:
                return path, self._files.create_file(path)
            except FileNotFoundError:
                self._make_directory(directory)
        return path, self._files.create_file(path)

    def read_naming(self, directory: str) -> Naming:
        """Return the best way that works in `directory`, found by trying it once."""
        with self._naming_lock:
            if self._naming is None:
                self._naming = self._probe(directory)
            return self._naming

    def give_name(self, temp: str, target: str, identity: tuple[int, int]) -> None:
        """Name the file `temp`, which is `identity`, `target`; raises FileExistsError if that is another file's.

        What is left of `temp` is the caller's to remove.
        """
        self._give(self._call(self.read_naming(os.path.dirname(target))), temp, target, identity)

    def discard(self, temp: str) -> None:
        """Remove what is left of a temporary file, if that is possible."""
        with suppress(OSError):
            self._files.unlink(temp)

    def make_directories(self, paths: Sequence[str]) -> None:
        """Make directories, and make their entries durable even if they are there: who made them may be dead."""
        for path in paths:
            self._make_directory(path)
            if self._files.stat(path).kind == "link":
                raise link_error(path)
        for path in paths:
            self.sync_new_directories(path)

    def sync_new_directories(self, directory: str) -> None:
        """Make the entries of the directories that we made on the way to `directory` durable."""
        if not self._unsynced:
            return
        # The lock is held while syncing: who finds nothing to do must be able to rely on it being done.
        with self._unsynced_lock:
            while (parent := os.path.dirname(directory)) != directory:
                if parent in self._unsynced:
                    self._files.sync_directory(parent)
                    self._unsynced.discard(parent)
                directory = parent

    def _make_directory(self, path: str) -> None:
        parent = os.path.dirname(path)
        # Also if somebody else made it just now: that it is durable yet is not known.
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
        """Tell whether `naming` works here and refuses a name in use: some filesystems only say that they do."""
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
            # A reply may be lost and the request sent again: NFS then answers EEXIST (to a link) or ENOENT
            # (to a rename) for our own success.
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


def _temp_path(directory: str) -> str:
    return os.path.join(directory, TEMP_PREFIX + os.urandom(12).hex())


def remove_debris(
    files: Files,
    namer: FileNamer,
    root: str,
    directories: Iterable[tuple[str, dict[str, FileKind]]],
    *,
    older_than_s: float,
) -> int:
    """Remove temporary files that are older, by the filesystem's own clock; return how many.

    With 0 all are removed, whatever their time. A negative age also removes files that are so much younger than now.
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
    """Return the time that the filesystem gives to a new file: this host's clock may be hours ahead of it."""
    try:
        path, handle = namer.create_temp(root)
    except OSError:
        return 0.0  # what is old cannot be told: nothing is
    try:
        return files.stat_handle(handle).modified_s
    finally:
        files.close(handle)
        namer.discard(path)


def _is_older(files: Files, path: str, time_s: float) -> bool:
    try:
        return files.stat(path).modified_s <= time_s
    except OSError:
        return False  # its writer is done with it
