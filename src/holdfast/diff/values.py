"""Measures how much the values of two snapshots differ: in blocks, by few passes where values are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from holdfast.diff.changes import Change, Diff, Distance
from holdfast.diff.compare import TreeSide, find_key, open_side
from holdfast.diff.facts import ItemLayout, LeafEntry, ReadableEntry, Tile, find_layout, is_too_repetitive, iter_tiles
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.read.reader import open_snapshot
from holdfast.snapshot.batches import iter_batches
from holdfast.snapshot.opened import Opened
from holdfast.tensors.memory import view_items, wrap_memory
from holdfast.tensors.spec import TensorSpec, decode_spec, is_quantised

Numbers = np.ndarray[Any, Any]
Block = TypeVar("Block")

_BLOCK_BYTES: Final = 64 << 20
"""The most stored bytes in a block, of both sides together."""
_BLOCK_ITEMS: Final = 1 << 20
"""The most items in a block. Each intermediate result takes 8 bytes or more per item."""
_MEASURED: Final = frozenset({"values", "dtype", "conj", "neg", "quantizer"})
_LOWEST: Final = -(1 << 63)
_SAFE: Final = (1e-100, 1e100)
"""If the largest magnitude of a vector is in this range, sums of its squares neither overflow nor underflow."""
_INTEGERS: Final = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32}
)
_STORED_AS: Final = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
_ARRAY_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "|b1": torch.bool,
    "|i1": torch.int8,
    "<i2": torch.int16,
    "<i4": torch.int32,
    "<i8": torch.int64,
    "|u1": torch.uint8,
    "<u2": torch.uint16,
    "<u4": torch.uint32,
    "<u8": torch.uint64,
    "<f2": torch.float16,
    "<f4": torch.float32,
    "<f8": torch.float64,
    "<c8": torch.complex64,
    "<c16": torch.complex128,
}
"""The torch dtypes of numpy dtypes; arrays of other dtypes are compared as bytes."""


def measure(repo: Repository, diff: Diff) -> Diff:
    """Return the diff with the distances of all tensors and arrays that changed and kept their shape.

    At most 64 MiB of stored bytes are in memory at a time.
    """
    return replace(diff, changes=tuple(iter_measured(repo, diff)))


def iter_measured(repo: Repository, diff: Diff) -> Iterator[Change]:
    """Yield the changes of a diff one by one, each with its distances, as `measure` finds them."""
    if not any(_is_measurable(change) for change in diff.changes):
        yield from diff.changes
        return
    assert isinstance(diff.b, CommittedSnapshot), "`compare_with_tree` measures the changes to a tree in memory"
    with Opened(open_snapshot(repo, diff.a)) as before, Opened(open_snapshot(repo, diff.b)) as after:
        yield from measure_changes(diff.changes, open_side(before), open_side(after))


def _is_measurable(change: Change) -> bool:
    return change.kind == "changed" and any(aspect.what in _MEASURED for aspect in change.aspects)


def measure_changes(changes: Sequence[Change], before: TreeSide, after: TreeSide) -> Iterator[Change]:
    """Yield the changes with their distances; entries of several changes are read together."""
    for batch in iter_batches(changes, lambda change: _count_bytes(change, before), before.ahead.limit_bytes):
        for side in (before, after):
            side.ahead.announce(part.entry for change in batch for part in _find_parts(change, side).values())
        yield from (_measure_change(change, before, after) for change in batch)


def _find_parts(change: Change, side: TreeSide) -> Mapping[str, LeafEntry]:
    content = side.find_content(find_key(change.path)) if _is_measurable(change) else None
    return content.parts if content else {}


def _count_bytes(change: Change, side: TreeSide) -> int:
    return sum(part.size_bytes for part in _find_parts(change, side).values())


def _measure_change(change: Change, before: TreeSide, after: TreeSide) -> Change:
    if not _is_measurable(change):
        return change
    ours, theirs = (_find_parts(change, side) for side in (before, after))
    found = []
    for role in dict.fromkeys(aspect.part for aspect in change.aspects if aspect.what in _MEASURED):
        if role in ours and role in theirs:
            distance = _measure_part((before, ours[role]), (after, theirs[role]))
            found += [replace(distance, part=role)] if distance else []
    return replace(change, distances=tuple(found))


def _measure_part(before: tuple[TreeSide, LeafEntry], after: tuple[TreeSide, LeafEntry]) -> Distance | None:
    a, b = (open_values(*each) for each in (before, after))
    if a is None or b is None or a.shape != b.shape:
        return None
    if a.can_convert() and b.can_convert():
        return None if is_too_repetitive(a.readable, b.readable) else _measure_numbers(a, b)
    return _measure_bytes(a, b) if a.dtype == b.dtype and not is_too_repetitive(a.readable, b.readable) else None


@dataclass(frozen=True, slots=True)
class StoredValues:
    """A tensor or an array that can be read in blocks."""

    readable: ReadableEntry
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    """A str for arrays whose numpy dtype torch does not have."""
    spec: TensorSpec | None = None

    def can_convert(self) -> bool:
        """Return whether torch can convert the items to numbers."""
        if self.spec and self.spec.quantizer is not None:
            return self.dtype in _STORED_AS and self.spec.quantizer[0] == "per_tensor"
        if not isinstance(self.dtype, torch.dtype) or is_quantised(self.dtype):
            return False
        if self.dtype.is_complex:
            return True
        try:
            torch.zeros(self.dtype.itemsize, dtype=torch.uint8).view(self.dtype).to(torch.float64)
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def read(self, tile: Tile) -> torch.Tensor:
        """Read a block of numbers: integers unchanged, others as float64 or complex128."""
        assert isinstance(self.dtype, torch.dtype)
        raw = self.read_raw(tile, self.readable.layout)
        if self.dtype.is_complex:
            # By way of real numbers: torch warns of complex32, and supports few operations on it.
            part = {4: torch.float16, 8: torch.float32, 16: torch.float64}[self.dtype.itemsize]
            numbers = torch.view_as_complex(raw.flatten().view(part).reshape(*raw.shape, 2).double())
        else:
            numbers = raw.view(_STORED_AS.get(self.dtype, self.dtype))
            is_integer = numbers.dtype in _INTEGERS or numbers.dtype == torch.uint64
            numbers = numbers if is_integer else numbers.double()
        if self.spec is None:
            return numbers
        if self.spec.quantizer is not None:
            _, scale, zero = self.spec.quantizer
            return numbers.double().sub(int(zero)).mul(float.fromhex(scale))
        numbers = numbers.conj_physical() if self.spec.conj else numbers
        return -numbers if self.spec.neg else numbers

    def read_raw(self, tile: Tile, layout: ItemLayout) -> torch.Tensor:
        """Read a block of stored items, in C order."""
        memory = wrap_memory(memoryview(self.readable.read(*tile.span(layout))))
        return view_items(memory, layout.item_bytes, tile.shape, layout.stride, 0).contiguous()


def open_values(side: TreeSide, part: LeafEntry) -> StoredValues | None:
    """Return a tensor or an array of a snapshot, to be read in blocks; None for anything else."""
    entry = part.entry
    readable = ReadableEntry(side.ahead, entry, find_layout(entry))
    if part.kind == "array":
        dtype = str(part.spec.get("dtype"))
        return StoredValues(readable, readable.layout.shape, _ARRAY_DTYPES.get(dtype, dtype))
    if part.kind != "tensor":
        return None
    spec = decode_spec(entry.spec, size_bytes=entry.size_bytes, what=f"{side.name!r}, {entry.name}")
    return None if spec.meta else StoredValues(readable, spec.shape, spec.dtype, spec)


def _measure_numbers(a: StoredValues, b: StoredValues) -> Distance:
    tally: DistanceTally[Tile] = DistanceTally()
    layouts = a.readable.layout, b.readable.layout
    for tile in iter_tiles(*layouts, limit_bytes=_BLOCK_BYTES, limit_items=_BLOCK_ITEMS):
        x, y = a.read(tile), b.read(tile)
        if _is_exact(x, y):
            tally.add_integers(tile, x, y)
            tally.add_products(_multiply(x.double(), y.double()))
        else:
            dtype = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
            _add_floats(tally, tile, x.to(dtype), y.to(dtype))
    return _make_distance(tally, math.prod(a.shape), count_repeats(*layouts))


def _is_exact(x: torch.Tensor, y: torch.Tensor) -> bool:
    return {x.dtype, y.dtype} <= _INTEGERS or x.dtype == y.dtype == torch.uint64


def count_repeats(a: ItemLayout, b: ItemLayout) -> int:
    """Return how often each compared item is repeated, by dimensions with stride 0 on both sides."""
    steps = zip(a.shape, a.stride, b.stride, strict=True)
    return math.prod(size for size, *both in steps if not any(both) and size)


@dataclass(slots=True)
class DistanceTally(Generic[Block]):
    """Accumulates the differences of two tensors, block by block; the caller says what a block is."""

    unequal: int = 0
    """The number of values that are not equal."""
    largest: float = 0.0
    """The largest difference so far."""
    largest_at: tuple[Block, int] | None = None
    """The block of the largest difference, and its index in the flat block."""
    nan: list[int] = field(default_factory=lambda: [0, 0])
    inf: list[int] = field(default_factory=lambda: [0, 0])
    products: list[float | Fraction] = field(default_factory=lambda: [0] * 4)
    """Sums of squares of the difference, of the old and of the new values, and of products of old and new values."""

    def add_integers(self, block: Block, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add a block of integers: both uint64, or both of other dtypes. Their differences are exact."""
        x, y = (_order(side.flatten()) for side in (x, y))
        self.unequal += int((x != y).sum())
        # The subtraction wraps around. Read as unsigned, its result is the exact difference.
        gap = torch.maximum(x, y) - torch.minimum(x, y)
        index = int((gap ^ _LOWEST).argmax())
        self.keep_largest(block, index, int(gap[index]) % (1 << 64))

    def keep_largest(self, block: Block, index: int, size: float) -> None:
        """Store a difference and its index in a block, if it is the largest so far."""
        if size > self.largest:
            self.largest, self.largest_at = size, (block, index)

    def add_nonfinite(self, x: Numbers, y: Numbers) -> None:
        """Count the NaN and the infinite values of a block."""
        for side, numbers in enumerate((x, y)):
            self.nan[side] += int(np.count_nonzero(np.isnan(numbers)))
            self.inf[side] += int(np.count_nonzero(np.isinf(numbers)))

    def add_products(self, products: Iterable[float | Fraction]) -> None:
        """Add the sums of products of a block; all blocks as floats, or all as fractions."""
        self.products = [old + new for old, new in zip(self.products, products, strict=True)]

    @property
    def relative_l2(self) -> float:
        """The L2 norm of the difference divided by that of the old values."""
        difference, old, *_ = self.products
        return _root(difference / old) if old else math.inf if difference else 0.0


