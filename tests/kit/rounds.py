"""Counts how many requests of an operation must wait for each other, without a clock.

Each thread has a counter. A request adds one to it. A task starts with the counter of the thread that made it, and a
thread that takes the result of a task continues with the greater counter of both. The greatest counter is the number
of rounds: how many times the latency of one request the operation takes at least.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from holdfast.objects.thread_pool import BackgroundThread, Task


@dataclass
class Rounds:
    """The rounds and requests since the count began."""

    greatest: int = 0
    requests: list[str] = field(default_factory=list)
    """What each request did, in the order in which they began."""
    levels: Counter[int] = field(default_factory=Counter)
    """How many requests have each value of the counter: none of these waits for another of them."""
    _here: threading.local = field(default_factory=threading.local)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self) -> int:
        """Return the counter of this thread."""
        return int(getattr(self._here, "value", 0))

    def raise_to(self, value: int) -> None:
        """Continue this thread with the greater of its counter and `value`."""
        self._here.value = max(self.find(), value)

    def add_request(self, what: str) -> None:
        """Count one request of this thread."""
        self._here.value = self.find() + 1
        with self._lock:
            self.greatest = max(self.greatest, self.find())
            self.requests.append(what)
            self.levels[self.find()] += 1

    def count_waves(self, at_once: int) -> int:
        """Return the rounds if at most `at_once` requests are in flight: requests of one level then wait in turns."""
        return sum(-(-number // at_once) for number in self.levels.values())

    def start_at(self, value: int) -> None:
        """Let this thread begin a task at `value`."""
        self._here.value = value


@contextmanager
def count_rounds(owner: type, method: str) -> Iterator[Rounds]:
    """Count the calls of a method of a store that makes one request per call; its first two arguments describe it."""
    rounds = Rounds()
    original = getattr(owner, method)

    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        rounds.add_request(" ".join(str(argument) for argument in args[:2]))
        return original(self, *args, **kwargs)

    with patch.object(owner, method, ask), _follow_tasks(rounds), _follow_threads(rounds):
        yield rounds


@contextmanager
def _follow_tasks(rounds: Rounds) -> Iterator[None]:
    make, result = Task.__init__, Task.result
    ends: dict[int, list[int]] = {}

    def make_task(self: Task[Any], pool: Any, work: Callable[[], Any]) -> None:
        end = ends[id(self)] = [0]
        make(self, pool, _follow(rounds, work, end))

    def take_result(self: Task[Any]) -> Any:
        try:
            return result(self)
        finally:
            rounds.raise_to(ends[id(self)][0])

    with patch.object(Task, "__init__", make_task), patch.object(Task, "result", take_result):
        yield


@contextmanager
def _follow_threads(rounds: Rounds) -> Iterator[None]:
    make, join = BackgroundThread.__init__, BackgroundThread.join
    ends: dict[int, list[int]] = {}

    def make_thread(self: BackgroundThread, work: Callable[[], object], name: str) -> None:
        end = ends[id(self)] = [0]
        make(self, _follow(rounds, work, end), name)

    def join_thread(self: BackgroundThread, timeout_s: float | None = None) -> None:
        join(self, timeout_s)
        rounds.raise_to(ends[id(self)][0])

    with patch.object(BackgroundThread, "__init__", make_thread), patch.object(BackgroundThread, "join", join_thread):
        yield


def _follow(rounds: Rounds, work: Callable[[], Any], end: list[int]) -> Callable[[], Any]:
    """Return `work` that begins with the counter of the thread that calls this, and stores its last one in `end`."""
    start = rounds.find()

    def run() -> Any:
        before = rounds.find()
        rounds.start_at(start)
        try:
            return work()
        finally:
            end[0] = rounds.find()
            rounds.start_at(before)

    return run
