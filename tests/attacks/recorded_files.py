"""Files that record each call and prove of each that it went through no symbolic link below the root."""

from __future__ import annotations

import os
from collections.abc import Sequence

from holdfast.objects.local.files import FileKind, FileStat, PosixFiles


class RecordedFiles(PosixFiles):
    """The real calls. Each that succeeds must have acted on exactly the path below the root that it was given."""

    calls: int = 0
    astray: list[str]
    """What acted on something else, as texts; shared by all instances, as is the number of calls."""

    def __init__(self, root: str = "/") -> None:
        super().__init__(root)
        self._root = root

    @classmethod
    def begin(cls) -> None:
        """Forget what was recorded."""
        cls.calls, cls.astray = 0, []

    def create_file(self, path: str) -> int:
        return self._note_handle("create_file", path, super().create_file(path))

    def open_file(self, path: str) -> int:
        return self._note_handle("open_file", path, super().open_file(path))

    def lock(self, path: str, *, exclusive: bool) -> int | None:
        handle = super().lock(path, exclusive=exclusive)
        return handle if handle is None else self._note_handle("lock", path, handle)

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        self._note("sync_directory", path)

    def stat(self, path: str) -> FileStat:
        found = super().stat(path)
        self._note("stat", os.path.dirname(path))
        seen = os.lstat(path)
        if path != self._root and found.identity != (seen.st_dev, seen.st_ino):
            self.astray.append(f"stat of {path} described {found.identity}")
        return found

    def stat_names(self, path: str, names: Sequence[str]) -> list[FileStat | None]:
        found = super().stat_names(path, names)
        self._note("stat_names", path)
        for name, status in zip(names, found, strict=True):
            seen = os.lstat(os.path.join(path, name))
            if status and status.identity != (seen.st_dev, seen.st_ino):
                self.astray.append(f"stat_names of {path} described {name} as {status.identity}")
        return found

    def list_directory(self, path: str) -> list[str]:
        names = super().list_directory(path)
        self._note("list_directory", path)
        return names

    def list_kinds(self, path: str) -> dict[str, FileKind]:
        kinds = super().list_kinds(path)
        self._note("list_kinds", path)
        return kinds

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self._note("link", os.path.dirname(source))
        self._note("link", os.path.dirname(target))

    def rename_noreplace(self, source: str, target: str) -> None:
        super().rename_noreplace(source, target)
        self._note("rename_noreplace", os.path.dirname(target))

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self._note("rename", os.path.dirname(target))

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self._note("unlink", os.path.dirname(path))

    def make_directory(self, path: str) -> None:
        super().make_directory(path)
        self._note("make_directory", os.path.dirname(path))

    def read_free_bytes(self, path: str) -> int:
        free_bytes = super().read_free_bytes(path)
        self._note("read_free_bytes", path)
        return free_bytes

    def _note(self, call: str, directory: str) -> None:
        """Record a call that acted in a directory: only the way to the root may hold links."""
        type(self).calls += 1
        if not self._is_below(directory):
            return
        below = os.path.relpath(directory, self._root)
        if os.path.realpath(directory) != os.path.normpath(os.path.join(os.path.realpath(self._root), below)):
            self.astray.append(f"{call} in {directory} acted in {os.path.realpath(directory)}")

    def _note_handle(self, call: str, path: str, handle: int) -> int:
        self._note(call, os.path.dirname(path))
        opened, seen = os.fstat(handle), os.lstat(path)
        if (opened.st_dev, opened.st_ino) != (seen.st_dev, seen.st_ino):
            self.astray.append(f"{call} of {path} opened {os.readlink(f'/proc/self/fd/{handle}')}")
        return handle

    def _is_below(self, path: str) -> bool:
        return path.startswith(self._root.rstrip("/") + "/")
