"""Decide whether paired events are equal, close or differ: by tolerance table, measured noise or a reference run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from holdfast.capture.compare.align import NameMap, Pair, align
from holdfast.capture.compare.distances import Measurer, TensorPair
from holdfast.capture.compare.measure import EXACT, TensorDistance, Tolerance, find_wider
from holdfast.capture.compare.step_graph import Standing
from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import Run
from holdfast.lru import LruCache

_KEPT_MEASURES: Final = 100_000
"""Number of distances to cache."""
_KEPT_STEPS: Final = 4
"""Number of aligned steps to cache."""
_NEVER: Final = 1 << 62
"""A step after all others."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What counts as close."""

    tolerance: Tolerance | None = None
    """One tolerance for all dtypes; None uses the table."""
    factor: float = 4.0
    """With a noise run: the largest difference that counts as close, as a multiple of the measured noise."""
    margin: float = 2.0
    """With a reference: how far the second run may be from it, as a multiple of the first run's distance."""


def make_bounds(tolerance: tuple[float, float] | None, factor: float, margin: float) -> Bounds:
    """Return bounds with a tolerance that is given as `(rtol, atol)`."""
    return Bounds(None if tolerance is None else Tolerance(*tolerance), factor, margin)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the events of a pair are equal, and by how much they differ."""

    standing: Standing
    measure: TensorDistance | None = None
    floor: float | None = None
    """The relative difference between the first run and its repetition, if it was measured."""


_EQUAL: Final = Verdict("equal")
_UNKNOWN: Final = Verdict("missing")
"""The tensors cannot be compared: their digests are of different kinds, and neither values nor statistics were kept."""


class Judge:
    """Compares the pairs of two runs; measures each pair of tensors once, however often it occurs."""

    def __init__(
        self,
        a: Run,
        b: Run,
        bounds: Bounds,
        *,
        noise: Run | None = None,
        reference: Run | None = None,
        names: NameMap | None = None,
    ) -> None:
        """Compare `b` with `a`."""
        self._a, self._b, self._bounds = a, b, bounds
        self._noise = _AlignedRun(a, noise) if noise else None
        self._reference = _AlignedRun(a, reference, names) if reference else None
        self._known: LruCache[tuple[object, ...], TensorDistance] = LruCache(_KEPT_MEASURES)

    def measure_ahead(self, pairs: Iterable[Pair], measurer: Measurer) -> None:
        """Measure what `judge` needs to know about these pairs, all at once."""
        jobs = (job for pair in pairs if not _is_equal(pair.a, pair.b) for job in self._iter_jobs(pair))
        wanted = {key: job for job in jobs if self._known.get(key := _find_key(job)) is None}
        for key, found in zip(wanted, measurer.iter_distances(wanted.values()), strict=True):
            self._known.put(key, found)

    def _iter_jobs(self, pair: Pair) -> Iterator[TensorPair]:
        a, b = pair.a, pair.b
        yield TensorPair(self._a, a, self._b, b)
        if a.shape != b.shape:
            return
        repeated = self._noise.find(a) if self._noise else None
        if self._noise and repeated and repeated.shape == a.shape and not repeated.has_bytes_of(a):
            yield TensorPair(self._a, a, self._noise.run, repeated)
        expected = self._reference.find(a) if self._reference else None
        if self._reference and expected:
            yield TensorPair(self._reference.run, expected, self._a, a)
            yield TensorPair(self._reference.run, expected, self._b, b)

    def judge(self, pair: Pair, *, is_given: bool) -> Verdict:
        """Return the verdict on a pair; `is_given`: the tensor was not computed, so it has no rounding."""
        a, b = pair.a, pair.b
        if _is_equal(a, b):
            return _EQUAL
        found = self._measure(self._a, a, self._b, b)
        if found.basis == "digest" and _is_other_kind(a, b):
            return _UNKNOWN
        if found.unequal == 0:
            # Other bits for the same values: a zero of the other sign, or another dtype that represents them too.
            return Verdict("close", found)
        if a.shape != b.shape:
            return Verdict("differs", found)
        floor = self._find_floor(a)
        if floor is not None:
            is_noise = self._is_noise(found, floor) or (found.is_close and self._has_noise_before(a))
            return Verdict("close" if is_noise else "differs", found, floor.relative_l2)
        if is_given and a.dtype == b.dtype:
            return Verdict("differs", found)
        if (is_close := self._fits_reference(a, b)) is not None:
            return Verdict("close" if is_close else "differs", found)
        return Verdict("close" if found.is_close else "differs", found)

    def _measure(self, ours: Run, a: Event, theirs: Run, b: Event) -> TensorDistance:
        job = TensorPair(ours, a, theirs, b)
        found = self._known.get(key := _find_key(job))
        if found is None:
            found = job.measure(self._bounds.tolerance)
            self._known.put(key, found)
        return found

    def _find_floor(self, a: Event) -> TensorDistance | None:
        """Return the distance of the repeated run from the first one at this event; None if it is not known."""
        repeated = self._noise.find(a) if self._noise else None
        if self._noise is None or repeated is None or repeated.shape != a.shape:
            return None
        if repeated.has_bytes_of(a):
            return TensorDistance("values", unequal=0, max_abs=0.0, relative_l2=0.0)
        found = self._measure(self._a, a, self._noise.run, repeated)
        return found if found.basis == "values" else None

    def _has_noise_before(self, a: Event) -> bool:
        """Return whether the repeated run diverged from the first one before this event.

        Then it may be equal here only by chance, and a difference within the table's tolerance is still noise.
        """
        return self._noise is not None and self._noise.has_diverged(a)

    def _is_noise(self, found: TensorDistance, floor: TensorDistance) -> bool:
        if found.basis != "values" or found.masks > floor.masks:
            return False
        both = [(found.max_abs, floor.max_abs), (found.relative_l2, floor.relative_l2)]
        if found.relative_l2 is None:
            both.append((found.unequal, floor.unequal))
        return all((size or 0) <= self._bounds.factor * (usual or 0) for size, usual in both)

    def _fits_reference(self, a: Event, b: Event) -> bool | None:
        """Return whether the second run is about as near to the reference as the first; None if it is not known."""
        expected = self._reference.find(a) if self._reference else None
        if self._reference is None or expected is None:
            return None
        run = self._reference.run
        ours, theirs = self._measure(run, expected, self._a, a), self._measure(run, expected, self._b, b)
        if ours.relative_l2 is None or theirs.relative_l2 is None or {ours.basis, theirs.basis} != {"values"}:
            return None
        # A value that is exact in the first run may still be rounded in the second, by one unit in the last place.
        limit = self._bounds.margin * ours.relative_l2 + _find_eps(a, b)
        return theirs.masks <= ours.masks and theirs.relative_l2 <= limit


def _is_equal(a: Event, b: Event) -> bool:
    return a.has_bytes_of(b) is True and a.dtype == b.dtype and a.shape == b.shape


def _is_other_kind(a: Event, b: Event) -> bool:
    """Return whether two tensors could be equal, and have no digests of the same kind by which to tell."""
    return a.has_bytes_of(b) is None and a.dtype == b.dtype and a.shape == b.shape


def _find_key(job: TensorPair) -> tuple[object, ...]:
    a, b = job.a, job.b
    return (a.identity, a.dtype, a.shape, b.identity, b.dtype, b.shape, bool(a.leaf and b.leaf))


def _find_eps(a: Event, b: Event) -> float:
    wider = find_wider(getattr(torch, a.dtype), getattr(torch, b.dtype))
    return torch.finfo(wider).eps if wider.is_floating_point or wider.is_complex else 0.0


class _AlignedRun:
    """A noise or reference run, aligned with the first run: finds its event for an event of the first."""

    def __init__(self, a: Run, run: Run, names: NameMap | None = None) -> None:
        self.run = run
        self._a, self._names = a, names
        self._steps: LruCache[tuple[int, int], Mapping[int, Event]] = LruCache(_KEPT_STEPS)
        self._diverged: dict[int, tuple[int, int]] = {}
        """By rank, the step and event number at which it diverges from the first run."""

    def find(self, event: Event) -> Event | None:
        key = (event.site.step, event.rank)
        partners = self._steps.get(key)
        if partners is None:
            pairs = align(self._a.events(*key), self.run.events(*key), names=self._names).pairs
            # Pairs that match only by shape or bytes may be unrelated, so they give no noise floor.
            partners = {pair.a.seq: pair.b for pair in pairs if pair.how not in ("shape", "digest")}
            self._steps.put(key, partners)
        return partners.get(event.seq)

    def has_diverged(self, event: Event) -> bool:
        """Return whether anything before an event differs between the two runs."""
        if event.rank not in self._diverged:
            self._diverged[event.rank] = self._find_divergence(event.rank)
        return self._diverged[event.rank] < (event.site.step, event.seq)

    def _find_divergence(self, rank: int) -> tuple[int, int]:
        for step in self._a.steps:
            if step in self.run.steps and self._a.root(step, rank) != self.run.root(step, rank):
                pairs = align(self._a.events(step, rank), self.run.events(step, rank), names=self._names).pairs
                unequal = (pair.a.seq for pair in pairs if pair.a.has_bytes_of(pair.b) is False)
                return (step, min(unequal, default=-1))
        return (_NEVER, 0)


def parse_tolerance(text: str) -> Tolerance | None:
    """Parse `table`, `exact`, or `RTOL,ATOL`; raises ValueError for anything else."""
    if text == "table":
        return None
    if text == "exact":
        return EXACT
    try:
        rtol, atol = (float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a tolerance: use table, exact, or RTOL,ATOL such as 1e-3,1e-5") from error
    return Tolerance(rtol, atol)
