"""Measure the distance of two tensors: one pass over both in blocks, in float64; or bounds from their statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import numpy as np
import torch

from holdfast.capture.stored.events import Stats
from holdfast.diff.values import DistanceTally, Numbers, unravel
from holdfast.display.readable import readable_repr
from holdfast.json_text import Json

_BLOCK_ITEMS: Final = 1 << 17
"""Small enough for the cache; with smaller blocks, threads would mostly wait for each other to call numpy."""
_ROW: Final = 1 << 10
"""Products are summed by rows of so many items: for a longer vector the library might start threads."""
_SERIAL_ITEMS: Final = 1 << 15
"""The most items that torch converts without starting threads."""
_BITS: Final[Mapping[torch.dtype, torch.dtype]] = MappingProxyType(
    {
        torch.float16: torch.int16,
        torch.bfloat16: torch.int16,
        torch.float32: torch.int32,
        torch.float64: torch.int64,
    }
)
_QUICK: Final = frozenset(_BITS)
"""Dtypes whose blocks are compared in memory that all blocks share."""
_SHARED: Final = frozenset({torch.float32, torch.float64})
"""Those of them that numpy converts fast; torch converts the others faster."""
_SAFE: Final = (1e-140, 1e140)
"""Magnitudes whose sums of squares neither overflow nor underflow."""

Basis = Literal["values", "stats", "digest"]


class Tolerance(NamedTuple):
    """A value is close if it differs from the expected one by at most `atol + rtol * |expected|`."""

    rtol: float
    atol: float


EXACT: Final = Tolerance(0.0, 0.0)
TABLE: Final[Mapping[str, Tolerance]] = MappingProxyType(
    {
        "float16": Tolerance(1e-3, 1e-5),
        "bfloat16": Tolerance(1.6e-2, 1e-5),
        "float32": Tolerance(1.3e-6, 1e-5),
        "float64": Tolerance(1e-7, 1e-7),
        "complex32": Tolerance(1e-3, 1e-5),
        "complex64": Tolerance(1.3e-6, 1e-5),
        "complex128": Tolerance(1e-7, 1e-7),
    }
)
"""The default tolerances of `torch.testing.assert_close` by dtype; other dtypes must be equal."""


MAX_SHOWN_ULP: Final = 1000
"""Differences up to this many units in the last place are shown as such."""


@dataclass(frozen=True, slots=True)
class TensorDistance:
    """The difference of `b` from `a`. None means not known; NaN at the same index on both sides counts as equal."""

    basis: Basis
    total: int = 0
    unequal: int | None = None
    """Number of values that are not equal."""
    mismatches: int | None = None
    """Number of values outside the tolerance, or NaN or infinite on one side only."""
    max_abs: float | None = None
    """The largest difference of values that are finite on both sides; a lower bound if only stats are known."""
    at: tuple[int, ...] | None = None
    """Index of that difference; if there is none, the first index that is NaN or infinite on one side only."""
    values: tuple[complex, complex] | None = None
    """Both values at that index."""
    relative_l2: float | None = None
    """The norm of the difference divided by that of `a`; a lower bound if only stats are known."""
    cosine: float | None = None
    sqnr_db: float | None = None
    """Power of `a` divided by power of the difference, in decibels; infinite if nothing differs."""
    max_ulp: int | None = None
    """The largest difference in units in the last place of the wider dtype."""
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)
    masks: int = 0
    """Number of values that are NaN, or infinite with that sign, on one side only."""
    note: str = ""

    __repr__ = readable_repr

    @property
    def percent(self) -> float | None:
        """Percentage of values outside the tolerance."""
        if self.mismatches is None:
            return None
        return 100 * self.mismatches / self.total if self.total else 0.0

    @property
    def ulp_text(self) -> str:
        """`max_ulp` for people: "3", or "> 1000" for a difference that is more than rounding; empty if not known.

        Beyond that the number means nothing: two small values of opposite sign are billions of units apart.
        """
        if self.max_ulp is None:
            return ""
        return str(self.max_ulp) if self.max_ulp <= MAX_SHOWN_ULP else f"> {MAX_SHOWN_ULP}"

    @property
    def is_close(self) -> bool:
        """Whether all values are known to be within the tolerance."""
        return self.mismatches == 0

    def to_json(self) -> dict[str, Json]:
        """Return the numbers as JSON; those that are not finite as text."""
        return {
            "basis": self.basis,
            "total": self.total,
            "unequal": self.unequal,
            "mismatches": self.mismatches,
            "percent": self.percent,
            "max_abs": _encode_number(self.max_abs),
            "at": None if self.at is None else list(self.at),
            "values": None if self.values is None else [_encode_number(value) for value in self.values],
            "relative_l2": _encode_number(self.relative_l2),
            "cosine": _encode_number(self.cosine),
            "sqnr_db": _encode_number(self.sqnr_db),
            "max_ulp": self.max_ulp,
            "nan": list(self.nan),
            "inf": list(self.inf),
            "masks": self.masks,
            "note": self.note,
        }


def _encode_number(value: complex | None) -> Json:
    if value is None or isinstance(value, int):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def find_tolerance(a: torch.dtype, b: torch.dtype) -> Tolerance:
    """Return the tolerance in the table for the wider of two dtypes."""
    return TABLE.get(str(find_wider(a, b)).removeprefix("torch."), EXACT)


def find_wider(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of both are compared."""
    if a == b:
        return a
    # Torch does not promote 8-bit floats, or unsigned integers of more than 8 bits.
    a, b = (_widen(dtype) for dtype in (a, b))
    return torch.promote_types(a, b)


