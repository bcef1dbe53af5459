"""Real processes that act on one store at the same moment, kept for many rounds so that only acting costs time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from threading import Barrier
from typing import Protocol

from holdfast.errors import HoldfastError
from holdfast.objects.url import open_store
from holdfast.repo.handle.repository import init_repository
from holdfast.repo.names.snapshots import read_snapshot, set_tag
from tests.faults.scenario import Content, save_content
from tests.kit.patience import PATIENCE_S


@dataclass(frozen=True, slots=True)
class SaveTask:
    """Save `content` under `name`."""

    root: str
    """The path or URL of the store, here and in the other tasks."""
    name: str
    content: Content
    overwrite: bool = False

    def run(self) -> str:
        result = save_content(open_store(self.root), self.name, self.content, overwrite=self.overwrite)
        return "existed" if result.existed else "saved"


@dataclass(frozen=True, slots=True)
class TagTask:
    """Point a tag to `name`."""

    root: str
    tag: str
    name: str

    def run(self) -> str:
        store = open_store(self.root)
        set_tag(store, self.tag, read_snapshot(store, self.name), move=True)
        return "tagged"


@dataclass(frozen=True, slots=True)
class InitTask:
    """Make a place a store."""

    root: str

    def run(self) -> str:
        init_repository(open_store(self.root))
        return "made"


class Task(Protocol):
    """What a process is to do; it is pickled."""

    def run(self) -> str:
        """Do it, and return in a word what has come of it."""


def _serve(tasks: Connection, barrier: Barrier) -> None:
    while (task := tasks.recv()) is not None:
        barrier.wait(PATIENCE_S)
        try:
            tasks.send(task.run())
        except HoldfastError as error:
            tasks.send(type(error).__name__)


class Crew:
    """`size` processes; use it in a fixture that closes it."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        # Kept: a process that starts late finds the barrier by a name which goes with the last holder.
        self._barrier = context.Barrier(size)
        self.size = size
        self._processes: list[SpawnProcess] = []
        self._ends: list[Connection] = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._barrier))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(ours)

    def run(self, tasks: Sequence[Task]) -> list[str]:
        """Run one task per process, all let go at once; return what each has come to, an error by its type."""
        for end, task in zip(self._ends, tasks, strict=True):
            end.send(task)
        return [self._receive(end) for end in self._ends]

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join(PATIENCE_S)
            assert process.exitcode == 0
            process.close()

    def _receive(self, end: Connection) -> str:
        assert end.poll(PATIENCE_S), "a process does not answer"
        return str(end.recv())
