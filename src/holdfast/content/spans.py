"""Sorted lists of byte ranges that do not overlap: join a range, find a range, find gaps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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


def find_span(spans: Sequence[ByteSpan], at: int) -> ByteSpan | None:
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
