"""Runs functions that wait for a server on several threads, or before their results are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Final, Generic, TypeVar

from typing_extensions import Self

from holdfast.objects.thread_pool import Task, ThreadPool

Result = TypeVar("Result")

AHEAD_BYTES: Final = 32 << 20
"""How many bytes `iter_together` reads before the caller has taken those before them."""


def run_together(works: Sequence[Callable[[], Result]], at_once: int) -> list[Result]:
    """Call all functions, at most `at_once` at a time, and return their results in order.

    The first failure, in order, is raised. When this returns or raises, no work is in progress.
    """
    size = min(at_once, len(works))
    if size <= 1:
        return [work() for work in works]
    pool = ThreadPool("holdfast-requests", size)
    tasks: list[Task[Result]] = []
    try:
        for work in works:
            # In the list before it can start: an interrupt at any point must find it there.
            tasks.append(Task(pool, work))
            pool.enqueue(tasks[-1])
        return [task.result() for task in tasks]
    finally:
        # From the last to the first, so that none starts while this waits for another.
        while tasks:
            tasks[-1].abandon()
            tasks.pop()
        pool.shutdown()


def iter_together(works: Iterable[tuple[Callable[[], Result], int]], at_once: int) -> Generator[Result, None, None]:
    """Yield the results of functions in order, while later ones run; each comes with the bytes that it will read.

    At most `at_once` run ahead, and at most AHEAD_BYTES, or one. The first failure, in order, is raised. When this
    ends, for whatever reason, no work is in progress. If `at_once` is 1, the caller runs each when it takes the result.
    """
    if at_once <= 1:
        yield from (work() for work, _ in works)
        return
    pool = ThreadPool("holdfast-requests", at_once)
    waiting: deque[tuple[Task[Result], int]] = deque()
    num_bytes = 0
    try:
        for work, work_bytes in works:
            while waiting and (len(waiting) >= at_once or num_bytes + work_bytes > AHEAD_BYTES):
                num_bytes -= waiting[0][1]
                yield _take_first(waiting)
            # In `waiting` before it can start: an interrupt at any point must find it there.
            waiting.append((Task(pool, work), work_bytes))
            pool.enqueue(waiting[-1][0])
            num_bytes += work_bytes
        while waiting:
            yield _take_first(waiting)
    finally:
        # From the last to the first, so that none starts while this waits for another.
        while waiting:
            waiting[-1][0].abandon()
            waiting.pop()
        pool.shutdown()


def _take_first(waiting: deque[tuple[Task[Result], int]]) -> Result:
    """Return the first result; if the wait for it is interrupted, the task stays in `waiting`."""
    result = waiting[0][0].result()
    waiting.popleft()
    return result


class EagerCall(Generic[Result]):
    """One function call that begins before its result is needed: on a thread, or when its result is taken.

    Use it in a `with`: at the end, the work is not in progress any more. For one thread.
    """

    def __init__(self, work: Callable[[], Result], *, is_eager: bool) -> None:
        """Call `work` on a thread if `is_eager`, otherwise in `result`."""
        self._work = work
        self._pool: ThreadPool | None = None
        self._task: Task[Result] | None = None
        self._results: list[Result] = []
        if is_eager:
            self._begin()

    def result(self) -> Result:
        """Return the result, or raise the error; the work runs once, unless it fails and was not eager."""
        if not self._results:
            task, self._task = self._task, None
            self._results.append(task.result() if task else self._work())
        return self._results[0]

    def __enter__(self) -> Self:
        """Return the call."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop work that has not begun, and wait for work that has."""
        if self._task is not None:
            self._task.abandon()
        if self._pool is not None:
            self._pool.shutdown()

    def _begin(self) -> None:
        self._pool = ThreadPool("holdfast-ahead", 1)
        self._task = self._pool.submit(self._work)
