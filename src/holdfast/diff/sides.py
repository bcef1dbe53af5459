"""One side of a comparison: the leaves and containers of a snapshot by path, and which leaves share memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.diff.facts import Content, LeafFacts, find_facts, is_stored, join_role, parse_leaf
from holdfast.diff.items import find_layout
from holdfast.json_text import Json, canonical_json
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.manifest import Manifest
from holdfast.snapshot.load.opened import Opened
from holdfast.trees.outline import ITEMS_START, KEYED_START, Leaf, has_children, key_text
from holdfast.trees.pick import matches

PathKey = tuple[str | bytes, ...]
"""A hashable path: strings as they are, other keys as JSON, in which 1, 1.0 and True differ."""
_PartKey = tuple[PathKey, str]
"""Identifies a part of a leaf: the path of the leaf, and the role of the part."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container, without its children."""

    name: str
    path: tuple[Json, ...]
    head: list[Json]
    """Its tag and the fields before its children."""
    keys: list[str | bytes]
    first_leaf: int
    """The number of leaves before it in the tree."""


class SnapshotSide:
    """One of the two snapshots: its leaves and containers by path."""

    def __init__(self, opened: Opened, only: Sequence[str] = ()) -> None:
        """Read the leaves whose names match a pattern in `only`; all if there are no patterns."""
        self.opened = opened
        self.manifest: Manifest = opened.reader.manifest
        wanted = [leaf for leaf in opened.leaves if not only or matches(leaf.name, only)]
        self.leaves: dict[PathKey, Leaf] = {find_key(leaf.path_json): leaf for leaf in wanted}
        # With patterns, containers are not compared: their order and attributes concern all of their leaves.
        self.containers = {} if only else {find_key(found.path): found for found in _iter_containers(opened.tree)}
        self.contents: dict[PathKey, Content] = {
            key: parse_leaf(self.manifest, leaf) for key, leaf in self.leaves.items() if is_stored(leaf)
        }

    def find_facts(self, key: PathKey) -> LeafFacts:
        """Return the facts of the leaf at a path."""
        return find_facts(self.leaves[key], self.contents.get(key, Content()))

    def iter_entries(self) -> Iterator[Entry]:
        """Yield the entries of all leaves."""
        return (part.entry for content in self.contents.values() for part in content.parts.values())


def find_key(path: Iterable[Json]) -> PathKey:
    """Return a path of encoded keys as a hashable key."""
    return tuple(key if type(key) is str else canonical_json(key) for key in path)


def _iter_containers(tree: Json) -> Iterator[Container]:
    """Yield the containers that have children, each before its children."""
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
    """A part of a leaf whose sharing changed: of memory, or of object identity."""

    key: PathKey
    role: str
    what: str
    """"memory" or "object"."""
    before: str
    after: str


def find_moved(before: SnapshotSide, after: SnapshotSide) -> Iterator[Moved]:
    """Yield the parts, present on both sides, that share memory or identity with other parts than before.

    Sharing with leaves that only one side has is not reported here.
    """
    yield from _compare_groups("object", "itself", "the same as", _find_objects(before), _find_objects(after), after)
    was, now = _find_memory(before), _find_memory(after)
    yield from _compare_groups("memory", "its own", "shared with", was, now, after)
    yield from _find_shifted(before, after, was, now)


_Groups = dict[_PartKey, object]
"""For each part, the group of parts that it shares memory or identity with."""


def _find_objects(side: SnapshotSide) -> _Groups:
    return {(key, role): group for key, content in side.contents.items() for role, group in content.objects.items()}


def _find_memory(side: SnapshotSide) -> _Groups:
    # A part that shares memory with no other is a group of its own.
    return {
        (key, role): part.entry.alias or (key, role)
        for key, content in side.contents.items()
        for role, part in content.parts.items()
    }


def _find_first(groups: _Groups, parts: Sequence[_PartKey]) -> dict[_PartKey, _PartKey]:
    """Return, for each part, the first part of its group."""
    first: dict[object, _PartKey] = {}
    return {part: first.setdefault(groups[part], part) for part in parts}


def _compare_groups(
    what: str, alone: str, shared: str, was: _Groups, now: _Groups, side: SnapshotSide
) -> Iterator[Moved]:
    parts = [part for part in now if part in was]
    old, new = _find_first(was, parts), _find_first(now, parts)
    for part in parts:
        if old[part] != new[part]:
            texts = [
                alone if first == part else f"{shared} {join_role(side.leaves[first[0]].name, first[1])}"
                for first in (old[part], new[part])
            ]
            yield Moved(*part, what, *texts)


def _find_shifted(before: SnapshotSide, after: SnapshotSide, was: _Groups, now: _Groups) -> Iterator[Moved]:
    """Yield the parts that share memory with the same parts as before, but at another offset."""
    parts = [part for part in now if part in was]
    old, new = _find_first(was, parts), _find_first(now, parts)
    members = [Counter(groups.values()) for groups in (was, now)]
    for part in parts:
        first = old[part]
        is_shared = first != part and first == new[part]
        # If a group has gained or lost a member, offsets may differ because other memory between them was saved.
        if is_shared and members[0][was[part]] == members[1][now[part]]:
            shifts = [_find_start(side, part) - _find_start(side, first) for side in (before, after)]
            if shifts[0] != shifts[1]:
                name = join_role(after.leaves[first[0]].name, first[1])
                yield Moved(*part, "memory", *(f"{shift} bytes after {name}" for shift in shifts))


def _find_start(side: SnapshotSide, part: _PartKey) -> int:
    """Return the byte offset of a part in the memory that its group shares."""
    found = side.contents[part[0]].parts[part[1]]
    at = found.spec.get("at", 0)
    layout = find_layout(found.entry)
    return (at if type(at) is int else 0) + layout.offset * layout.item_bytes
