"""The differences between two snapshots, as values and as JSON: which leaves differ, in what, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from holdfast.diff.facts import LeafFacts
from holdfast.digest import Digest
from holdfast.display.markup import Card, readable_repr, render_card
from holdfast.json_text import Json, describe_number
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.texts import format_bytes

SIGNS: Final = {"added": "+", "removed": "-", "changed": "~"}
"""How a line about a leaf begins."""
_WITHOUT_TEXTS: Final = {"values": "values differ", "order": "different key order"}


@dataclass(frozen=True, slots=True)
class Aspect:
    """One property in which a leaf differs."""

    what: str
    """kind, dtype, shape, strides, values, value, role, requires_grad, conj, neg, quantizer, memory, order, ..."""
    before: str = ""
    after: str = ""
    """The old and the new value, as text; empty where a text would not help."""
    part: str = ""
    """The part that differs of a tensor made of other tensors, such as "indices" or "grad"."""

    __repr__ = readable_repr

    def __str__(self) -> str:
        """Describe the difference: `dtype float32 -> bfloat16`."""
        part = f"{self.part}: " if self.part else ""
        if not (self.before or self.after):
            return part + _WITHOUT_TEXTS.get(self.what, self.what)
        name = "" if self.what == "value" else f"{self.what} "
        return f"{part}{name}{self.before} -> {self.after}"


@dataclass(frozen=True, slots=True)
class Distance:
    """The difference between the old and the new values of a tensor. NaN at the same index on both sides is equal."""

    total: int
    mismatches: int
    max_abs: float | None = None
    """The largest absolute difference, exact for integers; None if the values are not numbers."""
    at: tuple[int, ...] | None = None
    """The index of the largest difference; None if no two values that differ can be subtracted."""
    relative_l2: float | None = None
    """L2 norm of the difference divided by that of the old values, over values that are finite on both sides."""
    cosine: float | None = None
    """Cosine similarity, over values that are finite on both sides; None if one side is zero."""
    nan: tuple[int, int] = (0, 0)
    """The number of NaN values, old and new."""
    inf: tuple[int, int] = (0, 0)
    """The number of infinite values, old and new."""
    unit: Literal["item", "byte"] = "item"
    part: str = ""

    __repr__ = readable_repr

    @property
    def percent(self) -> float:
        """The share of items, or bytes, that differ."""
        return 100 * self.mismatches / self.total if self.total else 0.0

    def __str__(self) -> str:
        """Describe the difference: `max abs 0.001 at (3, 17)  rel 0.0001  cos 1  0.02 % differ`."""
        part = f"{self.part}: " if self.part else ""
        if not self.mismatches:
            return f"{part}values are the same"
        if self.unit == "byte":
            return f"{part}{self.mismatches} of {self.total} bytes differ"
        return part + "  ".join(self._iter_texts())

    def _iter_texts(self) -> Iterator[str]:
        if self.at is not None:
            yield f"max abs {self.max_abs:.3g} at {self.at}"
        if self.relative_l2 is not None:
            yield f"rel {self.relative_l2:.2g}"
        if self.cosine is not None:
            yield f"cos {self.cosine:.6g}"
        yield f"{self.percent:.3g} % differ"
        for name, (before, after) in (("NaN", self.nan), ("Inf", self.inf)):
            if before or after:
                yield f"{name} {before} -> {after}"


@dataclass(frozen=True, slots=True)
class Change:
    """A leaf or container that was added, removed or changed."""

    name: str
    path: tuple[Json, ...]
    """Encoded keys; unlike names, paths are unique."""
    before: LeafFacts | None
    """None if it was added."""
    after: LeafFacts | None
    """None if it was removed."""
    aspects: tuple[Aspect, ...] = ()
    distances: tuple[Distance, ...] = ()
    """What `measure` found: one item for a tensor, several for a tensor made of others."""

    def __repr__(self) -> str:
        """Show the line that `holdfast diff` prints."""
        name, what, difference = self.describe()
        return f"<Change {name}{f'  {what}' if what else ''}{f'  {difference}' if difference else ''}>"

    def describe(self) -> tuple[str, str, str]:
        """Return three texts: sign and name, what the leaf is, and how it differs."""
        name = f"{SIGNS[self.kind]} {self.name or '(the tree)'}"
        if self.kind != "changed":
            return name, str(self.after or self.before), ""
        # The text of a plain value shows the old and the new value, and so its type.
        is_plain = "value" in self.what
        aspects = [str(aspect) for aspect in self.aspects if not (is_plain and aspect.what == "kind")]
        text = "  ".join([", ".join(aspects), *map(str, self.distances)])
        return (name, text, "") if is_plain else (name, str(self.after), text)

    @property
    def kind(self) -> Literal["added", "removed", "changed"]:
        """Whether it was added, removed or changed."""
        return "added" if self.before is None else "removed" if self.after is None else "changed"

    @property
    def what(self) -> tuple[str, ...]:
        """The properties in which it differs, such as "dtype" or "values"."""
        return tuple(dict.fromkeys(aspect.what for aspect in self.aspects))


@dataclass(frozen=True, slots=True)
class LiveTree:
    """A tree in memory that was compared with a snapshot."""

    digest: Digest
    """The digest that its snapshot would have."""
    num_entries: int
    logical_bytes: int
    name: str = "(the tree in memory)"

    __repr__ = readable_repr


@dataclass(frozen=True, slots=True)
class Diff:
    """The differences from snapshot `a` to `b`, in the order of their trees; `b` is a snapshot or a tree in memory."""

    a: CommittedSnapshot = field(repr=False)
    b: CommittedSnapshot | LiveTree = field(repr=False)
    changes: tuple[Change, ...]
    equal: int
    """The number of equal leaves; of entries, if both digests are equal, because then the trees are not read."""
    equal_bytes: int
    """The size of the equal leaves."""
    shared_bytes: int
    """How many bytes of the compared leaves of `b` are in chunks that `a` has, too."""

    def __repr__(self) -> str:
        """Show both names and the counts."""
        return f"<Diff {self.a.name!r} -> {self.b.name!r}: {self}>"

    def _repr_html_(self) -> str:
        """Return the changes as a card for notebooks."""
        facts = [("added", str(len(self.added))), ("removed", str(len(self.removed)))]
        facts += [("changed", str(len(self.changed))), ("equal", str(self.equal))]
        facts.append(("shared", f"{format_bytes(self.shared_bytes)} of {format_bytes(self.b.logical_bytes)}"))
        texts, headers = (change.describe() for change in self.changes), ("leaf", "what", "difference")
        rows = [
            (name, what, difference.replace("  ", ", ").removeprefix("values differ, "))
            for name, what, difference in texts
        ]
        note = "Nothing differs." if self.is_equal else ""
        return render_card(Card("Diff", f"{self.a.name} → {self.b.name}", facts, None, headers, rows, note=note))

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.changes

    @property
    def added(self) -> tuple[Change, ...]:
        """The leaves that only `b` has."""
        return tuple(change for change in self.changes if change.kind == "added")

    @property
    def removed(self) -> tuple[Change, ...]:
        """The leaves that only `a` has."""
        return tuple(change for change in self.changes if change.kind == "removed")

    @property
    def changed(self) -> tuple[Change, ...]:
        """The leaves and containers that both have, and that differ."""
        return tuple(change for change in self.changes if change.kind == "changed")

    def __str__(self) -> str:
        """Return a summary in one line."""
        counts = (len(self.added), len(self.removed), len(self.changed), self.equal)
        return "{} added, {} removed, {} changed, {} equal".format(*counts)


def describe_diff(diff: Diff) -> dict[str, Json]:
    """Return a diff as JSON, with all changes."""
    return {**summarize_diff(diff), "changes": [describe_change(change) for change in diff.changes]}


def summarize_diff(diff: Diff) -> dict[str, Json]:
    """Return both snapshots and the counts of a diff as JSON."""
    return {
        "a": {"name": diff.a.name, "digest": diff.a.digest.hex()},
        "b": {"name": diff.b.name, "digest": diff.b.digest.hex()},
        "is_equal": diff.is_equal,
        "added": len(diff.added),
        "removed": len(diff.removed),
        "changed": len(diff.changed),
        "equal": diff.equal,
        "equal_bytes": diff.equal_bytes,
        "shared_bytes": diff.shared_bytes,
    }


def describe_change(change: Change) -> dict[str, Json]:
    """Return a change as JSON."""
    return {
        "name": change.name,
        "path": list(change.path),
        "kind": change.kind,
        "before": change.before.describe() if change.before else None,
        "after": change.after.describe() if change.after else None,
        "aspects": [
            {"what": aspect.what, "before": aspect.before, "after": aspect.after, "part": aspect.part}
            for aspect in change.aspects
        ],
        "distances": [_describe_distance(distance) for distance in change.distances],
    }


def _describe_distance(distance: Distance) -> dict[str, Json]:
    return {
        "part": distance.part,
        "unit": distance.unit,
        "total": distance.total,
        "mismatches": distance.mismatches,
        "max_abs": describe_number(distance.max_abs),
        "at": None if distance.at is None else list(distance.at),
        "relative_l2": describe_number(distance.relative_l2),
        "cosine": describe_number(distance.cosine),
        "nan": list(distance.nan),
        "inf": list(distance.inf),
    }
