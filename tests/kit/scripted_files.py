"""Real files whose calls are counted and can be made to fail, for the tests of the local store."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from holdfast.objects.local.files import Files, FileStat, PosixFiles
from holdfast.objects.local.local_store import LocalStore

Call = Callable[[], None]


class Scripted(PosixFiles):
    """The real calls; `before` and `after` map a call's name to what happens around it, and all are counted."""

    def __init__(self, *, before: dict[str, Call] | None = None, after: dict[str, Call] | None = None) -> None:
        self.before = before or {}
        self.after = after or {}
        self.counts: Counter[str] = Counter()

    def _meet(self, name: str) -> None:
        self.counts[name] += 1
        self.before.get(name, _nothing)()

    def _done(self, name: str) -> None:
        self.after.get(name, _nothing)()

    def create_file(self, path: str) -> int:
        self._meet("create_file")
        return super().create_file(path)

    def close(self, handle: int) -> None:
        super().close(handle)
        self._done("close")

    def write_at(self, handle: int, start: int, buffer: memoryview) -> int:
        self._meet("write_at")
        return super().write_at(handle, start, buffer)

    def read_into(self, handle: int, start: int, buffer: memoryview) -> int:
        self._meet("read_into")
        return super().read_into(handle, start, buffer)

    def sync_file(self, handle: int) -> None:
        self._meet("sync_file")
        super().sync_file(handle)

    def sync_directory(self, path: str) -> None:
        self._meet("sync_directory")
        super().sync_directory(path)

    def stat(self, path: str) -> FileStat:
        self._meet("stat")
        return super().stat(path)

    def list_directory(self, path: str) -> list[str]:
        self._meet("list_directory")
        names = super().list_directory(path)
        self._done("list_directory")
        return names

    def link(self, source: str, target: str) -> None:
        self._meet("link")
        super().link(source, target)
        self._done("link")

    def rename_noreplace(self, source: str, target: str) -> None:
        self._meet("rename_noreplace")
        super().rename_noreplace(source, target)
        self._done("rename_noreplace")

    def make_directory(self, path: str) -> None:
        self._meet("make_directory")
        super().make_directory(path)

    def unlink(self, path: str) -> None:
        self._meet("unlink")
        super().unlink(path)


def _nothing() -> None:
    return None


def fail(code: int) -> Call:
    def act() -> None:
        raise OSError(code, os.strerror(code))

    return act


def ready_store(root: Path, files: Files, *, single_writer: bool = False) -> LocalStore:
    """Return a store whose directory `packs` is there and whose filesystem has been tried out."""
    store = LocalStore(root, files=files, single_writer=single_writer)
    store.create("packs/before", b"")
    return store


def found_below(root: Path) -> list[str]:
    """Return every file, the hidden ones too."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def open_descriptors() -> int:
    """Return how many files are open; without sockets, which a client of an earlier test may close at any time."""
    return sum(not is_socket(handle) for handle in os.listdir("/proc/self/fd"))


def is_socket(handle: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{handle}").startswith("socket:")
    except FileNotFoundError:
        return True  # the handle of the listing itself, or a socket that was just closed
