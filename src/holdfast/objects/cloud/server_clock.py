"""Estimates the clock of a server from the times of objects that this process has created there."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from holdfast.objects.protocol import ObjectInfo

RESOLUTION_S: Final = 2.0
"""Servers round times to seconds, so a smaller difference between two clocks is none."""
_MAX_SPAN_S: Final = 10.0
_FRESH_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class _Created:
    """An object, and when this host began and ended its creation."""

    key: str
    began_s: float
    ended_s: float


class ServerClock:
    """The clock of a server. Makes no requests: it learns from the answers to those that are made anyway."""

    def __init__(self) -> None:
        self._created: _Created | None = None
        self._learned_monotonic_s: float | None = None
        self.skew_s: float = 0.0
        """How far the clock of the server is ahead of this host's; 0 until an object has shown it."""

    @property
    def is_known(self) -> bool:
        """Whether the clocks were compared in the last ten minutes."""
        learned = self._learned_monotonic_s
        return learned is not None and time.monotonic() - learned < _FRESH_S

    def now(self) -> float:
        """Return the time of the server, in seconds since 1970."""
        return time.time() + self.skew_s

    def note_created(self, key: str, *, began_s: float) -> None:
        """Note that `key` was created between `began_s`, by the clock of this host, and now."""
        ended_s = time.time()
        # The creation of a large object, or one that was repeated, may have taken place at any time in between.
        if 0.0 <= ended_s - began_s <= _MAX_SPAN_S:
            self._created = _Created(key, began_s, ended_s)

    def note_seen(self, infos: Iterable[ObjectInfo]) -> None:
        """Compare the clocks, if the object that was created last is among `infos`."""
        created = self._created
        info = next((info for info in infos if info.key == created.key), None) if created else None
        if created and info:
            skew_s = info.modified_s - (created.began_s + created.ended_s) / 2
            uncertainty_s = RESOLUTION_S + (created.ended_s - created.began_s) / 2
            self.skew_s = skew_s if abs(skew_s) > uncertainty_s else 0.0
            self._learned_monotonic_s, self._created = time.monotonic(), None
