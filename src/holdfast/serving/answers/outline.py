"""The leaves of one snapshot as compact rows, which can be filtered, sorted, folded and cut into pages."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from holdfast.diff.facts import Described, describe_leaf, find_single
from holdfast.errors import BadName
from holdfast.json_text import Json
from holdfast.query.globs import Glob, is_glob
from holdfast.repo.format.layout import natural_order
from holdfast.repo.format.rank_manifests import Manifests
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.serving.answers.snapshots import describe_sizes, read_present
from holdfast.snapshot.gc_pause import pause_gc
from holdfast.trees.folding import Fold, fold_leaves
from holdfast.trees.outline import TREE, Leaf, iter_found

MAX_LEAVES: Final = 1000
"""Leaves of one page."""
_MAX_TEXT: Final = 400
_MAX_PARTS: Final = 40


class LeafRow(NamedTuple):
    """One leaf; a tuple, because there may be hundreds of thousands."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...] | None
    size_bytes: int
    items: int
    """The number of values of a tensor; 0 for anything else."""
    ranks: int
    """How many ranks stored a part of it; 0 if a single process saved the snapshot."""
    label: str

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain value, which is in the tree itself."""
        return not self.size_bytes and self.kind not in _STORED


@dataclass(frozen=True, slots=True)
class SnapshotOutline:
    """A snapshot's leaves, and what its manifests say about its size."""

    rows: tuple[LeafRow, ...]
    folds: tuple[Fold, ...]
    sizes: Mapping[str, int]
    num_ranks: int

    def make_line(self, at: int) -> Fold:
        """Return one leaf as a line."""
        return Fold(self.rows[at].name, self.rows[at].label, (at,))


def read_outline(repo: Repository, snapshot: CommittedSnapshot) -> SnapshotOutline:
    """Read the manifests of a snapshot and describe its leaves, or its files."""
    with pause_gc():
        manifests = read_present(repo, snapshot)
        rows = tuple(_iter_rows(manifests))
        sizes = describe_sizes(snapshot, manifests)
        return SnapshotOutline(rows, tuple(fold_leaves(rows)), sizes, len(manifests.parts))


_STORED: Final = ("tensor", "array", "file", "bytes")


def _iter_rows(manifests: Manifests) -> Iterator[LeafRow]:
    manifest = manifests.view()
    ranks = Counter(name for part in manifests.parts for name in part.names)
    spec = manifest.spec
    if not isinstance(spec, dict) or TREE not in spec:
        for entry in manifest.iter_entries():
            yield LeafRow(entry.name, "file", "", None, entry.size_bytes, 0, ranks[entry.name], "file")
        return
    # Many tensors have one spec object, which the manifest keeps alive: what follows from it is computed once.
    known: dict[int, LeafRow] = {}
    for path, name, tag, node in iter_found(spec[TREE]):
        position = find_single(manifest, node)
        if position is None:
            yield _make_row(describe_leaf(manifest, Leaf(path, name, tag, node)), ranks)
            continue
        entry_spec, size_bytes, _ = manifest.find_facts(position)
        same = known.get(id(entry_spec))
        if same is None:
            same = known[id(entry_spec)] = _make_row(describe_leaf(manifest, Leaf(path, name, tag, node)), ranks)
        stored_by = ranks[manifest.names[position]] if ranks else 0
        yield LeafRow(name, same.kind, same.dtype, same.shape, size_bytes, same.items, stored_by, same.label)


def _make_row(described: Described, ranks: Mapping[str, int]) -> LeafRow:
    facts = described.facts
    is_tensor = facts.dtype != "" and facts.shape is not None
    stored_by = max((ranks[part.name] for part in described.parts.values()), default=0)
    label = str(facts)[:_MAX_TEXT]
    items = math.prod(facts.shape) if is_tensor and facts.shape is not None else 0
    kind = facts.kind if facts.kind or not is_tensor else "tensor"
    return LeafRow(described.leaf.name, kind, facts.dtype, facts.shape, facts.size_bytes, items, stored_by, label)


def describe_parts(outline: SnapshotOutline) -> list[Json]:
    """Return leaves, values and bytes for each first key of the names, such as `model` and `optimizer`."""
    totals: dict[str, list[int]] = {}
    for row in outline.rows:
        total = totals.setdefault(row.name.partition(".")[0], [0, 0, 0])
        total[0] += 1
        total[1] += row.items
        total[2] += row.size_bytes
    found = sorted(totals.items(), key=lambda item: -item[1][2])
    described: list[Json] = [
        {"name": name, "leaves": leaves, "items": items, "bytes": size_bytes}
        for name, (leaves, items, size_bytes) in found[:_MAX_PARTS]
    ]
    return described


