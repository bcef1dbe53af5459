"""Filesystem calls that go wrong on cue: the process dies at one, or one fails, while the machine lives on."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import TypeVar

from holdfast.objects.local.files import FileKind, Files, FileStat
from holdfast.testing.faults import Crashed

T = TypeVar("T")


class Trouble(Enum):
    """What happens at the chosen call."""

    DIES = "it is not performed, and neither is any later one: the process is dead"
    FAILS = "it is not performed and fails"
    LIES = "it is performed and fails all the same"
    INTERRUPTED = "it is performed, and then the user interrupts the process"


class TroubledFiles:
    """Passes every call on to `inner`, but for the trouble at the `at`-th mutating call (the first is 1)."""

    def __init__(self, inner: Files, *, at: int | None = None, trouble: Trouble = Trouble.DIES) -> None:
        self.mutations = 0
        self.met = ""
        self._inner = inner
        self._at = at
        self._trouble = trouble
        self._dead = False
        self._lock = threading.Lock()

    def _live(self) -> Files:
        if self._dead:
            raise Crashed("the process is dead")
        return self._inner

    def _mutate(self, name: str, act: Callable[[Files], T]) -> T:
        with self._lock:
            inner = self._live()
            self.mutations += 1
            is_met = self.mutations == self._at
            self._dead = is_met and self._trouble is Trouble.DIES
        if not is_met:
            return act(inner)
        self.met = name
        if self._trouble is Trouble.DIES:
            raise Crashed(f"at mutating call {self.mutations}, {name}")
        if self._trouble is Trouble.INTERRUPTED:
            with suppress(OSError):
                act(inner)
            raise KeyboardInterrupt
        if self._trouble is Trouble.LIES:
            act(inner)
        raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    def create_file(self, path: str) -> int:
        made: list[int] = []

        def act(inner: Files) -> int:
            made.append(inner.create_file(path))
            return made[0]

        try:
            return self._mutate("create_file", act)
        except (OSError, KeyboardInterrupt):
            # Made, but the caller never learns its number: the kernel has closed it.
            for handle in made:
                self._inner.close(handle)
            raise

    def open_file(self, path: str) -> int:
        return self._live().open_file(path)

    def close(self, handle: int) -> None:
        self._live().close(handle)

    def write_at(self, handle: int, start: int, buffer: memoryview) -> int:
        return self._mutate("write_at", lambda inner: inner.write_at(handle, start, buffer))

    def set_direct(self, handle: int, *, direct: bool) -> bool:
        return self._live().set_direct(handle, direct=direct)

    def is_cached(self, handle: int, start: int) -> bool:
        return self._live().is_cached(handle, start)

    def find_available_memory(self) -> int | None:
        return self._live().find_available_memory()

    def read_into(self, handle: int, start: int, buffer: memoryview) -> int:
        return self._live().read_into(handle, start, buffer)

    def sync_file(self, handle: int) -> None:
        self._mutate("sync_file", lambda inner: inner.sync_file(handle))

    def sync_directory(self, path: str) -> None:
        self._mutate("sync_directory", lambda inner: inner.sync_directory(path))

    def stat(self, path: str) -> FileStat:
        return self._live().stat(path)

    def stat_names(self, path: str, names: Sequence[str]) -> list[FileStat | None]:
        return self._live().stat_names(path, names)

    def stat_handle(self, handle: int) -> FileStat:
        return self._live().stat_handle(handle)

    def list_directory(self, path: str) -> list[str]:
        return self._live().list_directory(path)

    def list_kinds(self, path: str) -> dict[str, FileKind]:
        return self._live().list_kinds(path)

    def lock(self, path: str, *, exclusive: bool) -> int | None:
        return self._live().lock(path, exclusive=exclusive)

    def unlock(self, handle: int) -> None:
        self._live().unlock(handle)

    def link(self, source: str, target: str) -> None:
        self._mutate("link", lambda inner: inner.link(source, target))

    def rename_noreplace(self, source: str, target: str) -> None:
        self._mutate("rename_noreplace", lambda inner: inner.rename_noreplace(source, target))

    def rename(self, source: str, target: str) -> None:
        self._mutate("rename", lambda inner: inner.rename(source, target))

    def unlink(self, path: str) -> None:
        self._mutate("unlink", lambda inner: inner.unlink(path))

    def make_directory(self, path: str) -> None:
        self._mutate("make_directory", lambda inner: inner.make_directory(path))

    def read_free_bytes(self, path: str) -> int:
        return self._live().read_free_bytes(path)

    def read_filesystem_type(self, path: str) -> str:
        return self._inner.read_filesystem_type(path)
