"""Measure the distance of two tensors: one pass over both in blocks; or bounds from their statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from queue import Empty, SimpleQueue
from types import MappingProxyType, TracebackType
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from typing_extensions import Self

from holdfast.capture.stored.events import Event, Stats
from holdfast.capture.stored.runs import Run
from holdfast.diff.values import (
    BITS,
    BLOCK_ITEMS,
    BlockDistance,
    DistanceTally,
    Numbers,
    QuickBlocks,
    Workspace,
    dot,
    unravel,
)
from holdfast.digest import fingerprint, hash_bytes
from holdfast.display.markup import readable_repr
from holdfast.errors import NotFound
from holdfast.json_text import Json
from holdfast.objects.blocks import BlockPool
from holdfast.repo.engine import Engine
from holdfast.snapshot.batches import iter_batches
from holdfast.snapshot.load import ReusedMemory
from holdfast.tensors.spec import find_dtype

_QUICK: Final = frozenset(BITS)
"""Dtypes whose blocks are compared by `QuickBlocks`."""
_MAX_FILL_BYTES: Final = 64 << 20
"""Larger tensors are not compared with fills: each size takes so much memory once."""
_KEPT_FILLS: Final = 4000
UNKNOWN: Final = "whether it is NaN or infinite is unknown at level digest"
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
    """The norm of the difference divided by that of `a`, to about 6 digits; a lower bound if only stats are known."""
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


def describe_nonfinite(found: TensorDistance, names: tuple[str, str]) -> str:
    """Return how many values are NaN or infinite in each of two runs; "" if equally many are, or it is not known."""
    parts = [
        f"{_count(theirs)} of {found.total} values are {word} in {names[1]}, and {_count(ours)} in {names[0]}"
        for word, (ours, theirs) in (("NaN", found.nan), ("infinite", found.inf))
        if ours != theirs
    ]
    return "; ".join(parts)


def _count(number: int) -> str:
    return str(number or "none")


def iter_unknown(found: TensorDistance | None, event: Event) -> Iterator[str]:
    """Yield a note if only digests of an event were compared: they do not show whether some of its values are NaN."""
    if found is not None and found.basis == "digest" and find_dtype(event.dtype).is_floating_point:
        yield f"{UNKNOWN}: record at level 'stats' to see it"


def recognize_fill(event: Event) -> Literal["NaN", "infinite", ""]:
    """Return what all values of a tensor are, by its digest alone: NaN or one infinity; "" if they are neither."""
    dtype = find_dtype(event.dtype)
    size_bytes = math.prod(event.shape) * dtype.itemsize
    if not dtype.is_floating_point or not 0 < size_bytes <= _MAX_FILL_BYTES:
        return ""
    for word, patterns in _list_fills(dtype):
        if any(is_filled(event, pattern, size_bytes) for pattern in patterns):
            return word
    return ""


def describe_fill(a: Event, b: Event, names: tuple[str, str], *, of: str = "") -> str:
    """Return in which of two runs all values of a tensor are NaN or infinite; "" if they are in none, or in both.

    `of` names the tensor.
    """
    fills = recognize_fill(a), recognize_fill(b)
    parts = [
        f"all values{of and f' of {of}'} are {fill} in {name}" for fill, name in zip(fills, names, strict=True) if fill
    ]
    return "; ".join(parts) if fills[0] != fills[1] else ""


def is_filled(event: Event, pattern: bytes, size_bytes: int) -> bool:
    """Return whether a tensor of so many bytes consists of one pattern, by its digest."""
    return event.identity in _hash_fill(pattern, size_bytes)


@lru_cache(maxsize=_KEPT_FILLS)
def _hash_fill(pattern: bytes, size_bytes: int) -> tuple[bytes, bytes]:
    """Return both digests of a pattern that is repeated."""
    filled = pattern * (size_bytes // len(pattern))
    return fingerprint(filled), hash_bytes(filled)


@cache
def _list_fills(dtype: torch.dtype) -> Sequence[tuple[Literal["NaN", "infinite"], list[bytes]]]:
    """Return the bytes of the usual NaN and of infinity in a dtype, with both signs."""
    # Processors make NaN with the sign bit or without. Dtypes that have no infinity make NaN of it.
    values: list[tuple[Literal["NaN", "infinite"], float]] = [("NaN", math.nan), ("infinite", math.inf)]
    found = []
    for word, value in values:
        # Torch converts a few values and many values by different code, which makes different NaN.
        made = [torch.full((count,), value).to(dtype) for count in (1, 64)] + [torch.tensor([value], dtype=dtype)]
        items = {bytes(item) for each in made for item in each.view(torch.uint8).reshape(-1, dtype.itemsize).numpy()}
        found.append((word, sorted(items | {item[:-1] + bytes([item[-1] ^ 0x80]) for item in items})))
    return found


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
    for start in range(0, a.numel(), BLOCK_ITEMS):
        tally.add_integers(start, *(side[start : start + BLOCK_ITEMS] for side in (a, b)))
    at = None if tally.largest_at is None else (sum(tally.largest_at),)
    return TensorDistance("values", a.numel(), tally.unequal, tally.unequal, tally.largest, at)


def _measure_floats(
    a: torch.Tensor, b: torch.Tensor, wider: torch.dtype, allowed: Tolerance, space: Workspace
) -> TensorDistance:
    tally = _Tally(allowed, _find_scale(a, b))
    compared = torch.complex128 if wider.is_complex else torch.float64
    blocks = None
    if a.dtype == b.dtype and a.dtype in _QUICK and tally.scale == 1.0:
        blocks = QuickBlocks(a, b, space, rtol=allowed.rtol, atol=allowed.atol)
    # Extreme values overflow when they are subtracted; `_Tally` handles NaN and infinities itself.
    with np.errstate(all="ignore"):
        for start in range(0, a.numel(), BLOCK_ITEMS):
            found = blocks.measure(start, known=tally.distance.largest) if blocks else None
            if found is not None:
                tally.add_quick(start, found)
                continue
            x, y = (side[start : start + BLOCK_ITEMS] for side in (a, b))
            ranks = (_rank_floats(x.to(wider)), _rank_floats(y.to(wider))) if wider in BITS else None
            tally.add(start, x.to(compared).numpy(), y.to(compared).numpy(), ranks)
    return tally.finish(a.numel(), has_ulps=wider in BITS)


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

    def add_quick(self, start: int, block: BlockDistance) -> None:
        """Add a block that was measured already."""
        self.distance.unequal += block.unequal
        self.distance.keep_largest(start, block.largest_at, block.largest)
        self.distance.add_products(block.products)
        self.mismatches += block.mismatches
        self.ulp = max(self.ulp, block.ulp)

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
        gap = x - y
        return [dot(gap, gap), dot(x, x), dot(y, y), dot(x, y)]

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
    bits = block.view(BITS[block.dtype]).numpy().astype(np.int64)
    magnitude = bits & ((1 << (8 * block.dtype.itemsize - 1)) - 1)
    return np.where(bits < 0, -magnitude, magnitude)


_BATCH_BYTES: Final = 32 << 20
"""The bytes of a batch: enough that a read of them is one of a disk's large ones, few enough for the cache."""


