"""What is done before the interpreter exits: wait for work in the background, and exit with 120 if it failed unnoticed.

Work is waited for by callbacks of `threading._register_atexit`, as in the thread pools of the standard library. The
callbacks of `atexit` run later, and no thread can be started by then.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Literal

EXIT_STATUS: Final = 120
"""The exit status of a process whose work in the background failed, unseen by the caller. Python uses it for its own
errors at exit, for example if standard output cannot be flushed."""

Act = Callable[[], object]
ExitStage = Literal["work", "uploads", "threads"]
"""When an act is called: first; when all work is done, since it commits what is uploaded; when all threads have ended
that are not daemons, since they may use the others."""


class _Acts:
    """The acts of one stage. Without a lock: a forked child might inherit it locked."""

    def __init__(self) -> None:
        self._acts: dict[object, tuple[int, Act]] = {}
        self._has_ended = False

    def add(self, act: Act) -> Act:
        if self._has_ended:
            raise RuntimeError("the interpreter is exiting: it is too late to start work in the background")
        key = object()
        self._acts[key] = os.getpid(), act
        return partial(self._acts.pop, key, None)

    def run(self) -> None:
        while self._acts:
            with suppress(KeyError):  # another thread has just removed the last one
                _, (pid, act) = self._acts.popitem()
                if pid == os.getpid():
                    _run_one(act)
        self._has_ended = True


class _Stages:
    """The acts of all stages."""

    def __init__(self) -> None:
        self._stages: Final[dict[ExitStage, _Acts]] = {"work": _Acts(), "uploads": _Acts(), "threads": _Acts()}
        self._is_registered = False

    def add(self, act: Act, stage: ExitStage) -> Act:
        if not self._is_registered:
            atexit.register(self._stages["threads"].run)
            before_threads_end: Callable[[Act], None] = threading._register_atexit  # type: ignore[attr-defined]  # not public
            # The last that is registered is called first.
            before_threads_end(self._stages["uploads"].run)
            before_threads_end(self._stages["work"].run)
            self._is_registered = True
        return self._stages[stage].add(act)


_STAGES: Final = _Stages()


def before_exit(act: Act, *, stage: ExitStage = "work") -> Act:
    """Call `act` before the interpreter exits, in `stage`, the newest first; return a function that cancels this.

    If `act` raises, its error is shown like an uncaught error, and the process exits with EXIT_STATUS. A forked child
    does not call what its parent has added.
    """
    return _STAGES.add(act, stage)


def _run_one(act: Act) -> None:
    try:
        act()
    except BaseException as error:  # noqa: BLE001  # of any kind: shown as uncaught errors are
        _fail_exit()
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except BaseException:  # noqa: BLE001  # a hook of the user can fail in any way
            sys.__excepthook__(type(error), error, error.__traceback__)


def _fail_exit() -> None:
    """Make the process exit with EXIT_STATUS.

    Python ignores errors of callbacks at exit, and has no function that sets the status. `os._exit` would skip the
    callbacks that are left. But it does exit with 120 if standard error cannot be flushed, after all callbacks.
    """
    if sys.stderr is None:  # closed before Python was started
        sys.stderr = io.StringIO()
    # The second one in case that a callback puts it back in the place of the first.
    streams: tuple[Any, Any] = (sys.stderr, sys.__stderr__)
    for stream in streams:
        with suppress(AttributeError):  # None, or a stream of the user whose attributes are fixed
            stream.flush = partial(_flush, stream.flush)


def _flush(flush: Act) -> None:
    """Flush a stream; raise if the interpreter calls this in order to exit."""
    try:
        flush()
    finally:
        caller = sys._getframe().f_back
        # The interpreter calls from C. A process of multiprocessing leaves by os._exit, after it has flushed.
        if caller is None or caller.f_code.co_name == "_flush_std_streams":
            raise SystemExit(EXIT_STATUS)
