"""Storages that are still in use, by key and device, and which of their bytes have been read."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """The bytes from `start` up to, not including, `stop`."""

    start: int
    stop: int
    is_joined: bool = False
    """Whether it was joined from different spans."""


def join_span(spans: list[ByteSpan], new: ByteSpan) -> None:
    """Insert a span into a sorted list of spans that do not overlap; join it with the spans that it overlaps."""
    low = bisect_right(spans, new.start, key=_find_start)
    if low and spans[low - 1].stop > new.start:
        low -= 1
    high = max(low, bisect_left(spans, new.stop, key=_find_start))
    touched = spans[low:high]
    if touched:
        is_joined = any(span.is_joined or (span.start, span.stop) != (new.start, new.stop) for span in touched)
        new = ByteSpan(min(new.start, touched[0].start), max(new.stop, touched[-1].stop), is_joined)
    spans[low:high] = [new]


def find_span_at(spans: Sequence[ByteSpan], at: int) -> ByteSpan | None:
    """Return the span that contains `at`, or None."""
    number = bisect_right(spans, at, key=_find_start) - 1
    return spans[number] if number >= 0 and at < spans[number].stop else None


def iter_gaps(spans: Sequence[ByteSpan], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of [start, stop) that no span contains."""
    at = start
    for span in spans[max(0, bisect_right(spans, start, key=_find_start) - 1) :]:
        if span.start >= stop:
            break
        if span.start > at:
            yield at, span.start
        at = max(at, span.stop)
    if at < stop:
        yield at, stop


def _find_start(span: ByteSpan) -> int:
    return span.start


@dataclass(slots=True)
class FilledBytes:
    """Which bytes of a storage have been read."""

    spans: list[ByteSpan] = field(default_factory=list)
    """Sorted, and without overlaps."""
    packed: set[tuple[object, ...]] = field(default_factory=set)
    """Geometries of packed tensors that have been read; these fill only their items, not whole spans."""


class CachedStorage(NamedTuple):
    """A storage that is still in use."""

    storage: torch.UntypedStorage
    filled: FilledBytes | None
    """What was passed to `keep`."""


class StorageCache:
    """Finds storages that are still in use, without keeping them alive. Thread-safe."""

    def __init__(self) -> None:
        self._refs: dict[tuple[Hashable, str], tuple[StorageWeakRef, FilledBytes | None]] = {}
        self._lock = threading.Lock()

    def find(self, key: Hashable, device: torch.device) -> CachedStorage | None:
        """Return the storage that was added under `key` for `device`, or None if it is not in use any more."""
        with self._lock:
            ref, filled = self._refs.get((key, str(device)), (None, None))
            if ref is None:
                return None
            storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._refs[key, str(device)]
                return None
            return CachedStorage(storage, filled)

    def keep(self, key: Hashable, storage: torch.UntypedStorage, filled: FilledBytes | None = None) -> None:
        """Add a storage under `key`, for as long as it is in use elsewhere; `filled` is kept with it.

        A storage that is read as a whole needs no `filled`, which takes a few hundred bytes.
        """
        with self._lock:
            self._refs[key, str(storage.device)] = (StorageWeakRef(storage), filled)  # type: ignore[no-untyped-call]  # torch does not say
            if len(self._refs) % 256 == 0:
                live = {known: found for known, found in self._refs.items() if not found[0].expired()}  # type: ignore[no-untyped-call]  # as above
                self._refs = live
