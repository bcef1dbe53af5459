"""Threads and tasks whose callers do not wait for ever when memory runs out.

A step that must not fail allocates nothing: it sets an attribute, or acquires or releases a lock without arguments.
`threading.Condition`, `Event` and `Semaphore` cannot be used. They are written in Python, and a failed allocation
leaves their lock acquired or a waiter without its signal.
"""

from __future__ import annotations

import os
import threading
from _thread import get_ident, start_new_thread
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

from holdfast.objects.at_exit import before_exit

Result = TypeVar("Result")

EXIT_WAIT_S: Final = 10.0
"""How long interpreter exit waits for a thread that may never end."""
_BEGIN_S: Final = 1.0
"""How long to wait for the first thread to begin, before the caller works instead."""
_CHECK_S: Final = 1.0
"""How often a waiting caller checks again, in case a signal was lost."""
_IDLE_S: Final = 1.0
"""How long a thread waits for work before it ends."""
_START_S: Final = 30.0
"""How long to wait for a thread to begin. Normally it takes a moment; without memory it never begins."""


class Task(Generic[Result]):
    """One function call. It is claimed once: by a thread, or by the caller that waits for it or abandons it."""

    def __init__(self, pool: ThreadPool, work: Callable[[], Result]) -> None:
        self._pool = pool
        self._work: Callable[[], Result] | None = work
        self._claim: dict[str, int] = {}
        self._is_done = False
        self._done = threading.Lock()
        self._done.acquire()
        self._result: Result | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the task, unless it has been claimed."""
        if self._claim or not self._is_claimed_here():
            return
        try:
            work, self._work = self._work, None
            assert work is not None
            self._result = work()
        except BaseException as error:  # noqa: BLE001 - raised by result()
            self._error = error
        finally:
            self._is_done = True
            self._done.release()

    def abandon(self) -> None:
        """Return when no thread runs the task and none will; may be called again after an interrupt."""
        while not self._is_done:
            try:
                # If this thread has claimed the task before, an interrupt has ended the work.
                if self._is_claimed_here():
                    self._work = None
                    return
                self._done.acquire(timeout=_CHECK_S)
            except MemoryError:
                continue  # keep waiting: the thread that runs the task needs no memory to mark it as done

    def wait(self) -> None:
        """Wait until the task is done; run it in this thread if no other thread does."""
        while not self._is_done and not self._done.acquire(timeout=self._pool.find_patience_s()):
            self._pool.note_wait()
            self.run()

    def result(self) -> Result:
        """Wait until the task is done; return its result or raise its error. Must be called once."""
        self.wait()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # else error and frame would refer to each other
        result, self._result = self._result, None
        return result  # type: ignore[return-value]  # set by run()

    def _is_claimed_here(self) -> bool:
        """Claim the task for this thread if it is free; return whether this thread has claimed it.

        `setdefault` records the claim and its thread in one step, so that an interrupt cannot separate the two.
        """
        here = get_ident()
        return self._claim.setdefault("by", here) == here


class BackgroundThread:
    """A thread for one function, like `threading.Thread`; if the thread does not begin, `start` raises.

    `threading.Thread.start` waits until the new thread reports that it runs. A thread that gets no memory for its first
    steps ends without that report, and `start` waits for ever.

    With `stop`, interpreter exit calls `stop` and then waits for the thread, for at most EXIT_WAIT_S. Threads that call
    C++ need this. If such a call returns when Python is being finalized, Python ends the thread by unwinding its stack;
    C++ destructors on the stack do not allow that, and abort the process.
    """

    def __init__(self, work: Callable[[], object], name: str, *, stop: Callable[[], object] | None = None) -> None:
        self.error: BaseException | None = None
        """The error that the function raised, or None."""
        self._work: Callable[[], object] | None = work
        self._name = name
        self._stop = stop
        self._forget: Callable[[], object] = let_end
        self._pid = os.getpid()
        self._choice: dict[str, bool] = {}
        """Whether the thread begins: decided once, by the thread or by `start`, whichever is first."""
        self._begun = threading.Lock()
        self._ended = threading.Lock()
        self._begun.acquire()
        self._ended.acquire()
        self._has_begun = False

    def start(self) -> None:
        """Start the thread; raises RuntimeError or MemoryError without memory, and then it never begins."""
        try:
            if self._stop is not None:
                with suppress(RuntimeError):  # the interpreter is exiting
                    self._forget = before_exit(self._end, stage="threads")
            start_new_thread(self._serve, ())
            if not self._begun.acquire(timeout=_START_S) and not self._choice.setdefault("begins", False):
                raise MemoryError("a thread was started but did not get the memory to begin")
        except BaseException:
            self._choice.setdefault("begins", False)
            self._forget()
            raise

    def is_alive(self) -> bool:
        """Return whether the thread is running; False in a forked child."""
        return self._has_begun and self.is_own() and self._ended.locked()

    def is_own(self) -> bool:
        """Return whether the thread was started in this process, and not in the parent of a fork."""
        return self._pid == os.getpid()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended, if it has begun."""
        if self.is_alive() and self._ended.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            self._ended.release()

    def _serve(self) -> None:
        if not self._choice.setdefault("begins", True):
            return
        self._has_begun = True
        self._begun.release()
        try:
            _set_thread_name(self._name)
            assert self._work is not None
            self._work()
        except BaseException as error:  # noqa: BLE001 - the owner reads `error`
            self.error = error
        finally:
            # What the function refers to is freed on this thread, before `join` returns.
            self._work = None
            self._ended.release()
            self._forget()

    def _end(self) -> None:
        assert self._stop is not None
        self._stop()
        self.join(EXIT_WAIT_S)


