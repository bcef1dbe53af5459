"""Statistics of tensors: those of many small tensors in one pass, those of a large one block by block."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from holdfast.capture.stored.events import Measured, Stats
from holdfast.capture.stored.observed import Array, build_copy

SMALL_BYTES: Final = 1 << 14
"""Tensors up to this size are measured together: for each alone, calling numpy takes longer than what it computes."""
_BLOCK: Final = 1 << 16
"""Number of values that stay in the processor's cache while each statistic reads them."""
_ROW: Final = 1 << 10
"""Number of values whose sum is rounded to their dtype; the sums of rows are added in float64."""
_SAMPLE: Final = 1 << 12
"""Number of values that a histogram counts at most; of larger tensors, an even sample."""
_ONES: Final = {dtype: np.ones(_ROW, dtype=dtype) for dtype in (np.dtype(np.float32), np.dtype(np.float64))}
_NUMPY: Final = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bool: np.bool_,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    # Complex items are two numbers each.
    torch.complex128: np.float64,
    torch.complex64: np.float32,
    torch.complex32: np.float16,
}
_FLOATS: Final = (torch.float32, torch.float64)


def find_values(data: Array, dtype: torch.dtype) -> Array | None:
    """Return bytes as numbers for numpy, which uses one thread and no torch operations that dispatch modes see."""
    if dtype in _NUMPY:
        return data.view(_NUMPY[dtype])
    if dtype == torch.bfloat16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    try:
        with _disable_current_modes(), torch.no_grad():
            return build_copy(data, dtype, (-1,)).to(torch.float32).numpy()
    except (NotImplementedError, RuntimeError):
        return None


class StatsTally:
    """Accumulates the statistics of values, block by block; NaN and infinities are only counted."""

    def __init__(self) -> None:
        self.minimum, self.maximum = math.inf, -math.inf
        self.nan = self.inf = self.zero = self.finite = 0
        self._sum = self._squares = 0.0

    def add(self, values: Array) -> Array:
        """Add values, and return those that are finite."""
        total = values.size
        if not total:
            return values
        if values.dtype.kind not in "fiu":
            values = values.astype(np.float64)
        low, high = float(values.min()), float(values.max())
        # A comparison with NaN is false: then the zeros are counted too.
        if not (low > 0 or high < 0):
            self.zero += int(np.count_nonzero(values == 0))
        if not (math.isfinite(low) and math.isfinite(high)):
            nan = int(np.count_nonzero(np.isnan(values)))
            values = values[np.isfinite(values)]
            self.nan += nan
            self.inf += total - nan - values.size
            if not values.size:
                return values
            low, high = float(values.min()), float(values.max())
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        self.finite += values.size
        return values

    def add_sums(self, total: float, squares: float) -> None:
        """Add the sums of the finite values and of their squares; the caller knows the fastest way to compute them."""
        self._sum += total
        self._squares += squares

    def finish(self, histogram: tuple[int, ...] = ()) -> Stats:
        """Return the statistics; minimum, maximum, mean and norm are NaN if no value is finite."""
        if not self.finite:
            return Stats(math.nan, math.nan, math.nan, math.nan, self.nan, self.inf, self.zero)
        mean, norm = self._sum / self.finite, math.sqrt(self._squares)
        return Stats(self.minimum, self.maximum, mean, norm, self.nan, self.inf, self.zero, histogram)


class Unmeasured(NamedTuple):
    """Bytes whose statistics are still to be taken."""

    target: Measured
    memory: bytes | memoryview
    dtype: torch.dtype


def measure_all(waiting: Sequence[Unmeasured], bins: int) -> None:
    """Take the statistics of all bytes; the same for each tensor, whatever it is measured with."""
    alike: defaultdict[tuple[torch.dtype, int], list[Unmeasured]] = defaultdict(list)
    for each in waiting:
        size_bytes = len(each.memory)
        if each.dtype in _FLOATS and 0 < size_bytes <= SMALL_BYTES:
            alike[each.dtype, size_bytes].append(each)
        else:
            each.target.stats = measure_bytes(each.memory, each.dtype, bins)
    for (dtype, _), group in alike.items():
        values: Array = np.frombuffer(b"".join([each.memory for each in group]), dtype=_NUMPY[dtype])
        found = _measure_rows(values.reshape(len(group), -1), bins)
        for each, stats in zip(group, found, strict=True):
            each.target.stats = stats


