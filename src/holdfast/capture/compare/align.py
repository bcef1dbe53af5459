"""Pairing the events of two runs: by site, by name, by call, by shape and order, by bytes; what is left is listed."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Final, Literal

from holdfast.capture.stored.events import Event

How = Literal["exact", "name", "call", "shape", "digest"]
"""Which pass has paired two events: each looks only at what those before it have left."""

WRAPPERS: Final = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
"""Components of names that data-parallel, compiled, sharded and checkpointed modules put around what they wrap."""
_MAX_CELLS: Final = 250_000
"""How large a stretch may be, one side times the other, to be aligned by the longest blocks in common."""

NameMap = Mapping[str, str]
"""Names of the first run to names of the second: of a module and all below it, `*` for any part."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two events taken for the same one of two runs."""

    a: Event
    b: Event
    how: How


@dataclass(frozen=True, slots=True)
class Alignment:
    """The pairs in the order of the first run, and what only one of them has."""

    pairs: tuple[Pair, ...]
    only_a: tuple[Event, ...]
    only_b: tuple[Event, ...]


def align(a: Sequence[Event], b: Sequence[Event], *, names: NameMap | None = None) -> Alignment:
    """Pair the events of one step of two runs, each in the order in which it was seen; never gives up.

    Takes time in proportion to the number of events, but for short stretches of what is named differently.
    """
    work = _Work(a, b)
    work.pair_by("exact", lambda event: event.site, lambda event: event.site)
    rename = _make_renaming(names or {})
    work.pair_by("name", partial(_find_place, rename=rename), partial(_find_place, rename=strip_wrappers))
    for find in (_find_shaped_call, _find_call, _find_shaped_name, _find_name):
        work.pair_by("call", partial(find, rename=rename), partial(find, rename=strip_wrappers))
    work.pair_by_order()
    work.pair_by("digest", _find_bytes, _find_bytes)
    return work.finish()


def strip_wrappers(fqn: str) -> str:
    """Return a name without what wrappers have put into it."""
    return ".".join(part for part in fqn.split(".") if part not in WRAPPERS)


def _make_renaming(names: NameMap) -> Callable[[str], str]:
    rules = [(_compile_rule(old), new) for old, new in names.items()]
    known: dict[str, str] = {}

    def rename(fqn: str) -> str:
        if fqn not in known:
            bare = strip_wrappers(fqn)
            known[fqn] = next((found for rule, new in rules if (found := _apply_rule(rule, new, bare))), bare)
        return known[fqn]

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


def _find_place(event: Event, rename: Callable[[str], str]) -> Hashable:
    site = event.site
    return (site.phase, site.kind, rename(site.fqn), site.call, site.path)


def _find_shaped_call(event: Event, rename: Callable[[str], str]) -> tuple[Hashable, ...]:
    # Of several results of one call, those of the same shape belong together.
    return (*_find_call(event, rename), event.shape)


def _find_shaped_name(event: Event, rename: Callable[[str], str]) -> tuple[Hashable, ...]:
    return (*_find_name(event, rename), event.shape)


def _find_call(event: Event, rename: Callable[[str], str]) -> tuple[Hashable, ...]:
    return (event.site.kind, rename(event.site.fqn), event.site.call)


def _find_name(event: Event, rename: Callable[[str], str]) -> tuple[Hashable, ...]:
    return (event.site.kind, rename(event.site.fqn))


def _find_bytes(event: Event) -> Hashable:
    return (event.digest, event.dtype, event.shape)


def _find_signature(event: Event) -> Hashable:
    return (event.site.kind, event.site.phase, event.shape, event.dtype)


