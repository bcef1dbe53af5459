"""What a compile cache has done in this process: counts, reasons and seconds, and the one line that tells them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

CacheEvent = Literal["hit", "miss", "guard_miss", "saved", "corrupt", "refused", "restart", "waited"]
CacheStage = Literal["key", "find", "load", "wait", "compile", "save"]

_WORTH_TELLING_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What a cache has done so far; each graph that dynamo had is a hit, a miss, a bypass or a restart."""

    hit: int
    miss: int
    guard_miss: int
    """Of the misses: those with entries for other sizes."""
    saved: int
    corrupt: int
    """Entries that were damaged, or could not be loaded."""
    refused: int
    """Entries that nothing vouches for."""
    restart: int
    """Graphs that the compiler had dynamo trace again."""
    waited: int
    """Of the hits: those that another process compiled while this one waited."""
    bypass: Mapping[str, int]
    """Graphs that have no entry, by the reason."""
    not_saved: Mapping[str, int]
    """Of the misses: those that were compiled and not kept, by the reason."""
    seconds_saved: float
    """What the hits took to compile, once."""
    seconds: Mapping[CacheStage, float]
    """Where this process's time went."""

    def __str__(self) -> str:
        """Tell all of it in one line."""
        counts = {
            "hit" if self.hit == 1 else "hits": self.hit,
            "miss" if self.miss == 1 else "misses": self.miss,
            "for other sizes": self.guard_miss,
            "saved": self.saved,
            "bypassed": sum(self.bypass.values()),
            "not saved": sum(self.not_saved.values()),
            "corrupt": self.corrupt,
            "refused": self.refused,
            "traced again": self.restart,
            "waited for": self.waited,
        }
        told = [f"{count} {what}" for what, count in counts.items() if count or what in ("hits", "misses")]
        if self.seconds_saved:
            told.append(f"{self.seconds_saved:.1f} s of compiling saved")
        told += [f"{stage} {seconds:.2f} s" for stage, seconds in self.seconds.items() if seconds >= _WORTH_TELLING_S]
        return ", ".join(told)


class CacheCounters:
    """Counts while the cache works. Safe in any thread."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._turn = threading.Lock()
        self._events: Counter[CacheEvent] = Counter()
        self._bypass: Counter[str] = Counter()
        self._not_saved: Counter[str] = Counter()
        self._seconds: dict[CacheStage, float] = {}
        self._seconds_saved = 0.0

    def count(self, event: CacheEvent) -> None:
        """Count one more."""
        with self._turn:
            self._events[event] += 1

    def count_hit(self, *, seconds_saved: float) -> None:
        """Count a hit, and what it took to compile once."""
        with self._turn:
            self._events["hit"] += 1
            self._seconds_saved += seconds_saved

    def count_bypass(self, reason: str) -> None:
        """Count a graph that has no entry."""
        with self._turn:
            self._bypass[reason] += 1

    def count_not_saved(self, reason: str) -> None:
        """Count a graph that was compiled and not kept."""
        with self._turn:
            self._not_saved[reason] += 1

    def add_seconds(self, stage: CacheStage, seconds: float) -> None:
        """Add to the time of a stage."""
        with self._turn:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    @contextmanager
    def timed(self, stage: CacheStage) -> Iterator[None]:
        """Add the time that passes in the context, however that ends."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add_seconds(stage, time.monotonic() - started)

    def read(self) -> CacheStatistics:
        """Return what was counted so far."""
        with self._turn:
            return CacheStatistics(
                hit=self._events["hit"],
                miss=self._events["miss"],
                guard_miss=self._events["guard_miss"],
                saved=self._events["saved"],
                corrupt=self._events["corrupt"],
                refused=self._events["refused"],
                restart=self._events["restart"],
                waited=self._events["waited"],
                bypass=dict(self._bypass),
                not_saved=dict(self._not_saved),
                seconds_saved=self._seconds_saved,
                seconds=dict(self._seconds),
            )