def measure_bytes(memory: bytes | memoryview, dtype: torch.dtype, bins: int) -> Stats | None:
    """Return the statistics of bytes as numbers of a dtype; None if it has no numbers."""
    values = find_values(np.frombuffer(memory, dtype=np.uint8), dtype)
    return None if values is None else measure_values(values, bins)


def _measure_rows(rows: Array, bins: int) -> list[Stats]:
    """Return the statistics of each row of small tensors."""
    low, high = rows.min(axis=1), rows.max(axis=1)
    with np.errstate(all="ignore"):
        is_plain = np.isfinite(low) & np.isfinite(high)
        wide = rows.astype(np.float64)
        means = (wide.sum(axis=1) / rows.shape[1]).tolist()
        norms = np.sqrt(np.vecdot(wide, wide)).tolist()
        histograms = _count_rows(wide, bins, low.astype(np.float64), high.astype(np.float64))
    zeros = np.count_nonzero(rows == 0, axis=1).tolist()
    found = zip(rows, is_plain.tolist(), low.tolist(), high.tolist(), means, norms, zeros, histograms, strict=True)
    return [
        Stats(lowest, highest, mean, norm, 0, 0, zero, histogram) if plain else measure_values(row, bins)
        for row, plain, lowest, highest, mean, norm, zero, histogram in found
    ]


def _count_rows(rows: Array, bins: int, low: Array, high: Array) -> list[tuple[int, ...]]:
    """Return the histogram of each row; () for one whose values are all equal or not all finite."""
    has_bins = np.isfinite(high - low) & (low < high) & (bins > 0)
    rows, low, high = rows[has_bins], low[has_bins, None], high[has_bins, None]
    places = ((rows - low) * (bins / (high - low))).astype(np.intp)
    np.minimum(places, bins - 1, out=places)
    places += bins * np.arange(len(rows))[:, None]
    counted = iter(np.bincount(places.ravel(), minlength=bins * len(rows)).reshape(len(rows), bins).tolist())
    return [tuple(next(counted)) if has else () for has in has_bins.tolist()]


def measure_values(values: Array, bins: int) -> Stats:
    """Return the statistics of values, with a histogram of `bins` bins."""
    tally = StatsTally()
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, values.size, _BLOCK):
            tally.add_sums(*_add_up(tally.add(values[start : start + _BLOCK])))
    low, high = tally.minimum, tally.maximum
    if not (bins and low < high and math.isfinite(high - low)):
        return tally.finish()
    finite = values[np.isfinite(values)] if tally.nan or tally.inf else values
    return tally.finish(_count(finite, bins, low, high))


def _add_up(values: Array) -> tuple[float, float]:
    """Return the sums of values and of their squares: of each row in the dtype of floats, of all rows in float64."""
    ones = _ONES.get(values.dtype)
    if ones is None:
        return _add_up(values.astype(np.float64))
    end = values.size - values.size % _ROW
    rows, rest = values[:end].reshape(-1, _ROW), values[end:]
    # Not one product of all values: for long vectors the library would start threads.
    added = float(np.vecdot(rows, ones).sum(dtype=np.float64)) + float(np.vecdot(rest, ones[: rest.size]))
    squared = float(np.vecdot(rows, rows).sum(dtype=np.float64)) + float(np.vecdot(rest, rest))
    if values.dtype == np.float32 and not math.isfinite(added + squared):
        return _add_up(values.astype(np.float64))
    return added, squared


def _count(values: Array, bins: int, low: float, high: float) -> tuple[int, ...]:
    """Return the number of values in each of `bins` equal bins; of many values, an even sample."""
    places = values[:: -(-values.size // _SAMPLE)].astype(np.float64)
    places -= low
    places *= bins / (high - low)
    indices = places.astype(np.intp)
    return tuple(np.bincount(np.minimum(indices, bins - 1, out=indices), minlength=bins).tolist())