@dataclass(frozen=True, slots=True)
class LeafChoice:
    """Which lines of an outline a request asks for."""

    text: str = ""
    """A part of names, or a glob."""
    sort: str = ""
    is_folded: bool = False


_SORTS: Final = ("", "name", "bytes", "items", "dtype", "shape", "ranks")


@dataclass(frozen=True, slots=True)
class ChosenLines:
    """Which lines of an outline were chosen. Refers to the outline by positions, so that it does not keep it alive."""

    order: Sequence[int]
    """Positions of leaves, or of folds."""
    is_folded: bool

    def list(self, outline: SnapshotOutline, offset: int, limit: int) -> list[Fold]:
        """Return a part of the lines. A page shows few of very many, so they are created only now."""
        shown = self.order[offset : offset + limit]
        return [outline.folds[at] if self.is_folded else outline.make_line(at) for at in shown]


def choose_lines(outline: SnapshotOutline, choice: LeafChoice) -> ChosenLines:
    """Return the chosen lines, in order; raises BadName for a field that cannot be sorted by."""
    field = choice.sort.removeprefix("-")
    if field not in _SORTS:
        raise BadName(f"leaves cannot be sorted by {field!r}; choose one of {', '.join(_SORTS[1:])}")
    names = [fold.name for fold in outline.folds] if choice.is_folded else [row.name for row in outline.rows]
    order: Sequence[int] = _find_matching(names, choice.text) if choice.text else range(len(names))
    if field:
        keys = {at: _find_order(outline, at, field, is_folded=choice.is_folded) for at in order}
        # An array takes a quarter of the memory of a list, and is remembered.
        order = array("Q", sorted(order, key=keys.__getitem__, reverse=choice.sort.startswith("-")))
    return ChosenLines(order, choice.is_folded)


def _find_order(outline: SnapshotOutline, at: int, field: str, *, is_folded: bool) -> Any:
    members = [outline.rows[member] for member in outline.folds[at].members] if is_folded else [outline.rows[at]]
    match field:
        case "bytes":
            return sum(row.size_bytes for row in members)
        case "items":
            return sum(row.items for row in members)
        case "ranks":
            return members[0].ranks
        case "dtype":
            return (members[0].dtype, members[0].label)
        case "shape":
            return members[0].items
        case _:
            return natural_order(outline.folds[at].name if is_folded else members[0].name)


def _find_matching(names: Sequence[str], text: str) -> Sequence[int]:
    """Return the positions of the names that contain a text, or that match it as a glob."""
    if not is_glob(text):
        return array("Q", (at for at, name in enumerate(names) if text in name))
    glob = Glob(text)
    return array("Q", (at for at, name in enumerate(names) if text in name or glob.matches(name)))


def describe_leaves(outline: SnapshotOutline, lines: ChosenLines, offset: int, limit: int) -> dict[str, Json]:
    """Return a part of the chosen lines; with folds, repeated layers are one line each."""
    return {
        "total": len(lines.order),
        "leaves": len(outline.rows),
        "offset": offset,
        "lines": [_describe_line(outline, fold) for fold in lines.list(outline, offset, limit)],
    }


def _describe_line(outline: SnapshotOutline, fold: Fold) -> dict[str, Json]:
    rows = [outline.rows[at] for at in fold.members]
    first = rows[0]
    return {
        "name": fold.name,
        "label": fold.label[:_MAX_TEXT],
        "count": len(rows),
        "first": first.name,
        "last": rows[-1].name,
        "kind": first.kind,
        "dtype": first.dtype or None,
        "shape": None if first.shape is None else list(first.shape),
        "bytes": sum(row.size_bytes for row in rows),
        "items": sum(row.items for row in rows),
        "ranks": first.ranks,
    }


def list_members(outline: SnapshotOutline, name: str) -> SnapshotOutline:
    """Return the leaves that one folded line stands for; raises BadName if no line has that name."""
    for fold in outline.folds:
        if fold.name == name:
            rows = tuple(outline.rows[at] for at in fold.members)
            return SnapshotOutline(rows, (), outline.sizes, outline.num_ranks)
    raise BadName(f"no line of the list is called {name!r}")
