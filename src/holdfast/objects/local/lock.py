"""The lock of a local store: writers wait for it for a limited time, and an exclusive holder is named in the file."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

from holdfast.objects.local.files import Files

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.05
_HOLDER_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class LockWait:
    """How long a writer waits for a collector that has the exclusive lock."""

    limit_s: float = 10.0
    """The limit for each collector. A collector needs the lock for well under a second, unless it is stopped."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class StoreLock:
    """A file with a shared lock for writers and an exclusive lock for a collector. Thread-safe."""

    def __init__(self, files: Files, path: str, wait: LockWait) -> None:
        """Use the lock file at `path`, which the first holder creates."""
        self._files = files
        self._path = path
        self._wait = wait
        self._overdue: bytes | None = None
        """A holder that did not release the lock in time: later saves do not wait for it again."""

    @contextmanager
    def hold(self, *, exclusive: bool) -> Iterator[bool]:
        """Acquire the lock; yields False if another lock conflicts, for a shared lock after the waiting time."""
        owner = os.getpid()
        handle = self._lock_exclusive() if exclusive else self._lock_shared()
        try:
            yield handle is not None
        finally:
            # A forked child has closed its copy of the handle; the number may refer to another file there by now.
            if handle is not None and os.getpid() == owner:
                self._files.unlock(handle)

    def _lock_exclusive(self) -> int | None:
        handle = self._files.lock(self._path, exclusive=True)
        if handle is not None and self._may_write_holder(handle):
            since = datetime.now(timezone.utc).isoformat()
            holder = f"pid {os.getpid()} on {socket.gethostname()} since {since}".encode()
            with suppress(OSError):  # a full disk: the lock is valid, but its holder is not named
                self._files.write_at(handle, 0, memoryview(holder[:_HOLDER_BYTES].ljust(_HOLDER_BYTES)))
        return handle

    def _may_write_holder(self, handle: int) -> bool:
        """Return whether writing into the lock file is safe: it is a regular file with one name only."""
        with suppress(OSError):
            status = self._files.stat_handle(handle)
            return status.kind == "file" and status.num_names == 1
        return False

    def _lock_shared(self) -> int | None:
        watched: bytes | None = None
        deadline_s = 0.0
        while True:
            handle = self._files.lock(self._path, exclusive=False)
            if handle is not None:
                self._overdue = None
                return handle
            holder = self._read_holder()
            if holder == self._overdue:
                return None
            now_s = self._wait.clock()
            if holder != watched:
                # Each holder gets the full waiting time: a collector relies on all writers waiting for it. A writer
                # that was stopped during its sleep may find another holder than before.
                watched, deadline_s = holder, now_s + self._wait.limit_s
            if now_s >= deadline_s:
                self._overdue = holder or None  # holders without a text cannot be distinguished
                self._report(holder)
                return None
            self._wait.sleep(_POLL_S)

    def _read_holder(self) -> bytes:
        text = bytearray(_HOLDER_BYTES)
        with suppress(OSError):
            handle = self._files.open_file(self._path)
            try:
                count = self._files.read_into(handle, 0, memoryview(text))
                return bytes(text[:count]).strip()
            finally:
                self._files.close(handle)
        return b""

    def _report(self, holder: bytes) -> None:
        _log.warning(
            "%s: a garbage collection (%s) has kept this store locked for more than %g s. This process continues"
            " without the lock, which is safe; the next collections may free less. If that process is stopped, continue"
            " or end it",
            os.path.dirname(self._path),
            holder.decode("ascii", "backslashreplace") or "an unknown process",
            self._wait.limit_s,
        )
