"""One piece of work that begins before its result is needed, on stores whose requests mostly wait."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from typing_extensions import Self

from holdfast.objects.protocol import ObjectStore
from holdfast.objects.thread_pool import Task, ThreadPool
from holdfast.objects.together import count_requests_at_once

Result = TypeVar("Result")


class Ahead(Generic[Result]):
    """Work that runs beside its owner if the store answers many requests at once, otherwise when its result is taken.

    Use it in a `with`: at the end, the work is not in progress any more. For one thread.
    """

    def __init__(self, store: ObjectStore, work: Callable[[], Result]) -> None:
        self._work = work
        self._pool: ThreadPool | None = None
        self._task: Task[Result] | None = None
        self._results: list[Result] = []
        if count_requests_at_once(store) > 1:
            self._begin()

    def result(self) -> Result:
        """Return the result, or raise the error; the work runs once, unless it fails on a store without waiting."""
        if not self._results:
            task, self._task = self._task, None
            self._results.append(task.result() if task else self._work())
        return self._results[0]

    def __enter__(self) -> Self:
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
