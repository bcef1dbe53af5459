"""The directory that a restore writes to: files appear whole, and no link below it is followed."""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from holdfast.errors import BadName, HoldfastError
from holdfast.objects.local.naming import TEMP_PREFIX, UNSUPPORTED
from holdfast.repo.format.entry import Entry

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class FileTarget:
    """A directory to write files below; walks by directory handles, so that a link cannot lead out of it."""

    def __init__(self, root: str) -> None:
        """Open the directory `root`, which may be reached by links: the user named it."""
        self._root = root
        self._top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        # Entries come in order of their names, so the next one is mostly in the same directory.
        self._parent = ""
        self._handle = os.dup(self._top)
        # By what a filesystem that ignores case would compare, the names that were written.
        self._written: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)
        os.close(self._top)

    def has_file(self, name: str) -> bool:
        """Return whether something that can be replaced has this name; raises BadName if a directory has it."""
        parent, _, last = name.rpartition("/")
        try:
            self._enter(parent, create=False)
            status = os.stat(last, dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(status.st_mode):
            raise BadName(f"{self._root}/{name} is a directory, where a file is to be written; choose another place")
        return True

    def write(self, name: str, pieces: Iterable[memoryview], entry: Entry, *, replace: bool) -> None:
        """Write one file under a temporary name, then give it its own; raises BadName if another one has it."""
        parent, _, last = name.rpartition("/")
        try:
            self._verify_apart(name)
            self._enter(parent, create=True)
            temp = f"{TEMP_PREFIX}{os.urandom(12).hex()}"
            try:
                self._fill(temp, pieces, entry)
                self._give_name(temp, last, replace=replace)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temp, dir_fd=self._handle)
        except HoldfastError:
            raise
        except OSError as error:
            # The calls above know a handle and a short name; the user knows the path.
            raise OSError(error.errno, error.strerror, f"{self._root}/{name}") from error

    def _verify_apart(self, name: str) -> None:
        """Raise BadName if the filesystem ignores case and `name` means a file that was written before."""
        other = self._written.setdefault(_fold(name), name)
        if other == name:
            return
        try:
            found, written = (os.stat(each, dir_fd=self._top, follow_symlinks=False) for each in (name, other))
        except FileNotFoundError:
            return
        if (found.st_dev, found.st_ino) == (written.st_dev, written.st_ino):
            raise BadName(
                f"{other!r} and {name!r} are one file on this filesystem, which ignores case;"
                " choose one with --only (only=), or another place"
            )

    def _enter(self, parent: str, *, create: bool) -> None:
        """Make `parent` the directory in hand."""
        if parent == self._parent:
            return
        handle = os.dup(self._top)
        try:
            for part in parent.split("/") if parent else ():
                deeper = self._open_directory(part, handle, parent, create=create)
                os.close(handle)
                handle = deeper
        except BaseException:
            os.close(handle)
            raise
        os.close(self._handle)
        self._parent, self._handle = parent, handle

    def _open_directory(self, part: str, above: int, parent: str, *, create: bool) -> int:
        try:
            return os.open(part, _DIRECTORY, dir_fd=above)
        except FileNotFoundError:
            if not create:
                raise
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=above)
            return os.open(part, _DIRECTORY, dir_fd=above)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            raise BadName(
                f"{self._root}/{parent}: {part!r} is a file or a symbolic link, where a directory is needed;"
                " remove it or choose another place"
            ) from error

    def _fill(self, temp: str, pieces: Iterable[memoryview], entry: Entry) -> None:
        spec = entry.spec if isinstance(entry.spec, dict) else {}
        handle = os.open(temp, _NEW_FILE, 0o777 if spec.get("executable") is True else 0o666, dir_fd=self._handle)
        try:
            for piece in pieces:
                _write_all(handle, piece)
            mtime_ns = _read_mtime(entry)
            if mtime_ns is not None:
                os.utime(handle, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(handle)

    def _give_name(self, temp: str, name: str, *, replace: bool) -> None:
        here = {"src_dir_fd": self._handle, "dst_dir_fd": self._handle}
        if replace:
            os.rename(temp, name, **here)
            return
        try:
            # Not a rename: a file that came here meanwhile, or differs only in case, must not be lost.
            os.link(temp, name, follow_symlinks=False, **here)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            if self.has_file("/".join(filter(None, (self._parent, name)))):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            os.rename(temp, name, **here)


def _fold(name: str) -> str:
    """Return a name in a form that is equal for all names that a filesystem may take for one."""
    return unicodedata.normalize("NFC", name).casefold()


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _read_mtime(entry: Entry) -> int | None:
    mtime_ns = entry.note.get("mtime_ns") if isinstance(entry.note, dict) else None
    return mtime_ns if isinstance(mtime_ns, int) and abs(mtime_ns) < 1 << 62 else None
