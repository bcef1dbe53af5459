"""Counters of a compile cache in this process: events, reasons and times, and a one-line summary of them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

CacheEvent = Literal["hit", "miss", "guard_miss", "saved", "corrupt", "refused", "waited"]
CacheStage = Literal["key", "find", "load", "wait", "compile", "save"]

_MIN_SHOWN_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counters of a cache at one moment. Each graph from dynamo counts as a hit, a miss, a bypass or a restart."""

    hit: int
    miss: int
    guard_miss: int
    """Misses for which the store has entries with the same key, but for other sizes."""
    saved: int
    corrupt: int
    """Entries that are damaged or could not be loaded."""
    refused: int
    """Entries that are not trusted: neither signed nor in a private store."""
    waited: int
    """Hits that another process compiled while this one waited."""
    restart: Mapping[str, int]
    """Reason -> number of graphs that torch's compiler did not compile: dynamo traced again, perhaps shorter graphs."""
    bypass: Mapping[str, int]
    """Reason -> number of graphs that were compiled without the cache."""
    not_saved: Mapping[str, int]
    """Reason -> number of misses that were compiled but not saved."""
    seconds_saved: float
    """How long the hits took to compile when they were saved."""
    seconds: Mapping[CacheStage, float]
    """Time that this process spent in each stage."""

    def __str__(self) -> str:
        """Return a one-line summary; zero counts are left out, except of hits and misses."""
        counts = {
            "hit" if self.hit == 1 else "hits": self.hit,
            "miss" if self.miss == 1 else "misses": self.miss,
            "for other sizes": self.guard_miss,
            "saved": self.saved,
            "bypassed": sum(self.bypass.values()),
            "not saved": sum(self.not_saved.values()),
            "corrupt": self.corrupt,
            "refused": self.refused,
            "traced again": sum(self.restart.values()),
            "waited for": self.waited,
        }
        texts = [f"{count} {what}" for what, count in counts.items() if count or what in ("hits", "misses")]
        if self.seconds_saved:
            texts.append(f"{self.seconds_saved:.1f} s of compiling saved")
        texts += [f"{stage} {seconds:.2f} s" for stage, seconds in self.seconds.items() if seconds >= _MIN_SHOWN_S]
        return ", ".join(texts)


class CacheCounters:
    """Counts events, reasons and times while the cache works. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: Counter[CacheEvent] = Counter()
        self._restart: Counter[str] = Counter()
        self._bypass: Counter[str] = Counter()
        self._not_saved: Counter[str] = Counter()
        self._seconds: dict[CacheStage, float] = {}
        self._seconds_saved = 0.0

    def count(self, event: CacheEvent) -> None:
        """Count one event."""
        with self._lock:
            self._events[event] += 1

    def count_hit(self, *, seconds_saved: float) -> None:
        """Count a hit, and the compile time that it saved."""
        with self._lock:
            self._events["hit"] += 1
            self._seconds_saved += seconds_saved

    def count_restart(self, reason: str) -> None:
        """Count a graph that torch's compiler gave back to dynamo."""
        with self._lock:
            self._restart[reason] += 1

    def count_bypass(self, reason: str) -> None:
        """Count a graph that is compiled without the cache."""
        with self._lock:
            self._bypass[reason] += 1

    def count_not_saved(self, reason: str) -> None:
        """Count a graph that was compiled but not saved."""
        with self._lock:
            self._not_saved[reason] += 1

    def add_seconds(self, stage: CacheStage, seconds: float) -> None:
        """Add to the time spent in a stage."""
        with self._lock:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    @contextmanager
    def timed(self, stage: CacheStage) -> Iterator[None]:
        """Add the duration of the `with` block to a stage, also if the block raises."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add_seconds(stage, time.monotonic() - started)

    def read(self) -> CacheStatistics:
        """Return the counters as they are now."""
        with self._lock:
            return CacheStatistics(
                hit=self._events["hit"],
                miss=self._events["miss"],
                guard_miss=self._events["guard_miss"],
                saved=self._events["saved"],
                corrupt=self._events["corrupt"],
                refused=self._events["refused"],
                waited=self._events["waited"],
                restart=dict(self._restart),
                bypass=dict(self._bypass),
                not_saved=dict(self._not_saved),
                seconds_saved=self._seconds_saved,
                seconds=dict(self._seconds),
            )