def _widen(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.float32
    return torch.int64 if dtype in (torch.uint16, torch.uint32) else torch.float64 if dtype == torch.uint64 else dtype


def measure(
    a: torch.Tensor, b: torch.Tensor, *, tolerance: Tolerance | None = None, space: Workspace | None = None
) -> TensorDistance:
    """Return the difference of `b` from `a`; `tolerance` defaults to that of the table.

    Pass the same `space` for many tensors: new memory takes longer than comparing in it.
    """
    if a.shape != b.shape:
        note = f"shapes differ: {tuple(a.shape)} against {tuple(b.shape)}"
        return TensorDistance("values", total=a.numel(), note=note)
    allowed = find_tolerance(a.dtype, b.dtype) if tolerance is None else tolerance
    ours, theirs = (_flatten(side) for side in (a, b))
    wider = find_wider(a.dtype, b.dtype)
    if not (wider.is_floating_point or wider.is_complex):
        found = _measure_integers(ours, theirs)
    else:
        found = _measure_floats(ours, theirs, wider, allowed, space or Workspace())
    at = None if found.at is None else unravel(found.at[0], tuple(a.shape))
    values = None if found.at is None else _pick(ours, theirs, found.at[0])
    note = f"dtypes differ: {_name(a.dtype)} against {_name(b.dtype)}" if a.dtype != b.dtype else ""
    return replace(found, at=at, values=values, note=note)


def measure_stats(a: Stats | None, b: Stats | None, total: int) -> TensorDistance:
    """Return what is known about two tensors that differ if only statistics, or only digests, were kept."""
    if a is None or b is None:
        return TensorDistance(
            "digest", total=total, note="only digests were kept: the bytes differ, by how much is not known"
        )
    gap, drift = max(abs(a.minimum - b.minimum), abs(a.maximum - b.maximum)), abs(a.norm - b.norm)
    # If one side has no finite value, its statistics are NaN.
    is_known = math.isfinite(gap) and math.isfinite(drift)
    relative = drift / a.norm if a.norm else math.inf if drift else 0.0
    return TensorDistance(
        "stats",
        total=total,
        max_abs=gap if is_known else None,
        relative_l2=relative if is_known else None,
        nan=(a.nan, b.nan),
        inf=(a.inf, b.inf),
        note="only stats were kept: the differences are at least these",
    )


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor in C order, on the CPU; without a copy if possible."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.detach().cpu().contiguous().view(-1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pick(a: torch.Tensor, b: torch.Tensor, flat: int) -> tuple[complex, complex]:
    return a[flat].item(), b[flat].item()


def _measure_integers(a: torch.Tensor, b: torch.Tensor) -> TensorDistance:
    tally: DistanceTally[int] = DistanceTally(largest=0)  # an int, because all differences are
    for start in range(0, a.numel(), _BLOCK_ITEMS):
        tally.add_integers(start, *(side[start : start + _BLOCK_ITEMS] for side in (a, b)))
    at = None if tally.largest_at is None else (sum(tally.largest_at),)
    return TensorDistance("values", a.numel(), tally.unequal, tally.unequal, tally.largest, at)


def _measure_floats(
    a: torch.Tensor, b: torch.Tensor, wider: torch.dtype, allowed: Tolerance, space: Workspace
) -> TensorDistance:
    tally = _Tally(allowed, _find_scale(a, b))
    compared = torch.complex128 if wider.is_complex else torch.float64
    blocks = _FiniteBlocks(a, b, space) if a.dtype == b.dtype and a.dtype in _QUICK and tally.scale == 1.0 else None
    # Extreme values overflow when they are subtracted; `_Tally` handles NaN and infinities itself.
    with np.errstate(all="ignore"):
        for start in range(0, a.numel(), _BLOCK_ITEMS):
            if blocks is not None and blocks.add(tally, start):
                continue
            x, y = (side[start : start + _BLOCK_ITEMS] for side in (a, b))
            ranks = (_rank_floats(x.to(wider)), _rank_floats(y.to(wider))) if wider in _BITS else None
            tally.add(start, x.to(compared).numpy(), y.to(compared).numpy(), ranks)
    return tally.finish(a.numel(), has_ulps=wider in _BITS)


class Workspace:
    """Memory for the blocks of one tensor after the other; for one thread at a time."""

    def __init__(self) -> None:
        self.numbers = np.empty((3, -(-_BLOCK_ITEMS // _ROW), _ROW))
        """The values of both sides and their difference."""
        self.flags = np.empty(_BLOCK_ITEMS, dtype=np.bool_)
        self.integers = np.empty(_BLOCK_ITEMS, dtype=np.int64)


class _FiniteBlocks:
    """Adds blocks of two tensors of one dtype that are finite on both sides.

    Gives the same numbers as `_Tally.add`, several times faster.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor, space: Workspace) -> None:
        self._a, self._b = (side.numpy() if side.dtype in _SHARED else side for side in (a, b))
        bits = _BITS[a.dtype]
        self._bits_a, self._bits_b = a.view(bits).numpy(), b.view(bits).numpy()
        self._numbers, self._flags = space.numbers, space.flags
        self._x, self._y, self._gap = space.numbers.reshape(3, -1)
        self._integers = space.integers.view(self._bits_a.dtype)

    def add(self, tally: _Tally, start: int) -> bool:
        """Add a block; returns False, and adds nothing, if a value of it is not finite."""
        part = slice(start, min(start + _BLOCK_ITEMS, len(self._bits_a)))
        size = part.stop - start
        x, y, gap, flags = self._x[:size], self._y[:size], self._gap[:size], self._flags[:size]
        ours, theirs = _convert(self._a[part], x), _convert(self._b[part], y)
        np.subtract(x, y, out=gap)
        products = _sum_products(self._numbers, size)
        if not math.isfinite(sum(products)):
            return False
        unequal = int(np.count_nonzero(np.not_equal(ours, theirs, out=flags)))
        if unequal:
            tally.distance.unequal += unequal
            np.abs(gap, out=gap)
            index = int(gap.argmax())
            largest = float(gap[index])
            tally.distance.keep_largest(start, index, largest)
            if largest > tally.allowed.atol:
                np.abs(x, out=x)
                np.multiply(x, tally.allowed.rtol, out=x)
                np.add(x, tally.allowed.atol, out=x)
                tally.mismatches += int(np.count_nonzero(np.greater(gap, x, out=flags)))
            tally.ulp = max(tally.ulp, self._find_ulp(part))
        tally.distance.add_products(products)
        return True

    def _find_ulp(self, part: slice) -> int:
        """Return the largest difference in units in the last place: of equal sign, the difference of the bits."""
        ours, theirs = self._bits_a[part], self._bits_b[part]
        integers = self._integers[: len(ours)]
        crossing = None
        if np.bitwise_xor(ours, theirs, out=integers).min() < 0:
            crossing = np.flatnonzero(integers < 0)
        np.subtract(ours, theirs, out=integers)
        if crossing is None:
            return max(int(integers.max()), -int(integers.min()))
        integers[crossing] = 0
        apart = max(int(integers.max()), -int(integers.min()))
        lowest = np.iinfo(ours.dtype).max
        magnitudes = [(side[crossing] & lowest).astype(np.int64) for side in (ours, theirs)]
        index = int((magnitudes[0].astype(np.float64) + magnitudes[1]).argmax())
        return max(apart, int(magnitudes[0][index]) + int(magnitudes[1][index]))


def _convert(block: Numbers | torch.Tensor, target: Numbers) -> Numbers:
    """Copy a block of floats into float64 memory, in this thread; returns the values in the cheapest form."""
    if isinstance(block, np.ndarray):
        np.copyto(target, block)
        return block
    memory = torch.from_numpy(target)
    for start in range(0, len(block), _SERIAL_ITEMS):
        part = slice(start, start + _SERIAL_ITEMS)
        # By way of float32, which torch converts halves to several times faster.
        memory[part].copy_(block[part].float())
    return target


def _sum_products(numbers: Numbers, size: int) -> list[float]:
    """Return the sums of squares of the difference, of `x` and of `y`, and of products of `x` and `y`.

    `numbers` has `x`, `y` and the difference in rows of `_ROW` items; the first `size` items of each count.
    """
    rows, rest = divmod(size, _ROW)
    last = numbers[:, rows, :rest] if rest else numbers[:, 0, :0]
    ours, theirs, gap = np.vecdot(last, last).tolist()
    both = float(np.vecdot(last[0], last[1]))
    if not rows:
        return [gap, ours, theirs, both]
    full = numbers[:, :rows]
    squares = np.vecdot(full, full).sum(axis=1).tolist()
    both += float(np.vecdot(full[0], full[1]).sum())
    return [gap + squares[2], ours + squares[0], theirs + squares[1], both]


def _find_scale(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return a divisor that keeps squares of values in range: 1, except for extreme float64."""
    if not a.numel() or torch.float64 not in (a.dtype, b.dtype):
        return 1.0
    largest = max(float(side.double().abs().nan_to_num(posinf=0.0).max()) for side in (a, b) if not side.is_complex())
    return 1.0 if largest == 0 or _SAFE[0] < largest < _SAFE[1] else largest


@dataclass(slots=True)
class _Tally:
    """Totals of all blocks so far: the distance, and what counts against the tolerance."""

    allowed: Tolerance
    scale: float
    distance: DistanceTally[int] = field(default_factory=DistanceTally)
    """Of values that are finite on both sides; counts NaN, infinities and unequal values of all."""
    mismatches: int = 0
    first_mask: int | None = None
    """The first index that is NaN or infinite on one side only."""
    ulp: int = 0
    masks: int = 0

    def add(self, start: int, x: Numbers, y: Numbers, ranks: tuple[Numbers, Numbers] | None) -> None:
        """Add a block: values in float64 or complex128, and their ranks among the floats of the wider dtype, if any."""
        finite = np.isfinite(x) & np.isfinite(y)
        is_finite = bool(finite.all())
        differ = x != y
        if not is_finite:
            differ &= ~(np.isnan(x) & np.isnan(y))
            self.distance.add_nonfinite(x, y)
            self._add_masks(start, differ & ~finite)
            differ &= finite
            x, y = np.where(finite, x, 0), np.where(finite, y, 0)
        if differ.any():
            self.distance.unequal += int(np.count_nonzero(differ))
            gap = np.abs(x - y)
            self.mismatches += int(np.count_nonzero(gap > self.allowed.atol + self.allowed.rtol * np.abs(x)))
            index = int(gap.argmax())
            self.distance.keep_largest(start, index, float(gap[index]))
            if ranks is not None:
                self.ulp = max(self.ulp, _find_ulp(*(side[differ] for side in ranks)))
        self.distance.add_products(self._multiply(x, y))

    def _add_masks(self, start: int, is_mask: Numbers) -> None:
        count = int(np.count_nonzero(is_mask))
        self.masks += count
        self.distance.unequal += count
        self.mismatches += count
        if count and self.first_mask is None:
            self.first_mask = start + int(is_mask.argmax())

    def _multiply(self, x: Numbers, y: Numbers) -> list[float]:
        x, y = (np.ascontiguousarray(side).view(np.float64) for side in (x, y))
        if self.scale != 1.0:
            x, y = x / self.scale, y / self.scale
        numbers = np.zeros((3, -(-len(x) // _ROW), _ROW))
        for memory, values in zip(numbers.reshape(3, -1), (x, y, x - y), strict=True):
            memory[: len(x)] = values
        return _sum_products(numbers, len(x))

    def finish(self, total: int, *, has_ulps: bool) -> TensorDistance:
        """Return the numbers; `at` is an index into the flat tensor."""
        distance = self.distance
        gap, ours, theirs, both = map(float, distance.products)
        index = self.first_mask if distance.largest_at is None else sum(distance.largest_at)
        return TensorDistance(
            "values",
            total=total,
            unequal=distance.unequal,
            mismatches=self.mismatches,
            max_abs=distance.largest,
            at=None if index is None else (index,),
            relative_l2=distance.relative_l2,
            cosine=max(-1.0, min(1.0, both / math.sqrt(ours) / math.sqrt(theirs))) if ours and theirs else None,
            sqnr_db=math.inf if not gap else 10 * math.log10(ours / gap) if ours else -math.inf,
            max_ulp=self.ulp if has_ulps else None,
            nan=(distance.nan[0], distance.nan[1]),
            inf=(distance.inf[0], distance.inf[1]),
            masks=self.masks,
        )


def _find_ulp(ours: Numbers, theirs: Numbers) -> int:
    """Return the largest difference of ranks between two blocks."""
    is_same_sign = (ours ^ theirs) >= 0
    # Across zero the difference may overflow int64, so both sides are counted from zero and added as Python ints.
    near = int(np.where(is_same_sign, np.abs(ours - theirs), 0).max())
    if is_same_sign.all():
        return near
    ours, theirs = np.abs(ours[~is_same_sign]), np.abs(theirs[~is_same_sign])
    index = int((ours.astype(np.float64) + theirs).argmax())
    return max(near, int(ours[index]) + int(theirs[index]))


def _rank_floats(block: torch.Tensor) -> Numbers:
    """Return the rank of each float: the number of floats between zero and it, negative below zero."""
    bits = block.view(_BITS[block.dtype]).numpy().astype(np.int64)
    magnitude = bits & ((1 << (8 * block.dtype.itemsize - 1)) - 1)
    return np.where(bits < 0, -magnitude, magnitude)
