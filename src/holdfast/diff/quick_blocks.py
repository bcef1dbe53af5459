"""Measures blocks of two tensors of one float dtype that are finite on both sides: few passes, in the cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import torch

from holdfast.diff.values import Numbers

BLOCK_ITEMS: Final = 1 << 17
"""Small enough for the cache; with smaller blocks, threads would mostly wait for each other to call numpy."""
BITS: Final[Mapping[torch.dtype, torch.dtype]] = MappingProxyType(
    {
        torch.float16: torch.int16,
        torch.bfloat16: torch.int16,
        torch.float32: torch.int32,
        torch.float64: torch.int64,
    }
)
"""The dtypes that `QuickBlocks` accepts, and the integers of their size."""
_ROW: Final = 1 << 10
"""Products are summed by rows of so many items: for a longer vector the library might start threads."""
_SERIAL_ITEMS: Final = 1 << 15
"""The most items that torch converts without starting threads."""
_SLACK: Final = 1e-6
"""More than the relative error of a difference, and of a bound of the tolerance, in float32."""
_LEAST_SQUARES: Final = 1e-22
"""If a sum of squares in float32 is at least this, squares that are too small for float32 do not count."""
_LEAST_ATOL: Final = 1e-30
"""If `atol` is at least this, the product of `rtol` and a value need not be a normal float32."""


class Workspace:
    """Memory for the blocks of one tensor after the other; for one thread at a time."""

    def __init__(self) -> None:
        self.numbers = np.empty((3, BLOCK_ITEMS))
        self.flags = np.empty(BLOCK_ITEMS, dtype=np.bool_)


class BlockDistance(NamedTuple):
    """The distance of two blocks of finite values."""

    products: tuple[float, float, float, float]
    """Sums of squares of the difference, of both sides, and of products of both sides."""
    unequal: int = 0
    mismatches: int = 0
    largest: float = 0.0
    """The largest difference; 0 if the caller knows of one that is larger."""
    largest_at: int = 0
    """The index of the largest difference in the block."""
    ulp: int = 0


class QuickBlocks:
    """Measures two flat tensors of one dtype, which `BITS` contains, block by block.

    Halves and float32 are compared in float32. All numbers are exact nevertheless, except the sums of products: values
    for which rounding could decide are compared again in float64. The products of a row of 1024 values are summed in
    float32, and rows in float64; if the products of a block are too small or too large for that, in float64 throughout.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor, space: Workspace, *, rtol: float, atol: float) -> None:
        self._sides = (a, b)
        self._rtol, self._atol = rtol, atol
        self._bits_a, self._bits_b = (side.view(BITS[side.dtype]).numpy() for side in (a, b))
        self._is_wide = a.dtype == torch.float64
        self._flags = space.flags
        self._wide = space.numbers[2]
        if self._is_wide:
            self._gap, self._other = space.numbers[0], space.numbers[1]
        else:
            self._gap, self._other = space.numbers[0].view(np.float32).reshape(2, -1)
        self._converted = space.numbers[1].view(np.float32).reshape(2, -1)

    def measure(self, start: int, *, known: float) -> BlockDistance | None:
        """Return the distance of the block that begins at `start`; None if a value of it is not finite.

        `known` is the largest difference of earlier blocks: a smaller one need not be found exactly.
        """
        part = slice(start, min(start + BLOCK_ITEMS, len(self._bits_a)))
        size = part.stop - start
        x, y = (self._read(side, part) for side in (0, 1))
        gap = np.abs(np.subtract(x, y, out=self._gap[:size]), out=self._gap[:size])
        unequal = int(np.count_nonzero(gap.view(np.int64 if self._is_wide else np.int32)))
        products = self._multiply(x, y, gap if unequal else None)
        if not math.isfinite(sum(products)):
            return None
        if not unequal:
            return BlockDistance(products)
        index = int(gap.argmax())
        largest = float(gap[index])
        mismatches = self._count_outside(x, y, gap, unequal) if largest * (1 + _SLACK) > self._atol else 0
        if largest * (1 + _SLACK) <= known:
            largest = 0.0
        elif not self._is_wide:
            index, largest = self._find_largest(x, y, gap, largest)
        ulp = self._find_ulp(part, math.sqrt(max(products[1], products[2])))
        return BlockDistance(products, unequal, mismatches, largest, index, ulp)

    def _read(self, side: int, part: slice) -> Numbers:
        """Return a block of one side in the dtype in which it is compared; halves are converted."""
        block = self._sides[side][part]
        if block.dtype.itemsize >= 4:  # the bytes of a float32
            found: Numbers = block.numpy()
            return found
        converted: Numbers = self._converted[side][: len(block)]
        memory = torch.from_numpy(converted)
        for start in range(0, len(block), _SERIAL_ITEMS):
            values = block[start : start + _SERIAL_ITEMS]
            memory[start : start + len(values)].copy_(values)
        return converted

    def _multiply(self, x: Numbers, y: Numbers, gap: Numbers | None) -> tuple[float, float, float, float]:
        """Return the sums of products; `gap` is None if it is zero everywhere."""
        apart = 0.0 if gap is None else self._sum_squares(gap)
        ours, theirs = self._sum_squares(x), self._sum_squares(y)
        if 4 * apart <= ours + theirs:
            # Exact to the last digits for sides that are nearly equal, and a pass less.
            return apart, ours, theirs, (ours + theirs - apart) / 2
        if self._is_wide or min(ours, theirs) >= _LEAST_SQUARES:
            both = dot(x, y)
            if math.isfinite(both):
                return apart, ours, theirs, both
        return apart, ours, theirs, dot(x.astype(np.float64), y.astype(np.float64))

    def _sum_squares(self, values: Numbers) -> float:
        total = dot(values, values)
        if self._is_wide or _LEAST_SQUARES <= total < math.inf:
            return total
        wide = self._wide[: len(values)]
        np.copyto(wide, values)
        return dot(wide, wide)

    @staticmethod
    def _find_exactly(x: Numbers, y: Numbers, where: Numbers) -> tuple[Numbers, Numbers]:
        """Return the magnitudes of `x` and the differences at these indices, in float64."""
        ours, theirs = (side[where].astype(np.float64) for side in (x, y))
        return np.abs(ours), np.abs(ours - theirs)

    def _find_largest(self, x: Numbers, y: Numbers, gap: Numbers, largest: float) -> tuple[int, float]:
        """Return the first index of the largest difference, and that difference in float64."""
        flags = np.greater_equal(gap, np.float32(largest * (1 - _SLACK)), out=self._flags[: len(gap)])
        near = np.flatnonzero(flags)
        _, apart = self._find_exactly(x, y, near)
        best = int(apart.argmax())
        return int(near[best]), float(apart[best])

    def _count_outside(self, x: Numbers, y: Numbers, gap: Numbers, unequal: int) -> int:
        """Return how many differences are larger than `atol + rtol * |x|`."""
        if not self._rtol and not self._atol:
            return unequal
        if not self._is_wide and self._atol < _LEAST_ATOL:
            values, apart = self._find_exactly(x, y, np.flatnonzero(gap))
            return int(np.count_nonzero(apart > self._atol + self._rtol * values))
        flags, bound = self._flags[: len(gap)], np.abs(x, out=self._other[: len(gap)])
        slack = 0.0 if self._is_wide else _SLACK
        np.multiply(bound, gap.dtype.type(self._rtol * (1 - slack)), out=bound)
        np.add(bound, gap.dtype.type(self._atol * (1 - slack)), out=bound)
        maybe = int(np.count_nonzero(np.greater(gap, bound, out=flags)))
        if not slack or not maybe:
            return maybe
        # The first bound may be too low by rounding, and this one too high: what is between them is counted in float64.
        np.multiply(bound, np.float32(1 + 2 * slack), out=bound)
        surely = int(np.count_nonzero(gap > bound))
        if maybe == surely:
            return surely
        values, apart = self._find_exactly(x, y, np.flatnonzero(flags & (gap <= bound)))
        return surely + int(np.count_nonzero(apart > self._atol + self._rtol * values))

    def _find_ulp(self, part: slice, largest: float) -> int:
        """Return the largest difference in units in the last place; no magnitude is above `largest`."""
        ours, theirs = self._bits_a[part], self._bits_b[part]
        integers = self._other.view(ours.dtype)[: len(ours)]
        np.subtract(ours, theirs, out=integers)
        apart = _find_magnitude(integers)
        # Of equal sign, the difference of the bits. Of different sign, that wraps around and is larger than this:
        most = torch.tensor(largest * (1 + 1 / 64), dtype=self._sides[0].dtype).view(BITS[self._sides[0].dtype])
        if apart < (1 << (8 * ours.dtype.itemsize - 1)) - int(most):
            return apart
        crossing = np.flatnonzero((ours ^ theirs) < 0)
        integers[crossing] = 0
        apart = _find_magnitude(integers)
        if not len(crossing):
            return apart
        lowest = np.iinfo(ours.dtype).max
        magnitudes = [(side[crossing] & lowest).astype(np.int64) for side in (ours, theirs)]
        index = int((magnitudes[0].astype(np.float64) + magnitudes[1]).argmax())
        return max(apart, int(magnitudes[0][index]) + int(magnitudes[1][index]))


def _find_magnitude(integers: Numbers) -> int:
    return max(int(np.maximum.reduce(integers)), -int(np.minimum.reduce(integers)))


def dot(x: Numbers, y: Numbers) -> float:
    """Return the sum of products: in the dtype of the vectors for each row of 1024 items, in float64 for all rows."""
    full = len(x) // _ROW * _ROW
    total = float(np.vecdot(x[full:], y[full:])) if full < len(x) else 0.0
    if full:
        rows = np.vecdot(x[:full].reshape(-1, _ROW), y[:full].reshape(-1, _ROW))
        total += float(np.add.reduce(rows, dtype=np.float64))
    return total