def _order(block: torch.Tensor) -> torch.Tensor:
    """Return integers as int64 with the same order and differences; uint64 is shifted."""
    return block.view(torch.int64) ^ _LOWEST if block.dtype == torch.uint64 else block.to(torch.int64)


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index in each dimension of an item of a flat tensor."""
    return tuple(map(int, np.unravel_index(index, shape)))


def _add_floats(tally: DistanceTally[Tile], tile: Tile, x: torch.Tensor, y: torch.Tensor) -> None:
    """Add a block of floats or complex numbers."""
    differ = x != y
    is_finite = math.isfinite(_find_largest(x)) and math.isfinite(_find_largest(y))
    if not is_finite:
        differ &= ~(x.isnan() & y.isnan())
        tally.add_nonfinite(x.numpy(), y.numpy())
    tally.unequal += int(differ.count_nonzero())
    # inf - inf and differences with NaN have no size; they do not count for the largest difference.
    gap = (x - y).abs().flatten().nan_to_num_(nan=0.0, posinf=math.inf)
    index = int(gap.argmax())
    tally.keep_largest(tile, index, float(gap[index]))
    if not is_finite:
        finite = x.isfinite() & y.isfinite()
        x, y = x[finite], y[finite]
    tally.add_products(_multiply(x, y))


def _multiply(x: torch.Tensor, y: torch.Tensor) -> tuple[Fraction, ...]:
    """Return the sums of products of a block of finite numbers. Fractions neither overflow nor lose small terms."""
    if not x.numel():
        return (Fraction(),) * 4
    x, y = (torch.view_as_real(side) if side.is_complex() else side for side in (x, y))
    ours, theirs, gap = (_Scaled.make(vector.flatten()) for vector in (x, y, x - y))
    if not gap:
        # The difference of two floats may overflow; half of it does not.
        gap = _Scaled.make((x / 2 - y / 2).flatten(), 2)
    assert ours and theirs and gap, "only finite values are added"  # noqa: PT018  # one condition in three parts
    return gap.multiply(gap), ours.multiply(ours), theirs.multiply(theirs), ours.multiply(theirs)


def _make_distance(tally: DistanceTally[Tile], total: int, repeats: int) -> Distance:
    """Return the distance of a tensor of `total` items, in which each compared item is repeated `repeats` times."""
    _, old, new, product = (Fraction(each) for each in tally.products)
    cosine = min(1.0, _root(product * product / (old * new))) if old and new else None
    at = None
    if tally.largest_at:
        tile, index = tally.largest_at
        at = tuple(start + step for start, step in zip(tile.start, unravel(index, tile.shape), strict=True))
    return Distance(
        total,
        tally.unequal * repeats,
        tally.largest,
        at,
        tally.relative_l2,
        -cosine if cosine and product < 0 else cosine,
        (tally.nan[0] * repeats, tally.nan[1] * repeats),
        (tally.inf[0] * repeats, tally.inf[1] * repeats),
    )


def _root(square: float | Fraction) -> float:
    try:
        return math.sqrt(square)
    except OverflowError:
        return math.inf


def _find_largest(numbers: torch.Tensor) -> float:
    """Return the largest magnitude of real numbers, or of real and imaginary parts; NaN if any number is NaN."""
    low, high = torch.aminmax(torch.view_as_real(numbers) if numbers.is_complex() else numbers)
    return max(abs(float(low)), abs(float(high)))


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A vector whose squares do not overflow, and the factor that restores its original values."""

    vector: torch.Tensor
    scale: Fraction

    @classmethod
    def make(cls, vector: torch.Tensor, scale: int = 1) -> _Scaled | None:
        """Scale a vector of any magnitude; None if it is not finite."""
        largest = _find_largest(vector)
        if not math.isfinite(largest):
            return None
        if largest == 0 or _SAFE[0] < largest < _SAFE[1]:
            return cls(vector, Fraction(scale))
        return cls(vector / largest, Fraction(largest) * scale)

    def multiply(self, other: _Scaled) -> Fraction:
        """Return the scalar product of the original vectors; only the dot product is rounded, to float64."""
        return Fraction(float(torch.dot(self.vector, other.vector))) * self.scale * other.scale


def _measure_bytes(a: StoredValues, b: StoredValues) -> Distance:
    layouts = [_split_bytes(values.readable.layout) for values in (a, b)]
    mismatches = 0
    for tile in iter_tiles(*layouts, limit_bytes=_BLOCK_BYTES):
        x, y = a.read_raw(tile, layouts[0]), b.read_raw(tile, layouts[1])
        mismatches += int((x != y).sum())
    return Distance(math.prod(layouts[0].shape), mismatches * count_repeats(*layouts), unit="byte")


def _split_bytes(layout: ItemLayout) -> ItemLayout:
    """Return a layout in which each byte is an item, with the bytes of an item as the last dimension."""
    size = layout.item_bytes
    stride = (*(step * size for step in layout.stride), 1)
    return ItemLayout(1, (*layout.shape, size), stride, layout.offset * size)


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