class _Work:
    """One alignment under way: positions that are not paired yet."""

    def __init__(self, a: Sequence[Event], b: Sequence[Event]) -> None:
        self._a, self._b = a, b
        self._left_a, self._left_b = list(range(len(a))), list(range(len(b)))
        self._pairs: dict[int, tuple[int, How]] = {}

    def pair_by(self, how: How, key_a: Callable[[Event], Hashable], key_b: Callable[[Event], Hashable]) -> None:
        """Pair what has the same key, in order."""
        if not self._left_a or not self._left_b:
            return
        waiting: defaultdict[Hashable, deque[int]] = defaultdict(deque)
        for place in self._left_b:
            waiting[key_b(self._b[place])].append(place)
        found = ((place, waiting.get(key_a(self._a[place]))) for place in self._left_a)
        self._keep(how, [(place, queue.popleft()) for place, queue in found if queue])

    def pair_by_order(self) -> None:
        """Pair what has the same kind, phase, shape and dtype and comes in the same order."""
        if self._left_a and self._left_b:
            ours = [_find_signature(self._a[place]) for place in self._left_a]
            theirs = [_find_signature(self._b[place]) for place in self._left_b]
            anchors = self._find_anchors()
            matched = [*_iter_matches(ours, theirs, anchors)]
            self._keep("shape", [(self._left_a[left], self._left_b[right]) for left, right in matched])

    def _find_anchors(self) -> list[tuple[int, int]]:
        """Return what is left and has the same bytes, which nothing else has, in an order that both runs share."""
        ours, theirs = (
            _find_unique([(_find_signature(side[place]), side[place].digest) for place in left])
            for side, left in ((self._a, self._left_a), (self._b, self._left_b))
        )
        common = [(place, theirs[key]) for key, place in ours.items() if key in theirs]
        return _find_rising(common)

    def _keep(self, how: How, pairs: Sequence[tuple[int, int]]) -> None:
        self._pairs.update({left: (right, how) for left, right in pairs})
        paired_a, paired_b = {left for left, _ in pairs}, {right for _, right in pairs}
        self._left_a = [place for place in self._left_a if place not in paired_a]
        self._left_b = [place for place in self._left_b if place not in paired_b]

    def finish(self) -> Alignment:
        """Return what was found."""
        pairs = (Pair(self._a[left], self._b[right], how) for left, (right, how) in sorted(self._pairs.items()))
        only_a, only_b = (self._a[place] for place in self._left_a), (self._b[place] for place in self._left_b)
        return Alignment(tuple(pairs), tuple(only_a), tuple(only_b))


def _find_unique(keys: Sequence[Hashable]) -> dict[Hashable, int]:
    places: dict[Hashable, int] = {}
    repeated = set()
    for place, key in enumerate(keys):
        if key in places:
            repeated.add(key)
        places[key] = place
    return {key: place for key, place in places.items() if key not in repeated}


def _find_rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest part of pairs, which rise on the left, that rises on the right as well."""
    tails: list[int] = []
    chain: list[int] = []
    before: list[int] = [-1] * len(pairs)
    for number, (_, right) in enumerate(pairs):
        length = bisect_left(tails, right)
        before[number] = chain[length - 1] if length else -1
        # A chain of that length now ends lower; or it is the longest so far.
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
    """Yield pairs of places that have the same signature, in order; anchors are pairs already."""
    start_a = start_b = 0
    for end_a, end_b in (*anchors, (len(a), len(b))):
        yield from _iter_stretch(a[start_a:end_a], b[start_b:end_b], start_a, start_b)
        if end_a < len(a):
            yield end_a, end_b
        start_a, start_b = end_a + 1, end_b + 1


def _iter_stretch(
    a: Sequence[Hashable], b: Sequence[Hashable], start_a: int, start_b: int
) -> Iterator[tuple[int, int]]:
    """Yield pairs between two anchors: what is alike at both ends first, then blocks if that is affordable."""
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
    """Yield the first of a signature with the first of it on the other side, the second with the second, and so on."""
    waiting: defaultdict[Hashable, deque[int]] = defaultdict(deque)
    for place, key in enumerate(b):
        waiting[key].append(place)
    for place, key in enumerate(a):
        if queue := waiting.get(key):
            yield place, queue.popleft()
