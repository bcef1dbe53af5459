"""Advisory file locks (flock) that a forked child does not inherit."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final


class ForkSafeLocks:
    """The file locks of this process. Thread-safe.

    A lock belongs to the open file, and a forked child shares the open files of its parent. So a child closes its
    copies, which leaves the lock with the parent. The parent unlocks explicitly, which releases the lock even if a
    child has kept a copy.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler that forks may run while its own thread is opening a lock file.
        self._mutex = threading.RLock()
        self._handles: dict[int, bool] = {}
        """Open lock files; the value is whether the lock is exclusive."""
        self._is_registered = False

    def take(self, open_file: Callable[[], int], *, exclusive: bool) -> int | None:
        """Lock the file that `open_file` opens, without waiting; None if another lock conflicts."""
        # A fork waits for this mutex, so the child knows every handle that it inherits.
        with self._mutex:
            self._register()
            handle = open_file()
            self._handles[handle] = exclusive
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:
            self._close(handle)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise
        return handle

    def release(self, handle: int) -> None:
        """Unlock and close; an exclusive holder's description of itself is removed from the file."""
        # A file with a second name may not be ours, and no holder has written into it.
        if self._handles[handle] and os.fstat(handle).st_nlink == 1:
            with suppress(OSError):  # the next holder overwrites it
                os.ftruncate(handle, 0)
        try:
            fcntl.flock(handle, fcntl.LOCK_UN)
        finally:
            self._close(handle)

    def _close(self, handle: int) -> None:
        with self._mutex:
            del self._handles[handle]
            os.close(handle)

    def _register(self) -> None:
        if not self._is_registered:
            self._is_registered = True
            os.register_at_fork(
                before=self._mutex.acquire, after_in_parent=self._mutex.release, after_in_child=self._close_inherited
            )

    def _close_inherited(self) -> None:
        """Close the parent's lock files in a child; unlocking would release the locks of the parent."""
        for handle in self._handles:
            os.close(handle)
        self._handles.clear()
        self._mutex.release()


PROCESS_LOCKS: Final = ForkSafeLocks()
"""One object per process, because fork handlers cannot be unregistered."""
