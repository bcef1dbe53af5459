"""How the slow tests are divided into slices, one of which a commit runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

UNKNOWN_S: Final = 3.0
"""What a slow test takes of which no run is recorded."""


@dataclass(frozen=True, slots=True)
class _Part:
    seconds: float
    tests: Sequence[str]


def plan_slices(
    tests: Mapping[str, Sequence[str]], seconds: Mapping[str, float], *, slice_s: float, part_s: float
) -> list[list[str]]:
    """Divide tests, given by file, into slices that take about `slice_s` seconds each, in one process.

    The tests of a file stay together, because they share fixtures, unless they take more than `part_s`.
    """
    parts = [part for file in sorted(tests) for part in _split(tests[file], seconds.get(file), part_s)]
    total = sum(part.seconds for part in parts)
    slices: list[list[_Part]] = [[] for _ in range(max(1, math.ceil(total / slice_s)))]
    # The longest first, each into the slice that is shortest so far: the slices become equally long.
    for part in sorted(parts, key=lambda part: -part.seconds):
        min(slices, key=lambda chosen: sum(each.seconds for each in chosen)).append(part)
    return [[test for part in chosen for test in part.tests] for chosen in slices]


def _split(tests: Sequence[str], seconds: float | None, part_s: float) -> list[_Part]:
    length = UNKNOWN_S * len(tests) if seconds is None else seconds
    count = min(len(tests), max(1, math.ceil(length / part_s)))
    size = math.ceil(len(tests) / count)
    pieces = [tests[start : start + size] for start in range(0, len(tests), size)]
    return [_Part(length * len(piece) / len(tests), piece) for piece in pieces]


def choose_slice(commit: str, count: int) -> int:
    """Return which of `count` slices a commit runs."""
    return int(commit[:15], 16) % count
