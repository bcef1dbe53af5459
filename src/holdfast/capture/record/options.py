"""Options of a recording: levels by name, kinds, steps and limits, validated once."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, Literal, TypeVar, get_args

from holdfast.capture.stored.events import KINDS, EventKind, Level

WhenFull = Literal["block", "degrade", "raise"]
CompiledMode = Literal["boundary", "tap", "eager"]
Hashes = Literal["auto", "both"]
LevelName = Literal["off", "digest", "stats", "full"]
Choice = TypeVar("Choice")
Steps = str | int | Collection[int] | Callable[[int], bool]

_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS_BINARY: Final = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*\Z")
_STEPS: Final = re.compile(r"([0-9]+)(?:(-)([0-9]*)|:([0-9]+)(?::([0-9]+))?)?\Z")


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What to record, and within which limits; `Store.record` describes each."""

    levels: tuple[tuple[str, Level], ...] = (("*", Level.DIGEST),)
    """Pairs of pattern and level. The first pattern that matches wins; a name without a match is not recorded."""
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    kinds: frozenset[EventKind] = frozenset(KINDS)
    steps: Callable[[int], bool] = field(default=lambda step: True)
    max_bytes: int | None = None
    """Limit for all copies of tensors in the run; after that, only digests and statistics are kept."""
    queue_bytes: int = 512 << 20
    when_full: WhenFull = "block"
    compiled: CompiledMode = "boundary"
    drill: tuple[str, ...] = ()
    overwrite: bool = False
    first_step: int = 0
    segment_steps: int = 32
    segment_s: float | None = None
    bins: int = 32
    """Number of histogram bins."""
    hashes: Hashes = "auto"

    def find_level(self, kind: EventKind, name: str) -> Level:
        """Return the level at which a tensor of that kind and name is recorded."""
        if kind not in self.kinds or _matches(name, self.exclude) or not _matches(name, self.include):
            return Level.OFF
        return next((level for pattern, level in self.levels if _matches(name, (pattern,))), Level.OFF)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches a pattern, or is inside a module that a pattern names in full."""
    return any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns)


def make_options(
    *,
    level: LevelName | Level | Mapping[str, LevelName | Level] = "digest",
    include: str | Iterable[str] = "*",
    exclude: str | Iterable[str] = (),
    kinds: str | Iterable[str] | None = None,
    steps: Steps | None = None,
    max_bytes: int | str | None = None,
    queue_bytes: int | str = "512MiB",
    when_full: WhenFull = "block",
    compiled: CompiledMode = "boundary",
    drill: str | Iterable[str] = (),
    overwrite: bool = False,
    first_step: int = 0,
    segment_steps: int = 32,
    segment_s: float | None = None,
    bins: int = 32,
    hashes: Hashes = "auto",
) -> RecordOptions:
    """Return the options that a caller has stated; raises ValueError for a bad value."""
    return RecordOptions(
        levels=_parse_levels(level),
        include=_parse_patterns(include),
        exclude=_parse_patterns(exclude),
        kinds=_parse_kinds(KINDS if kinds is None else kinds),
        steps=(lambda step: True) if steps is None else parse_steps(steps),
        max_bytes=None if max_bytes is None else parse_size(max_bytes, what="max_bytes"),
        queue_bytes=parse_size(queue_bytes, what="queue_bytes"),
        when_full=_verify_choice("when_full", when_full, get_args(WhenFull)),
        compiled=_verify_choice("compiled", compiled, get_args(CompiledMode)),
        drill=_parse_patterns(drill),
        overwrite=overwrite,
        first_step=first_step,
        segment_steps=segment_steps,
        segment_s=segment_s,
        bins=bins,
        hashes=_verify_choice("hashes", hashes, get_args(Hashes)),
    )


def _verify_choice(what: str, value: Choice, allowed: tuple[object, ...]) -> Choice:
    if value not in allowed:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
    return value


def _parse_levels(level: LevelName | Level | Mapping[str, LevelName | Level]) -> tuple[tuple[str, Level], ...]:
    pairs = level.items() if isinstance(level, Mapping) else [("*", level)]
    allowed = [each.value for each in Level]
    for pattern, value in pairs:
        if not isinstance(value, Level):
            _verify_choice(f"the level of {pattern!r}", value, tuple(allowed))
    return tuple((pattern, Level(value)) for pattern, value in pairs)


def _parse_patterns(patterns: str | Iterable[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _parse_kinds(kinds: str | Iterable[str]) -> frozenset[EventKind]:
    names = kinds.replace(",", " ").split() if isinstance(kinds, str) else list(kinds)
    found = {kind: kind for kind in KINDS}
    for name in names:
        _verify_choice("each of kinds", name, KINDS)
    return frozenset(found[name] for name in names if name in found)


def parse_size(size: int | str, *, what: str) -> int:
    """Return a number of bytes from an int or a text such as "20GB" or "512 MiB"; raises ValueError."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size <= 0:
            raise ValueError(f"{what} must be more than 0 bytes, not {size}")
        return size
    found = _SIZE.match(str(size))
    units = _UNITS | _UNITS_BINARY
    if found is None or found[2].upper() not in units:
        raise ValueError(f"{what} must be a number of bytes or a text such as '20GB' or '512MiB', not {size!r}")
    return parse_size(int(float(found[1]) * units[found[2].upper()]), what=what)


def parse_steps(steps: Steps) -> Callable[[int], bool]:
    """Return a function that says whether a step is selected, from "0-9,20,100:1000:100", numbers, or a function."""
    if isinstance(steps, int):
        return {steps}.__contains__
    if isinstance(steps, str):
        ranges = [_parse_range(part.strip()) for part in steps.split(",")]
        return lambda step: any(step in each for each in ranges)
    return steps if callable(steps) else frozenset(steps).__contains__


def _parse_range(text: str) -> range:
    found = _STEPS.match(text)
    if found is None:
        raise ValueError(f"steps must look like '0-9,20,100:1000:100', not {text!r}")
    first, dash, last, stop, stride = found.groups()
    if dash:
        return range(int(first), int(last) + 1 if last else 1 << 62)
    if stop:
        return range(int(first), int(stop), max(1, int(stride or 1)))
    return range(int(first), int(first) + 1)
