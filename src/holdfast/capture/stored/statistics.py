"""What is known of the values of tensors: statistics, histograms, and the values themselves as text.

Recordings measure many small tensors in one pass. Large tensors are read block by block, of one tensor or of several
that are compared; a tensor that is read while it is shown is read once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
"""Number of values that a recorded histogram counts at most; of larger tensors, an even sample."""
BINS: Final = 40
"""Bins of the histogram of a summary."""
_SHOWN: Final = 64
"""Tensors of up to this many values are shown in full; of larger ones, only the corners."""
_SUMMARY_ITEMS: Final = 1 << 20
"""Values that a summary converts at a time, each to a few times 8 bytes."""
_GROWING_BINS: Final = 128
_SHOWN_BINS: Final = 48
_LARGEST: Final = 1e300
"""Values beyond this are counted at the ends of a growing histogram: the width of a bin must be a finite float64."""
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


class SpreadTally:
    """Accumulates the standard deviation of values, block by block.

    The sum of squares would not do: if the values are large and differ by little, it loses the difference.
    """

    def __init__(self) -> None:
        self._count = 0
        self._origin = self._mean = self._squares = 0.0

    def add(self, values: Array) -> None:
        """Add values; all must be finite."""
        if not values.size:
            return
        if not self._count:
            self._origin = float(values[0])
        # Distances from one of the values have more digits than values that are all large.
        values = values - self._origin
        mean = float(values.mean())
        deviations = values - mean
        total = self._count + values.size
        gap = mean - self._mean
        self._squares += float(np.dot(deviations, deviations)) + gap * self._count * values.size / total * gap
        self._mean += gap * values.size / total
        self._count = total

    def finish(self) -> float:
        """Return the standard deviation of all values; NaN if there are none, or if a sum is too large for a float."""
        return math.sqrt(self._squares / self._count) if self._count else math.nan


class GrowingHistogram:
    """Counts values in equal bins. A value outside doubles the range, as often as needed: then two bins become one."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self._low = 0.0
        self._width = 0.0
        self._counts = np.zeros(_GROWING_BINS, dtype=np.int64)
        self._only: tuple[float, int] | None = None
        """While all values are equal: the value, and how many there are."""

    def add(self, values: Array) -> None:
        """Count values; all must be finite."""
        if not values.size:
            return
        values = np.clip(values.astype(np.float64, copy=False), -_LARGEST, _LARGEST).ravel()
        low, high = float(values.min()), float(values.max())
        if self._width == 0.0 and not self._begin(low, high, values.size):
            return
        self._widen(low, high)
        places = ((values - self._low) / self._width).astype(np.int64)
        self._counts += np.bincount(np.clip(places, 0, _GROWING_BINS - 1), minlength=_GROWING_BINS)

    def _begin(self, low: float, high: float, size: int) -> bool:
        """Return whether there is a range now; while all values are equal there is none."""
        only = self._only
        if low == high and (only is None or only[0] == low):
            self._only = (low, size + (only[1] if only else 0))
            return False
        if only is not None:
            low, high = min(low, only[0]), max(high, only[0])
        self._low, self._width = low, max((high - low) / _GROWING_BINS, abs(high) * 1e-15, 5e-300)
        if only is not None:
            self._counts[min(int((only[0] - low) / self._width), _GROWING_BINS - 1)] += only[1]
        self._only = None
        return True

    def _widen(self, low: float, high: float) -> None:
        while low < self._low:
            self._low -= self._width * _GROWING_BINS
            self._join(is_upper=True)
        while high > self._low + self._width * _GROWING_BINS * (1 + 1e-9):
            self._join(is_upper=False)

    def _join(self, *, is_upper: bool) -> None:
        """Double the width of the bins; the counts so far move to the upper or the lower half."""
        joined = self._counts.reshape(-1, 2).sum(axis=1)
        empty = np.zeros(_GROWING_BINS // 2, dtype=np.int64)
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
        step = max(1, math.ceil((last - first) / _SHOWN_BINS))
        last = first + step * math.ceil((last - first) / step)
        padded = np.zeros(last - first, dtype=np.int64)
        shown = self._counts[first : min(last, _GROWING_BINS)]
        padded[: shown.size] = shown
        counts = padded.reshape(-1, step).sum(axis=1)
        return self._low + first * self._width, self._low + last * self._width, counts.tolist()


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


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """Statistics of a tensor, whose histogram has equal bins from `low` to `high` and counts every value."""

    stats: Stats
    low: float
    high: float


def summarize_tensor(
    tensor: torch.Tensor, *, ends: tuple[float, float] | None = None, bins: int = BINS
) -> TensorSummary:
    """Return statistics and histogram of a tensor; `ends` are the range of the histogram, by default the tensor's."""
    tally = StatsTally()
    for block in _iter_blocks(tensor):
        finite = torch.from_numpy(tally.add(block.numpy()))
        tally.add_sums(float(finite.sum()), float(finite.square().sum()))
    stats = tally.finish()
    if not tally.finite:
        return TensorSummary(replace(stats, norm=0.0), 0.0, 0.0)
    low, high = ends or (stats.minimum, stats.maximum)
    return TensorSummary(replace(stats, histogram=_count_exactly(tensor, low, high, bins)), low, high)


def find_ends(*tensors: torch.Tensor) -> tuple[float, float] | None:
    """Return the smallest and the largest finite value of all tensors; None if there is none."""
    low, high = math.inf, -math.inf
    for tensor in tensors:
        for block in _iter_blocks(tensor):
            finite = block[torch.isfinite(block)]
            if finite.numel():
                low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    return (low, high) if low <= high else None


def copy_summary(stats: Stats) -> TensorSummary:
    """Return a summary made from recorded statistics."""
    low, high = stats.minimum, stats.maximum
    has_bins = math.isfinite(low) and math.isfinite(high)
    return TensorSummary(stats if has_bins else replace(stats, histogram=()), low, high)


def format_values(tensor: torch.Tensor) -> list[str]:
    """Return lines that show the values of a small tensor, or the corners of a large one."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    if host.is_floating_point() and host.dtype.itemsize < 4:
        # Numpy has no bfloat16 or 8-bit floats.
        host = host.float()
    return np.array2string(host.numpy(), threshold=_SHOWN, edgeitems=2, precision=6, max_line_width=110).splitlines()


def _iter_blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the values as float64 blocks; for complex values, their magnitudes."""
    flat = tensor.detach().cpu().reshape(-1)
    for start in range(0, flat.numel(), _SUMMARY_ITEMS):
        block = flat[start : start + _SUMMARY_ITEMS]
        yield (block.abs() if block.is_complex() else block).to(torch.float64)


def _count_exactly(tensor: torch.Tensor, low: float, high: float, bins: int) -> tuple[int, ...]:
    counts = torch.zeros(bins, dtype=torch.int64)
    # Divide before subtracting: the difference of extreme float64 values would overflow.
    width = high / bins - low / bins
    for block in _iter_blocks(tensor):
        finite = block[torch.isfinite(block)]
        if width > 0:
            places = ((finite / width) - low / width).to(torch.int64).clamp_(0, bins - 1)
        else:
            places = torch.full(finite.shape, bins // 2, dtype=torch.int64)
        counts += torch.bincount(places, minlength=bins)
    return tuple(counts.tolist())
