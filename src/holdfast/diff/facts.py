"""Describes a leaf of a snapshot by its manifest alone: kind, dtype, shape and size. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from holdfast.errors import Corrupt, NewerFormat
from holdfast.json_text import Json
from holdfast.repo.format.entry import ChunkTable, Entry
from holdfast.trees.outline import Leaf, format_value, iter_leaves

_BLOBS: Final = frozenset({"@array", "@str", "@bytes", "@bytearray", "@pickle", "@torch_save"})
_MAX_DEPTH: Final = 12
GRAD_ROLE: Final = "grad"


@dataclass(frozen=True, slots=True)
class LeafFacts:
    """The description of a leaf: what is known without reading its bytes."""

    kind: str
    """"tensor", a layout ("sparse_coo"), a tensor class, "array", "file", or the type of a plain value."""
    size_bytes: int = 0
    """Total size of its entries; 0 for a plain value, which has none."""
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    text: str = ""
    """A plain value as text."""

    def __str__(self) -> str:
        """Return kind, dtype and shape for display; a plain value as text."""
        if not self.dtype:
            return self.text or self.kind
        kind = "" if self.kind == "tensor" else f"{self.kind} "
        return kind + self.dtype + ("" if self.shape is None else f" {self.shape}")

    def describe(self) -> dict[str, Json]:
        """Return the facts as JSON."""
        return {
            "kind": self.kind,
            "dtype": self.dtype or None,
            "shape": None if self.shape is None else list(self.shape),
            "bytes": self.size_bytes,
            "text": self.text or None,
        }


class EntryTable(Protocol):
    """The entries of a tree, by position: a manifest, or the entries that a tree in memory would have."""

    @property
    def names(self) -> Sequence[str]:
        """The name of each entry."""

    def __len__(self) -> int:
        """Return the number of entries."""

    def entry(self, position: int) -> Entry:
        """Return an entry, with its chunks."""

    def find_facts(self, position: int) -> tuple[Json, int, int]:
        """Return the spec, the size in bytes and the alias of an entry, without creating its chunks."""

    def find_chunks(self, position: int) -> ChunkTable:
        """Return the cuts and digests of an entry's chunks."""


class LeafEntry:
    """One entry of a leaf. Its chunks are created when `entry` is read: a list of leaves does not need them."""

    __slots__ = ("_entry", "_position", "_table")

    def __init__(self, table: EntryTable, position: int) -> None:
        """Refer to the entry at a position of a table."""
        self._table = table
        self._position = position
        self._entry: Entry | None = None

    @property
    def entry(self) -> Entry:
        """The entry, with its chunks."""
        if self._entry is None:
            self._entry = self._table.entry(self._position)
        return self._entry

    @property
    def name(self) -> str:
        """The name of the entry."""
        return self._table.names[self._position]

    @property
    def size_bytes(self) -> int:
        """The size of the entry."""
        return self._table.find_facts(self._position)[1]

    @property
    def alias(self) -> int:
        """A number that entries which share memory have in common; 0 for none."""
        return self._table.find_facts(self._position)[2]

    @property
    def chunks(self) -> ChunkTable:
        """The cuts and digests of its chunks."""
        return self._table.find_chunks(self._position)

    @property
    def spec(self) -> Mapping[str, Json]:
        """The spec of the entry; empty if it has none."""
        spec = self._table.find_facts(self._position)[0]
        return spec if isinstance(spec, dict) else {}

    @property
    def kind(self) -> str:
        """The type in the spec, such as "tensor" or "array"; "bytes" if there is none."""
        kind = self.spec.get("type")
        return kind if isinstance(kind, str) else "bytes"


