"""Describes leaves by their manifest alone: kind, dtype, shape, size, and whether two entries have the same items."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final, Literal, Protocol

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


_LETTERS: Final[Mapping[int, Literal["B", "H", "I", "Q"]]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
_PACKED_DTYPES: Final = ("quint4x2", "quint2x4")
"""Dtypes with several items in a byte. They are compared as bytes, because they are always stored in C order."""
_MAX_REPEATS: Final = 64
"""Views that repeat their items more often than this would take too long to compare. No real view does."""


@dataclass(frozen=True, slots=True)
class ItemLayout:
    """The layout of the items of a tensor or an array in its entry; for other entries, of single bytes."""

    item_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In items."""
    offset: int = 0
    """In items."""
    flips: tuple[bool, ...] = ()
    """For each number of an item, whether its sign is the opposite of the stored one; two for complex dtypes."""

    @property
    def normalized(self) -> tuple[object, ...]:
        """Equal for layouts that differ only in the strides of dimensions of size 1."""
        dims = [(size, step) for size, step in zip(self.shape, self.stride, strict=True) if size != 1]
        return self.item_bytes, self.offset, self.flips, tuple(dims)


class EntryBytes(Protocol):
    """Reads the bytes of entries: from a store, or from tensors in memory."""

    @property
    def limit_bytes(self) -> int:
        """How many bytes of entries should be announced at a time."""

    def announce(self, entries: Iterable[Entry]) -> None:
        """Prepare to read these entries next."""

    def read(self, entry: Entry, start: int, stop: int) -> bytearray:
        """Return the bytes of an entry from `start` to `stop`."""


@dataclass(frozen=True, slots=True)
class ReadableEntry:
    """An entry with its layout and a reader for its bytes."""

    reader: EntryBytes
    entry: Entry
    layout: ItemLayout

    def read(self, start: int, stop: int) -> bytearray:
        """Read the bytes from `start` to `stop`; those of a store are verified."""
        return self.reader.read(self.entry, start, stop)


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of items that is small enough to be compared at once."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def span(self, layout: ItemLayout) -> tuple[int, int]:
        """Return the byte range of the entry that contains the items."""
        first = layout.offset + sum(at * step for at, step in zip(self.start, layout.stride, strict=True))
        return first * layout.item_bytes, (first + find_span(self.shape, layout.stride)) * layout.item_bytes


def find_layout(entry: Entry) -> ItemLayout:
    """Return the layout of the items of an entry; raise Corrupt if it does not fit into the entry."""
    spec = entry.spec if isinstance(entry.spec, dict) else {}
    kind, dtype = spec.get("type"), str(spec.get("dtype", ""))
    if kind == "tensor" and not spec.get("meta") and dtype not in _PACKED_DTYPES:
        layout = _find_tensor_layout(entry, spec, dtype)
    elif kind == "array":
        layout = _find_array_layout(entry, spec)
    else:
        layout = ItemLayout(1, (entry.size_bytes,), (1,))
    end = (layout.offset + find_span(layout.shape, layout.stride)) * layout.item_bytes
    if 0 not in layout.shape and end > entry.size_bytes:
        raise Corrupt(f"{entry.name}: it needs {end} bytes, but its entry has {entry.size_bytes}", key=entry.name)
    return layout


def _find_tensor_layout(entry: Entry, spec: dict[str, Json], dtype: str) -> ItemLayout:
    shape = parse_shape(spec.get("shape"), entry.name)
    stride = parse_shape(spec["stride"], entry.name) if "stride" in spec else find_stride(shape)
    (offset,) = parse_shape([spec.get("offset", 0)], entry.name)
    if len(stride) != len(shape):
        raise Corrupt(f"{entry.name}: its strides and its shape differ in length", key=entry.name)
    if spec.get("packed"):
        dense = iter(find_stride([size for size, step in zip(shape, stride, strict=True) if step or size == 1]))
        stride = tuple(next(dense) if step or size == 1 else 0 for size, step in zip(shape, stride, strict=True))
    flips = (bool(spec.get("neg")), bool(spec.get("neg")) != bool(spec.get("conj")))
    return ItemLayout(count_item_bytes(dtype), shape, stride, offset, flips[: 2 if dtype.startswith("complex") else 1])


