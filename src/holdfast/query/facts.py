"""The fields of a snapshot that expressions, sort keys and columns name, and records as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from holdfast.json_text import Json
from holdfast.query.expression import FieldRef
from holdfast.repo.names.snapshots import CommittedSnapshot, DamagedName, Tag
from holdfast.texts import format_utc

MISSING: Final = object()
"""The value of a field that a snapshot does not have."""

_STEP: Final = re.compile(r"(?:^|[^a-z])(?:step|iter|iteration|epoch)[-_=]?([0-9]{1,18})\Z", re.IGNORECASE)
_METRICS: Final = "metrics"
_NOT_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class Facts:
    """What can be asked about one snapshot."""

    snapshot: CommittedSnapshot
    tags: tuple[str, ...]
    now_s: float

    def find(self, field: FieldRef) -> Json:
        """Return the value of a field, or MISSING.

        Its own fields come first, then metrics, then metadata. `meta.`, `metrics.` and `env.` name one of them.
        """
        first, *others = field.path
        if not others and first in _OWN:
            return _OWN[first](self)
        if others and first in ("meta", "metadata"):
            return _find_below(self.snapshot.metadata, tuple(others))
        if others and first in ("env", "environment"):
            return _find_below(self.snapshot.environment, tuple(others))
        return self._find_saved(field.path)

    def find_step(self) -> Json:
        """Return the step: in the metadata, or else the number at the end of a name such as `run/step-100`."""
        saved = self._find_saved(("step",))
        if saved is not MISSING:
            return saved
        named = _STEP.search(self.snapshot.name)
        return int(named[1]) if named else MISSING

    def find_number(self, field: FieldRef) -> float | None:
        """Return the value of a field if it is a finite number, else None."""
        value = self.find(field)
        return value if is_finite(value) else None

    def iter_metrics(self) -> Iterator[tuple[str, Json]]:
        """Yield the metrics by name; NaN and infinities as floats."""
        metrics = self.snapshot.metadata.get(_METRICS)
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            yield name, _restore_float(value)

    def _find_saved(self, path: tuple[str, ...]) -> Json:
        metrics = self.snapshot.metadata.get(_METRICS)
        if path[0] == _METRICS and len(path) > 1:
            path = path[1:]
        found = _find_below(metrics, path) if isinstance(metrics, dict) else MISSING
        return _find_below(self.snapshot.metadata, path) if found is MISSING else _restore_float(found)


_OWN: Final[dict[str, Callable[[Facts], Json]]] = {
    "name": lambda facts: facts.snapshot.name,
    "step": lambda facts: facts.find_step(),
    "created": lambda facts: facts.snapshot.time_s,
    "age": lambda facts: facts.now_s - facts.snapshot.time_s,
    "size": lambda facts: facts.snapshot.logical_bytes,
    "entries": lambda facts: facts.snapshot.num_entries,
    "generation": lambda facts: facts.snapshot.generation,
    "digest": lambda facts: facts.snapshot.digest.hex(),
    "tag": lambda facts: list(facts.tags) or MISSING,
    "ranks": lambda facts: facts.snapshot.environment.get("world_size", MISSING),
    "host": lambda facts: facts.snapshot.environment.get("host", MISSING),
}
"""The fields that every snapshot has, whatever its metadata contains."""


def is_nan(value: Json) -> bool:
    """Return whether a value is NaN; an integer never is, however large."""
    return isinstance(value, float) and math.isnan(value)


def is_finite(value: Json) -> bool:
    """Return whether a value is a number that is finite; an integer always is, though no float may be as large."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def make_facts(snapshots: Iterable[CommittedSnapshot], tags: Iterable[Tag], *, now_s: float) -> list[Facts]:
    """Return the facts about each snapshot."""
    names: dict[str, list[str]] = {}
    for tag in tags:
        names.setdefault(tag.snapshot_name, []).append(tag.name)
    return [Facts(snapshot, tuple(names.get(snapshot.name, ())), now_s) for snapshot in snapshots]


def _restore_float(value: Json) -> Json:
    # JSON has no NaN, so a metric that is not finite is stored as its name.
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _find_below(values: Mapping[str, Json], path: tuple[str, ...]) -> Json:
    """Return the value at a path of keys; a dot may also be part of a key, and the longest key is tried first."""
    for length in range(len(path), 0, -1):
        key = ".".join(path[:length])
        if key in values:
            value = values[key]
            if length == len(path):
                return value
            found = _find_below(value, path[length:]) if isinstance(value, dict) else MISSING
            if found is not MISSING:
                return found
    return MISSING


_Found = TypeVar("_Found", CommittedSnapshot, Tag)


def describe_snapshot(snapshot: CommittedSnapshot, tags: Iterable[Tag]) -> dict[str, Json]:
    """Return a snapshot's record as JSON."""
    return {
        "name": snapshot.name,
        "time": format_utc(snapshot.time_s),
        "time_s": snapshot.time_s,
        "entries": snapshot.num_entries,
        "logical_bytes": snapshot.logical_bytes,
        "digest": snapshot.digest.hex(),
        "generation": snapshot.generation,
        "tags": [tag.name for tag in tags if tag.snapshot_name == snapshot.name],
        "metadata": snapshot.metadata,
    }


def split_damaged(found: Iterable[_Found | DamagedName]) -> tuple[list[_Found], list[DamagedName]]:
    """Split a listing into intact and damaged items."""
    intact: list[_Found] = []
    damaged: list[DamagedName] = []
    for item in found:
        if isinstance(item, DamagedName):
            damaged.append(item)
        else:
            intact.append(item)
    return intact, damaged


def describe_damage(name: DamagedName) -> dict[str, Json]:
    """Return a damaged name as JSON."""
    return {"key": name.stem, "error": str(name.error)}
