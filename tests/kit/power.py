"""A simulated disk that can lose power: it then keeps only what POSIX promises."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import time
from typing import Literal

from holdfast.objects.local.files import FileKind, FileStat
from holdfast.testing.faults import Crashed

SyncKind = Literal["file", "directory"]


@dataclass(frozen=True, slots=True)
class SyncSite:
    """Where an fsync happened: of a file or a directory, and below which top-level directory of the store.

    `top` is "." for the root of the store, ".." for anything outside, "top/*" for a directory below a top-level one.
    """

    kind: SyncKind
    top: str


@dataclass(slots=True, eq=False)
class _File:
    number: int
    data: bytearray = field(default_factory=bytearray)
    durable_data: bytes = b""
    modified_s: float = field(default_factory=time)


@dataclass(slots=True, eq=False)
class _Directory:
    number: int
    entries: dict[str, _Node] = field(default_factory=dict)
    durable_entries: dict[str, _Node] = field(default_factory=dict)
    unsynced: list[dict[str, _Node | None]] = field(default_factory=list)
    """Changes since the last fsync, by name; a power loss keeps each change entirely or not at all."""
    modified_s: float = field(default_factory=time)

    def change(self, names: dict[str, _Node | None]) -> None:
        _apply(self.entries, names)
        self.unsynced.append(names)


_Node = _File | _Directory


class SimulatedDisk:
    """`Files` for a LocalStore at `root`: counts or ignores fsyncs, crashes at a chosen call, and loses power."""

    def __init__(self, *, root: str = "/store", ignore: Collection[SyncSite] = (), stop_at: int | None = None) -> None:
        """Create an empty disk; the `stop_at`-th mutating call (from 1) and all later calls raise Crashed."""
        self._root = root
        self._ignore = frozenset(ignore)
        self._stop_at = stop_at
        self._lock = threading.RLock()
        self._numbers = count(1)
        self._top = _Directory(next(self._numbers))
        self._handles: dict[int, tuple[_File, str]] = {}
        self._locks: dict[int, bool] = {}
        self._syncs: Counter[SyncSite] = Counter()
        self._mutations = 0
        self._dead = False

    @property
    def syncs(self) -> Counter[SyncSite]:
        """The number of fsyncs at each site, including ignored ones."""
        with self._lock:
            return Counter(self._syncs)

    @property
    def mutations(self) -> int:
        """The number of mutating calls; an fsync counts, a close does not."""
        return self._mutations

    @property
    def open_handles(self) -> int:
        """The number of open handles."""
        return len(self._handles)

    def power_loss(self, rng: random.Random | None = None) -> SimulatedDisk:
        """Return the disk after a power loss.

        Without `rng`, everything that was not fsynced is lost. With it, a random part survives: some changes of a
        directory and not others, and torn files that end early or in zeros.
        """
        with self._lock:
            survivor = SimulatedDisk(root=self._root)
            survivor._top = _Survival(survivor._numbers, rng).keep_directory(self._top)
            return survivor

    def create_file(self, path: str) -> int:
        with self._lock:
            self._mutate()
            directory, name = self._find_parent(path)
            if name in directory.entries:
                raise _failure(errno.EEXIST, path)
            file = _File(next(self._numbers))
            directory.change({name: file})
            return self._open(file, path)

    def open_file(self, path: str) -> int:
        with self._lock:
            node = self._find(path)
            if isinstance(node, _Directory):
                raise _failure(errno.EISDIR, path)
            return self._open(node, path)

    def close(self, handle: int) -> None:
        with self._lock:
            self._verify_alive()
            del self._handles[handle]
            self._locks.pop(handle, None)

    def close_all(self) -> None:
        """Close all handles and drop all locks, as the kernel does when a process dies and the machine lives on."""
        with self._lock:
            self._handles.clear()
            self._locks.clear()

    def write_at(self, handle: int, start: int, buffer: memoryview) -> int:
        with self._lock:
            self._mutate()
            file, _ = self._handles[handle]
            file.data.extend(bytes(max(0, start - len(file.data))))
            file.data[start : start + buffer.nbytes] = buffer
            file.modified_s = time()
            return buffer.nbytes

    def set_direct(self, handle: int, *, direct: bool) -> bool:
        """Return `direct`; bytes that are not synced are lost either way."""
        with self._lock:
            self._verify_alive()
            return direct

    def is_cached(self, handle: int, start: int) -> bool:
        """Return False, so that direct reads are used; both ways return the same bytes."""
        return False

    def find_available_memory(self) -> int | None:
        """Return None, so that direct reads are used."""
        return None

    def read_into(self, handle: int, start: int, buffer: memoryview) -> int:
        with self._lock:
            self._verify_alive()
            found = self._handles[handle][0].data[start : start + buffer.nbytes]
            buffer[: len(found)] = found
            return len(found)

    def sync_file(self, handle: int) -> None:
        with self._lock:
            self._mutate()
            file, path = self._handles[handle]
            if self._count_sync("file", path):
                file.durable_data = bytes(file.data)

    def sync_directory(self, path: str) -> None:
        with self._lock:
            self._mutate()
            directory = self._find_directory(path)
            if self._count_sync("directory", path):
                directory.durable_entries = dict(directory.entries)
                directory.unsynced.clear()

    def stat(self, path: str) -> FileStat:
        with self._lock:
            return _describe(self._find(path))

    def stat_names(self, path: str, names: Sequence[str]) -> list[FileStat | None]:
        found: list[FileStat | None] = []
        for name in names:
            try:
                found.append(self.stat(os.path.join(path, name)))
            except FileNotFoundError:
                found.append(None)
        return found

    def stat_handle(self, handle: int) -> FileStat:
        with self._lock:
            self._verify_alive()
            return _describe(self._handles[handle][0])

    def list_directory(self, path: str) -> list[str]:
        with self._lock:
            return list(self._find_directory(path).entries)

    def list_kinds(self, path: str) -> dict[str, FileKind]:
        with self._lock:
            return {name: _describe(node).kind for name, node in self._find_directory(path).entries.items()}

    def link(self, source: str, target: str) -> None:
        with self._lock:
            self._mutate()
            node = self._find(source)
            directory, name = self._find_parent(target)
            if name in directory.entries:
                raise _failure(errno.EEXIST, target)
            directory.change({name: node})

    def rename_noreplace(self, source: str, target: str) -> None:
        with self._lock:
            self._mutate()
            directory, name = self._find_parent(target)
            if name in directory.entries:
                raise _failure(errno.EEXIST, target)
            self._rename(source, target)

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            self._mutate()
            self._rename(source, target)

    def unlink(self, path: str) -> None:
        with self._lock:
            self._mutate()
            if isinstance(self._find(path), _Directory):
                raise _failure(errno.EISDIR, path)
            directory, name = self._find_parent(path)
            directory.change({name: None})

    def make_directory(self, path: str) -> None:
        with self._lock:
            self._mutate()
            directory, name = self._find_parent(path)
            if name in directory.entries:
                raise _failure(errno.EEXIST, path)
            directory.change({name: _Directory(next(self._numbers))})

    def lock(self, path: str, *, exclusive: bool) -> int | None:
        """Lock, or return None if another lock conflicts."""
        with self._lock:
            self._verify_alive()
            if any(held or exclusive for held in self._locks.values()):
                return None
            handle = self._open(_File(next(self._numbers)), path)
            self._locks[handle] = exclusive
            return handle

    def unlock(self, handle: int) -> None:
        self.close(handle)

    def read_free_bytes(self, path: str) -> int:
        with self._lock:
            self._find(path)
            return 1 << 40

    def read_filesystem_type(self, path: str) -> str:
        return "simulated"

    def _verify_alive(self) -> None:
        if self._dead:
            raise Crashed("the process that used this disk is dead")

    def _mutate(self) -> None:
        self._verify_alive()
        self._mutations += 1
        if self._mutations == self._stop_at:
            self._dead = True
            raise Crashed(f"at mutating call {self._mutations}")

    def _open(self, file: _File, path: str) -> int:
        handle = next(self._numbers)
        self._handles[handle] = (file, path)
        return handle

    def _rename(self, source: str, target: str) -> None:
        node = self._find(source)
        old, old_name = self._find_parent(source)
        new, new_name = self._find_parent(target)
        assert old is new, "a rename between directories is not modelled"
        old.change({old_name: None, new_name: node})

    def _find(self, path: str) -> _Node:
        self._verify_alive()
        node: _Node = self._top
        for name in _split(path):
            if not isinstance(node, _Directory):
                raise _failure(errno.ENOTDIR, path)
            if name not in node.entries:
                raise _failure(errno.ENOENT, path)
            node = node.entries[name]
        return node

    def _find_directory(self, path: str) -> _Directory:
        node = self._find(path)
        if not isinstance(node, _Directory):
            raise _failure(errno.ENOTDIR, path)
        return node

    def _find_parent(self, path: str) -> tuple[_Directory, str]:
        directory, name = os.path.split(path)
        return self._find_directory(directory), name

    def _count_sync(self, kind: SyncKind, path: str) -> bool:
        """Count an fsync and return whether it should be performed."""
        below = os.path.relpath(path, self._root).split("/")
        top = below[0]
        if len(below) == 1 and kind == "file":
            top = "."  # a file in the root itself has no top-level directory
        elif len(below) > 1 and kind == "directory" and top != "..":
            top += "/*"
        site = SyncSite(kind, top)
        self._syncs[site] += 1
        return site not in self._ignore


class _Survival:
    """Computes what survives of each file and directory; a file with two names stays one file."""

    def __init__(self, numbers: count[int], rng: random.Random | None) -> None:
        self._numbers = numbers
        self._rng = rng
        self._kept: dict[int, _Node] = {}

    def keep_directory(self, directory: _Directory) -> _Directory:
        entries = dict(directory.durable_entries)
        for names in directory.unsynced:
            if self._rng is not None and self._rng.random() < 0.5:
                _apply(entries, names)
        kept = {name: self._keep(node) for name, node in entries.items()}
        return _Directory(
            next(self._numbers), entries=dict(kept), durable_entries=kept, modified_s=directory.modified_s
        )

    def _keep(self, node: _Node) -> _Node:
        if node.number not in self._kept:
            self._kept[node.number] = self.keep_directory(node) if isinstance(node, _Directory) else self._tear(node)
        return self._kept[node.number]

    def _tear(self, file: _File) -> _File:
        data = file.durable_data
        if self._rng is not None and len(data) < len(file.data):
            size_bytes = self._rng.randint(len(data), len(file.data))
            written_bytes = self._rng.randint(len(data), size_bytes)
            data = bytes(file.data[:written_bytes]).ljust(size_bytes, b"\0")
        return _File(next(self._numbers), data=bytearray(data), durable_data=data, modified_s=file.modified_s)


def _apply(entries: dict[str, _Node], names: dict[str, _Node | None]) -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _describe(node: _Node) -> FileStat:
    return FileStat(
        kind="file" if isinstance(node, _File) else "directory",
        size_bytes=len(node.data) if isinstance(node, _File) else 0,
        modified_s=node.modified_s,
        identity=(0, node.number),
    )


def _split(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


def _failure(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)
