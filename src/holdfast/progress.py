"""Progress reporting: a small protocol and a silent default; no terminal code."""

from __future__ import annotations

from typing import Protocol


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
