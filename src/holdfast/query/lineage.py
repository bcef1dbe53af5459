"""Lineage: which snapshots a process loaded and saved before it saved this one.

It is stored in the `environment` of a snapshot record, which is not compared when a save is repeated, and which readers
that do not know it show as it is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from holdfast.json_text import Json
from holdfast.repo.format.layout import split_prefix
from holdfast.repo.names.snapshots import CommittedSnapshot

LINEAGE: Final = "lineage"
"""The key in the environment of a record."""
_MAX_LOADS: Final = 16
_MAX_SERIES: Final = 256


@dataclass(frozen=True, slots=True)
class LoadedSnapshot:
    """A snapshot that was loaded before another was saved."""

    name: str
    digest_hex: str = ""
    """Its content digest when it was loaded; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """What a record says about where its state came from."""

    loaded: tuple[LoadedSnapshot, ...] = ()
    """Snapshots that the process loaded after its save before this one."""
    previous: str = ""
    """The snapshot that the process saved before, under the same prefix; empty if this was the first."""
    began: tuple[LoadedSnapshot, ...] = ()
    """What the process had loaded before its first save under this prefix, or since. Every later save repeats it: the
    first ones are often deleted soon."""


class LineageLog:
    """What one handle has loaded and saved so far. Safe in any thread."""

    def __init__(self) -> None:
        """Begin with nothing loaded and nothing saved."""
        self._lock = threading.Lock()
        self._now = 0
        self._loads: deque[tuple[int, LoadedSnapshot]] = deque(maxlen=_MAX_LOADS)
        self._saves: OrderedDict[str, _LastSave] = OrderedDict()

    def note_loaded(self, snapshot: CommittedSnapshot) -> None:
        """Note that a snapshot was loaded."""
        origin = LoadedSnapshot(snapshot.name, snapshot.digest.hex())
        with self._lock:
            self._now += 1
            self._loads = deque((pair for pair in self._loads if pair[1] != origin), maxlen=_MAX_LOADS)
            self._loads.append((self._now, origin))

    def note_saved(self, name: str) -> None:
        """Note that a snapshot was saved, or that its save has begun."""
        prefix = split_prefix(name)
        with self._lock:
            self._now += 1
            before = self._saves.get(prefix, _LastSave())
            self._saves[prefix] = _LastSave(self._now, name, self._list_loads(before) or before.began)
            self._saves.move_to_end(prefix)
            while len(self._saves) > _MAX_SERIES:
                self._saves.popitem(last=False)

    def describe(self, name: str) -> dict[str, Json]:
        """Return the lineage of a snapshot that is about to be saved, as part of an environment."""
        with self._lock:
            last = self._saves.get(split_prefix(name), _LastSave())
            loaded = self._list_loads(last)
        fields: dict[str, Json] = {}
        if loaded:
            fields["loaded"] = _describe_origins(loaded)
        if last.name and last.name != name:
            fields["previous"] = last.name
        if last.began and not loaded:
            fields["began"] = _describe_origins(last.began)
        return {LINEAGE: fields} if fields else {}

    def _list_loads(self, last: _LastSave) -> tuple[LoadedSnapshot, ...]:
        """Return what was loaded since a save."""
        return tuple(origin for number, origin in self._loads if number > last.number)


class _LastSave(NamedTuple):
    """The last save under a prefix."""

    number: int = 0
    """Its place in the order of all loads and saves."""
    name: str = ""
    began: tuple[LoadedSnapshot, ...] = ()


def _describe_origins(origins: Sequence[LoadedSnapshot]) -> Json:
    return [{"name": origin.name, "digest": origin.digest_hex} for origin in origins]


def parse_lineage(environment: Mapping[str, Json]) -> Lineage:
    """Return the lineage in an environment; what is malformed there is left out."""
    fields = environment.get(LINEAGE)
    if not isinstance(fields, dict):
        return Lineage()
    previous = fields.get("previous")
    text = previous if isinstance(previous, str) else ""
    return Lineage(_parse_origins(fields.get("loaded")), text, _parse_origins(fields.get("began")))


def _parse_origins(value: Json) -> tuple[LoadedSnapshot, ...]:
    origins = [_parse_origin(each) for each in value[:_MAX_LOADS]] if isinstance(value, list) else []
    return tuple(each for each in origins if each)


def _parse_origin(value: Json) -> LoadedSnapshot | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    digest = value.get("digest")
    return LoadedSnapshot(value["name"], digest if isinstance(digest, str) else "")