class TensorPair(NamedTuple):
    """An event of each of two runs, whose tensors are to be compared."""

    ours: Run
    a: Event
    theirs: Run
    b: Event

    @property
    def has_values(self) -> bool:
        """Whether both tensors were kept and have the same shape."""
        return bool(self.a.leaf and self.b.leaf) and self.a.shape == self.b.shape

    @property
    def size_bytes(self) -> int:
        """The bytes to read."""
        if not self.has_values:
            return 0
        return sum(math.prod(event.shape) * find_dtype(event.dtype).itemsize for event in (self.a, self.b))

    def measure(self, tolerance: Tolerance | None) -> TensorDistance:
        """Return the distance from the values, else from the statistics, else from the digests."""
        a, b = self.a, self.b
        if a.shape != b.shape:
            note = f"shapes differ: {a.shape} against {b.shape}"
            return TensorDistance("digest", total=math.prod(a.shape), note=note)
        try:
            x, y = self.ours.read_tensor(a), self.theirs.read_tensor(b)
        except NotFound:
            return measure_stats(a.stats, b.stats, math.prod(a.shape))
        return measure(x, y, tolerance=tolerance)


class Measurer:
    """Measures pairs on a thread for each core, within a memory budget. Use it in a `with`, from one thread."""

    def __init__(
        self, tolerance: Tolerance | None, *, budget_bytes: int, advance: Callable[[int], object] = lambda _: None
    ) -> None:
        """Call `advance` with the bytes of each batch that is done."""
        self._tolerance = tolerance
        self._advance = advance
        # Half of it: the other half is for the threads that read.
        self._engine = Engine("holdfast-compare", budget_bytes=budget_bytes // 2, waits=False)
        self._batch_bytes = min(_BATCH_BYTES, budget_bytes // 2 // self._engine.threads)
        self._blocks = BlockPool(self._batch_bytes, kept=self._engine.threads, huge=True)
        self._spaces: SimpleQueue[Workspace] = SimpleQueue()

    def __enter__(self) -> Self:
        """Return the measurer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop its threads."""
        self._engine.__exit__(kind, error, trace)

    def iter_distances(self, jobs: Iterable[TensorPair]) -> Iterator[TensorDistance]:
        """Yield the distance of each pair, in order, while later ones are measured."""
        batches = iter_batches(jobs, lambda job: job.size_bytes, self._batch_bytes)
        sized = ((batch, sum(job.size_bytes for job in batch)) for batch in batches)
        for found, size_bytes in self._engine.iter_results(self._measure_batch, sized):
            self._advance(size_bytes)
            yield from found

    def _measure_batch(self, batch: Sequence[TensorPair]) -> tuple[list[TensorDistance], int]:
        with self._blocks.lend() as block:
            try:
                space = self._spaces.get_nowait()
            except Empty:
                space = Workspace()
            try:
                found = self._measure_in(batch, ReusedMemory(block), space)
            finally:
                self._spaces.put(space)
        return found, sum(job.size_bytes for job in batch)

    def _measure_in(self, batch: Sequence[TensorPair], memory: ReusedMemory, space: Workspace) -> list[TensorDistance]:
        try:
            tensors = _read_batch([job for job in batch if job.has_values], memory)
        except NotFound:
            tensors = {}  # a segment no longer exists: then each pair says what is known of it
        found = []
        for job in batch:
            both = tensors.get(id(job))
            found.append(
                measure(*both, tolerance=self._tolerance, space=space) if both else job.measure(self._tolerance)
            )
        return found


def _read_batch(jobs: Sequence[TensorPair], memory: ReusedMemory) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return both tensors of each job, by its id; what one run has of them is read together."""
    wanted: dict[int, tuple[Run, list[Event]]] = {}
    for job in jobs:
        for run, event in ((job.ours, job.a), (job.theirs, job.b)):
            wanted.setdefault(id(run), (run, []))[1].append(event)
    read = {key: iter(run.read_tensors(events, memory)) for key, (run, events) in wanted.items()}
    return {id(job): (next(read[id(job.ours)]), next(read[id(job.theirs)])) for job in jobs}
