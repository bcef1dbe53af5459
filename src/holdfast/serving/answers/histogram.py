"""A histogram that needs one pass: its range grows with the values, and bins are joined in pairs."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

Values = np.ndarray[Any, Any]
BINS: Final = 128
SHOWN_BINS: Final = 48
_LARGEST: Final = 1e300
"""Values beyond this are counted at the ends: the width of a bin must be a finite float64."""


class GrowingHistogram:
    """Counts values in equal bins. A value outside doubles the range, as often as needed: then two bins become one."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self._low = 0.0
        self._width = 0.0
        self._counts = np.zeros(BINS, dtype=np.int64)
        self._only: tuple[float, int] | None = None
        """While all values are equal: the value, and how many there are."""

    def add(self, values: Values) -> None:
        """Count values; all must be finite."""
        if not values.size:
            return
        values = np.clip(values.astype(np.float64, copy=False), -_LARGEST, _LARGEST).ravel()
        low, high = float(values.min()), float(values.max())
        if self._width == 0.0 and not self._begin(low, high, values.size):
            return
        self._widen(low, high)
        places = ((values - self._low) / self._width).astype(np.int64)
        self._counts += np.bincount(np.clip(places, 0, BINS - 1), minlength=BINS)

    def _begin(self, low: float, high: float, size: int) -> bool:
        """Return whether there is a range now; while all values are equal there is none."""
        only = self._only
        if low == high and (only is None or only[0] == low):
            self._only = (low, size + (only[1] if only else 0))
            return False
        if only is not None:
            low, high = min(low, only[0]), max(high, only[0])
        self._low, self._width = low, max((high - low) / BINS, abs(high) * 1e-15, 5e-300)
        if only is not None:
            self._counts[min(int((only[0] - low) / self._width), BINS - 1)] += only[1]
        self._only = None
        return True

    def _widen(self, low: float, high: float) -> None:
        while low < self._low:
            self._low -= self._width * BINS
            self._join(is_upper=True)
        while high > self._low + self._width * BINS * (1 + 1e-9):
            self._join(is_upper=False)

    def _join(self, *, is_upper: bool) -> None:
        """Double the width of the bins; the counts so far move to the upper or the lower half."""
        joined = self._counts.reshape(-1, 2).sum(axis=1)
        empty = np.zeros(BINS // 2, dtype=np.int64)
        self._counts = np.concatenate([empty, joined] if is_upper else [joined, empty])
        self._width *= 2

    def read(self) -> tuple[float, float, list[int]]:
        """Return the start of the first bin, the end of the last, and the counts, without empty bins at the ends."""
        if self._only is not None:
            return self._only[0], self._only[0], [self._only[1]]
        used = np.flatnonzero(self._counts)
        if not used.size:
            return 0.0, 0.0, []
        first, last = int(used[0]), int(used[-1]) + 1
        step = max(1, math.ceil((last - first) / SHOWN_BINS))
        last = first + step * math.ceil((last - first) / step)
        padded = np.zeros(last - first, dtype=np.int64)
        shown = self._counts[first : min(last, BINS)]
        padded[: shown.size] = shown
        counts = padded.reshape(-1, step).sum(axis=1)
        return self._low + first * self._width, self._low + last * self._width, counts.tolist()
