"""What differs between two snapshots: leaf by leaf, from their manifests, and from bytes only where these cannot tell.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from holdfast.diff.facts import Content, LeafEntry, LeafFacts, is_stored, parse_shape
from holdfast.diff.items import ReadableEntry, find_layout, find_stride, is_same, list_chunks
from holdfast.diff.sides import Container, PathKey, SnapshotSide, find_moved
from holdfast.errors import NotFound
from holdfast.repo.format.record import Json, canonical_json
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import Snapshot
from holdfast.repo.read.reader import open_snapshot
from holdfast.snapshot.load.opened import Opened
from holdfast.trees.outline import Leaf

_DEFAULTS: Final[Mapping[str, Mapping[str, Json]]] = {
    "tensor": {"role": "tensor", "requires_grad": False, "conj": False, "neg": False, "meta": False},
    "array": {"order": "C"},
}
"""What the specs of these kinds leave out if it goes without saying."""
_CONTAINERS: Final = {
    "odict": "OrderedDict",
    "odict+": "OrderedDict with attributes",
    "counter": "Counter",
    "counter+": "Counter with attributes",
}
"""Those that are called otherwise than their class."""
_MAX_TEXT: Final = 80


@dataclass(frozen=True, slots=True)
class Aspect:
    """One thing in which a leaf differs."""

    what: str
    """kind, dtype, shape, strides, values, value, role, requires_grad, conj, neg, quantizer, memory, order, ..."""
    before: str = ""
    after: str = ""
    """What it was and is, as texts; empty where a text would not help."""
    part: str = ""
    """Of a tensor made of others, which one: "indices", "grad"."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far the values of a tensor are from what they were; NaN in the same place on both sides counts as equal."""

    total: int
    mismatches: int
    max_abs: float | None = None
    """The largest difference, exact for integers; None where the values are not numbers."""
    at: tuple[int, ...] | None = None
    """Where that is; None where none of the values that differ can be subtracted."""
    relative_l2: float | None = None
    """The norm of the difference by the norm of what was, over what is finite on both sides."""
    cosine: float | None = None
    """Over what is finite on both sides; None if one side is zero."""
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)
    """How many there were and are."""
    unit: Literal["item", "byte"] = "item"
    part: str = ""

    @property
    def percent(self) -> float:
        """How much of it differs."""
        return 100 * self.mismatches / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """One leaf, or container, that is not what it was."""

    name: str
    path: tuple[Json, ...]
    """Encoded keys, which tell leaves of the same name apart."""
    before: LeafFacts | None
    """None if it was added."""
    after: LeafFacts | None
    """None if it was removed."""
    aspects: tuple[Aspect, ...] = ()
    distances: tuple[Distance, ...] = ()
    """Of what was measured: one for a tensor, more for one that is made of others."""

    @property
    def kind(self) -> Literal["added", "removed", "changed"]:
        """What happened to it."""
        return "added" if self.before is None else "removed" if self.after is None else "changed"

    @property
    def what(self) -> tuple[str, ...]:
        """In what it differs."""
        return tuple(dict.fromkeys(aspect.what for aspect in self.aspects))


