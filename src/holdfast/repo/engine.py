"""Runs work on a thread for each core or request, limits the bytes in progress, and measures the stages of work."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter
from types import TracebackType
from typing import Final, Literal, TypeVar

from typing_extensions import Self

from holdfast.display.markup import readable_repr
from holdfast.objects.thread_pool import Task, ThreadPool
from holdfast.repo.format.chunk import UNIT_BYTES

Item = TypeVar("Item")
Result = TypeVar("Result")

_GROUPS: Final = "/proc/self/cgroup"
_GROUP_ROOT: Final = "/sys/fs/cgroup"
_WAITERS: Final = 4
"""Threads beyond the number of cores: some wait for the disk while others compute."""
_PATIENCE_S: Final = 1.0
"""How long to wait for any request, before the caller waits for the first, and runs it if no thread does."""
_AHEAD: Final = 2
"""Items in progress per thread: one being worked on, and one so that threads stay busy while the caller is slow."""


class Engine:
    """Runs work on threads, ahead of the caller, who gets results in order. Use it in a `with`, from one thread.

    Threads start with the first work, and have ended when the `with` ends, whether by an error or not.
    """

    def __init__(self, name: str, *, budget_bytes: int, waits: bool, requests: int | None = None) -> None:
        """Limit work in progress to `budget_bytes` (or one item); `waits` adds threads, for work that waits for I/O.

        Work that is a request to a store gets one thread for each of `requests`.
        """
        threads = min(count_cores() + (_WAITERS if waits else 0), budget_bytes // UNIT_BYTES)
        self.threads = requests or max(1, threads)
        self._are_requests = requests is not None
        self.budget_bytes = budget_bytes
        self._name = name
        self._start()

    def _start(self) -> None:
        self._pool = ThreadPool(self._name, self.threads)
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the threads."""
        self._pool.shutdown()

    def iter_results(self, work: Callable[[Item], Result], items: Iterable[tuple[Item, int]]) -> Iterator[Result]:
        """Yield `work(item)` for each (item, size in bytes), in order, while later items are worked on.

        The first failure, in order, is raised. When this ends, for whatever reason, no work is in progress.
        """
        if os.getpid() != self._pid:
            self._start()  # a forked child has no threads, and its copy of the pool does not know
        waiting: deque[tuple[Task[Result], int]] = deque()
        bytes_in_flight = 0
        try:
            for item, size in items:
                while waiting and (bytes_in_flight + size > self.budget_bytes or len(waiting) > _AHEAD * self.threads):
                    bytes_in_flight -= waiting[0][1]
                    yield _take_first(waiting)
                # In `waiting` before it can start: an interrupt at any point must find it there.
                waiting.append((Task(self._pool, partial(work, item)), size))
                self._pool.enqueue(waiting[-1][0])
                bytes_in_flight += size
            while waiting:
                yield _take_first(waiting)
        finally:
            # From the last to the first, so that none starts while this waits for another.
            while waiting:
                waiting[-1][0].abandon()
                waiting.pop()

    def run(self, work: Callable[[Item], object], items: Iterable[tuple[Item, int]]) -> None:
        """Call `work` for all items; when this returns or raises, no work is in progress."""
        if self._are_requests:
            self._run_requests(work, items)
        else:
            for _ in self.iter_results(work, items):
                pass

    def _run_requests(self, work: Callable[[Item], object], items: Iterable[tuple[Item, int]]) -> None:
        """Let no item wait for a slow one before it while there is room in the budget."""
        if os.getpid() != self._pid:
            self._start()
        ended: SimpleQueue[int] = SimpleQueue()
        waiting: dict[int, tuple[Task[object], int]] = {}
        try:
            for number, (item, size) in enumerate(items):
                while waiting and self._is_full(waiting.values(), size):
                    _take_any(waiting, ended)
                # In `waiting` before it can start: an interrupt at any point must find it there.
                waiting[number] = (Task(self._pool, partial(_run_and_tell, work, item, number, ended)), size)
                self._pool.enqueue(waiting[number][0])
            while waiting:
                _take_any(waiting, ended)
        finally:
            # From the last to the first, so that none starts while this waits for another.
            for number in sorted(waiting, reverse=True):
                waiting[number][0].abandon()

    def _is_full(self, waiting: Collection[tuple[Task[object], int]], size: int) -> bool:
        return len(waiting) >= self.threads or sum(each for _, each in waiting) + size > self.budget_bytes


def _run_and_tell(work: Callable[[Item], object], item: Item, number: int, ended: SimpleQueue[int]) -> None:
    try:
        work(item)
    finally:
        with suppress(MemoryError):  # the caller checks all tasks again after a while
            ended.put(number)


def _take_any(waiting: dict[int, tuple[Task[object], int]], ended: SimpleQueue[int]) -> None:
    """Wait for a task that ends, and take its result; for the first one if none ends soon."""
    try:
        number = ended.get(timeout=_PATIENCE_S)
    except Empty:
        number = min(waiting)
    if number in waiting:
        waiting[number][0].result()
        del waiting[number]


def _take_first(waiting: deque[tuple[Task[Result], int]]) -> Result:
    """Return the first result; if the wait for it is interrupted, the task stays in `waiting`."""
    result = waiting[0][0].result()
    waiting.popleft()
    return result


def count_cores() -> int:
    """Return how many cores this process may use, by CPU affinity and cgroup quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_core_quota(_GROUPS, _GROUP_ROOT)
    return max(1, cores if quota is None else min(cores, round(quota)))


def read_core_quota(groups: str, root: str) -> float | None:
    """Return the CPU quota of this process's control groups, in cores; None if there is no limit or it is unknown."""
    # cgroup version 2 has one line, whose first field is 0. The limits of all parent groups apply as well.
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
        return None  # "max", or a format of a later kernel


StageName = Literal["hash", "encode", "look up", "append", "commit", "read", "decode", "verify"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Totals of one stage."""

    seconds: float = 0.0
    """Summed over threads, so it can exceed the elapsed time."""
    size_bytes: int = 0
    calls: int = 0

    __repr__ = readable_repr


class Stages:
    """The stages of one handle. Safe in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[StageName, Stage] = {}

    def add(self, name: StageName, seconds: float, size_bytes: int = 0) -> None:
        """Add one call to a stage's totals."""
        with self._lock:
            before = self._stages.get(name, Stage())
            self._stages[name] = Stage(before.seconds + seconds, before.size_bytes + size_bytes, before.calls + 1)

    @contextmanager
    def time(self, name: StageName, size_bytes: int = 0) -> Iterator[None]:
        """Add the duration of a `with` block to a stage."""
        started = perf_counter()
        try:
            yield
        finally:
            self.add(name, perf_counter() - started, size_bytes)

    def read(self) -> dict[StageName, Stage]:
        """Return the totals of all stages that ran so far."""
        with self._lock:
            return dict(self._stages)
