"""The leaves of one snapshot as compact rows, which can be filtered, sorted, folded and cut into pages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from holdfast.diff.facts import Described, iter_described
from holdfast.errors import BadName
from holdfast.json_text import Json
from holdfast.query.globs import Glob, is_glob
from holdfast.repo.format.layout import natural_order
from holdfast.repo.format.rank_manifests import Manifests, read_manifests
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.serving.answers.snapshots import describe_sizes
from holdfast.trees.folding import Fold, FoldableLeaf, fold_leaves
from holdfast.trees.outline import TREE

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


@dataclass(frozen=True, slots=True)
class SnapshotOutline:
    """A snapshot's leaves, and what its manifests say about its size."""

    rows: tuple[LeafRow, ...]
    folds: tuple[Fold, ...]
    sizes: Mapping[str, int]
    num_ranks: int


def read_outline(repo: Repository, snapshot: CommittedSnapshot) -> SnapshotOutline:
    """Read the manifests of a snapshot and describe its leaves, or its files."""
    manifests = read_manifests(repo.store, snapshot.manifest)
    rows = tuple(_iter_rows(manifests))
    leaves = [FoldableLeaf(row.name, row.label, row.kind not in _STORED and not row.size_bytes) for row in rows]
    return SnapshotOutline(rows, tuple(fold_leaves(leaves)), describe_sizes(snapshot, manifests), len(manifests.parts))


_STORED: Final = ("tensor", "array", "file", "bytes")


def _iter_rows(manifests: Manifests) -> Iterator[LeafRow]:
    manifest = manifests.view()
    ranks = Counter(name for part in manifests.parts for name in part.names)
    spec = manifest.spec
    if isinstance(spec, dict) and TREE in spec:
        for described in iter_described(manifest, spec[TREE]):
            yield _make_row(described, ranks)
        return
    for entry in manifest.iter_entries():
        yield LeafRow(entry.name, "file", "", None, entry.size_bytes, 0, ranks[entry.name], "file")


def _make_row(described: Described, ranks: Mapping[str, int]) -> LeafRow:
    facts = described.facts
    is_tensor = facts.dtype != "" and facts.shape is not None
    stored_by = max((ranks[part.entry.name] for part in described.parts.values()), default=0)
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


def describe_leaves(outline: SnapshotOutline, choice: LeafChoice, offset: int, limit: int) -> dict[str, Json]:
    """Return a part of the chosen lines; with folds, repeated layers are one line each."""
    lines = choose_lines(outline, choice)
    shown = lines[offset : offset + limit]
    return {
        "total": len(lines),
        "leaves": len(outline.rows),
        "offset": offset,
        "lines": [_describe_line(outline, fold) for fold in shown],
    }


def choose_lines(outline: SnapshotOutline, choice: LeafChoice) -> Sequence[Fold]:
    """Return the chosen lines, in order; raises BadName for a field that cannot be sorted by."""
    field = choice.sort.removeprefix("-")
    if field not in _SORTS:
        raise BadName(f"leaves cannot be sorted by {field!r}; choose one of {', '.join(_SORTS[1:])}")
    folds: Sequence[Fold] = outline.folds
    if not choice.is_folded:
        folds = [Fold(row.name, row.label, (at,)) for at, row in enumerate(outline.rows)]
    folds = [fold for fold in folds if _matches(fold.name, choice.text)]
    if field:
        folds = sorted(folds, key=lambda fold: _find_order(outline, fold, field), reverse=choice.sort.startswith("-"))
    return folds


def _matches(name: str, text: str) -> bool:
    if not text:
        return True
    return text in name or (is_glob(text) and Glob(text).matches(name))


def _find_order(outline: SnapshotOutline, fold: Fold, field: str) -> tuple[object, ...]:
    rows = [outline.rows[at] for at in fold.members]
    match field:
        case "bytes":
            return (sum(row.size_bytes for row in rows),)
        case "items":
            return (sum(row.items for row in rows),)
        case "ranks":
            return (rows[0].ranks,)
        case "dtype":
            return (rows[0].dtype, rows[0].label)
        case "shape":
            return (rows[0].items,)
        case _:
            return (natural_order(fold.name),)


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
