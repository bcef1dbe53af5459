"""The history of snapshots: newest first, each with those it was saved from, and the graph between them as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.query.lineage import Lineage, LoadedSnapshot, parse_lineage
from holdfast.repo.format.layout import natural_order
from holdfast.repo.names.snapshots import CommittedSnapshot


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
