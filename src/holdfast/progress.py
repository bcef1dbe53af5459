"""Progress reporting: a small protocol, a silent default, and what callers pass as `progress=`; no terminal code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Receives the progress of a long operation; called from any of its threads, but one call at a time."""

    def begin(self, task: str, total_bytes: int) -> None:
        """Start a task of `total_bytes`, ending any task before it."""

    def advance(self, num_bytes: int) -> None:
        """Count `num_bytes` more as done."""

    def end(self) -> None:
        """End the task, finished or not; ending twice is harmless."""


class Silent:
    """A `Progress` that reports nothing."""

    def begin(self, task: str, total_bytes: int) -> None:
        """Do nothing."""

    def advance(self, num_bytes: int) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    """How far an operation is: what a callback passed as `progress=` receives."""

    task: str
    """What is being done, such as "save run/step-100"."""
    done_bytes: int
    total_bytes: int
    is_ended: bool = False
    """True in the last call for a task, whether it has succeeded or not."""


ProgressCallback = Callable[[ProgressUpdate], object]
ProgressChoice = bool | Progress | ProgressCallback | None
"""True for a progress bar, a function that receives each `ProgressUpdate`, or a `Progress`; otherwise nothing."""


class CallbackProgress:
    """A `Progress` that calls a function for every step. An error that the function raises ends the operation."""

    def __init__(self, callback: ProgressCallback) -> None:
        self._callback = callback
        self._task: str | None = None
        self._done_bytes = self._total_bytes = 0

    def begin(self, task: str, total_bytes: int) -> None:
        """Call the function with nothing done yet."""
        self.end()
        self._task, self._done_bytes, self._total_bytes = task, 0, total_bytes
        self._callback(ProgressUpdate(task, 0, total_bytes))

    def advance(self, num_bytes: int) -> None:
        """Call the function with the bytes that are done."""
        if self._task is not None:
            self._done_bytes = min(self._done_bytes + num_bytes, self._total_bytes)
            self._callback(ProgressUpdate(self._task, self._done_bytes, self._total_bytes))

    def end(self) -> None:
        """Call the function for the last time."""
        if self._task is not None:
            task, self._task = self._task, None
            self._callback(ProgressUpdate(task, self._done_bytes, self._total_bytes, is_ended=True))


class LockedProgress:
    """Passes the calls of many threads on to a `Progress`, one at a time."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()

    def begin(self, task: str, total_bytes: int) -> None:
        """Start a task."""
        with self._lock:
            self._progress.begin(task, total_bytes)

    def advance(self, num_bytes: int) -> None:
        """Count bytes as done."""
        with self._lock:
            self._progress.advance(num_bytes)

    def end(self) -> None:
        """End the task."""
        with self._lock:
            self._progress.end()
