"""Lineage: which snapshots a process loaded and saved before it saved this one; history and its graph as text."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from holdfast.json_text import Json
from holdfast.repo.format.layout import natural_order, split_prefix
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


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One snapshot of a history."""

    snapshot: CommittedSnapshot
    lineage: Lineage
    parents: tuple[str, ...]
    """Names of the snapshots that it was saved from and that still have that content; if none is left, of those that
    its process began from."""
    lost: tuple[str, ...]
    """Names of others that it was saved from: deleted or overwritten since."""


@dataclass(frozen=True, slots=True)
class GraphRow:
    """One line of a graph: lanes before the snapshot's mark, and the snapshot; None for a line that joins lanes."""

    lanes: str
    entry: HistoryEntry | None


def make_history(snapshots: Iterable[CommittedSnapshot]) -> list[HistoryEntry]:
    """Return the history of all snapshots of a store, newest first."""
    by_name = {snapshot.name: snapshot for snapshot in snapshots}
    newest = sorted(by_name.values(), key=lambda each: (each.time_s, natural_order(each.name)), reverse=True)
    return [_make_entry(snapshot, by_name) for snapshot in newest]


def _make_entry(snapshot: CommittedSnapshot, by_name: Mapping[str, CommittedSnapshot]) -> HistoryEntry:
    lineage = parse_lineage(snapshot.environment)
    # A process that loaded something since its last save continues from that, and not from its last save.
    origins = lineage.loaded or ((LoadedSnapshot(lineage.previous),) if lineage.previous else ())
    is_kept = {origin.name: _is_kept(origin, snapshot, by_name.get(origin.name)) for origin in origins}
    parents = tuple(name for name, kept in is_kept.items() if kept)
    if not parents:
        # The first saves of a run are often deleted; then the next one continues what they began from.
        found = (origin.name for origin in lineage.began if _is_kept(origin, snapshot, by_name.get(origin.name)))
        parents = tuple(found)
    return HistoryEntry(snapshot, lineage, parents, tuple(name for name, kept in is_kept.items() if not kept))


def _is_kept(origin: LoadedSnapshot, child: CommittedSnapshot, found: CommittedSnapshot | None) -> bool:
    """Return whether a snapshot is still the one that `child` was saved from."""
    if found is None or found.name == child.name:
        return False
    # Without a digest, a snapshot that is newer than its child was overwritten.
    return found.digest.hex() == origin.digest_hex if origin.digest_hex else found.time_s <= child.time_s


def find_ancestors(history: Sequence[HistoryEntry], name: str) -> list[HistoryEntry]:
    """Return the entry of a name and of everything that it was saved from, newest first."""
    by_name = {entry.snapshot.name: entry for entry in history}
    wanted: set[str] = set()
    following = [name]
    while following:
        each = following.pop()
        if each not in wanted and each in by_name:
            wanted.add(each)
            following.extend(by_name[each].parents)
    return [entry for entry in history if entry.snapshot.name in wanted]


def iter_graph(entries: Sequence[HistoryEntry]) -> Iterator[GraphRow]:
    """Yield the lines of a graph. A lane leads from a snapshot down to one that it was saved from."""
    shown = {entry.snapshot.name: number for number, entry in enumerate(entries)}
    lanes: list[str] = []
    for number, entry in enumerate(entries):
        name = entry.snapshot.name
        waiting = [lane for lane, awaited in enumerate(lanes) if awaited == name]
        lane = waiting[0] if waiting else len(lanes)
        if len(waiting) > 1:
            yield GraphRow(_draw(len(lanes), lane, waiting[1:], "/"), None)
        lanes = [awaited for position, awaited in enumerate(lanes) if position not in waiting[1:]]
        lanes += [] if waiting else [name]
        yield GraphRow(" ".join("*" if position == lane else "|" for position in range(len(lanes))), entry)
        # With equal clocks a parent may be listed before its child; its lane would never end.
        parents = [parent for parent in entry.parents if shown.get(parent, -1) > number]
        lanes[lane : lane + 1] = parents[:1]
        if len(parents) > 1:
            lanes += parents[1:]
            yield GraphRow(_draw(len(lanes), lane, range(len(lanes) - len(parents) + 1, len(lanes)), "\\"), None)


def _draw(num_lanes: int, lane: int, others: Iterable[int], sign: str) -> str:
    """Return a line of the graph with an edge between the lane `lane` and each of the lanes `others`."""
    cells = list(" ".join("|" * num_lanes))
    for other in others:
        cells[2 * other - 1 : 2 * other + 1] = [sign, " "]
    first, last = 2 * lane + 1, "".join(cells).rfind(sign)
    cells[first:last] = ["_" if cell == " " else cell for cell in cells[first:last]]
    return "".join(cells).rstrip()