@dataclass(frozen=True, slots=True)
class Shell:
    """Kind and metadata of a tensor that is made of other tensors."""

    kind: str
    meta: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Content:
    """The entries and shells of a stored leaf, by role; the leaf itself has the role ""."""

    parts: dict[str, LeafEntry] = field(default_factory=dict)
    shells: dict[str, Shell] = field(default_factory=dict)
    objects: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By role, an identity that is equal for all parts that were one object in memory."""


def is_stored(leaf: Leaf) -> bool:
    """Return whether a leaf has entries; a plain value is stored in the tree itself."""
    return leaf.tag.startswith("@")


def parse_leaf(table: EntryTable, leaf: Leaf) -> Content:
    """Return the entries and shells of a stored leaf; raise Corrupt or NewerFormat if it cannot be parsed."""
    content = Content()
    _parse(table, leaf.node, "", leaf.name, content)
    return content


def find_single(table: EntryTable, node: Json) -> int | None:
    """Return the position of the entry if a node is a tensor that has one entry and nothing else; otherwise None."""
    # One look at most leaves; `_parse` says what is wrong with a malformed one.
    if type(node) is list and len(node) == 2 and node[0] == "@tensor":
        position = node[1]
        return position if type(position) is int and 0 <= position < len(table) else None
    return None


def _parse(table: EntryTable, node: Json, role: str, name: str, content: Content) -> int:
    """Add the parts of a node to `content`; return the number of its first entry, or -1."""
    if not isinstance(node, list) or not node or role.count(".") > _MAX_DEPTH or role in content.objects:
        raise _malformed(name)
    tag, rest = node[0], node[1:]
    if (tag in _BLOBS and len(rest) == 1) or (tag == "@tensor" and len(rest) in (1, 2)):
        if not all(type(number) is int and 0 <= number < len(table) for number in rest):
            raise _malformed(name)
        content.parts[role] = LeafEntry(table, rest[0])
        content.objects[role] = ("entry", rest[-1])
        return int(rest[0])
    if tag == "@grad" and len(rest) == 2:
        number = _parse(table, rest[0], role, name, content)
        _parse(table, rest[1], join_role(role, GRAD_ROLE), name, content)
        return number
    if tag == "@parts" and len(rest) >= 3 and len(rest) % 2:
        return _parse_parts(table, rest, role, name, content)
    if type(tag) is str and tag.startswith("@") and tag not in (*_BLOBS, "@tensor", "@grad", "@parts"):
        raise NewerFormat(f"{name}: this version does not know leaves of kind {tag[1:40]!r}: upgrade Holdfast")
    raise _malformed(name)


def _parse_parts(table: EntryTable, rest: list[Json], role: str, name: str, content: Content) -> int:
    kind, meta, first, *children = rest
    if type(kind) is not str or not isinstance(meta, dict) or not (first is None or type(first) is int):
        raise _malformed(name)
    content.shells[role] = Shell(kind, meta)
    numbers = [
        _parse(table, child, join_role(role, str(child_role)), name, content)
        for child_role, child in zip(children[::2], children[1::2], strict=True)
    ]
    number = next(iter(numbers), -1)
    content.objects[role] = ("parts", number if first is None else first)
    return number


def join_role(role: str, more: str) -> str:
    """Join a role, or a name, and the role of a part of it with a dot; either may be empty."""
    return f"{role}.{more}" if role and more else role or more


def _malformed(name: str) -> Corrupt:
    return Corrupt(f"{name[:200]}: the stored tree has a malformed leaf; run `holdfast check`", key=name)


@dataclass(frozen=True, slots=True)
class Described:
    """A leaf, its facts, and its entries by role."""

    leaf: Leaf
    facts: LeafFacts
    parts: Mapping[str, LeafEntry]


def iter_described(table: EntryTable, tree: Json) -> Iterator[Described]:
    """Yield the leaves of a tree, described; their entries are in `table`."""
    return (describe_leaf(table, leaf) for leaf in iter_leaves(tree))


def describe_leaf(table: EntryTable, leaf: Leaf) -> Described:
    """Describe one leaf; its entries are in `table`."""
    content = parse_leaf(table, leaf) if is_stored(leaf) else Content()
    return Described(leaf, find_facts(leaf, content), content.parts)


def find_facts(leaf: Leaf, content: Content) -> LeafFacts:
    """Return the facts of a leaf; `content` is empty for a plain value."""
    return _summarise(content, leaf.name) if is_stored(leaf) else LeafFacts(leaf.tag, text=format_value(leaf.node))


def _summarise(content: Content, name: str) -> LeafFacts:
    size_bytes = sum(part.size_bytes for part in content.parts.values())
    shell = content.shells.get("")
    if shell is None:
        if "" not in content.parts:
            raise _malformed(name)
        part = content.parts[""]
        shape = parse_shape(part.spec.get("shape"), name) if "shape" in part.spec else None
        return LeafFacts(part.kind, size_bytes, str(part.spec.get("dtype", "")), shape)
    values = content.parts.get("values") or next(iter(content.parts.values()), None)
    dtype = str(values.spec.get("dtype", "")) if values else ""
    kind = str(shell.meta.get("type", "")).rpartition(":")[2] if shell.kind == "subclass" else shell.kind
    shape = parse_shape(shell.meta["shape"], name) if "shape" in shell.meta else None
    return LeafFacts(kind, size_bytes, dtype, shape)


def parse_shape(value: Json, name: str) -> tuple[int, ...]:
    """Validate the shape or strides of a spec; raise Corrupt."""
    if not isinstance(value, list) or len(value) > 64:
        raise _malformed(name)
    if not all(type(size) is int and 0 <= size <= 1 << 60 for size in value):
        raise _malformed(name)
    return tuple(value)
