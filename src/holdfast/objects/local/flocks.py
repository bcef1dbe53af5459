"""Advisory file locks (flock) that a child of fork does not keep."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final


class ForkSafeLocks:
    """The file locks of this process. Safe in any thread.

    A lock belongs to the open file, and a child of fork shares the open files of its parent. So a child closes its
    copies, which leaves the lock with the parent, and the parent unlocks explicitly, which frees the lock even if a
    child has kept a copy.
    """

    def __init__(self) -> None:
        """Hold nothing; the fork handlers are registered when the first lock is taken."""
        # Reentrant: a signal handler that forks may run while its own thread is opening a lock file.
        self._turn = threading.RLock()
        self._handles: dict[int, bool] = {}
        """Which of them are locked alone."""
        self._is_registered = False

    def take(self, open_file: Callable[[], int], *, exclusive: bool) -> int | None:
        """Lock the file that `open_file` opens, without waiting; None if somebody else's lock forbids it."""
        # A fork waits for this, so the child knows every handle that it inherits.
        with self._turn:
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
        """Unlock and close; what a holder has written about itself goes, if it was alone."""
        # With a second name it may be somebody else's file, into which no holder has written.
        if self._handles[handle] and os.fstat(handle).st_nlink == 1:
            with suppress(OSError):  # the next one overwrites it
                os.ftruncate(handle, 0)
        try:
            fcntl.flock(handle, fcntl.LOCK_UN)
        finally:
            self._close(handle)

    def _close(self, handle: int) -> None:
        with self._turn:
            del self._handles[handle]
            os.close(handle)

    def _register(self) -> None:
        if not self._is_registered:
            self._is_registered = True
            os.register_at_fork(
                before=self._turn.acquire, after_in_parent=self._turn.release, after_in_child=self._close_inherited
            )

    def _close_inherited(self) -> None:
        """Close, in a child, the locks of the parent; to unlock them would take them from the parent, too."""
        for handle in self._handles:
            os.close(handle)
        self._handles.clear()
        self._turn.release()


PROCESS_LOCKS: Final = ForkSafeLocks()
"""One for the process, because fork handlers cannot be unregistered."""
