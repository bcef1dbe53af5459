"""Pair the events of two runs: by site, name, call, shape and bytes; and decide whether a pair is equal."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache, partial
from typing import Final, Literal

import torch

from holdfast.capture.compare.measure import EXACT, Measurer, TensorDistance, TensorPair, Tolerance, find_wider
from holdfast.capture.compare.step_graph import Standing
from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import Run
from holdfast.lru import LruCache

How = Literal["exact", "name", "call", "shape", "digest"]
"""Which pass paired two events; each pass sees only the events that earlier passes left."""

WRAPPERS: Final = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
"""Name components that wrappers add: data-parallel, compiled, sharded and checkpointed modules."""
_MAX_CELLS: Final = 250_000
"""Limit for aligning a stretch by common blocks: the product of the lengths of both sides."""

NameMap = Mapping[str, str]
"""Names of the first run to names of the second: a module and everything below it; `*` matches any component."""


@dataclass(frozen=True, slots=True)
class Pair:
    """An event of each run, treated as the same one."""

    a: Event
    b: Event
    how: How


@dataclass(frozen=True, slots=True)
class Alignment:
    """The pairs in the order of the first run, and the events that only one run has."""

    pairs: tuple[Pair, ...]
    only_a: tuple[Event, ...]
    only_b: tuple[Event, ...]


def align(a: Sequence[Event], b: Sequence[Event], *, names: NameMap | None = None) -> Alignment:
    """Pair the events of one step of two runs; both lists are in the order of observation.

    Takes linear time, except for short stretches of events whose names differ.
    """
    aligner = _Aligner(a, b)
    aligner.pair_by("exact", lambda event: event.site, lambda event: event.site)
    rename = _make_renaming(names or {})
    aligner.pair_by(
        "name", partial(_find_renamed_site, rename=rename), partial(_find_renamed_site, rename=strip_wrappers)
    )
    for find in (_find_shaped_call, _find_call, _find_shaped_name, _find_name):
        aligner.pair_by("call", partial(find, rename=rename), partial(find, rename=strip_wrappers))
    aligner.pair_by_order()
    for find_bytes in (_find_blake3, _find_xxh3):
        aligner.pair_by("digest", find_bytes, find_bytes)
    return aligner.finish()


def strip_wrappers(fqn: str) -> str:
    """Return a name without the components that wrappers added."""
    return ".".join(part for part in fqn.split(".") if part not in WRAPPERS)


def _make_renaming(names: NameMap) -> Callable[[str], str]:
    rules = [(_compile_rule(old), new) for old, new in names.items()]

    @cache
    def rename(fqn: str) -> str:
        bare = strip_wrappers(fqn)
        return next((found for rule, new in rules if (found := _apply_rule(rule, new, bare))), bare)

    return rename


def _compile_rule(pattern: str) -> re.Pattern[str]:
    parts = (re.escape(part) for part in strip_wrappers(pattern).split("*"))
    return re.compile(r"(.*)".join(parts).replace(r"(.*)\.", r"([^.]*)\.") + r"(?P<rest>(?:\..*)?)")


def _apply_rule(rule: re.Pattern[str], new: str, fqn: str) -> str | None:
    match = rule.fullmatch(fqn)
    if match is None:
        return None
    *parts, rest = match.groups()
    filled = iter(parts)
    return re.sub(r"\*", lambda star: next(filled, star[0]), new) + rest


def _find_renamed_site(event: Event, rename: Callable[[str], str]) -> Hashable:
    site = event.site
    return (site.phase, site.kind, rename(site.fqn), site.call, site.path)


def _find_shaped_call(event: Event, rename: Callable[[str], str]) -> tuple[Hashable, ...]:
    # Among several results of one call, pair those of the same shape.
    return (*_find_call(event, rename), event.shape)


def _find_shaped_name(event: Event, rename: Callable[[str], str]) -> tuple[Hashable, ...]:
    return (*_find_name(event, rename), event.shape)


def _find_call(event: Event, rename: Callable[[str], str]) -> tuple[Hashable, ...]:
    return (event.site.kind, rename(event.site.fqn), event.site.call, _find_stage(event))


def _find_name(event: Event, rename: Callable[[str], str]) -> tuple[Hashable, ...]:
    return (event.site.kind, rename(event.site.fqn), _find_stage(event))


def _find_stage(event: Event) -> str:
    """Return what distinguishes gradients of a parameter, and inputs changed in place from outputs."""
    path = event.site.path
    return path if path.startswith("#") else ""


def _find_blake3(event: Event) -> Hashable:
    return (event.blake3, event.dtype, event.shape, _find_stage(event)) if event.blake3 else None


def _find_xxh3(event: Event) -> Hashable:
    return (event.digest, event.dtype, event.shape, _find_stage(event)) if event.digest else None


def _find_signature(event: Event) -> Hashable:
    return (event.site.kind, event.site.phase, event.shape, event.dtype, _find_stage(event))


class _Aligner:
    """The state of one alignment: the pairs so far, and the indices that are not paired yet."""

    def __init__(self, a: Sequence[Event], b: Sequence[Event]) -> None:
        self._a, self._b = a, b
        self._left_a, self._left_b = list(range(len(a))), list(range(len(b)))
        self._pairs: dict[int, tuple[int, How]] = {}

    def pair_by(self, how: How, key_a: Callable[[Event], Hashable], key_b: Callable[[Event], Hashable]) -> None:
        """Pair events with the same key, in order; those whose key is None are left."""
        if not self._left_a or not self._left_b:
            return
        waiting: defaultdict[Hashable, deque[int]] = defaultdict(deque)
        for index in self._left_b:
            if (key := key_b(self._b[index])) is not None:
                waiting[key].append(index)
        found = ((index, waiting.get(key_a(self._a[index]))) for index in self._left_a)
        self._keep(how, [(index, queue.popleft()) for index, queue in found if queue])

    def pair_by_order(self) -> None:
        """Pair events with the same kind, phase, shape and dtype that come in the same order."""
        if self._left_a and self._left_b:
            ours = [_find_signature(self._a[index]) for index in self._left_a]
            theirs = [_find_signature(self._b[index]) for index in self._left_b]
            anchors = self._find_anchors()
            matched = [*_iter_matches(ours, theirs, anchors)]
            self._keep("shape", [(self._left_a[left], self._left_b[right]) for left, right in matched])

    def _find_anchors(self) -> list[tuple[int, int]]:
        """Return unpaired events whose bytes occur once in each run, as pairs in an order that both runs share."""
        ours, theirs = (
            _find_unique([(_find_signature(side[index]), side[index].identity) for index in left])
            for side, left in ((self._a, self._left_a), (self._b, self._left_b))
        )
        common = [(index, theirs[key]) for key, index in ours.items() if key in theirs]
        return _find_rising(common)

    def _keep(self, how: How, pairs: Sequence[tuple[int, int]]) -> None:
        self._pairs.update({left: (right, how) for left, right in pairs})
        paired_a, paired_b = {left for left, _ in pairs}, {right for _, right in pairs}
        self._left_a = [index for index in self._left_a if index not in paired_a]
        self._left_b = [index for index in self._left_b if index not in paired_b]

    def finish(self) -> Alignment:
        """Return the pairs and the events left over."""
        pairs = (Pair(self._a[left], self._b[right], how) for left, (right, how) in sorted(self._pairs.items()))
        only_a, only_b = (self._a[index] for index in self._left_a), (self._b[index] for index in self._left_b)
        return Alignment(tuple(pairs), tuple(only_a), tuple(only_b))


def _find_unique(keys: Sequence[Hashable]) -> dict[Hashable, int]:
    indices: dict[Hashable, int] = {}
    repeated = set()
    for index, key in enumerate(keys):
        if key in indices:
            repeated.add(key)
        indices[key] = index
    return {key: index for key, index in indices.items() if key not in repeated}


def _find_rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest subsequence of pairs, sorted on the left, that is also increasing on the right."""
    tails: list[int] = []
    chain: list[int] = []
    before: list[int] = [-1] * len(pairs)
    for number, (_, right) in enumerate(pairs):
        length = bisect_left(tails, right)
        before[number] = chain[length - 1] if length else -1
        # A chain of this length now ends with a smaller number, or is the longest so far.
        tails[length : length + 1] = [right]
        chain[length : length + 1] = [number]
    found = []
    number = chain[-1] if chain else -1
    while number >= 0:
        found.append(pairs[number])
        number = before[number]
    return found[::-1]


