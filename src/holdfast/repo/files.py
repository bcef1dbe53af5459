"""Files as entries: which files a path means, their bytes as sources, and entries written back as files."""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Final, Self

from holdfast.errors import BadName, HoldfastError, NameInUse, NotFound, SourceChanged
from holdfast.json_text import Json
from holdfast.objects.local.naming import UNSUPPORTED, new_temp_name
from holdfast.objects.url import verify_path
from holdfast.progress import Progress, Silent
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import verify_name
from holdfast.repo.read.reader import SnapshotReader
from holdfast.texts import list_some

_LISTED: Final = 50
"""How many files an error names before it only counts them."""
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class FileSource:
    """The bytes of one file, which must not change until the save is over.

    The file is opened for each read and not in between, so that a save of a million files holds few handles.
    """

    name: str
    path: str
    size_bytes: int
    mtime_ns: int
    executable: bool
    identity: tuple[int, int]
    """Device and inode: another file that takes the path meanwhile is noticed."""
    alias: int = 0
    cuts: Sequence[int] = ()

    @property
    def spec(self) -> Json:
        """What a restored file has besides its bytes; part of the content."""
        return {"type": "file", "executable": self.executable}

    @property
    def note(self) -> Json:
        """When the file was modified; not part of the content, so that touching a file does not change a snapshot."""
        return {"mtime_ns": self.mtime_ns}

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop` in new memory; raises SourceChanged if the file did."""
        # A pipe that took the file's place must not make us wait for its writer.
        handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            # Before and after: a change is noticed whenever it came, unless it left size and time as they were.
            self._verify_same(os.fstat(handle))
            data = memoryview(bytearray(stop - start))
            filled = 0
            while filled < len(data):
                count = os.preadv(handle, [data[filled:]], start + filled)
                if not count:
                    break
                filled += count
            self._verify_same(os.fstat(handle))
        finally:
            os.close(handle)
        if filled < len(data):
            raise self._changed(f"it ended at byte {start + filled}")
        return data

    def _verify_same(self, status: os.stat_result) -> None:
        if (status.st_dev, status.st_ino) != self.identity:
            raise self._changed("another file has taken its place")
        if status.st_size != self.size_bytes:
            raise self._changed(f"it had {self.size_bytes} bytes and now has {status.st_size}")
        if status.st_mtime_ns != self.mtime_ns:
            raise self._changed("it was written to")

    def _changed(self, how: str) -> SourceChanged:
        return SourceChanged(
            f"{self.path} changed while it was being saved: {how}. Nothing was committed;"
            " save again when nobody writes to it"
        )


def plan_files(paths: Sequence[str], *, outside: str | None = None) -> list[FileSource]:
    """Return a source for each file that `paths` mean, in their order; raises BadName, OSError.

    - A file becomes the entry `<its name>`.
    - A directory becomes the entries `<its name>/<path below it>`, sorted; hidden files are included.
    - `DIR/`, `.` and `..` mean what is in the directory: entries `<path below it>`.
    - A symbolic link to a file counts as the file, under the link's name; one to a directory is followed only if it is
      given as `LINK/`, any other is refused.
    - Directories without files leave no trace. Sockets, pipes and devices are refused.

    A path that holds the directory `outside`, or lies in it, is refused: a store cannot be saved into itself.
    """
    planned: dict[str, FileSource] = {}
    for path in paths:
        if outside is not None:
            _verify_outside(path, outside)
        for source in _iter_path(path):
            first = planned.setdefault(source.name, source)
            if first is not source:
                raise BadName(
                    f"{first.path} and {source.path} would both be the entry {source.name!r};"
                    " save them under two names, or give the directory above both"
                )
    return list(planned.values())


def _iter_path(path: str) -> Iterator[FileSource]:
    if not path:
        raise BadName("an empty path names no file")
    last = os.path.basename(path)
    means_contents = last in ("", os.curdir, os.pardir)
    status = os.stat(path) if means_contents else os.lstat(path)
    if stat.S_ISDIR(status.st_mode):
        prefix = "" if means_contents else last + "/"
        yield from sorted(_iter_directory(path, prefix), key=lambda source: source.name.split("/"))
    else:
        yield _plan_file(path, last, status)


def _iter_directory(top: str, prefix: str) -> Iterator[FileSource]:
    """Yield every file below `top`, in no order; directories are taken from a list, so depth costs no stack."""
    waiting = [(top, prefix)]
    while waiting:
        directory, start = waiting.pop()
        with os.scandir(directory) as items:
            for item in items:
                if item.is_dir(follow_symlinks=False):
                    waiting.append((item.path, f"{start}{item.name}/"))
                else:
                    yield _plan_file(item.path, start + item.name, item.stat(follow_symlinks=False))


def _plan_file(path: str, name: str, status: os.stat_result) -> FileSource:
    if stat.S_ISLNK(status.st_mode):
        status = _follow(path)
    if not stat.S_ISREG(status.st_mode):
        raise BadName(f"{path} is neither a file nor a directory ({_describe(status)}); only files can be saved")
    return FileSource(
        name=_name_entry(path, name),
        path=path,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        executable=bool(status.st_mode & stat.S_IXUSR),
        identity=(status.st_dev, status.st_ino),
    )


def _follow(link: str) -> os.stat_result:
    """Return what a symbolic link leads to, if that is a file."""
    target = os.readlink(link)
    try:
        status = os.stat(link)
    except OSError as error:
        raise BadName(f"{link} is a symbolic link to {target!r}, which leads nowhere; remove it or mend it") from error
    if stat.S_ISDIR(status.st_mode):
        raise BadName(
            f"{link} is a symbolic link to the directory {target!r}, which is not followed; give {link}/ to save"
            " what is in it"
        )
    return status


def _name_entry(path: str, name: str) -> str:
    """Return the entry's name: what may be saved is exactly what may be restored."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadName(f"{path!r} has a name that is not UTF-8; rename it") from None
    return verify_name(name, what="entry")


def _verify_outside(path: str, directory: str) -> None:
    # Links to directories are not followed on the way down, so looking at the top is enough.
    if is_below(path, directory):
        raise BadName(f"{path} lies inside the store {directory}; save files that are outside of it")
    if is_below(directory, path):
        raise BadName(f"{path} holds the store {directory} itself; give the files and directories beside it")


def is_below(path: str, directory: str) -> bool:
    """Return whether `path` is `directory` or lies in it, whatever links lead there."""
    real, above = os.path.realpath(path), os.path.realpath(directory)
    return real == above or real.startswith(above.rstrip("/") + "/")


def _describe(status: os.stat_result) -> str:
    kinds = {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return kinds.get(stat.S_IFMT(status.st_mode), "something else")


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore wrote."""

    num_files: int
    num_bytes: int


def restore(
    reader: SnapshotReader,
    target_dir: str,
    *,
    only: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Restored:
    """Write the entries of a snapshot as files below `target_dir`, which is made if need be; memory stays bounded.

    Every name is checked and everything in the way is found before the first byte is written. No symbolic link below
    `target_dir` is followed. Each file appears whole and verified, with the time and the executable bit it had; those
    written before a failure stay. `only` is a glob over entry names, in which `*` matches `/` too.

    Raises:
        NameInUse: files are in the way, all of them named; with `overwrite` they are replaced.
        NotFound: `only` matches nothing.
        BadName: a name that must not become a path, or a link or file where a directory should be.
    """
    progress = progress or Silent()
    chosen = _place_entries(_choose_entries(reader, only))
    target_dir = os.path.abspath(verify_path(target_dir))
    existing = _find_existing(target_dir, chosen)
    if existing and not overwrite:
        raise NameInUse(
            f"{len(existing)} of {len(chosen)} files are there already in {target_dir}: {_enumerate(existing)}."
            " Nothing was written; choose another directory, or replace them (--overwrite, overwrite=True)",
            name=next(iter(existing)),
        )
    total = sum(entry.size_bytes for entry in chosen.values())
    progress.begin(f"get {reader.snapshot.name}", total)
    try:
        os.makedirs(target_dir, exist_ok=True)
        with FileTarget(target_dir) as target:
            for name, entry in chosen.items():
                pieces = _iter_counted(reader.iter_entry(entry), progress)
                target.write(name, pieces, entry, replace=name in existing)
    finally:
        progress.end()
    return Restored(len(chosen), total)


def _choose_entries(reader: SnapshotReader, only: str | None) -> list[Entry]:
    entries = [entry for entry in reader.manifest.iter_entries() if only is None or fnmatchcase(entry.name, only)]
    if not entries and only is not None:
        name = reader.snapshot.name
        raise NotFound(f"no entry of {name!r} matches {only!r}; `holdfast show {name}` lists them", name=only)
    return entries


def _place_entries(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Return the entries by the path below the target that each gets; names come from a store and are not trusted."""
    placed: dict[str, Entry] = {}
    for entry in entries:
        name = verify_name(entry.name, what="entry")
        if placed.setdefault(name, entry) is not entry:
            raise BadName(f"two entries would both be written to {name!r}; choose one with --only (only=)")
    for name in placed:
        parts = name.split("/")
        for depth in range(1, len(parts)):
            if (above := "/".join(parts[:depth])) in placed:
                raise BadName(
                    f"{above!r} would be both a file and the directory of {name!r}; choose one with --only (only=)"
                )
    return placed


def _find_existing(target_dir: str, names: Iterable[str]) -> set[str]:
    """Return which files are there already; raises BadName for what cannot even be replaced."""
    if not os.path.lexists(target_dir):
        return set()
    with FileTarget(target_dir) as target:
        return {name for name in names if target.has_file(name)}


def _enumerate(names: Iterable[str]) -> str:
    return list_some(sorted(names), _LISTED)


def _iter_counted(pieces: Iterable[memoryview], progress: Progress) -> Iterator[memoryview]:
    for piece in pieces:
        yield piece
        progress.advance(len(piece))


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
            temp = new_temp_name()
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
