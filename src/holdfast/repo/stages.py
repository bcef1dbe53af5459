"""Measures how long each stage of reads and writes takes: seconds and bytes, summed over all threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from holdfast.display.readable import readable_repr

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
