"""Outcomes that ranks report to a test, as plain data; and stores that count or refuse operations."""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import holdfast
from holdfast.errors import RankError
from holdfast.objects.local.local_store import LocalReads, LocalStore
from holdfast.objects.protocol import ReadInto


@dataclass(frozen=True, slots=True)
class ActOutcome:
    """How an act ended on a rank, as plain data."""

    kind: str = ""
    """Type name of the error that it raised; empty if it raised none."""
    text: str = ""
    step: str = ""
    failures: dict[int, str] = field(default_factory=dict)
    """Type names of the failures of a RankError, by rank."""
    causes: tuple[str, ...] = ()
    """Type names of the causes of the error."""
    value: Any = None
    seconds: float = 0.0
    warned: tuple[str, ...] = ()


def report_outcome(act: Callable[[], Any]) -> ActOutcome:
    """Call `act` and return its outcome; its result must be plain."""
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value, error = act(), None
        except BaseException as raised:  # noqa: BLE001 - for the test to look at
            value, error = None, raised
    seconds = time.monotonic() - began
    warned = tuple(str(warning.message) for warning in caught)
    if error is None:
        return ActOutcome(value=value, seconds=seconds, warned=warned)
    failures = error.failures if isinstance(error, RankError) else {}
    return ActOutcome(
        kind=type(error).__name__,
        text=_read_text(error),
        step=error.step if isinstance(error, RankError) else "",
        failures={rank: failure.type_name.rpartition(".")[2] for rank, failure in failures.items()},
        causes=tuple(type(cause).__name__ for cause in _iter_causes(error)),
        seconds=seconds,
        warned=warned,
    )


def _read_text(error: BaseException) -> str:
    try:
        return str(error)
    except ValueError:  # there are errors that do not say what they are
        return ""


def _iter_causes(error: BaseException) -> Iterator[BaseException]:
    cause = error.__cause__
    while cause is not None:
        assert cause is not error, "an error is no cause of itself"
        yield cause
        cause = cause.__cause__


class CountingStore(LocalStore):
    """Counts the bytes that are read and written, by the first part of the key, and the reads of every key."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_bytes: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        data = super().read(key, limit_bytes=limit_bytes)
        self._count(key, len(data))
        return data

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        super().read_into(key, start, buffer)
        self._count(key, buffer.nbytes)

    def keep_reads(self) -> LocalReads:
        return _CountedReads(self, None)

    def _count(self, key: str, size_bytes: int) -> None:
        self.read_bytes[key.partition("/")[0]] += size_bytes
        self.reads[key] += 1


class _CountedReads(LocalReads):
    """Reads that are counted like all others, although they stay in the page cache."""

    @contextmanager
    def run(self) -> Iterator[ReadInto]:
        yield self._store.read_into


@contextmanager
def counting(path: Path) -> Iterator[tuple[holdfast.Store, CountingStore]]:
    """Open a store whose reads are counted."""
    inner = CountingStore(path)
    with holdfast.Store(inner) as store:
        yield store, inner


class KeptLog(logging.Handler):
    """Keeps what is logged while it is used in a `with`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._logger = logging.getLogger(name)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        self._logger.addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)


def list_files(path: Path) -> list[str]:
    """Return the files below a path, leases and locks aside: those may be left by whoever gives up."""
    files = (found.relative_to(path).as_posix() for found in path.rglob("*") if found.is_file())
    return sorted(file for file in files if not file.startswith((".", "leases/")))
