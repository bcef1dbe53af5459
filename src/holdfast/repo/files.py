"""Saves files and directories as entries, and restores entries as files; decides which links are followed."""

from __future__ import annotations

import errno
import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import TracebackType
from typing import BinaryIO, Final

from typing_extensions import Self

from holdfast.display.markup import readable_repr
from holdfast.errors import BadName, HoldfastError, NameInUse, NotFound, SourceChanged
from holdfast.json_text import Json
from holdfast.objects.local.files import SEARCH, open_directory
from holdfast.objects.local.upload import UNSUPPORTED, new_temp_name
from holdfast.objects.url import verify_path
from holdfast.progress import Progress, Silent
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import verify_name
from holdfast.repo.read.reader import SnapshotReader
from holdfast.texts import list_some

_LISTED: Final = 50
"""How many files an error message lists; further ones are only counted."""
FILE: Final = "file"
"""The type in the spec of an entry that is a file."""
_HUB_FOLDER: Final = re.compile(r"(?:models|datasets|spaces)--")
"""How the folder of a repository begins in the cache of the Hugging Face hub."""
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class FileSource:
    """The bytes of one file, which must not change until the save ends.

    The file is open only during each read, so that a save of a million files needs few handles.
    """

    name: str
    path: str
    size_bytes: int
    mtime_ns: int
    executable: bool
    identity: tuple[int, int]
    """Device and inode: they show if another file gets the path during the save."""
    alias: int = 0
    cuts: Sequence[int] = ()
    item_bytes: int = 1

    @property
    def spec(self) -> Json:
        """Properties that a restored file gets; part of the content."""
        return {"type": FILE, "executable": self.executable}

    @property
    def note(self) -> Json:
        """The modification time; not part of the content, so that touching a file does not change a snapshot."""
        return {"mtime_ns": self.mtime_ns}

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop` in new memory; raises SourceChanged if the file has changed."""
        # Non-blocking: if the file was replaced by a pipe, opening must not wait for its writer.
        handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            # Before and after the read: detects any change, unless size and modification time are the same.
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

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open the file to look into it; raises SourceChanged if it has changed since it was planned."""
        with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            self._verify_same(os.fstat(file.fileno()))
            yield file
            self._verify_same(os.fstat(file.fileno()))

    def _verify_same(self, status: os.stat_result) -> None:
        if _identify(status) != self.identity:
            raise self._changed("it was replaced by another file")
        if status.st_size != self.size_bytes:
            raise self._changed(f"it had {self.size_bytes} bytes and now has {status.st_size}")
        if status.st_mtime_ns != self.mtime_ns:
            raise self._changed("it was written to")

    def _changed(self, how: str) -> SourceChanged:
        return SourceChanged(
            f"{self.path} changed while it was being saved: {how}. Nothing was committed;"
            " save again when no process writes to it"
        )


def plan_files(paths: Sequence[str], *, outside: str | None = None, follow_links: bool = False) -> list[FileSource]:
    """Return a source for each file at or below `paths`, in their order; raises BadName, OSError.

    - A file becomes the entry `<its name>`.
    - A directory becomes the entries `<its name>/<path below it>`, sorted; hidden files are included.
    - `DIR/`, `.` and `..` stand for the content of the directory: entries `<path below it>`.
    - A path may be a symbolic link to a file, or `LINK/` to a directory. Of links below a directory, `SourceFolder`
      follows those to files inside it. A link is saved as its target, under the name of the link.
    - With `follow_links`, links to directories and links that lead outside are followed as well.
    - Empty directories are not saved. Sockets, pipes and devices are refused.

    A path that contains the directory `outside`, or is inside it, is refused: a store cannot be saved into itself.
    """
    planned: dict[str, FileSource] = {}
    for path in paths:
        if not path:
            raise BadName("an empty path names no file")
        verify_path(path)
        if outside is not None:
            _verify_outside(path, outside)
        for source in _iter_path(path, outside, follow_links=follow_links):
            first = planned.setdefault(source.name, source)
            if first is not source:
                raise BadName(
                    f"{first.path} and {source.path} would both be the entry {source.name!r};"
                    " save them in two snapshots, or save the directory that contains both"
                )
    return list(planned.values())


def _iter_path(path: str, outside: str | None, *, follow_links: bool) -> Iterator[FileSource]:
    last = os.path.basename(path)
    means_contents = last in ("", os.curdir, os.pardir)
    status = os.stat(path) if means_contents or (follow_links and os.path.isdir(path)) else os.lstat(path)
    if stat.S_ISDIR(status.st_mode):
        prefix = "" if means_contents else last + "/"
        yield from open_source_folder(path, follow_links=follow_links).iter_files(prefix, outside=outside)
    else:
        yield _plan_file(path, last, _follow(path) if stat.S_ISLNK(status.st_mode) else status)


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """A folder to save or import, and where links below it may lead.

    A link to a file is followed if the file is inside the folder, or among the `blobs/` of the Hugging Face cache that
    the folder is a part of. Any other link raises BadName, so that files from elsewhere are not saved by accident.
    The check and the source that it returns refer to one inode: if a path is changed to a link afterwards, reading
    raises SourceChanged. A hard link cannot be told from a file.
    """

    path: str
    roots: tuple[str, ...] | None
    """Real paths of the directories that files may be in; None to follow every link."""

    def join(self, name: str) -> str:
        """Return the path of a name in this folder."""
        return os.path.join(self.path, name)

    def enter(self, name: str) -> SourceFolder:
        """Return a folder in this one; links in it may lead to the same places."""
        return replace(self, path=self.join(name))

    def has(self, name: str) -> bool:
        """Return whether there is something of that name; it need not be a file."""
        return os.path.exists(self.join(name))

    def list_names(self) -> list[str]:
        """Return the names in this folder; raises OSError if it is no folder, BadName if a link leads to it."""
        handle = self._open_directory(self.path)
        try:
            return os.listdir(handle)
        finally:
            os.close(handle)

    def plan_file(self, name: str) -> FileSource:
        """Return the source of a file in this folder; raises FileNotFoundError, BadName."""
        return _plan_file(self.join(name), name, self._read_status(self.join(name)))

    def iter_files(self, prefix: str = "", *, outside: str | None = None) -> Iterator[FileSource]:
        """Yield every file at any depth, sorted by its entry name, which begins with `prefix`."""
        yield from sorted(self._iter_unsorted(prefix, outside), key=lambda source: source.name.split("/"))

    def _iter_unsorted(self, prefix: str, outside: str | None) -> Iterator[FileSource]:
        # A list of directories, each with those above it, so that depth is not limited and a cycle is found.
        waiting: list[tuple[str, str, frozenset[tuple[int, int]]]] = [(self.path, prefix, frozenset())]
        while waiting:
            directory, start, above = waiting.pop()
            handle = self._open_directory(directory)
            try:
                inside = above | {_identify(os.fstat(handle))}
                with os.scandir(handle) as items:
                    for item in items:
                        path, status = os.path.join(directory, item.name), item.stat(follow_symlinks=False)
                        if stat.S_ISLNK(status.st_mode):
                            status = self._follow_below(path, inside, outside)
                        if stat.S_ISDIR(status.st_mode):
                            waiting.append((path, f"{start}{item.name}/", inside))
                        else:
                            yield _plan_file(path, start + item.name, status)
            finally:
                os.close(handle)

    def _follow_below(self, link: str, inside: frozenset[tuple[int, int]], outside: str | None) -> os.stat_result:
        """Return the status of what a link below the folder leads to: a file, or with `roots` None a directory."""
        if self.roots is not None:
            _follow(link)
            return self._read_status(link)
        status = _follow(link, to_directory=True)
        if stat.S_ISDIR(status.st_mode):
            if _identify(status) in inside:
                raise BadName(f"{link} is a symbolic link to a directory that contains it; remove the link")
            if outside is not None:
                _verify_outside(link, outside)
        return status

    def _read_status(self, path: str) -> os.stat_result:
        """Return the status of a file; raises BadName if a link leads outside of the roots."""
        if self.roots is None:
            return os.stat(path)
        real = self._find_real(path)
        handle = self._open_real(os.path.dirname(real))
        try:
            return os.stat(os.path.basename(real), dir_fd=handle, follow_symlinks=False)
        finally:
            os.close(handle)

    def _open_directory(self, path: str) -> int:
        if self.roots is None:
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        return self._open_real(self._find_real(path), os.O_RDONLY)

    def _find_real(self, path: str) -> str:
        """Return the path without links; raises BadName if it is outside of the roots."""
        assert self.roots is not None, "the caller follows every link"
        real = os.path.realpath(path)
        if not any(_is_in(real, root) for root in self.roots):
            raise BadName(
                f"{path} is reached by a symbolic link that leads to {real}, outside of the folder {self.roots[0]};"
                " such links are not followed, because they can add any file of this machine to the store. Remove the"
                " link, or follow all links (--follow-links, follow_links=True)"
            )
        return real

    def _open_real(self, real: str, access: int = SEARCH) -> int:
        """Open a directory that was found without links; raises SourceChanged if there is one now."""
        assert self.roots is not None, "the caller follows every link"
        root = next((root for root in self.roots if _is_in(real, root)), real)
        try:
            return open_directory(root.rstrip("/") + "/", real, access)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise SourceChanged(f"{real} became a symbolic link while it was read; nothing was saved") from error


def open_source_folder(path: str, *, follow_links: bool = False) -> SourceFolder:
    """Return a folder that a user named; the path itself may be a link, and lead through links."""
    if follow_links:
        return SourceFolder(path, None)
    real = os.path.realpath(path)
    return SourceFolder(path, (real, *_find_blobs(real)))


def _find_blobs(real: str) -> Iterator[str]:
    """Yield the folder of file contents, if `real` is a snapshot in a cache of the Hugging Face hub, or inside one.

    There, `models--ORG--NAME/snapshots/REVISION/FILE` is a link to `models--ORG--NAME/blobs/DIGEST`.
    """
    parts = real.split("/")
    for depth in range(2, len(parts)):
        if parts[depth - 1] == "snapshots" and _HUB_FOLDER.match(parts[depth - 2]):
            # Not resolved again: if `blobs` is a link itself, files in it are elsewhere.
            yield "/".join((*parts[: depth - 1], "blobs"))


def _is_in(real: str, root: str) -> bool:
    return real == root or real.startswith(root.rstrip("/") + "/")


def _identify(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _plan_file(path: str, name: str, status: os.stat_result) -> FileSource:
    if not stat.S_ISREG(status.st_mode):
        raise BadName(f"{path} is neither a file nor a directory ({_describe(status)}); only files can be saved")
    return FileSource(
        name=_name_entry(path, name),
        path=path,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        executable=bool(status.st_mode & stat.S_IXUSR),
        identity=_identify(status),
    )


def _follow(link: str, *, to_directory: bool = False) -> os.stat_result:
    """Return the status of the file that a symbolic link leads to; raises BadName if it leads to no file."""
    target = os.readlink(link)
    try:
        status = os.stat(link)
    except OSError as error:
        raise BadName(f"{link} is a symbolic link to {target!r}, which cannot be followed; fix or remove it") from error
    if stat.S_ISDIR(status.st_mode) and not to_directory:
        raise BadName(
            f"{link} is a symbolic link to the directory {target!r}, and such links are not followed;"
            f" pass {link}/ to save the content of the directory, or follow all links (--follow-links,"
            " follow_links=True)"
        )
    return status


def _name_entry(path: str, name: str) -> str:
    """Return the entry's name; raises BadName for a name that could not be restored."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadName(f"{path!r} has a name that is not UTF-8; rename it") from None
    return verify_name(name, what="entry")


def _verify_outside(path: str, directory: str) -> None:
    # Below `path`, each link to a directory that is followed is checked as well.
    if is_below(path, directory):
        raise BadName(f"{path} is inside the store {directory}; save files outside of it")
    if is_below(directory, path):
        raise BadName(f"{path} contains the store {directory} itself; pass the other files and directories in it")


def is_below(path: str, directory: str) -> bool:
    """Return whether `path` is `directory` or inside it, after following all links."""
    real, top = os.path.realpath(path), os.path.realpath(directory)
    return _is_in(real, top)


def _describe(status: os.stat_result) -> str:
    kinds = {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    kinds |= {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link"}
    return kinds.get(stat.S_IFMT(status.st_mode), "something else")


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore wrote."""

    num_files: int
    num_bytes: int

    __repr__ = readable_repr


def restore(
    reader: SnapshotReader,
    target_dir: str,
    *,
    only: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Restored:
    """Write the entries of a snapshot as files below `target_dir`, created if missing; memory stays bounded.

    All names and existing files are checked before the first byte is written. No symbolic link below `target_dir` is
    followed. Each file appears whole and verified, with its modification time and executable bit. After a failure, the
    files that were written so far stay. `only` is a glob over entry names, in which `*` also matches `/`.

    Raises:
        NameInUse: some files exist already; the text lists them. With `overwrite` they are replaced.
        NotFound: no entry matches `only`.
        BadName: a name cannot be used as a path, or a link or file is where a directory is needed.
    """
    progress = progress or Silent()
    chosen = _assign_paths(_choose_entries(reader, only))
    target_dir = os.path.abspath(verify_path(target_dir))
    existing = _find_existing(target_dir, chosen)
    if existing and not overwrite:
        raise NameInUse(
            f"{len(existing)} of {len(chosen)} files exist already in {target_dir}: {_enumerate(existing)}."
            " Nothing was written; choose another directory, or replace them (--overwrite, overwrite=True)",
            name=next(iter(existing)),
        )
    total = sum(entry.size_bytes for entry in chosen.values())
    progress.begin(f"get {reader.snapshot.name}", total)
    try:
        os.makedirs(target_dir, exist_ok=True)
        with FileTarget(target_dir) as target:
            for name, (entry, pieces) in zip(chosen, reader.iter_contents(chosen.values()), strict=True):
                target.write(name, _iter_counted(pieces, progress), entry, replace=name in existing)
    finally:
        progress.end()
    return Restored(len(chosen), total)


def _choose_entries(reader: SnapshotReader, only: str | None) -> list[Entry]:
    entries = [entry for entry in reader.manifest.iter_entries() if only is None or fnmatchcase(entry.name, only)]
    if not entries and only is not None:
        name = reader.snapshot.name
        raise NotFound(f"no entry of {name!r} matches {only!r}; `holdfast show {name}` lists them", name=only)
    return entries


def _assign_paths(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Return the entries by their path below the target; names come from a store, so each is verified."""
    by_path: dict[str, Entry] = {}
    for entry in entries:
        name = verify_name(entry.name, what="entry")
        if by_path.setdefault(name, entry) is not entry:
            raise BadName(f"two entries would both be written to {name!r}; choose one with --only (only=)")
    for name in by_path:
        parts = name.split("/")
        for depth in range(1, len(parts)):
            if (parent := "/".join(parts[:depth])) in by_path:
                raise BadName(
                    f"{parent!r} would be both a file and the directory of {name!r}; choose one with --only (only=)"
                )
    return by_path


def _find_existing(target_dir: str, names: Iterable[str]) -> set[str]:
    """Return which of the files exist already; raises BadName for a directory, which cannot be replaced."""
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
    """The directory that a restore writes to. Files appear whole, and no link below it is followed.

    Paths are walked with directory handles, so that a link cannot lead outside.
    """

    def __init__(self, root: str) -> None:
        """Open the directory `root`; the path to it may contain links, because the user chose it."""
        self._root = root
        self._top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        # The directory of the last file stays open: entries are sorted, so the next file is mostly in it.
        self._parent = ""
        self._handle = os.dup(self._top)
        # The names written so far, by the form in which a filesystem that ignores case compares them.
        self._written: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)
        os.close(self._top)

    def has_file(self, name: str) -> bool:
        """Return whether a file or link of this name exists; raises BadName if it is a directory."""
        parent, _, last = name.rpartition("/")
        try:
            self._enter(parent, create=False)
            status = os.stat(last, dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(status.st_mode):
            raise BadName(f"{self._root}/{name} is a directory, and a file is to be written; choose another target")
        return True

    def write(self, name: str, pieces: Iterable[memoryview], entry: Entry, *, replace: bool) -> None:
        """Write one file under a temporary name, then rename it; raises BadName if it would replace an earlier one."""
        parent, _, last = name.rpartition("/")
        try:
            self._verify_distinct(name)
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
            # The calls above use handles and short names; the message needs the full path.
            raise OSError(error.errno, error.strerror, f"{self._root}/{name}") from error

    def _verify_distinct(self, name: str) -> None:
        """Raise BadName if the filesystem ignores case and `name` is a file that was written before."""
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
                " choose one with --only (only=), or another target"
            )

    def _enter(self, parent: str, *, create: bool) -> None:
        """Open the directory `parent`, for the calls that follow."""
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

    def _open_directory(self, part: str, outer: int, parent: str, *, create: bool) -> int:
        try:
            return os.open(part, _DIRECTORY, dir_fd=outer)
        except FileNotFoundError:
            if not create:
                raise
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=outer)
            return os.open(part, _DIRECTORY, dir_fd=outer)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            raise BadName(
                f"{self._root}/{parent}: {part!r} is a file or a symbolic link, but a directory is needed;"
                " remove it or choose another target"
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
            # Not a rename: that would replace a file created since, or one whose name differs only in case.
            os.link(temp, name, follow_symlinks=False, **here)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            if self.has_file("/".join(filter(None, (self._parent, name)))):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            os.rename(temp, name, **here)


def _fold(name: str) -> str:
    """Return a form of a name that is equal for all names that some filesystem treats as the same."""
    return unicodedata.normalize("NFC", name).casefold()


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _read_mtime(entry: Entry) -> int | None:
    mtime_ns = entry.note.get("mtime_ns") if isinstance(entry.note, dict) else None
    return mtime_ns if isinstance(mtime_ns, int) and abs(mtime_ns) < 1 << 62 else None
