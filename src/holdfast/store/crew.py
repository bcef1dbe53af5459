"""A thread pool that does not hang when a new thread gets no memory to start."""

from __future__ import annotations

import os
import threading
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

Result = TypeVar("Result")

_BEGIN_S: Final = 1.0
"""How long to wait for the first thread to begin, before the caller works instead."""
_LOOK_S: Final = 1.0
_START_S: Final = 30.0
"""How long a thread may take to begin: a moment, or for ever."""


class Task(Generic[Result]):
    """One piece of work. It is claimed once: by a thread, by the caller that waits for it, or by `cancel`."""

    def __init__(self, crew: Crew, work: Callable[[], Result]) -> None:
        self._crew = crew
        self._work: Callable[[], Result] | None = work
        self._claim = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()
        self._result: Result | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it, unless it has been claimed."""
        if not self._claim.acquire(blocking=False):
            return
        work, self._work = self._work, None
        try:
            assert work is not None
            self._result = work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            self._error = error
        finally:
            self._done.release()

    def cancel(self) -> bool:
        """Keep it from being done; False if it has begun."""
        is_ours = self._claim.acquire(blocking=False)
        if is_ours:
            self._work = None
            self._done.release()
        return is_ours

    def wait(self) -> None:
        """Wait until it is done; do it here if no thread will."""
        while not self._done.acquire(timeout=self._crew.find_patience_s()):
            if not self._crew.is_working():
                self.run()
        self._done.release()

    def result(self) -> Result:
        """Wait until it is done; return what came of it, or raise what it raised. To be called once."""
        self.wait()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # else it would hold this frame, and the frame the error
        result, self._result = self._result, None
        return result  # type: ignore[return-value]  # set by run()


class LoneThread:
    """A thread for one piece of work, like `threading.Thread`; if it does not begin, `start` raises.

    `threading.Thread.start` waits until the new thread reports that it runs. A thread that gets no memory for its first
    steps ends without that report, and `start` waits for ever.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self._work = work
        self._name = name
        self._pid = os.getpid()
        self._turn = threading.Lock()
        self._begun = threading.Lock()
        self._ended = threading.Lock()
        self._begun.acquire()
        self._ended.acquire()
        self._is_off = False
        self._has_begun = False

    def start(self) -> None:
        """Begin; raises RuntimeError or MemoryError if there is no memory for it, and then it never begins."""
        try:
            start_new_thread(self._serve, ())
            if not self._begun.acquire(timeout=_START_S):
                raise MemoryError("a thread was started, and got no memory to begin")
        except BaseException:
            with self._turn:
                self._is_off = True
            raise

    def is_alive(self) -> bool:
        """Tell whether it is at work; in a forked child it is not."""
        return self._has_begun and self._pid == os.getpid() and self._ended.locked()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, if it has begun."""
        if self.is_alive() and self._ended.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            self._ended.release()

    def _serve(self) -> None:
        with self._turn:
            if self._is_off:
                return
            self._has_begun = True
        self._begun.release()
        try:
            _tell_name(self._name)
            self._work()
        finally:
            self._ended.release()


class Crew:
    """At most `size` threads, begun when there is work. End it by `shutdown`.

    Threads are started without waiting for them, and count once they have begun. If none begins within a second, the
    caller that waits for a task does the task itself.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._queue: SimpleQueue[Task[object] | None] = SimpleQueue()
        self._turn = threading.Lock()
        self._left = threading.Semaphore(0)
        self._num_started = 0
        self._num_begun = 0
        self._is_over = False
        self._has_waited = False

    def submit(self, work: Callable[[], Result]) -> Task[Result]:
        """Have something done by the next thread that is free."""
        task = Task(self, work)
        self._queue.put(task)  # type: ignore[arg-type]  # a task of any result
        if self._num_started < self._size:
            # No room for another thread: those that there are do it, or the caller.
            with suppress(RuntimeError, MemoryError):
                start_new_thread(self._serve, ())
                self._num_started += 1
        return task

    def is_working(self) -> bool:
        """Tell whether a thread takes work; one that has not begun counts for a while."""
        if self._num_begun or not self._num_started:
            return self._num_begun > 0
        had_waited, self._has_waited = self._has_waited, True
        return not had_waited

    def find_patience_s(self) -> float:
        """Return how long to wait for a task before it is worth looking whether anybody works."""
        if self._num_begun:
            return _LOOK_S
        return _BEGIN_S if self._num_started and not self._has_waited else 0.0

    def shutdown(self) -> None:
        """Do all that was submitted and not cancelled, then end the threads."""
        with self._turn:
            self._is_over = True
            num_begun = self._num_begun
        for _ in range(num_begun):
            self._queue.put(None)
        for _ in range(num_begun):
            self._left.acquire()
        with suppress(Empty):
            while True:
                task = self._queue.get_nowait()
                if task is not None:
                    task.run()

    def _serve(self) -> None:
        with self._turn:
            if self._is_over:
                return
            self._num_begun += 1
        try:
            _tell_name(self._name)
            while (task := self._queue.get()) is not None:
                task.run()
                del task  # it may hold a block
        finally:
            self._left.release()


def _tell_name(name: str) -> None:
    """Name the thread that runs, for `top -H` and debuggers."""
    with suppress(OSError, MemoryError):
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w", encoding="utf-8") as file:
            file.write(name[:15])
