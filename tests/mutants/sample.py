"""Chooses mutants at random: each package by its number of places, a quarter of them dropped guard calls."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from tests.mutants.mutator import GUARD, Mutant

GUARD_SHARE: Final = 0.25


def choose_mutants(mutants: Sequence[Mutant], seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants in a random order; a change of the code replaces only mutants near it."""
    ordered = _shuffle(mutants, f"{seed}")
    guards = [mutant for mutant in ordered if mutant.kind == GUARD]
    others = [mutant for mutant in ordered if mutant.kind != GUARD]
    quota = min(len(guards), round(count * GUARD_SHARE))
    # In another order: guards were chosen from fewer, so all of them would be last.
    return _shuffle([*_take_by_package(guards, quota), *_take_by_package(others, count - quota)], f"{seed} order")


def _shuffle(mutants: Iterable[Mutant], salt: str) -> list[Mutant]:
    return sorted(mutants, key=lambda mutant: hashlib.sha256(f"{salt} {mutant.key}".encode()).digest())


def _take_by_package(ordered: Sequence[Mutant], count: int) -> list[Mutant]:
    shares = split_count(Counter(mutant.package for mutant in ordered), count)
    taken = []
    for mutant in ordered:
        if shares[mutant.package] > 0:
            shares[mutant.package] -= 1
            taken.append(mutant)
    return taken


def split_count(places: Counter[str], count: int) -> Counter[str]:
    """Split a number in proportion to the places; who lost most by rounding down gets the rest."""
    count = min(count, total := places.total())
    shares = Counter({name: count * number // total for name, number in places.items()})

    def lost(name: str) -> tuple[int, str]:
        return count * places[name] % total, name

    rest: Iterable[str] = sorted(places, key=lost, reverse=True)[: count - shares.total()]
    shares.update(rest)
    return shares
