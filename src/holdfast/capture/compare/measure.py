"""How far two tensors are apart: one pass over both in blocks, in float64; or what their stored numbers alone tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from holdfast.capture.stored.events import Stats
from holdfast.repo.format.record import Json

_BLOCK_ITEMS: Final = 1 << 13
"""Few enough to stay in the cache, several times over, and for no library to wake its threads for."""
_BITS: Final[Mapping[torch.dtype, torch.dtype]] = MappingProxyType(
    {
        torch.float16: torch.int16,
        torch.bfloat16: torch.int16,
        torch.float32: torch.int32,
        torch.float64: torch.int64,
    }
)
_SIGN: Final = -(1 << 63)
_SAFE: Final = (1e-140, 1e140)
"""Magnitudes whose squares, summed, are floats."""

Basis = Literal["values", "stats", "digest"]
Numbers = np.ndarray[Any, Any]


class Tolerance(NamedTuple):
    """A value fits if it is no farther from the expected one than `atol + rtol * |expected|`."""

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
"""What `torch.testing.assert_close` allows by default, by dtype; all others have to be equal."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far `b` is from `a`; NaN in the same place on both sides counts as equal. None is what is not known."""

    basis: Basis
    total: int = 0
    unequal: int | None = None
    """How many values are not the same."""
    mismatches: int | None = None
    """How many of them are outside of the tolerance, or NaN or infinite on one side only."""
    max_abs: float | None = None
    """The largest difference of values that are finite on both sides; at least that, where only stats are known."""
    at: tuple[int, ...] | None = None
    """Where that is, or else the first place that is NaN or infinite on one side only."""
    values: tuple[complex, complex] | None = None
    """Both values there."""
    relative_l2: float | None = None
    """The norm of the difference by that of `a`; at least that, where only stats are known."""
    cosine: float | None = None
    sqnr_db: float | None = None
    """Power of `a` by power of the difference, in decibel; infinite if nothing differs."""
    max_ulp: int | None = None
    """How many floats of the wider dtype lie between the two that are farthest apart in this sense."""
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)
    masks: int = 0
    """In how many places only one side is NaN, or infinite in that way."""
    note: str = ""

    @property
    def percent(self) -> float | None:
        """How much is outside of the tolerance."""
        if self.mismatches is None:
            return None
        return 100 * self.mismatches / self.total if self.total else 0.0

    @property
    def is_close(self) -> bool:
        """Whether all values are known to be within the tolerance."""
        return self.mismatches == 0

    def to_json(self) -> dict[str, Json]:
        """Return the numbers as JSON has them; those that are not finite as text."""
        return {
            "basis": self.basis,
            "total": self.total,
            "unequal": self.unequal,
            "mismatches": self.mismatches,
            "percent": self.percent,
            "max_abs": _spell(self.max_abs),
            "at": None if self.at is None else list(self.at),
            "values": None if self.values is None else [_spell(value) for value in self.values],
            "relative_l2": _spell(self.relative_l2),
            "cosine": _spell(self.cosine),
            "sqnr_db": _spell(self.sqnr_db),
            "max_ulp": self.max_ulp,
            "nan": list(self.nan),
            "inf": list(self.inf),
            "masks": self.masks,
            "note": self.note,
        }


def _spell(value: complex | None) -> Json:
    if value is None or isinstance(value, int):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def find_tolerance(a: torch.dtype, b: torch.dtype) -> Tolerance:
    """Return what the table allows for the wider of two dtypes."""
    return TABLE.get(str(find_wider(a, b)).removeprefix("torch."), EXACT)


