"""A store that wants many requests at once, and a pool that runs them one by one, the last first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from holdfast.objects import together
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import StoreTraits
from holdfast.objects.thread_pool import Task
from tests.kit.waiting_store import let_wait

Result = TypeVar("Result")


class BusyMemoryStore(MemoryStore):
    """A MemoryStore with the traits of a bucket."""

    def __init__(self, inner: MemoryStore | None = None) -> None:
        """Begin empty, or with the objects of `inner`."""
        super().__init__()
        if inner is not None:
            self._objects = inner._objects
            self._clock = inner._clock

    @property
    def traits(self) -> StoreTraits:
        return replace(let_wait(super().traits, 8), checked_uploads=True)

    def clone(self, *, read_only: bool = False) -> BusyMemoryStore:
        return BusyMemoryStore(super().clone(read_only=read_only))


class BackwardsPool:
    """Runs tasks on the thread of their owner: a single one at once, several from the last to the first."""

    def __init__(self, _name: str, _size: int) -> None:
        self._queue: list[Task[object]] = []

    def submit(self, work: Callable[[], Result]) -> Task[Result]:
        """Run work that was begun ahead of its time at once: that is as early as it can be."""
        task: Task[Result] = Task(self, work)  # type: ignore[arg-type]  # it has what a task needs of a pool
        task.run()
        return task

    def enqueue(self, task: Task[object]) -> None:
        self._queue.append(task)

    def find_patience_s(self) -> float:
        """Run whatever waits, now that somebody waits for it."""
        while self._queue:
            self._queue.pop().run()
        return 0.0

    def note_wait(self) -> None:
        """Do nothing: no thread has to begin."""

    def shutdown(self) -> None:
        """Do nothing: there are no threads."""


def run_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests that are made at once be done in the order that differs most from the usual one."""
    monkeypatch.setattr(together, "ThreadPool", BackwardsPool)
