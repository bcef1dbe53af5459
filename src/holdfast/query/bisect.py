"""Finds the first snapshot of a series that fails a test, by halving the series, as `git bisect run` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast.errors import NotBisectable, NotFound
from holdfast.query.facts import Facts, is_finite
from holdfast.repo.format.layout import natural_order

Item = TypeVar("Item")

Test = Callable[[Item], bool | None]
"""Returns True for good, False for bad, None if it cannot tell."""


@dataclass(frozen=True, slots=True)
class Bisection(Generic[Item]):
    """Where a series turns from good to bad."""

    first_bad: Item
    """The first of the series that was found to be bad."""
    last_good: Item
    """The last before it that was found to be good."""
    tried: tuple[Item, ...]
    """Those that were tested, in the order of the tests, the skipped ones included."""
    skipped: tuple[Item, ...]
    """Those for which the test could not tell."""
    candidates: tuple[Item, ...]
    """Each of these may be the first bad one: `first_bad`, and skipped ones between it and `last_good`."""


def order_series(facts: Iterable[Facts]) -> tuple[list[Facts], str]:
    """Return a series in order, and by what: by "step" if every snapshot has a different one, else by "time"."""
    found = list(facts)
    steps = {each.snapshot.name: each.find_step() for each in found}
    if all(map(is_finite, steps.values())) and len(set(steps.values())) == len(found):
        return sorted(found, key=lambda each: steps[each.snapshot.name]), "step"
    return sorted(found, key=lambda each: (each.snapshot.time_s, natural_order(each.snapshot.name))), "time"


def bisect(series: Sequence[Item], test: Test[Item], *, label: Callable[[Item], str], prefix: str) -> Bisection[Item]:
    """Find where a series turns from good to bad; raises NotBisectable if it does not begin good and end bad.

    Assumes that whatever follows a bad one is bad. The ends are tested first. After that, a series of n takes about
    log2(n) tests, and more if some are skipped.
    """
    if not series:
        raise NotFound(f"no snapshot begins with {prefix!r}, so there is nothing to bisect", name=prefix)
    if len(series) == 1:
        raise NotBisectable(f"{label(series[0])!r} is the only snapshot here; a series to bisect has at least two")
    search = _Search(series, test)
    low = search.find_end(range(len(series)))
    if low is None:
        raise NotBisectable("the test skipped every snapshot of the series, so there is no result")
    if not search.verdicts[low]:
        raise NotBisectable(
            f"{label(series[low])!r}, the first of the series, fails already; begin with an earlier one"
        )
    high = search.find_end(range(len(series) - 1, low, -1))
    if high is None or search.verdicts[high]:
        last = series[low if high is None else high]
        raise NotBisectable(f"{label(last)!r}, the last of the series, passes, so no snapshot is the first that fails")
    return search.narrow(low, high)


class _Search(Generic[Item]):
    """The tests of one series so far, by position."""

    def __init__(self, series: Sequence[Item], test: Test[Item]) -> None:
        self._series = series
        self._test = test
        self.verdicts: dict[int, bool | None] = {}

    def find_end(self, positions: Iterable[int]) -> int | None:
        """Return the first of the positions that the test does not skip."""
        return next((at for at in positions if self._judge(at) is not None), None)

    def narrow(self, low: int, high: int) -> Bisection[Item]:
        """Halve the range between a good and a bad position until nothing between them is left to test."""
        while (middle := self._choose(low, high)) is not None:
            verdict = self._judge(middle)
            if verdict is not None:
                low, high = (middle, high) if verdict else (low, middle)
        skipped = [at for at, verdict in self.verdicts.items() if verdict is None]
        return Bisection(
            first_bad=self._series[high],
            last_good=self._series[low],
            tried=tuple(self._series[at] for at in self.verdicts),
            skipped=tuple(self._series[at] for at in skipped),
            candidates=tuple(self._series[low + 1 : high + 1]),
        )

    def _choose(self, low: int, high: int) -> int | None:
        """Return the position nearest to the middle that was not tested; None if there is none."""
        middle = (low + high) // 2
        open_ones = (at for at in range(low + 1, high) if at not in self.verdicts)
        return min(open_ones, key=lambda at: abs(at - middle), default=None)

    def _judge(self, at: int) -> bool | None:
        if at not in self.verdicts:
            self.verdicts[at] = verify_verdict(self._test(self._series[at]))
        return self.verdicts[at]


def verify_verdict(verdict: object) -> bool | None:
    """Return what a test returned; raises TypeError unless that is True, False or None."""
    if verdict is None or isinstance(verdict, bool):
        return verdict
    raise TypeError(f"a test of a bisection returns True (good), False (bad) or None (skip), not {verdict!r}")
