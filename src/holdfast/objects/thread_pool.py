"""Threads that nobody waits for in vain when memory runs out.

Where a step below must not fail, it allocates nothing: an attribute is set, or a lock is acquired or released without
arguments. `threading.Condition`, `Event` and `Semaphore` do not qualify. They are written in Python, and a failed
allocation leaves their lock held or a waiter without its signal.
"""

from __future__ import annotations

import os
import threading
from _thread import get_ident, start_new_thread
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

Result = TypeVar("Result")

_BEGIN_S: Final = 1.0
"""How long to wait for the first thread to begin, before the caller works instead."""
_LOOK_S: Final = 1.0
"""How often whoever waits looks again, in case a signal was lost."""
_IDLE_S: Final = 5.0
"""How often a thread without work looks whether there will be any."""
_START_S: Final = 30.0
"""How long a thread may take to begin: a moment, or for ever."""


class Task(Generic[Result]):
    """One piece of work. It is claimed once: by a thread, by the caller that waits for it, or by `cancel`."""

    def __init__(self, crew: ThreadPool, work: Callable[[], Result]) -> None:
        self._crew = crew
        self._work: Callable[[], Result] | None = work
        self._claim: dict[str, int] = {}
        self._is_done = False
        self._done = threading.Lock()
        self._done.acquire()
        self._result: Result | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it, unless it has been claimed."""
        if self._claim or not self._is_claimed_here():
            return
        try:
            work, self._work = self._work, None
            assert work is not None
            self._result = work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            self._error = error
        finally:
            self._is_done = True
            self._done.release()

    def cancel(self) -> bool:
        """Keep it from being done; False if it has begun."""
        if self._claim or not self._is_claimed_here():
            return False
        self._work = None
        self._is_done = True
        self._done.release()
        return True

    def abandon(self) -> None:
        """Return when nobody does it and nobody will; may be called again after an interrupt."""
        while not self._is_done:
            try:
                # If this thread has claimed it before, an interrupt has ended the work: this thread is here.
                if self._is_claimed_here():
                    self._work = None
                    return
                self._done.acquire(timeout=_LOOK_S)
            except MemoryError:
                continue  # to the end: the thread that does it needs no memory to say that it is done

    def wait(self) -> None:
        """Wait until it is done; do it here if no thread does."""
        while not self._is_done and not self._done.acquire(timeout=self._crew.find_patience_s()):
            self._crew.note_wait()
            self.run()

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

    def _is_claimed_here(self) -> bool:
        """Claim it for this thread if it is free; tell whether this thread has it.

        One step notes the claim and who has it, so that an interrupt right after it loses neither.
        """
        here = get_ident()
        return self._claim.setdefault("by", here) == here


class BackgroundThread:
    """A thread for one piece of work, like `threading.Thread`; if it does not begin, `start` raises.

    `threading.Thread.start` waits until the new thread reports that it runs. A thread that gets no memory for its first
    steps ends without that report, and `start` waits for ever.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self.error: BaseException | None = None
        """What the work raised."""
        self._work = work
        self._name = name
        self._pid = os.getpid()
        self._choice: dict[str, bool] = {}
        """Whether it begins: decided once, by the thread or by `start`, whichever is first."""
        self._begun = threading.Lock()
        self._ended = threading.Lock()
        self._begun.acquire()
        self._ended.acquire()
        self._has_begun = False

    def start(self) -> None:
        """Begin; raises RuntimeError or MemoryError if there is no memory for it, and then it never begins."""
        try:
            start_new_thread(self._serve, ())
            if not self._begun.acquire(timeout=_START_S) and not self._choice.setdefault("begins", False):
                raise MemoryError("a thread was started, and got no memory to begin")
        except BaseException:
            self._choice.setdefault("begins", False)
            raise

    def is_alive(self) -> bool:
        """Tell whether it is at work; in a forked child it is not."""
        return self._has_begun and self.is_own() and self._ended.locked()

    def is_own(self) -> bool:
        """Tell whether it is a thread of this process: a forked child has none of its parent's."""
        return self._pid == os.getpid()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, if it has begun."""
        if self.is_alive() and self._ended.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            self._ended.release()

    def _serve(self) -> None:
        if not self._choice.setdefault("begins", True):
            return
        self._has_begun = True
        self._begun.release()
        try:
            _tell_name(self._name)
            self._work()
        except BaseException as error:  # noqa: BLE001 - whoever has started it looks
            self.error = error
        finally:
            self._ended.release()


class _Slot:
    """One thread of a crew."""

    __slots__ = ("has_begun", "left")

    def __init__(self) -> None:
        self.has_begun = False
        self.left = threading.Lock()
        self.left.acquire()


class ThreadPool:
    """At most `size` threads, begun when there is work. End it by `shutdown`.

    Threads are started without waiting for them, and count once they have begun. A caller that waits for a task that
    no thread has taken for a second does it itself.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._queue: SimpleQueue[Task[object] | None] = SimpleQueue()
        self._seats: list[_Slot] = []
        self._has_begun = False
        self._is_over = False
        self._has_waited = False

    def submit(self, work: Callable[[], Result]) -> Task[Result]:
        """Have something done by the next thread that is free."""
        task = Task(self, work)
        self.enqueue(task)
        return task

    def enqueue(self, task: Task[Result]) -> None:
        """Have a task done by the next thread that is free."""
        self._queue.put(task)  # type: ignore[arg-type]  # a task of any result
        if len(self._seats) < self._size:
            # No room for another thread: those that there are do it, or the caller.
            with suppress(RuntimeError, MemoryError):
                self._start()

    def _start(self) -> None:
        seat = _Slot()
        self._seats.append(seat)
        try:
            start_new_thread(self._serve, (seat,))
        except BaseException:
            self._seats.remove(seat)
            raise

    def note_wait(self) -> None:
        """Note that somebody has waited for a thread to begin: it is not waited for again."""
        self._has_waited = True

    def find_patience_s(self) -> float:
        """Return how long to wait for a task before it is worth looking whether somebody does it."""
        if self._has_begun:
            return _LOOK_S
        return _BEGIN_S if self._seats and not self._has_waited else 0.0

    def shutdown(self) -> None:
        """Do all that was submitted and not cancelled, then end the threads."""
        # First of all: a thread that begins from now on sees it and leaves, those that have begun are waited for.
        self._is_over = True
        with suppress(MemoryError):  # a thread that is not told looks by itself
            for _ in self._seats:
                self._queue.put(None)
        while self._seats:
            # The caller goes on only when they have left: they use its files and its memory.
            try:
                seat = self._seats[-1]
                if seat.has_begun:
                    seat.left.acquire()
                    seat.has_begun = False
                self._seats.pop()
            except MemoryError:
                continue
        with suppress(Empty):
            while True:
                task = self._queue.get_nowait()
                if task is not None:
                    task.run()

    def _serve(self, seat: _Slot) -> None:
        seat.has_begun = True
        try:
            if not self._is_over:
                self._has_begun = True
                _tell_name(self._name)
                while self._work_on():
                    pass
        finally:
            seat.left.release()

    def _work_on(self) -> bool:
        """Do one task, if there is one; False if there will be none."""
        try:
            task = self._queue.get(timeout=_IDLE_S)
            if task is None:
                return False
            task.run()
        except Empty:
            return not self._is_over
        except MemoryError:
            # Of the queue, or of a task that was not begun: its caller does it.
            pass
        return True


def _tell_name(name: str) -> None:
    """Name the thread that runs, for `top -H` and debuggers."""
    with suppress(OSError, MemoryError):
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w", encoding="utf-8") as file:
            file.write(name[:15])
