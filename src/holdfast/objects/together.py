"""Many requests to one store at once, as many as the store answers best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from holdfast.objects.protocol import ObjectStore
from holdfast.objects.thread_pool import Task, ThreadPool

Result = TypeVar("Result")


def run_together(store: ObjectStore, works: Sequence[Callable[[], Result]]) -> list[Result]:
    """Call all functions, at most `requests_at_once` of the store at a time, and return their results in order.

    The first failure, in order, is raised. When this returns or raises, no work is in progress.
    """
    size = min(store.traits.requests_at_once, len(works))
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


def read_together(store: ObjectStore, keys: Sequence[str], *, limit_bytes: int) -> list[bytes]:
    """Return the whole objects, in order; raises as `ObjectStore.read` does."""
    return run_together(store, [lambda key=key: store.read(key, limit_bytes=limit_bytes) for key in keys])  # type: ignore[misc]  # a default binds it