def _find_array_layout(entry: Entry, spec: dict[str, Json]) -> ItemLayout:
    shape = parse_shape(spec.get("shape"), entry.name)
    stride = find_stride(shape)
    if spec.get("order") == "F":
        stride = tuple(reversed(find_stride(shape[::-1])))
    return ItemLayout(entry.size_bytes // max(math.prod(shape), 1) or 1, shape, stride)


def count_item_bytes(dtype: str) -> int:
    """Return the size of an item from the name of its dtype, which contains the number of bits."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0][:4]) // 8) if bits else 1


def find_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of items in C order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def find_span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the distance from the first to the last item, in items, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def is_same(a: ReadableEntry, b: ReadableEntry, *, limit_bytes: int) -> bool:
    """Return whether two entries contain the same items, bit for bit; reads bytes only if digests do not decide."""
    if (a.layout.shape, a.layout.item_bytes) != (b.layout.shape, b.layout.item_bytes):
        return False
    if 0 in a.layout.shape:
        return True
    if a.layout.normalized == b.layout.normalized:
        if list_chunks(a.entry) == list_chunks(b.entry):
            return True
        if is_filled(a.layout, a.entry.size_bytes) and a.entry.size_bytes == b.entry.size_bytes:
            return _has_same_bytes(a, b, limit_bytes)
    if is_too_repetitive(a, b):
        return False
    return all(_has_same_tile(a, b, tile) for tile in iter_tiles(a.layout, b.layout, limit_bytes=limit_bytes))


def is_too_repetitive(a: ReadableEntry, b: ReadableEntry) -> bool:
    """Return whether the views repeat their items so often that comparing every item would take too long."""
    steps = zip(a.layout.shape, a.layout.stride, b.layout.stride, strict=True)
    items = math.prod(size for size, *both in steps if any(both))
    return items * a.layout.item_bytes > _MAX_REPEATS * (a.entry.size_bytes + b.entry.size_bytes)


def list_chunks(entry: Entry) -> list[tuple[bytes, int, tuple[int, ...]]]:
    """Return digest, size and box of each chunk: what the bytes of an entry are, not where they are stored."""
    return [(chunk.digest, chunk.size_bytes, chunk.box) for chunk in entry.chunks]


def is_filled(layout: ItemLayout, size_bytes: int) -> bool:
    """Return whether every byte of the entry belongs to an item; a view may have unrelated bytes between its items."""
    reach = 1
    for step, size in sorted(zip(layout.stride, layout.shape, strict=True)):
        if size > 1 and step > reach:
            return False
        reach += (size - 1) * step
    return layout.offset == 0 and reach * layout.item_bytes == size_bytes


def _has_same_bytes(a: ReadableEntry, b: ReadableEntry, limit_bytes: int) -> bool:
    """Compare chunks with the same byte range by their digests, and read the bytes of the other ranges."""
    if a.entry.dims or b.entry.dims:
        # With the same boxes, the digests have already decided that the entries differ.
        boxes = [[chunk.box for chunk in each.entry.chunks] for each in (a, b)]
        if boxes[0] == boxes[1]:
            return False
    ours, theirs = _find_ranges(a.entry), _find_ranges(b.entry)
    if any(digest != ours[span] for span, digest in theirs.items() if span in ours):
        return False
    # Only ranges that are not chunks of both entries are left to compare.
    rest = _merge(sorted(span for span in ours if span not in theirs))
    step = max(1, limit_bytes // 2)
    pieces = ((low, min(low + step, stop)) for start, stop in rest for low in range(start, stop, step))
    return all(a.read(*piece) == b.read(*piece) for piece in pieces)


def _find_ranges(entry: Entry) -> dict[tuple[int, int], bytes]:
    """Return the digest of each chunk by its byte range in the entry."""
    found, end = {}, 0
    for chunk in entry.chunks:
        found[end, end + chunk.size_bytes] = bytes(chunk.digest)
        end += chunk.size_bytes
    return found


def _merge(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join sorted ranges that are adjacent."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def iter_tiles(a: ItemLayout, b: ItemLayout, *, limit_bytes: int, limit_items: int = 1 << 62) -> Iterator[Tile]:
    """Yield boxes that together cover all items; each is within the limits, for both entries together.

    A dimension with stride 0 on both sides repeats one item, so it is treated as a dimension of size 1.
    """
    steps = list(zip(a.stride, b.stride, strict=True))
    shape = tuple(size if any(both) else min(size, 1) for size, both in zip(a.shape, steps, strict=True))
    limit_span = max(1, limit_bytes // (a.item_bytes + b.item_bytes))
    waiting = [Tile((0,) * len(shape), shape)] if 0 not in shape else []
    while waiting:
        tile = waiting.pop()
        spans = [find_span(tile.shape, layout.stride) for layout in (a, b)]
        if max(spans) <= limit_span and math.prod(tile.shape) <= limit_items:
            yield tile
            continue
        side = 1 if spans[1] > max(spans[0], limit_span) else 0
        dim = max(range(len(shape)), key=lambda at: ((tile.shape[at] - 1) * steps[at][side], tile.shape[at]))
        waiting += _halve(tile, dim)


def _halve(tile: Tile, dim: int) -> list[Tile]:
    """Return the two halves of a tile, the second one first because the caller puts them on a stack."""
    low = (tile.shape[dim] + 1) // 2
    start = [*tile.start[:dim], tile.start[dim] + low, *tile.start[dim + 1 :]]
    sizes = [(*tile.shape[:dim], size, *tile.shape[dim + 1 :]) for size in (tile.shape[dim] - low, low)]
    return [Tile(tuple(start), sizes[0]), Tile(tile.start, sizes[1])]


def _has_same_tile(a: ReadableEntry, b: ReadableEntry, tile: Tile) -> bool:
    """Compare the items of a tile. The longest dimension is compared by slices, the others in a loop."""
    flips = [first != second for first, second in zip(a.layout.flips, b.layout.flips, strict=True)]
    # If signs are flipped, items are compared number by number; else in the largest units that a memoryview has.
    whole = a.layout.item_bytes // len(flips) if any(flips) else a.layout.item_bytes
    unit = next(size for size in (8, 4, 2, 1) if whole % size == 0)
    planes = a.layout.item_bytes // unit
    ours, theirs = (memoryview(each.read(*tile.span(each.layout))).cast(_LETTERS[unit]) for each in (a, b))
    dims = _merge_dims(tile, a.layout, b.layout)
    long = max((dim for dim in dims if dim[1] and dim[2]), default=(1, 1, 1))
    others = [dim for dim in dims if dim is not long]
    size, x_step, y_step = long[0], long[1] * planes, long[2] * planes
    for plane in range(planes):
        for index in product(*(range(dim[0]) for dim in others)):
            x = plane + planes * sum(at * dim[1] for at, dim in zip(index, others, strict=True))
            y = plane + planes * sum(at * dim[2] for at, dim in zip(index, others, strict=True))
            found = ours[x : x + (size - 1) * x_step + 1 : x_step].tobytes()
            if any(flips) and flips[plane]:
                found = _flip(found, unit)
            if found != theirs[y : y + (size - 1) * y_step + 1 : y_step].tobytes():
                return False
    return True


def _merge_dims(tile: Tile, a: ItemLayout, b: ItemLayout) -> list[tuple[int, int, int]]:
    """Return (size, stride in a, stride in b) of the dimensions, after joining those that can be joined."""
    merged: list[tuple[int, int, int]] = []
    for size, x, y in zip(tile.shape, a.stride, b.stride, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * x, size * y):
            merged[-1] = (merged[-1][0] * size, x, y)
        else:
            merged.append((size, x, y))
    return merged


def _flip(numbers: bytes, size_bytes: int) -> bytes:
    """Return little-endian floats with their signs flipped."""
    mask = (bytes(size_bytes - 1) + b"\x80") * (len(numbers) // size_bytes)
    return (int.from_bytes(numbers, "little") ^ int.from_bytes(mask, "little")).to_bytes(len(numbers), "little")