def find_wider(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of both are compared."""
    if a == b:
        return a
    # Torch promotes no float of 8 bits, and no unsigned integer of more than 8.
    a, b = (_widen(dtype) for dtype in (a, b))
    return torch.promote_types(a, b)


def _widen(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.float32
    return torch.int64 if dtype in (torch.uint16, torch.uint32) else torch.float64 if dtype == torch.uint64 else dtype


def measure(a: torch.Tensor, b: torch.Tensor, *, tolerance: Tolerance | None = None) -> Distance:
    """Return how far `b` is from `a`, by the table's tolerance if none is given."""
    if a.shape != b.shape:
        note = f"shapes differ: {tuple(a.shape)} against {tuple(b.shape)}"
        return Distance("values", total=a.numel(), note=note)
    allowed = find_tolerance(a.dtype, b.dtype) if tolerance is None else tolerance
    ours, theirs = (side.detach().cpu().resolve_conj().resolve_neg().contiguous() for side in (a, b))
    wider = find_wider(a.dtype, b.dtype)
    if not (wider.is_floating_point or wider.is_complex):
        found = _measure_integers(ours, theirs)
    else:
        found = _measure_floats(ours.flatten(), theirs.flatten(), wider, allowed)
    at = None if found.at is None else _unravel(found.at[0], tuple(a.shape))
    values = None if found.at is None else _pick(ours, theirs, found.at[0])
    note = f"dtypes differ: {_name(a.dtype)} against {_name(b.dtype)}" if a.dtype != b.dtype else ""
    return replace(found, at=at, values=values, note=note)


def measure_stats(a: Stats | None, b: Stats | None, total: int) -> Distance:
    """Return what is known of two tensors that differ and of which only numbers, or not even those, were kept."""
    if a is None or b is None:
        return Distance(
            "digest", total=total, note="only digests were kept: the bytes differ, by how much is not known"
        )
    gap, drift = max(abs(a.minimum - b.minimum), abs(a.maximum - b.maximum)), abs(a.norm - b.norm)
    # Where nothing is finite on one side, there are no numbers.
    is_known = math.isfinite(gap) and math.isfinite(drift)
    relative = drift / a.norm if a.norm else math.inf if drift else 0.0
    return Distance(
        "stats",
        total=total,
        max_abs=gap if is_known else None,
        relative_l2=relative if is_known else None,
        nan=(a.nan, b.nan),
        inf=(a.inf, b.inf),
        note="only stats were kept: the differences are at least these",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unravel(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.append(rest)
    return tuple(reversed(index))


def _pick(a: torch.Tensor, b: torch.Tensor, place: int) -> tuple[complex, complex]:
    x, y = (side.flatten()[place].item() for side in (a, b))
    return x, y


def _measure_integers(a: torch.Tensor, b: torch.Tensor) -> Distance:
    total, unequal, largest, at = a.numel(), 0, 0, None
    for start in range(0, total, _BLOCK_ITEMS):
        x, y = (_order(side.flatten()[start : start + _BLOCK_ITEMS]) for side in (a, b))
        unequal += int((x != y).sum())
        # Modulo 2**64 the difference is right, and as an unsigned number it fits.
        gap = torch.maximum(x, y) - torch.minimum(x, y)
        place = int((gap ^ _SIGN).argmax())
        if (size := int(gap[place]) % (1 << 64)) > largest:
            largest, at = size, (start + place,)
    return Distance("values", total, unequal, unequal, largest, at)


def _order(block: torch.Tensor) -> torch.Tensor:
    """Return integers as int64 that are as far apart as before; those of uint64 in their order."""
    return block.view(torch.int64) ^ _SIGN if block.dtype == torch.uint64 else block.to(torch.int64)


def _measure_floats(a: torch.Tensor, b: torch.Tensor, wider: torch.dtype, allowed: Tolerance) -> Distance:
    tally = _Tally(allowed, _find_scale(a, b))
    compared = torch.complex128 if wider.is_complex else torch.float64
    # Two infinities, or two numbers at the ends of what a float can hold, have no difference; they are looked for.
    with np.errstate(all="ignore"):
        for start in range(0, a.numel(), _BLOCK_ITEMS):
            x, y = (side[start : start + _BLOCK_ITEMS] for side in (a, b))
            ranks = (_rank_floats(x.to(wider)), _rank_floats(y.to(wider))) if wider in _BITS else None
            tally.add(start, x.to(compared).numpy(), y.to(compared).numpy(), ranks)
    return tally.finish(a.numel(), has_ulps=wider in _BITS)


def _find_scale(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return what values are to be divided by for their squares to be floats: 1, but for extreme float64."""
    if not a.numel() or torch.float64 not in (a.dtype, b.dtype):
        return 1.0
    largest = max(float(side.double().abs().nan_to_num(posinf=0.0).max()) for side in (a, b) if not side.is_complex())
    return 1.0 if largest == 0 or _SAFE[0] < largest < _SAFE[1] else largest


@dataclass(slots=True)
class _Tally:
    """What is known of the differences so far."""

    allowed: Tolerance
    scale: float
    unequal: int = 0
    mismatches: int = 0
    largest: float = 0.0
    at: int | None = None
    torn_at: int | None = None
    ulp: int = 0
    masks: int = 0
    nan: list[int] = field(default_factory=lambda: [0, 0])
    inf: list[int] = field(default_factory=lambda: [0, 0])
    squares: list[float] = field(default_factory=lambda: [0.0] * 4)
    """Of the difference, of a, of b, and of a times b."""

    def add(self, start: int, x: Numbers, y: Numbers, ranks: tuple[Numbers, Numbers] | None) -> None:
        """Add a block: in float64 or complex128, and as ranks among the floats of the wider dtype, if it has them."""
        finite = np.isfinite(x) & np.isfinite(y)
        is_finite = bool(finite.all())
        differ = x != y
        if not is_finite:
            differ &= ~(np.isnan(x) & np.isnan(y))
            self._add_masks(start, x, y, differ & ~finite)
            differ &= finite
            x, y = np.where(finite, x, 0), np.where(finite, y, 0)
        if not differ.any():
            self._add_squares(x, y)
            return
        self.unequal += int(np.count_nonzero(differ))
        gap = np.abs(x - y)
        self.mismatches += int(np.count_nonzero(gap > self.allowed.atol + self.allowed.rtol * np.abs(x)))
        place = int(gap.argmax())
        if (size := float(gap[place])) > self.largest:
            self.largest, self.at = size, start + place
        if ranks is not None:
            self.ulp = max(self.ulp, _find_ulp(*(side[differ] for side in ranks)))
        self._add_squares(x, y)

    def _add_masks(self, start: int, x: Numbers, y: Numbers, torn: Numbers) -> None:
        for side, block in enumerate((x, y)):
            self.nan[side] += int(np.count_nonzero(np.isnan(block)))
            self.inf[side] += int(np.count_nonzero(np.isinf(block)))
        count = int(np.count_nonzero(torn))
        self.masks += count
        self.unequal += count
        self.mismatches += count
        if count and self.torn_at is None:
            self.torn_at = start + int(torn.argmax())

    def _add_squares(self, x: Numbers, y: Numbers) -> None:
        x, y = (np.ascontiguousarray(side).view(np.float64) for side in (x, y))
        if self.scale != 1.0:
            x, y = x / self.scale, y / self.scale
        gap = x - y
        for number, (left, right) in enumerate(((gap, gap), (x, x), (y, y), (x, y))):
            self.squares[number] += float(np.dot(left, right))

    def finish(self, total: int, *, has_ulps: bool) -> Distance:
        """Return the numbers; `at` is a place in the flat tensor."""
        gap, ours, theirs, both = self.squares
        place = self.torn_at if self.at is None else self.at
        return Distance(
            "values",
            total=total,
            unequal=self.unequal,
            mismatches=self.mismatches,
            max_abs=self.largest,
            at=None if place is None else (place,),
            relative_l2=math.sqrt(gap / ours) if ours else math.inf if gap else 0.0,
            cosine=max(-1.0, min(1.0, both / math.sqrt(ours) / math.sqrt(theirs))) if ours and theirs else None,
            sqnr_db=math.inf if not gap else 10 * math.log10(ours / gap) if ours else -math.inf,
            max_ulp=self.ulp if has_ulps else None,
            nan=(self.nan[0], self.nan[1]),
            inf=(self.inf[0], self.inf[1]),
            masks=self.masks,
        )


def _find_ulp(ours: Numbers, theirs: Numbers) -> int:
    """Return how many floats lie between those of two blocks that are farthest apart in this sense."""
    is_same_sign = (ours ^ theirs) >= 0
    # Across zero the count may be larger than any int64, so both sides are counted from there.
    near = int(np.where(is_same_sign, np.abs(ours - theirs), 0).max())
    if is_same_sign.all():
        return near
    ours, theirs = np.abs(ours[~is_same_sign]), np.abs(theirs[~is_same_sign])
    place = int((ours.astype(np.float64) + theirs).argmax())
    return max(near, int(ours[place]) + int(theirs[place]))


def _rank_floats(block: torch.Tensor) -> Numbers:
    """Return for each float how many floats lie between zero and it; below zero that number is negative."""
    bits = block.view(_BITS[block.dtype]).numpy().astype(np.int64)
    magnitude = bits & ((1 << (8 * block.dtype.itemsize - 1)) - 1)
    return np.where(bits < 0, -magnitude, magnitude)
