"""Real processes that stop themselves (SIGSTOP) before an operation of a store, and are continued by a test."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from typing_extensions import Self

from holdfast.objects.local.local_store import LocalStore, LockWait
from holdfast.objects.protocol import ObjectStore
from tests.faults.hooked_store import HookedStore

IMPATIENT = LockWait(limit_s=0.0)
"""Goes on without the lock at once: no test has to wait."""

Act = Callable[[ObjectStore], object]


class CountingStore(HookedStore):
    """Counts the operations, and those with the exclusive lock; stops the process before one of them."""

    def __init__(self, inner: ObjectStore, *, stop_at: int | None = None) -> None:
        super().__init__(inner, before=self._count)
        self.count = 0
        self.while_alone: list[int] = []
        self.created: dict[int, str] = {}
        """Keys by the number of the operation that creates them."""
        self._stop_at = stop_at
        self._is_alone = False

    def hold(self, *, exclusive: bool) -> AbstractContextManager[bool]:
        held = super().hold(exclusive=exclusive)
        return _Alone(self, held) if exclusive else held

    def remove_debris(self, *, older_than_s: float) -> int:
        self._count("remove_debris", "")
        return super().remove_debris(older_than_s=older_than_s)

    def be_alone(self, *, is_alone: bool) -> None:
        self._is_alone = is_alone

    def _count(self, name: str, key: str) -> None:
        self.count += 1
        if self._is_alone:
            self.while_alone.append(self.count)
        if name == "create":
            self.created[self.count] = key
        if self.count == self._stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)


class _Alone:
    """Reports to a store whether it is locked exclusively."""

    def __init__(self, store: CountingStore, held: AbstractContextManager[bool]) -> None:
        self._store = store
        self._held = held

    def __enter__(self) -> bool:
        is_held = self._held.__enter__()
        self._store.be_alone(is_alone=is_held)
        return is_held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.be_alone(is_alone=False)
        self._held.__exit__(kind, error, trace)


class Stopped:
    """A process that has done something up to its `stop_at`-th operation; `finish` lets it go on to its end.

    Use it in a `with`: a process that was not continued is ended there.
    """

    def __init__(self, root: str, act: Act, *, stop_at: int) -> None:
        """Return when the process has stopped, or ended."""
        self._pid = os.fork()
        if not self._pid:
            code = 1
            try:
                act(CountingStore(LocalStore(root, lock_wait=IMPATIENT), stop_at=stop_at))
                code = 0
            except Exception:  # noqa: BLE001 - whatever it is, the child must not go on with the tests of its parent
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(self._pid, os.WUNTRACED)
        self.is_stopped = os.WIFSTOPPED(status)
        self._code = None if self.is_stopped else os.waitstatus_to_exitcode(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def finish(self) -> int:
        """Continue it and return its exit code: 1 if it raised."""
        return self._end(signal.SIGCONT)

    def kill(self) -> None:
        """End it as it is."""
        self._end(signal.SIGKILL)

    def _end(self, sent: signal.Signals) -> int:
        if self._code is None:
            os.kill(self._pid, sent)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code
