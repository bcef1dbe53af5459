"""What a notebook shows of a store, of a snapshot and of a tensor in it. Reads records and manifests, never tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.digest import short_hex
from holdfast.display.markup import Bar, Card, format_when, render_card
from holdfast.json_text import Json, canonical_json
from holdfast.repo.names.snapshots import CommittedSnapshot, Tag
from holdfast.snapshot.leaves import PARTS, iter_entry_numbers
from holdfast.snapshot.opened import Opened
from holdfast.texts import count, format_bytes, shorten
from holdfast.trees.folding import Fold, FoldableLeaf, fold_leaves
from holdfast.trees.outline import Leaf, format_value

_MAX_VALUE: Final = 60
_MAX_METADATA: Final = 80


@dataclass(frozen=True, slots=True)
class LeafLine:
    """One leaf of a snapshot, described without reading it."""

    name: str
    label: str
    """Dtype and shape of a tensor; a plain value as text."""
    size_bytes: int | None
    """None for a plain value, which is stored in the tree."""


def complete_keys(names: Iterable[str]) -> list[str]:
    """Return the names, and the names of all groups of them: what a notebook offers after `snapshot["`."""
    found: dict[str, None] = {}
    for name in names:
        keys = name.split(".")
        found.update(dict.fromkeys(".".join(keys[:end]) for end in range(1, len(keys) + 1)))
    return list(found)


def describe_leaf(opened: Opened, leaf: Leaf) -> LeafLine:
    """Return the line of a leaf."""
    if not leaf.tag.startswith("@"):
        return LeafLine(leaf.name, shorten(format_value(leaf.node), _MAX_VALUE), None)
    facts = [opened.find_facts(number) for number in iter_entry_numbers(leaf.node, what=leaf.name)]
    size_bytes = sum(size for _, size, _ in facts)
    spec = next((spec for spec, _, _ in facts if isinstance(spec, dict)), {})
    return LeafLine(leaf.name, _label(leaf, spec), size_bytes)


def _label(leaf: Leaf, spec: Mapping[str, Json]) -> str:
    kind = leaf.tag.removeprefix("@")
    if leaf.tag == PARTS:
        _, kind, meta, *_ = leaf.node
        spec = meta if isinstance(meta, dict) else {}
        kind = str(spec.get("type", kind)).rpartition(":")[2]
    shape = spec.get("shape")
    text = f"{spec.get('dtype', '')} {tuple(shape) if isinstance(shape, list) else ''}".strip()
    return " ".join(part for part in ("" if kind == "tensor" else kind, text) if part)


def render_store(url: str, records: Sequence[CommittedSnapshot], tags: Sequence[Tag]) -> str:
    """Return the card of a store: its snapshots, the newest first."""
    newest = sorted(records, key=lambda record: record.time_s, reverse=True)
    total = sum(record.logical_bytes for record in newest)
    facts = [("snapshots", str(len(newest))), ("size without sharing", format_bytes(total)), ("tags", str(len(tags)))]
    rows = [[record.name, format_when(record.time_s), *_describe_record(record, tags)] for record in newest]
    headers = ("name", "saved", "size", "tags", "metadata")
    note = "" if rows else 'Nothing was saved yet: store.save("run/step-1", {"model": model})'
    return render_card(Card("Store", url, facts, headers=headers, rows=rows, right="size", note=note))


def _describe_record(record: CommittedSnapshot, tags: Iterable[Tag]) -> Iterator[str]:
    yield format_bytes(record.logical_bytes)
    yield ", ".join(tag.name for tag in tags if tag.snapshot_name == record.name)
    yield shorten(_format_metadata(record.metadata), _MAX_METADATA)


def _format_metadata(metadata: Mapping[str, Json]) -> str:
    texts = (value if isinstance(value, str) else canonical_json(value).decode() for value in metadata.values())
    return ", ".join(f"{key} {text}" for key, text in zip(metadata, texts, strict=True))


def render_snapshot(record: CommittedSnapshot, opened: Opened) -> str:
    """Return the card of a snapshot: its facts, and its leaves with repeated layers folded."""
    facts = [("saved", format_when(record.time_s)), ("size", format_bytes(record.logical_bytes))]
    facts += [("leaves", str(len(opened.leaves))), ("digest", short_hex(record.digest))]
    note = f"metadata: {_format_metadata(record.metadata)}" if record.metadata else ""
    return _render_leaves("Snapshot", record.name, facts, opened, opened.leaves, note=note)


def render_view(name: str, opened: Opened, leaves: Sequence[Leaf]) -> str:
    """Return the card of a part of a snapshot."""
    return _render_leaves("Part of", f"{opened.name}: {name}", [("leaves", str(len(leaves)))], opened, leaves)


def _render_leaves(
    kind: str, title: str, facts: list[tuple[str, str]], opened: Opened, leaves: Sequence[Leaf], *, note: str = ""
) -> str:
    lines = [describe_leaf(opened, leaf) for leaf in leaves]
    folds = fold_leaves([FoldableLeaf(line.name, line.label, line.size_bytes is None) for line in lines])
    rows = [_describe_fold(fold, [lines[position] for position in fold.members]) for fold in folds]
    return render_card(Card(kind, title, facts, None, ("leaf", "what", "size"), rows, right="size", note=note))


def _describe_fold(fold: Fold, lines: Sequence[LeafLine]) -> list[str]:
    sizes = [line.size_bytes for line in lines if line.size_bytes is not None]
    return [fold.name or "(the tree)", fold.label, format_bytes(sum(sizes)) if sizes else ""]


def render_tensor(line: LeafLine, digest: bytes, *, share: float, snapshot: str) -> str:
    """Return the card of one tensor; `share` is its part of the snapshot's bytes."""
    facts = [("", line.label), ("digest", short_hex(digest))]
    bar = Bar(share, f"{format_bytes(line.size_bytes or 0)}, {100 * share:.3g} % of {snapshot}")
    return render_card(Card("Tensor", line.name, facts, bar, note="Its values are read on request: .read() or [0:8]"))


def describe_view(opened: Opened, leaves: Sequence[Leaf]) -> str:
    """Return how many leaves there are, and their size."""
    size_bytes = sum(describe_leaf(opened, leaf).size_bytes or 0 for leaf in leaves)
    return f"{count(len(leaves), 'leaf')}, {format_bytes(size_bytes)}"
