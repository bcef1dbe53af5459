"""One side of a comparison of two snapshots: leaves and containers by path, and which leaves share memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.diff.facts import Content, LeafFacts, find_facts, is_stored, join_role, parse_leaf
from holdfast.diff.items import find_layout
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.format.record import Json, canonical_json
from holdfast.snapshot.load.opened import Opened
from holdfast.trees.outline import ITEMS_START, KEYED_START, Leaf, has_children, key_text
from holdfast.trees.pick import matches

PathKey = tuple[str | bytes, ...]
"""A path that can be looked up: texts as they are, other keys as JSON, in which 1, 1.0 and True differ."""
_Place = tuple[PathKey, str]
"""A part of a leaf: its path and the part's role."""


@dataclass(frozen=True, slots=True)
class Container:
    """What a container is besides what is in it."""

    name: str
    path: tuple[Json, ...]
    head: list[Json]
    keys: list[str | bytes]
    first_leaf: int


class SnapshotSide:
    """One of the two snapshots: its leaves and containers by path."""

    def __init__(self, opened: Opened, only: Sequence[str] = ()) -> None:
        """Take up the leaves whose names fit a pattern, or all."""
        self.opened = opened
        self.manifest: Manifest = opened.reader.manifest
        wanted = [leaf for leaf in opened.leaves if not only or matches(leaf.name, only)]
        self.leaves: dict[PathKey, Leaf] = {find_key(leaf.path_json): leaf for leaf in wanted}
        # A part of a tree does not tell how the whole is ordered.
        self.containers = {} if only else {find_key(found.path): found for found in _iter_containers(opened.tree)}
        self.contents: dict[PathKey, Content] = {
            key: parse_leaf(self.manifest, leaf) for key, leaf in self.leaves.items() if is_stored(leaf)
        }

    def find_facts(self, key: PathKey) -> LeafFacts:
        """Return what the leaf at a path is."""
        return find_facts(self.leaves[key], self.contents.get(key, Content()))

    def iter_entries(self) -> Iterator[Entry]:
        """Yield the entries of all leaves."""
        return (part.entry for content in self.contents.values() for part in content.parts.values())


def find_key(path: Iterable[Json]) -> PathKey:
    """Return a path of encoded keys as what can be looked up."""
    return tuple(key if type(key) is str else canonical_json(key) for key in path)


def _iter_containers(tree: Json) -> Iterator[Container]:
    """Yield the containers that hold something, each before what is in it."""
    waiting: list[tuple[tuple[Json, ...], str, Json]] = [((), "", tree)]
    leaves = 0
    while waiting:
        path, name, node = waiting.pop()
        if not has_children(node):
            leaves += 1
            continue
        start = KEYED_START.get(node[0]) or ITEMS_START[node[0]]
        is_keyed = node[0] in KEYED_START
        children = node[start + 1 :: 2] if is_keyed else node[start:]
        keys = node[start::2] if is_keyed else range(len(children))
        yield Container(name, path, node[:start], list(find_key(keys)), leaves)
        prefix = f"{name}." if path else ""
        for key, child in zip(reversed(keys), reversed(children), strict=True):
            waiting.append(((*path, key), prefix + key_text(key), child))


@dataclass(frozen=True, slots=True)
class Moved:
    """A part of a leaf that shares memory with others, or is one object with them, otherwise than it did."""

    key: PathKey
    role: str
    what: str
    """"memory" or "object"."""
    before: str
    after: str


def find_moved(before: SnapshotSide, after: SnapshotSide) -> Iterator[Moved]:
    """Yield what shares memory otherwise than it did, among what is on both sides.

    That a leaf shares memory with one that was added says the latter.
    """
    yield from _compare_groups("object", "itself", "the same as", _find_objects(before), _find_objects(after), after)
    was, now = _find_memory(before), _find_memory(after)
    yield from _compare_groups("memory", "its own", "shared with", was, now, after)
    yield from _find_shifted(before, after, was, now)


_Groups = dict[_Place, object]


def _find_objects(side: SnapshotSide) -> _Groups:
    return {(key, role): group for key, content in side.contents.items() for role, group in content.objects.items()}


def _find_memory(side: SnapshotSide) -> _Groups:
    # What shares memory with nothing is a group of its own.
    return {
        (key, role): part.entry.alias or (key, role)
        for key, content in side.contents.items()
        for role, part in content.parts.items()
    }


def _label(groups: _Groups, places: Sequence[_Place]) -> dict[_Place, _Place]:
    """Return for each place the first one of its group."""
    first: dict[object, _Place] = {}
    return {place: first.setdefault(groups[place], place) for place in places}


def _compare_groups(
    what: str, alone: str, shared: str, was: _Groups, now: _Groups, side: SnapshotSide
) -> Iterator[Moved]:
    places = [place for place in now if place in was]
    old, new = _label(was, places), _label(now, places)
    for place in places:
        if old[place] != new[place]:
            texts = [
                alone if label == place else f"{shared} {join_role(side.leaves[label[0]].name, label[1])}"
                for label in (old[place], new[place])
            ]
            yield Moved(*place, what, *texts)


def _find_shifted(before: SnapshotSide, after: SnapshotSide, was: _Groups, now: _Groups) -> Iterator[Moved]:
    """Yield what shares memory with the same others, but begins elsewhere in it."""
    places = [place for place in now if place in was]
    old, new = _label(was, places), _label(now, places)
    members = [Counter(groups.values()) for groups in (was, now)]
    for place in places:
        label = old[place]
        is_shared = label != place and label == new[place]
        # Where a group has lost or won a member, the memory in between may be kept no more.
        if is_shared and members[0][was[place]] == members[1][now[place]]:
            shifts = [_find_start(side, place) - _find_start(side, label) for side in (before, after)]
            if shifts[0] != shifts[1]:
                name = join_role(after.leaves[label[0]].name, label[1])
                yield Moved(*place, "memory", *(f"{shift} bytes after {name}" for shift in shifts))


def _find_start(side: SnapshotSide, place: _Place) -> int:
    """Return where in the memory that its group shares a part begins."""
    part = side.contents[place[0]].parts[place[1]]
    at = part.spec.get("at", 0)
    layout = find_layout(part.entry)
    return (at if type(at) is int else 0) + layout.offset * layout.item_bytes
