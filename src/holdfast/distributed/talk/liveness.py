"""Signs of life: how a rank tells that it works, and how one that waits notices that another is silent or has left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from holdfast.distributed.talk.failures import GONE, LEFT
from holdfast.errors import RankFailure

MonotonicClock = Callable[[], float]

BEAT_S: Final = 5.0
"""A rank beats at most this often within one step, however often it is asked to; more often if the timeout is short."""
_CLOSED: Final = b"closed"


class Pulse:
    """A rank's own beat: what it last told, and when it is time to tell again. Any thread may use it."""

    def __init__(self, *, timeout_s: float, clock: MonotonicClock = time.monotonic) -> None:
        self._every_s = min(BEAT_S, timeout_s / 4)
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0
        self._last = -self._every_s
        self._step = ""

    def find_due(self, step: str) -> bytes | None:
        """Return what to tell, if it is time or the step is a new one; each is another than the one before."""
        now = self._clock()
        with self._lock:
            if self._count and step == self._step and now - self._last < self._every_s:
                return None
            self._last = now
            self._step = step
            self._count += 1
            return f"{self._count} {step}".encode("utf-8", "replace")


def format_closed() -> bytes:
    """Return what a rank tells last."""
    return _CLOSED


def is_closed(beat: bytes) -> bool:
    """Tell whether a beat was a rank's last."""
    return beat == _CLOSED


class PeerWatch:
    """What one that waits sees of the others. Their silence counts from the beginning of the wait, by our own clock."""

    def __init__(self, *, timeout_s: float, clock: MonotonicClock = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self.look_s = min(1.0, timeout_s / 8)
        """How long to let pass between two looks."""
        self._last = self.began = clock()
        self._seen: dict[int, bytes | None] = {}
        self._silent_s: dict[int, float] = {}

    def find_waited(self) -> float:
        """Return for how long the wait has been going on, in seconds."""
        return self._clock() - self.began

    def is_due(self) -> bool:
        """Tell whether enough time has passed since this last said so."""
        """Tell whether it is time for another look."""
        return self._clock() - self._last >= self.look_s

    def look(self, beats: Mapping[int, bytes | None]) -> list[RankFailure]:
        """Take what is known of the ranks that are waited for; return those to be given up on."""
        now = self._clock()
        # Not more than a little at once: if we were stopped ourselves, so may the others have been.
        passed_s = min(now - self._last, 2 * self.look_s)
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
                text = "has left without taking part in this step; do all ranks make the same calls?"
                yield RankFailure(rank, LEFT, text)
            elif self._silent_s[rank] >= self._timeout_s:
                yield RankFailure(rank, GONE, self._describe_silence(beat))

    def _describe_silence(self, beat: bytes | None) -> str:
        if beat is None:
            last = "it has not even begun; do all ranks make this call?"
        else:
            step = beat.decode("utf-8", "replace").partition(" ")[2]
            last = (
                f"it was last seen {f'at step {step!r}' if step else 'before its first step'}; is it stopped, or gone?"
            )
        return f"no sign of life for {self._timeout_s:g} s (timeout_s); {last}"


class Pace:
    """Tells whether it is time again; any thread may ask."""

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._next = 0.0
        self._lock = threading.Lock()

    def is_due(self) -> bool:
        """Tell whether enough time has passed since this last said so."""
        now = time.monotonic()
        with self._lock:
            if now < self._next:
                return False
            self._next = now + self._every_s
            return True
