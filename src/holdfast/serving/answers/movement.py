"""Answers about a series of snapshots: how far each layer moves from one to the next, sent while it is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from holdfast.diff.facts import LeafFacts
from holdfast.diff.movement import FindGroup, MeasuredBytes, PairMovement, iter_movement
from holdfast.errors import BadName
from holdfast.json_text import Json, describe_number
from holdfast.query.facts import Facts, is_finite
from holdfast.query.globs import Glob, is_glob
from holdfast.repo.format.layout import natural_order, split_prefix
from holdfast.repo.handle.repository import Repository

MAX_COMPARED: Final = 128
DEFAULT_COMPARED: Final = 32
"""Snapshots of a series that are compared; of more, some at equal distances."""
MAX_LAYERS: Final = 512
_MAX_SERIES: Final = 50
_MAX_STEP: Final = 1e300
_REPORT_S: Final = 0.25
_STATE_KEYS: Final = ("optim", "sched", "scaler", "rng", "exp_avg", "momentum_buffer", "grad")
"""Tensors with a key that contains one of these are not parameters."""


@dataclass(frozen=True, slots=True)
class ChosenSeries:
    """The snapshots of one series that are compared, in order."""

    series: Sequence[tuple[str, int]]
    """All series that were found, each with its number of snapshots, the longest first."""
    name: str
    total: int
    facts: Sequence[Facts]
    has_steps: bool
    """Whether all of them have a step; then they are in order of steps, else of times."""


def choose_series(found: Sequence[Facts], name: str, limit: int) -> ChosenSeries:
    """Choose a series of at least two snapshots: the one with this name, else the longest. Raises BadName."""
    groups: dict[str, list[Facts]] = {}
    for each in found:
        groups.setdefault(split_prefix(each.snapshot.name), []).append(each)
    series = sorted(((key, len(members)) for key, members in groups.items()), key=lambda pair: (-pair[1], pair[0]))
    chosen = name if name and name in groups else series[0][0] if series else ""
    members = groups.get(chosen, [])
    if limit < 2:
        raise BadName(f"the parameter limit={limit} is too small: movement compares at least two snapshots")
    if len(members) < 2:
        raise BadName("movement needs a series of at least two snapshots, such as run1/step-100 and run1/step-200")
    steps = [each.find_step() for each in members]
    has_steps = all(map(_is_step, steps)) and len(set(steps)) == len(steps)
    members.sort(key=lambda each: each.find_step() if has_steps else each.snapshot.time_s)
    last = len(members) - 1
    places = sorted({round(at * last / (limit - 1)) for at in range(limit)}) if last >= limit else range(last + 1)
    return ChosenSeries(series[:_MAX_SERIES], chosen, len(members), [members[at] for at in places], has_steps)


def _is_step(step: Json) -> bool:
    """Return whether a distance can be divided by a number of steps: integers may be larger than any float."""
    return is_finite(step) and abs(step) < _MAX_STEP


def find_layer(name: str) -> str:
    """Return the layer of a leaf: its name up to the first number, else without its last key."""
    keys = name.split(".")
    for at, key in enumerate(keys):
        if key.isascii() and key.isdigit():
            return ".".join(keys[: at + 1])
    return ".".join(keys[:-1]) or name


def make_grouping(text: str, *, by_leaf: bool) -> FindGroup:
    """Return which tensors are measured, and their layers: those that a text or glob matches, else parameters."""
    glob = Glob(text) if text and is_glob(text) else None

    def find_group(name: str, facts: LeafFacts) -> str | None:
        if "float" not in facts.dtype or not facts.size_bytes:
            return None
        if text:
            is_wanted = text in name or (glob is not None and glob.matches(name))
        else:
            is_wanted = not any(state in key for key in name.lower().split(".") for state in _STATE_KEYS)
        return (name if by_leaf else find_layer(name)) if is_wanted else None

    return find_group


def describe_series(chosen: ChosenSeries) -> dict[str, Json]:
    """Return which snapshots are compared, and whether distances are divided by the number of steps between them."""
    return {
        "series": [{"name": name, "snapshots": count} for name, count in chosen.series],
        "chosen": chosen.name,
        "total": chosen.total,
        "names": [each.snapshot.name for each in chosen.facts],
        "steps": [each.find_step() for each in chosen.facts] if chosen.has_steps else None,
        "time_s": [each.snapshot.time_s for each in chosen.facts],
        "per": "step" if chosen.has_steps else "snapshot",
    }


def iter_moves(repo: Repository, chosen: ChosenSeries, find_group: FindGroup) -> Iterator[Json]:
    """Yield the series, then for each two neighbours how much was measured, and their distances by layer."""
    yield describe_series(chosen)
    gaps = [1.0] * (len(chosen.facts) - 1)
    if chosen.has_steps:
        gaps = [after.find_step() - before.find_step() for before, after in pairwise(chosen.facts)]
    reported_s = time.monotonic()
    for found in iter_movement(repo, [each.snapshot for each in chosen.facts], find_group):
        if isinstance(found, PairMovement):
            yield _describe_pair(found, gaps[found.pair])
        elif time.monotonic() - reported_s > _REPORT_S:
            reported_s = time.monotonic()
            yield _describe_progress(found)


def _describe_pair(found: PairMovement, gap: float) -> dict[str, Json]:
    layers = sorted(found.distances, key=natural_order)
    shown = layers[:MAX_LAYERS]
    return {
        "pair": found.pair,
        "steps": gap,
        "layers": {name: _divide(found.distances[name], gap) for name in shown},
        "more": len(layers) - len(shown),
        "read_bytes": found.read_bytes,
    }


def _divide(distance: float | None, gap: float) -> Json:
    return None if distance is None else describe_number(distance / gap)


def _describe_progress(found: MeasuredBytes) -> dict[str, Json]:
    return {"pair": found.pair, "done_bytes": found.done_bytes, "total_bytes": found.total_bytes}
