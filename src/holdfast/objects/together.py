"""Many requests to one store at once, as many as the store answers best."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar, runtime_checkable

from holdfast.objects.protocol import ObjectStore
from holdfast.objects.thread_pool import Task, ThreadPool

Result = TypeVar("Result")

AHEAD_BYTES: Final = 32 << 20
"""How many bytes `iter_together` reads before the caller has taken those before them."""


@runtime_checkable
class UntestedStore(Protocol):
    """Extra property of a store that tests its traits by writing: what is known without a test."""

    @property
    def requests_at_once(self) -> int:
        """The same as in its traits."""


def count_requests_at_once(store: ObjectStore) -> int:
    """Return how many requests should be in flight, without testing the store: a reader may not write to it."""
    return store.requests_at_once if isinstance(store, UntestedStore) else store.traits.requests_at_once


def checks_uploads(store: ObjectStore) -> bool:
    """Return the trait `checked_uploads` of a store whose requests wait; others are not tested for it."""
    return count_requests_at_once(store) > 1 and store.traits.checked_uploads


def run_together(store: ObjectStore, works: Sequence[Callable[[], Result]]) -> list[Result]:
    """Call all functions, at most `requests_at_once` of the store at a time, and return their results in order.

    The first failure, in order, is raised. When this returns or raises, no work is in progress.
    """
    size = min(count_requests_at_once(store), len(works))
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


def iter_together(
    store: ObjectStore, works: Iterable[tuple[Callable[[], Result], int]]
) -> Generator[Result, None, None]:
    """Yield the results of functions in order, while later ones run; each comes with the bytes that it will read.

    At most `requests_at_once` of the store run ahead, and at most AHEAD_BYTES, or one. The first failure, in order, is
    raised. When this ends, for whatever reason, no work is in progress. A store that wants one request at a time is
    asked by the caller, when the caller takes the result.
    """
    size = count_requests_at_once(store)
    if size <= 1:
        yield from (work() for work, _ in works)
        return
    pool = ThreadPool("holdfast-requests", size)
    waiting: deque[tuple[Task[Result], int]] = deque()
    num_bytes = 0
    try:
        for work, work_bytes in works:
            while waiting and (len(waiting) >= size or num_bytes + work_bytes > AHEAD_BYTES):
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


@runtime_checkable
class BulkStore(Protocol):
    """Extra methods of a store that deletes many objects with one request."""

    @property
    def delete_limit(self) -> int:
        """How many keys one request can name."""

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete at most `delete_limit` objects, in no order; no error for absent ones. An error may leave some."""


def delete_together(store: ObjectStore, keys: Sequence[str]) -> None:
    """Delete objects in no order, with as few requests as the store allows; no error for those that are absent."""
    if isinstance(store, BulkStore) and len(keys) > 1:
        size = store.delete_limit
        batches = [keys[first : first + size] for first in range(0, len(keys), size)]
        run_together(store, [partial(store.delete_many, batch) for batch in batches])
    else:
        run_together(store, [partial(store.delete, key) for key in keys])