def let_end() -> None:
    """Do nothing: the `stop` of a thread that ends by itself."""


class _Slot:
    """One thread of a pool."""

    __slots__ = ("end", "has_begun", "left")

    def __init__(self) -> None:
        self.end: dict[str, str] = {}
        """Who ends the thread: decided once, by the thread that was idle or by `shutdown`, whichever is first."""
        self.has_begun = False
        self.left = threading.Lock()
        self.left.acquire()


class ThreadPool:
    """At most `size` threads, started when there is work. They end when they were idle, and with `shutdown`.

    Starting a thread does not wait for it to begin. A caller that has waited for a second for a task that no thread has
    claimed runs the task itself.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._queue: SimpleQueue[Task[object] | None] = SimpleQueue()
        self._slots: list[_Slot] = []
        self._has_begun = False
        self._is_shut_down = False
        self._has_waited = False

    def submit(self, work: Callable[[], Result]) -> Task[Result]:
        """Queue a function for the next free thread, and return its task."""
        task = Task(self, work)
        self.enqueue(task)
        return task

    def enqueue(self, task: Task[Result]) -> None:
        """Queue a task for the next free thread."""
        self._queue.put(task)  # type: ignore[arg-type]  # a task of any result
        if len(self._slots) < self._size:
            # If no thread can be started, the existing threads or the caller run the task.
            with suppress(RuntimeError, MemoryError):
                self._start()

    def _start(self) -> None:
        slot = _Slot()
        self._slots.append(slot)
        try:
            start_new_thread(self._serve, (slot,))
        except BaseException:
            self._slots.remove(slot)
            raise

    def note_wait(self) -> None:
        """Record that a caller has waited for the first thread to begin; later callers do not wait for that."""
        self._has_waited = True

    def find_patience_s(self) -> float:
        """Return how long to wait for a task before checking whether a thread has claimed it."""
        if self._has_begun:
            return _CHECK_S
        return _BEGIN_S if self._slots and not self._has_waited else 0.0

    def shutdown(self) -> None:
        """Run all tasks that were submitted and not abandoned, then end the threads."""
        # First: a thread that begins after this sees the flag and ends. Threads that have begun are waited for.
        self._is_shut_down = True
        with suppress(MemoryError):  # a thread that gets no message ends when it has been idle
            for _ in self._slots:
                self._queue.put(None)
        while self._slots:
            # Return only when all threads have ended: they use files and memory of the caller.
            try:
                slot = self._slots[-1]
                # A thread that ends by itself has no work, and takes none any more.
                is_awaited = slot.has_begun and slot.end.setdefault("by", "shutdown") == "shutdown"
                if is_awaited and not slot.left.acquire(timeout=_CHECK_S):
                    # A thread may sleep past its own timeout: `SimpleQueue.get` waits for ever if it is woken for an
                    # item that another thread takes and finds its timeout just passed.
                    self._queue.put(None)
                    continue
                slot.has_begun = False
                self._slots.remove(slot)
            except (MemoryError, IndexError, ValueError):
                continue  # a thread that ended by itself has removed its slot meanwhile
        with suppress(Empty):
            while True:
                task = self._queue.get_nowait()
                if task is not None:
                    task.run()

    def _serve(self, slot: _Slot) -> None:
        slot.has_begun = True
        try:
            if not self._is_shut_down:
                self._has_begun = True
                _set_thread_name(self._name)
                while self._run_next(slot):
                    pass
        finally:
            slot.left.release()

    def _run_next(self, slot: _Slot) -> bool:
        """Run the next task, if there is one; return False if the thread should end."""
        try:
            task = self._queue.get(timeout=_IDLE_S)
            if task is None:
                return False
            task.run()
        except Empty:
            return not self._end_idle(slot)
        except MemoryError:
            # Raised by the queue, or by a task before it was claimed: its caller runs it.
            pass
        return True

    def _end_idle(self, slot: _Slot) -> bool:
        """Return whether a thread that has found no work should end; it then takes none any more."""
        try:
            if slot.end.setdefault("by", "idle") == "idle":
                # A task that is queued just now finds no thread: its caller runs it, after a second at most.
                self._slots.remove(slot)
        except ValueError:
            pass  # `shutdown` has removed it
        except MemoryError:
            return False  # tries again when it is idle next time
        return True


def _set_thread_name(name: str) -> None:
    """Name the current thread, for `top -H` and debuggers."""
    with suppress(OSError, MemoryError):
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w", encoding="utf-8") as file:
            file.write(name[:15])