@dataclass(frozen=True, slots=True)
class Diff:
    """What differs from one snapshot to another, in the order of the trees."""

    a: Snapshot = field(repr=False)
    b: Snapshot = field(repr=False)
    changes: tuple[Change, ...]
    equal: int
    """How many leaves are the same; if all are, how many entries, for then nothing has been read."""
    equal_bytes: int
    """Their size."""
    shared_bytes: int
    """How much of the leaves of `b` that were looked at consists of chunks that `a` has as well."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.changes

    @property
    def added(self) -> tuple[Change, ...]:
        """What only `b` has."""
        return tuple(change for change in self.changes if change.kind == "added")

    @property
    def removed(self) -> tuple[Change, ...]:
        """What only `a` has."""
        return tuple(change for change in self.changes if change.kind == "removed")

    @property
    def changed(self) -> tuple[Change, ...]:
        """What both have, and differs."""
        return tuple(change for change in self.changes if change.kind == "changed")

    def __str__(self) -> str:
        """Sum it up in a line."""
        counts = (len(self.added), len(self.removed), len(self.changed), self.equal)
        return "{} added, {} removed, {} changed, {} equal".format(*counts)


def compare(repo: Repository, a: Snapshot, b: Snapshot, *, only: Sequence[str] = ()) -> Diff:
    """Tell what differs from `a` to `b`, of the leaves whose names fit `only`, if there are any patterns.

    Equal digests mean equal, and nothing is read. Otherwise both manifests are, and bytes only where the same
    tensor was cut or laid out in another way.
    """
    if a.digest == b.digest:
        return Diff(a, b, (), b.num_entries, b.logical_bytes, b.logical_bytes)
    with Opened(open_snapshot(repo, a)) as before, Opened(open_snapshot(repo, b)) as after:
        run = _Run(SnapshotSide(before, only), SnapshotSide(after, only), limit_bytes=repo.budget_bytes // 4)
        if only and not (run.before.leaves or run.after.leaves):
            raise NotFound(f"no leaf of {a.name!r} or {b.name!r} fits {' or '.join(map(repr, only))}")
        changes, shared_bytes = tuple(run.iter_changes()), _count_shared(run.before, run.after)
        return Diff(a, b, changes, run.equal, run.equal_bytes, shared_bytes)


def _count_shared(before: SnapshotSide, after: SnapshotSide) -> int:
    known = {chunk.digest for entry in before.iter_entries() for chunk in entry.chunks}
    return sum(chunk.size_bytes for entry in after.iter_entries() for chunk in entry.chunks if chunk.digest in known)


class _Run:
    """One comparison."""

    def __init__(self, before: SnapshotSide, after: SnapshotSide, *, limit_bytes: int) -> None:
        self.before = before
        self.after = after
        self.equal = 0
        self.equal_bytes = 0
        self._limit_bytes = limit_bytes
        self._moved: dict[PathKey, list[Aspect]] = {}
        for moved in find_moved(before, after):
            aspect = Aspect(moved.what, moved.before, moved.after, moved.role)
            self._moved.setdefault(moved.key, []).append(aspect)

    def iter_changes(self) -> Iterator[Change]:
        """Yield the changes in the order of the tree that is now; what was removed comes after what it followed."""
        removed = self._place_removed()
        containers = self._place_containers()
        yield from removed.get(None, ())
        for position, (key, leaf) in enumerate(self.after.leaves.items()):
            yield from containers.get(position, ())
            if key not in self.before.leaves:
                yield Change(leaf.name, leaf.path_json, None, self.after.find_facts(key))
            else:
                yield from self._compare_leaf(key, leaf)
            yield from removed.get(key, ())

    def _place_removed(self) -> dict[PathKey | None, list[Change]]:
        """Return what was removed, by the leaf that it followed and that is still there."""
        placed: dict[PathKey | None, list[Change]] = {}
        last: PathKey | None = None
        for key, leaf in self.before.leaves.items():
            if key in self.after.leaves:
                last = key
            else:
                change = Change(leaf.name, leaf.path_json, self.before.find_facts(key), None)
                placed.setdefault(last, []).append(change)
        return placed

    def _place_containers(self) -> dict[int, list[Change]]:
        """Return the containers that differ, by the number of the first leaf in them."""
        placed: dict[int, list[Change]] = {}
        for key, new in self.after.containers.items():
            old = self.before.containers.get(key)
            aspects = [*_compare_containers(old, new)] if old else []
            if old and aspects:
                before, after = LeafFacts(_find_class(old)), LeafFacts(_find_class(new))
                change = Change(new.name, new.path, before, after, tuple(aspects))
                placed.setdefault(new.first_leaf, []).append(change)
        return placed

    def _compare_leaf(self, key: PathKey, leaf: Leaf) -> Iterator[Change]:
        x, y = self.before.contents.get(key), self.after.contents.get(key)
        if x and y:
            aspects = [*self._compare_contents(x, y), *self._moved.get(key, ())]
        else:
            aspects = [*self._compare_plain(key)]
        if aspects:
            facts = self.before.find_facts(key), self.after.find_facts(key)
            yield Change(leaf.name, leaf.path_json, *facts, tuple(aspects))
        else:
            self.equal += 1
            self.equal_bytes += sum(part.entry.size_bytes for part in y.parts.values()) if y else 0

    def _compare_plain(self, key: PathKey) -> Iterator[Aspect]:
        """Compare leaves of which one at least is a plain value."""
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
        # Most are the same, and there may be very many.
        if a.entry.spec == b.entry.spec and list_chunks(a.entry) == list_chunks(b.entry):
            return
        if a.kind != b.kind:
            yield Aspect("kind", a.kind, b.kind, role)
            return
        x, y = (_drop_storage(part) for part in (a, b))
        yield from _compare_fields(x, y, _DEFAULTS.get(a.kind, {}), role)
        if x.get("dtype") != y.get("dtype") or x.get("shape") != y.get("shape") or (x.get("meta") or y.get("meta")):
            return
        ours = ReadableEntry(self.before.opened.reader, a.entry, find_layout(a.entry))
        theirs = ReadableEntry(self.after.opened.reader, b.entry, find_layout(b.entry))
        if not is_same(ours, theirs, limit_bytes=self._limit_bytes):
            before, after = _show_sizes(a, b)
            yield Aspect("values", before, after, role)


def _find_kind(content: Content) -> str:
    """Return the kind of a leaf and of all that it is made of."""
    kinds = [shell.kind for shell in content.shells.values()]
    return " of ".join(kinds) or next(part.kind for part in content.parts.values())


def _show_sizes(a: LeafEntry, b: LeafEntry) -> tuple[str, str]:
    """Return the sizes of mere bytes that have become more or less; those of tensors go by their shape."""
    if "shape" in a.spec or a.entry.size_bytes == b.entry.size_bytes:
        return "", ""
    return f"{a.entry.size_bytes} bytes", f"{b.entry.size_bytes} bytes"


def _drop_storage(part: LeafEntry) -> dict[str, Json]:
    """Return what a part says of itself without where in which bytes it lies; strides said aloud."""
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
        # Of another shape, the strides are others as a matter of course.
        if canonical_json(x) != canonical_json(y) and not (key == "stride" and is_reshaped):
            yield Aspect("strides" if key == "stride" else key, _show(x), _show(y), role)


def _show(value: Json) -> str:
    if value is None:
        return "none"
    if isinstance(value, list) and all(type(item) is int for item in value):
        return str(tuple(value))
    text = value if isinstance(value, str) else canonical_json(value).decode()
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


def _find_class(container: Container) -> str:
    tag = str(container.head[0])
    return _CONTAINERS.get(tag, tag)


def _compare_containers(old: Container, new: Container) -> Iterator[Aspect]:
    if canonical_json(old.head) != canonical_json(new.head):
        if old.head[0] != new.head[0]:
            yield Aspect("kind", _find_class(old), _find_class(new))
        else:
            # The attributes of an OrderedDict, the factory of a defaultdict, the limit of a deque, a class.
            yield Aspect("attributes", _show(old.head[1]), _show(new.head[1]))
    theirs, ours = set(old.keys), set(new.keys)
    if [key for key in old.keys if key in ours] != [key for key in new.keys if key in theirs]:
        yield Aspect("order")