def _iter_matches(
    a: Sequence[Hashable], b: Sequence[Hashable], anchors: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of indices that have the same signature, in order; anchors are already pairs."""
    start_a = start_b = 0
    for end_a, end_b in (*anchors, (len(a), len(b))):
        yield from _iter_stretch(a[start_a:end_a], b[start_b:end_b], start_a, start_b)
        if end_a < len(a):
            yield end_a, end_b
        start_a, start_b = end_a + 1, end_b + 1


def _iter_stretch(
    a: Sequence[Hashable], b: Sequence[Hashable], start_a: int, start_b: int
) -> Iterator[tuple[int, int]]:
    """Yield pairs between two anchors: equal ends first, then common blocks if the stretch is small enough."""
    head = 0
    while head < min(len(a), len(b)) and a[head] == b[head]:
        yield start_a + head, start_b + head
        head += 1
    tail = 0
    while tail < min(len(a), len(b)) - head and a[-1 - tail] == b[-1 - tail]:
        tail += 1
        yield start_a + len(a) - tail, start_b + len(b) - tail
    a, b = a[head : len(a) - tail], b[head : len(b) - tail]
    for left, right in _find_blocks(a, b) if len(a) * len(b) <= _MAX_CELLS else _find_in_turn(a, b):
        yield start_a + head + left, start_b + head + right


def _find_blocks(a: Sequence[Hashable], b: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        yield from ((block.a + step, block.b + step) for step in range(block.size))


def _find_in_turn(a: Sequence[Hashable], b: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """Yield pairs by count: the n-th of a signature with the n-th of it on the other side."""
    waiting: defaultdict[Hashable, deque[int]] = defaultdict(deque)
    for index, key in enumerate(b):
        waiting[key].append(index)
    for index, key in enumerate(a):
        if queue := waiting.get(key):
            yield index, queue.popleft()


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
