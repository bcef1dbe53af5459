"""Signs of life (beats): when a rank writes them, and how a waiting rank detects that another is silent or has left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from holdfast.distributed.talk.failures import GONE, LEFT
from holdfast.errors import RankFailure

MonotonicClock = Callable[[], float]

BEAT_S: Final = 5.0
"""Shortest time between two beats of a rank within one step; a quarter of the timeout if that is shorter."""
_CLOSED: Final = b"closed"


class Pulse:
    """Decides when this rank writes its next beat. Any thread may use it."""

    def __init__(self, *, timeout_s: float, clock: MonotonicClock = time.monotonic) -> None:
        self._every_s = min(BEAT_S, timeout_s / 4)
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0
        self._last = -self._every_s
        self._step = ""

    def find_due(self, step: str) -> bytes | None:
        """Return the beat to write if one is due or the step is new, else None. No two beats are equal."""
        now = self._clock()
        with self._lock:
            if self._count and step == self._step and now - self._last < self._every_s:
                return None
            self._last = now
            self._step = step
            self._count += 1
            return f"{self._count} {step}".encode("utf-8", "replace")


def format_closed() -> bytes:
    """Return the last beat of a rank, which says that it has left."""
    return _CLOSED


def is_closed(beat: bytes) -> bool:
    """Return whether a beat says that its rank has left."""
    return beat == _CLOSED


class PeerWatch:
    """The beats of other ranks, as seen by a rank that waits. Silence counts from the start of the wait."""

    def __init__(self, *, timeout_s: float, clock: MonotonicClock = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self.interval_s = min(1.0, timeout_s / 8)
        """How long to wait between two reads of the beats."""
        self._last = self._began = clock()
        self._seen: dict[int, bytes | None] = {}
        self._silent_s: dict[int, float] = {}

    @property
    def waited_s(self) -> float:
        """How long this rank has waited."""
        return self._clock() - self._began

    def is_due(self) -> bool:
        """Return whether it is time to read the beats again."""
        return self._clock() - self._last >= self.interval_s

    def observe(self, beats: Mapping[int, bytes | None]) -> list[RankFailure]:
        """Note the beats of the ranks that are waited for; return those that have left or were silent for too long."""
        now = self._clock()
        # If this process was suspended, the others may have been, too. So one call adds only a short silence.
        passed_s = min(now - self._last, 2 * self.interval_s)
        self._last = now
        for rank, beat in beats.items():
            is_news = rank not in self._seen or self._seen[rank] != beat
            self._silent_s[rank] = 0.0 if is_news else self._silent_s[rank] + passed_s
            self._seen[rank] = beat
        return list(self._find_failures(beats))

    def _find_failures(self, ranks: Iterable[int]) -> Iterable[RankFailure]:
        for rank in ranks:
            beat = self._seen[rank]
            if beat is not None and is_closed(beat):
                text = "left without joining this step; check that all ranks make the same calls"
                yield RankFailure(rank, LEFT, text)
            elif self._silent_s[rank] >= self._timeout_s:
                yield RankFailure(rank, GONE, self._describe_silence(beat))

    def _describe_silence(self, beat: bytes | None) -> str:
        if beat is None:
            last = "it has not started; check that all ranks make this call"
        else:
            step = beat.decode("utf-8", "replace").partition(" ")[2]
            where = f"at step {step!r}" if step else "before its first step"
            last = f"it was last seen {where}; check whether its process is suspended or has died"
        return f"no sign of life for {self._timeout_s:g} s (timeout_s); {last}"


class Pace:
    """Limits how often something is done. Any thread may use it."""

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._next = 0.0
        self._lock = threading.Lock()

    def is_due(self) -> bool:
        """Return whether `every_s` have passed since this last returned True."""
        now = time.monotonic()
        with self._lock:
            if now < self._next:
                return False
            self._next = now + self._every_s
            return True
