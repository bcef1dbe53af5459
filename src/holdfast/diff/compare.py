"""Compares two trees leaf by leaf, by the digests of their chunks; reads bytes only if these do not decide.

Needs neither torch nor numpy, so that `holdfast diff` starts quickly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from holdfast.diff.changes import Aspect, Change, Diff
from holdfast.diff.facts import (
    Content,
    EntryBytes,
    EntryTable,
    LeafEntry,
    LeafFacts,
    ReadableEntry,
    find_facts,
    find_layout,
    find_stride,
    is_same,
    is_stored,
    join_role,
    parse_leaf,
    parse_shape,
)
from holdfast.errors import NotFound
from holdfast.json_text import Json, canonical_json
from holdfast.repo.format.entry import ChunkTable
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.read.reader import open_snapshot
from holdfast.repo.read.stream import ReadAhead
from holdfast.snapshot.opened import Opened
from holdfast.texts import shorten
from holdfast.trees.outline import ITEMS_START, KEYED_START, Leaf, has_children, iter_leaves, key_text
from holdfast.trees.pick import matches

_DEFAULTS: Final[Mapping[str, Mapping[str, Json]]] = {
    "tensor": {"role": "tensor", "requires_grad": False, "conj": False, "neg": False, "meta": False},
    "array": {"order": "C"},
}
"""The default values that specs of these kinds omit."""
_CONTAINERS: Final = {
    "odict": "OrderedDict",
    "odict+": "OrderedDict with attributes",
    "counter": "Counter",
    "counter+": "Counter with attributes",
}
"""Class names of the containers whose tree tag is not their class name."""
_MAX_TEXT: Final = 80

PathKey = tuple[str | bytes, ...]
"""A hashable path: strings as they are, other keys as JSON, in which 1, 1.0 and True differ."""
_PartKey = tuple[PathKey, str]
"""Identifies a part of a leaf: the path of the leaf, and the role of the part."""
_Groups = dict[_PartKey, object]
"""For each part, the group of parts that it shares memory or identity with."""


def compare(repo: Repository, a: CommittedSnapshot, b: CommittedSnapshot, *, only: Sequence[str] = ()) -> Diff:
    """Return the differences from `a` to `b`, restricted to leaves whose names match a pattern in `only`, if any.

    Snapshots with equal digests are equal, and nothing is read. Otherwise both manifests are read. Bytes are read only
    if the same tensor was divided into other chunks, or stored with another layout.
    """
    if a.digest == b.digest:
        return Diff(a, b, (), b.num_entries, b.logical_bytes, b.logical_bytes)
    with Opened(open_snapshot(repo, a)) as before, Opened(open_snapshot(repo, b)) as after, before.pausing_gc():
        found = compare_sides(open_side(before, only), open_side(after, only), limit_bytes=repo.budget_bytes // 4)
    if found is None:
        raise NotFound(f"no leaf of {a.name!r} or {b.name!r} matches {' or '.join(map(repr, only))}")
    return Diff(a, b, *found)


class Compared(NamedTuple):
    """What a comparison has found; see `Diff`."""

    changes: tuple[Change, ...]
    equal: int
    equal_bytes: int
    shared_bytes: int


def compare_sides(before: TreeSide, after: TreeSide, *, limit_bytes: int) -> Compared | None:
    """Return the differences between two trees; None if neither has a leaf."""
    if not (before.leaves or after.leaves):
        return None
    comparison = _Comparison(before, after, limit_bytes=limit_bytes)
    changes = tuple(comparison.iter_changes())
    return Compared(changes, comparison.equal, comparison.equal_bytes, _count_shared(before, after))


def _count_shared(before: TreeSide, after: TreeSide) -> int:
    known = {digest for table in before.iter_chunks() for digest in table.digest_list}
    tables = after.iter_chunks()
    return sum(
        size for table in tables for digest, size in zip(table.digest_list, table.sizes, strict=True) if digest in known
    )


class _Comparison:
    """One comparison of two trees; counts the equal leaves."""

    def __init__(self, before: TreeSide, after: TreeSide, *, limit_bytes: int) -> None:
        self.before = before
        self.after = after
        self.equal = 0
        self.equal_bytes = 0
        self._limit_bytes = limit_bytes
        self._sharing: dict[PathKey, list[Aspect]] = {}
        for change in find_sharing_changes(before, after):
            aspect = Aspect(change.what, change.before, change.after, change.role)
            self._sharing.setdefault(change.key, []).append(aspect)

    def iter_changes(self) -> Iterator[Change]:
        """Yield the changes in the order of the new tree; a removed leaf comes after the leaf that it followed."""
        removed = self._list_removed()
        containers = self._list_containers()
        yield from removed.get(None, ())
        for position, (key, leaf) in enumerate(self.after.leaves.items()):
            yield from containers.get(position, ())
            if key not in self.before.leaves:
                yield Change(leaf.name, leaf.path_json, None, self.after.find_facts(key))
            else:
                yield from self._compare_leaf(key, leaf)
            yield from removed.get(key, ())

    def _list_removed(self) -> dict[PathKey | None, list[Change]]:
        """Return the removed leaves, by the last leaf before them that still exists."""
        removed: dict[PathKey | None, list[Change]] = {}
        last: PathKey | None = None
        for key, leaf in self.before.leaves.items():
            if key in self.after.leaves:
                last = key
            else:
                change = Change(leaf.name, leaf.path_json, self.before.find_facts(key), None)
                removed.setdefault(last, []).append(change)
        return removed

    def _list_containers(self) -> dict[int, list[Change]]:
        """Return the containers that differ, by the position of their first leaf."""
        changed: dict[int, list[Change]] = {}
        for key, new in self.after.containers.items():
            old = self.before.containers.get(key)
            aspects = [*_compare_containers(old, new)] if old else []
            if old and aspects:
                before, after = LeafFacts(_find_class(old)), LeafFacts(_find_class(new))
                change = Change(new.name, new.path, before, after, tuple(aspects))
                changed.setdefault(new.first_leaf, []).append(change)
        return changed

    def _compare_leaf(self, key: PathKey, leaf: Leaf) -> Iterator[Change]:
        x, y = self.before.contents.get(key), self.after.contents.get(key)
        if x and y:
            aspects = [*self._compare_contents(x, y), *self._sharing.get(key, ())]
        else:
            aspects = [*self._compare_plain(key)]
        if aspects:
            facts = self.before.find_facts(key), self.after.find_facts(key)
            yield Change(leaf.name, leaf.path_json, *facts, tuple(aspects))
        else:
            self.equal += 1
            self.equal_bytes += sum(part.size_bytes for part in y.parts.values()) if y else 0

    def _compare_plain(self, key: PathKey) -> Iterator[Aspect]:
        """Compare two leaves, at least one of which is a plain value."""
        a, b = self.before.leaves[key], self.after.leaves[key]
        if is_stored(a) == is_stored(b) and canonical_json(a.node) == canonical_json(b.node):
            return
        old, new = self.before.find_facts(key), self.after.find_facts(key)
        if old.kind != new.kind:
            yield Aspect("kind", old.kind, new.kind)
        yield Aspect("value", str(old), str(new))

    def _compare_contents(self, a: Content, b: Content) -> Iterator[Aspect]:
        if (a.shells or b.shells) and _find_kind(a) != _find_kind(b):
            yield Aspect("kind", _find_kind(a), _find_kind(b))
            return
        for role, shell in b.shells.items():
            if role in a.shells:
                yield from _compare_fields(a.shells[role].meta, shell.meta, {}, role)
        for role in dict.fromkeys((*a.parts, *b.parts)):
            x, y = a.parts.get(role), b.parts.get(role)
            if x and y:
                yield from self._compare_parts(x, y, role)
            else:
                yield Aspect("part", "present" if x else "absent", "present" if y else "absent", role)

    def _compare_parts(self, a: LeafEntry, b: LeafEntry, role: str) -> Iterator[Aspect]:
        # Fast path: most parts are equal, and there may be very many.
        if a.spec == b.spec and a.chunks == b.chunks:
            return
        if a.kind != b.kind:
            yield Aspect("kind", a.kind, b.kind, role)
            return
        x, y = (_drop_storage(part) for part in (a, b))
        yield from _compare_fields(x, y, _DEFAULTS.get(a.kind, {}), role)
        if x.get("dtype") != y.get("dtype") or x.get("shape") != y.get("shape") or (x.get("meta") or y.get("meta")):
            return
        ours = ReadableEntry(self.before.ahead, a.entry, find_layout(a.entry))
        theirs = ReadableEntry(self.after.ahead, b.entry, find_layout(b.entry))
        if not is_same(ours, theirs, limit_bytes=self._limit_bytes):
            before, after = _format_sizes(a, b)
            yield Aspect("values", before, after, role)


def _find_kind(content: Content) -> str:
    """Return the kind of a leaf, such as "tensor" or, if shells are nested, "outer of inner"."""
    kinds = [shell.kind for shell in content.shells.values()]
    return " of ".join(kinds) or next(part.kind for part in content.parts.values())


def _format_sizes(a: LeafEntry, b: LeafEntry) -> tuple[str, str]:
    """Return the sizes of two entries without a shape as text; empty if they are equal, or if there is a shape."""
    if "shape" in a.spec or a.entry.size_bytes == b.entry.size_bytes:
        return "", ""
    return f"{a.entry.size_bytes} bytes", f"{b.entry.size_bytes} bytes"


def _drop_storage(part: LeafEntry) -> dict[str, Json]:
    """Return the spec of a part without its position in the entry, and with strides, which may be implicit."""
    spec = {key: value for key, value in part.spec.items() if key not in ("type", "at", "offset", "packed")}
    if part.kind == "tensor" and "stride" not in spec:
        spec["stride"] = list(find_stride(parse_shape(spec.get("shape"), part.entry.name)))
    return spec


def _compare_fields(
    a: Mapping[str, Json], b: Mapping[str, Json], defaults: Mapping[str, Json], role: str
) -> Iterator[Aspect]:
    is_reshaped = a.get("shape") != b.get("shape")
    for key in dict.fromkeys((*a, *b)):
        x, y = a.get(key, defaults.get(key)), b.get(key, defaults.get(key))
        # If the shape differs, different strides are not worth a line.
        if canonical_json(x) != canonical_json(y) and not (key == "stride" and is_reshaped):
            yield Aspect("strides" if key == "stride" else key, _format(x), _format(y), role)


def _format(value: Json) -> str:
    if value is None:
        return "none"
    if isinstance(value, list) and all(type(item) is int for item in value):
        return str(tuple(value))
    text = value if isinstance(value, str) else canonical_json(value).decode()
    return shorten(text, _MAX_TEXT)


def _find_class(container: Container) -> str:
    tag = str(container.head[0])
    return _CONTAINERS.get(tag, tag)


def _compare_containers(old: Container, new: Container) -> Iterator[Aspect]:
    if canonical_json(old.head) != canonical_json(new.head):
        if old.head[0] != new.head[0]:
            yield Aspect("kind", _find_class(old), _find_class(new))
        else:
            # The attributes of an OrderedDict, the factory of a defaultdict, the maxlen of a deque, or a class.
            yield Aspect("attributes", _format(old.head[1]), _format(new.head[1]))
    theirs, ours = set(old.keys), set(new.keys)
    if [key for key in old.keys if key in ours] != [key for key in new.keys if key in theirs]:
        yield Aspect("order")


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


class TreeSide:
    """One of two trees that are compared: its leaves and containers by path."""

    def __init__(
        self, name: str, tree: Json, entries: EntryTable, ahead: EntryBytes, *, only: Sequence[str] = ()
    ) -> None:
        """Use the leaves whose names match a pattern in `only`; all if there are no patterns."""
        self.name = name
        self.ahead = ahead
        self._tree = tree
        self._entries = entries
        wanted = (leaf for leaf in iter_leaves(tree) if not only or matches(leaf.name, only))
        self.leaves: dict[PathKey, Leaf] = {find_key(leaf.path_json): leaf for leaf in wanted}
        # With patterns, containers are not compared: their order and attributes concern all of their leaves.
        self._has_containers = not only

    @cached_property
    def containers(self) -> Mapping[PathKey, Container]:
        """The containers by path; none with patterns."""
        found = _iter_containers(self._tree) if self._has_containers else ()
        return {find_key(each.path): each for each in found}

    @cached_property
    def contents(self) -> Mapping[PathKey, Content]:
        """The entries of all leaves that have any, by path."""
        return {key: parse_leaf(self._entries, leaf) for key, leaf in self.leaves.items() if is_stored(leaf)}

    def find_content(self, key: PathKey) -> Content | None:
        """Return the entries of one leaf; None if it has none, or if there is no such leaf. Parses no other leaf."""
        leaf = self.leaves.get(key)
        return parse_leaf(self._entries, leaf) if leaf is not None and is_stored(leaf) else None

    def find_facts(self, key: PathKey) -> LeafFacts:
        """Return the facts of the leaf at a path."""
        return find_facts(self.leaves[key], self.contents.get(key, Content()))

    def iter_chunks(self) -> Iterator[ChunkTable]:
        """Yield the chunks of the entries of all leaves."""
        return (part.chunks for content in self.contents.values() for part in content.parts.values())


def open_side(opened: Opened, only: Sequence[str] = ()) -> TreeSide:
    """Return a snapshot as a side of a comparison, restricted to leaves whose names match a pattern, if any."""
    reader = opened.reader
    return TreeSide(opened.name, opened.tree, reader.manifest, ReadAhead(reader), only=only)


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
class SharingChange:
    """A part of a leaf whose sharing changed: of memory, or of object identity."""

    key: PathKey
    role: str
    what: str
    """"memory" or "object"."""
    before: str
    after: str


def find_sharing_changes(before: TreeSide, after: TreeSide) -> Iterator[SharingChange]:
    """Yield the parts, present on both sides, that share memory or identity with other parts than before.

    Sharing with leaves that only one side has is not reported here.
    """
    yield from _compare_groups("object", "itself", "the same as", _find_objects(before), _find_objects(after), after)
    was, now = _find_memory(before), _find_memory(after)
    yield from _compare_groups("memory", "its own", "shared with", was, now, after)
    yield from _find_shifted(before, after, was, now)


def _find_objects(side: TreeSide) -> _Groups:
    return {(key, role): group for key, content in side.contents.items() for role, group in content.objects.items()}


def _find_memory(side: TreeSide) -> _Groups:
    # A part that shares memory with no other is a group of its own.
    return {
        (key, role): part.alias or (key, role)
        for key, content in side.contents.items()
        for role, part in content.parts.items()
    }


def _find_first(groups: _Groups, parts: Sequence[_PartKey]) -> dict[_PartKey, _PartKey]:
    """Return, for each part, the first part of its group."""
    first: dict[object, _PartKey] = {}
    return {part: first.setdefault(groups[part], part) for part in parts}


def _compare_groups(
    what: str, alone: str, shared: str, was: _Groups, now: _Groups, side: TreeSide
) -> Iterator[SharingChange]:
    parts = [part for part in now if part in was]
    old, new = _find_first(was, parts), _find_first(now, parts)
    for part in parts:
        if old[part] != new[part]:
            texts = [
                alone if first == part else f"{shared} {join_role(side.leaves[first[0]].name, first[1])}"
                for first in (old[part], new[part])
            ]
            yield SharingChange(*part, what, *texts)


def _find_shifted(before: TreeSide, after: TreeSide, was: _Groups, now: _Groups) -> Iterator[SharingChange]:
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
                yield SharingChange(*part, "memory", *(f"{shift} bytes after {name}" for shift in shifts))


def _find_start(side: TreeSide, part: _PartKey) -> int:
    """Return the byte offset of a part in the memory that its group shares."""
    found = side.contents[part[0]].parts[part[1]]
    at = found.spec.get("at", 0)
    layout = find_layout(found.entry)
    return (at if type(at) is int else 0) + layout.offset * layout.item_bytes
