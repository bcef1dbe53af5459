"""The engine that reads and writes share: threads for the cores there are, and bytes under way within a budget."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Final, Self, TypeVar

from holdfast.objects.thread_pool import Task, ThreadPool
from holdfast.repo.format.chunk import UNIT_BYTES

Item = TypeVar("Item")
Result = TypeVar("Result")

_GROUPS: Final = "/proc/self/cgroup"
_GROUP_ROOT: Final = "/sys/fs/cgroup"
_WAITERS: Final = 4
"""Threads beyond the cores: they wait for the disk while the others compute."""
_AHEAD: Final = 2
"""Items under way for each thread: one in hand, and one for when whoever takes the results is late."""


class Engine:
    """Does work on threads, in order and ahead of whoever takes the results. Use it in a `with`, from one thread.

    No thread is started before there is work, and none is left when the `with` ends, by an error or not.
    """

    def __init__(self, name: str, *, budget_bytes: int, waits: bool) -> None:
        """Have at most `budget_bytes` under way, though always one item; tell whether work waits for a disk."""
        self.threads = max(1, min(count_cores() + (_WAITERS if waits else 0), budget_bytes // UNIT_BYTES))
        self.budget_bytes = budget_bytes
        self._name = name
        self._start()

    def _start(self) -> None:
        self._crew = ThreadPool(self._name, self.threads)
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the threads."""
        self._crew.shutdown()

    def iter_results(self, work: Callable[[Item], Result], items: Iterable[tuple[Item, int]]) -> Iterator[Result]:
        """Yield `work(item)` for each item and its size in bytes, in order, others being worked on meanwhile.

        The first that fails, in order, ends it. When this ends, however it does, no work is going on any more.
        """
        if os.getpid() != self._pid:
            self._start()  # a forked child has none of the threads, and a pool does not notice
        waiting: deque[tuple[Task[Result], int]] = deque()
        under_way = 0
        try:
            for item, size in items:
                while waiting and (under_way + size > self.budget_bytes or len(waiting) > _AHEAD * self.threads):
                    under_way -= waiting[0][1]
                    yield _take_first(waiting)
                # Noted before it can begin: an interrupt may come at any point.
                waiting.append((Task(self._crew, partial(work, item)), size))
                self._crew.enqueue(waiting[-1][0])
                under_way += size
            while waiting:
                yield _take_first(waiting)
        finally:
            # The last first, so that none begins while others are waited for.
            while waiting:
                waiting[-1][0].abandon()
                waiting.pop()

    def run(self, work: Callable[[Item], object], items: Iterable[tuple[Item, int]]) -> None:
        """Do `work` on all items; returns, or raises, when no work is going on any more."""
        for _ in self.iter_results(work, items):
            pass


def _take_first(waiting: deque[tuple[Task[Result], int]]) -> Result:
    """Return the first result; if the wait for it is interrupted, the task stays in `waiting`."""
    result = waiting[0][0].result()
    waiting.popleft()
    return result


def count_cores() -> int:
    """Return how many threads may compute at once: the cores this process may use, or its share of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_core_quota(_GROUPS, _GROUP_ROOT)
    return max(1, cores if quota is None else min(cores, round(quota)))


def read_core_quota(groups: str, root: str) -> float | None:
    """Return how many cores the control groups of this process let it use; None if there is no limit, or none known."""
    # Version 2 has one line, whose first field is 0; the limit of every group above counts as well.
    name = next((line[3:].strip("/") for line in _read_lines(groups) if line.startswith("0::")), "")
    quotas = []
    while True:
        quotas += [_parse_quota(line) for line in _read_lines(os.path.join(root, name, "cpu.max"))]
        if not name:
            return min((quota for quota in quotas if quota is not None), default=None)
        name = os.path.dirname(name)


def _read_lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _parse_quota(line: str) -> float | None:
    try:
        quota, period = map(int, line.split())
        return quota / period
    except (ValueError, ZeroDivisionError):
        return None  # "max", or what a later kernel says
