"""Observes by inotify what was opened, read, changed or deleted in a directory tree."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Final

from typing_extensions import Self

_EVENT: Final = struct.Struct("iIII")
# From sys/inotify.h: all events, from any process; reading only an inode's attributes (stat) causes none.
_ALL: Final = 0xFFF
_NONBLOCK: Final = os.O_NONBLOCK | os.O_CLOEXEC
_NAMES: Final = {
    0x1: "read", 0x2: "written", 0x4: "facts changed", 0x8: "closed after writing", 0x10: "closed", 0x20: "opened",
    0x40: "moved away", 0x80: "moved here", 0x100: "created", 0x200: "deleted", 0x400: "itself deleted", 0x800: "moved",
}  # fmt: skip


class KernelWatch:
    """Watches `top` and every directory below it, with their files, from `__enter__` on."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._directories: dict[int, Path] = {}
        self._handle = -1

    def __enter__(self) -> Self:
        self._handle = self._libc.inotify_init1(_NONBLOCK)
        if self._handle < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1 failed")
        for directory in [self._top, *(path for path in self._top.rglob("*") if path.is_dir())]:
            number = self._libc.inotify_add_watch(self._handle, os.fsencode(directory), _ALL)
            if number < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch failed", str(directory))
            self._directories[number] = directory
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)

    def read_events(self) -> list[str]:
        """Return a text for each event since the last call."""
        found = []
        while data := self._read():
            start = 0
            while start < len(data):
                number, mask, _, size = _EVENT.unpack_from(data, start)
                start += _EVENT.size + size
                name = data[start - size : start].rstrip(b"\0").decode(errors="replace")
                found.append(f"{self._directories.get(number, self._top) / name}: {_describe(mask)}")
        return found

    def _read(self) -> bytes:
        try:
            return os.read(self._handle, 1 << 16)
        except BlockingIOError:
            return b""


def _describe(mask: int) -> str:
    return ", ".join(text for bit, text in _NAMES.items() if mask & bit) or hex(mask)
