"""Turns the leaves of a tree (tensors, arrays, long values) into entries, and into nodes that name entries by number.

A node replaces its value in the encoded tree::

    ["@tensor", entry]                          an ordinary tensor
    ["@tensor", entry, first]                   the same object as the tensor of entry `first`
    ["@parts", kind, meta, first, role, node, ...]   a tensor made of others; `first` is null, or the first entry
                                                of an earlier node for the same object
    ["@grad", node, node]                       a tensor and its gradient
    ["@array" | "@str" | "@bytes" | "@bytearray" | "@pickle", entry]
    ["@torch_save", entry]                      bytes of torch.save, from DCP; decoded only when it is loaded
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from holdfast.errors import Corrupt, Unsupported
from holdfast.json_text import DEFERRED, EncodedJson, Json, canonical_json
from holdfast.repo.format.source import BytesSource, Source
from holdfast.snapshot.pickled import pickle_value
from holdfast.tensors.composite import has_own_bytes, split
from holdfast.tensors.shard_source import ShardSource, make_shard_source
from holdfast.tensors.sharding import Layouts, LocalLeaf, PerRank, Shard, describe
from holdfast.tensors.sources import SourcePlan, group_equal, make_source
from holdfast.trees.encoding import decode_tree, encode_tree, refuse
from holdfast.trees.outline import TreePath, join_name
from holdfast.trees.registered import Types

TENSOR: Final = "@tensor"
PARTS: Final = "@parts"
GRAD: Final = "@grad"
ARRAY: Final = "@array"
PICKLE: Final = "@pickle"
PAYLOAD: Final = "@torch_save"
TENSOR_TAGS: Final = (TENSOR, PARTS, GRAD)
"""The tags of tensors: ordinary, composite, and with a gradient."""
BLOBS: Final = {"@str": str, "@bytes": bytes, "@bytearray": bytearray}
_BLOB_TAGS: Final = {kind: tag for tag, kind in BLOBS.items()}
_ENTRY_TAGS: Final = frozenset({TENSOR, ARRAY, PICKLE, PAYLOAD, *BLOBS})
_MAX_PARTS_DEPTH: Final = 8
_KIND_NAMES: Final[Mapping[str, str]] = {
    TENSOR: "a tensor",
    GRAD: "a tensor with its gradient",
    ARRAY: "an array",
    PICKLE: "a pickled object",
    PAYLOAD: "a payload of torch.save",
    "odict": "an OrderedDict",
    "odict+": "an OrderedDict",
    "counter+": "a counter",
    "int": "an int",
    "enum": "an enum",
}


class LeafWriter:
    """Collects the leaves of one tree as entries, in the order in which they are encoded."""

    def __init__(self, types: Types, *, allow_pickle: bool = False, grads: bool = False) -> None:
        """With `grads`, the gradients of tensors are saved as well."""
        self._types = types
        self._allow_pickle = allow_pickle
        self._grads = grads
        self._plan = SourcePlan()
        self._count = 0
        # Sources of entries that are not ordinary tensors, by the number of the entry.
        self._others: dict[int, BytesSource | ShardSource] = {}
        self._layouts = Layouts()
        self.local_leaves: dict[int, LocalLeaf] = {}
        """Entries, by number, that are shards of a global tensor, or declared to be replicas."""
        self.per_rank_entries: set[int] = set()
        """Entries that are declared to differ from rank to rank (`per_rank`)."""
        self._names: set[str] = set()
        # Keyed by `id()`. The ids stay valid because the plan keeps every ordinary tensor alive, and `_kept` all
        # others.
        self._ids = array("Q")
        # Only for tensors that are not ordinary; there are few of them.
        self._first: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []

    def encode(self, value: object, path: TreePath) -> Json:
        """Add the entries of a leaf, and return its node; raises Unsupported with the path of the leaf.

        For an ordinary tensor the node is DEFERRED, because a node takes 130 bytes; `encode_nodes` makes it later.
        """
        name = join_name(path)
        if isinstance(value, PerRank):
            return self._encode_per_rank(value, path)
        try:
            if isinstance(value, Shard):
                return [TENSOR, self._add_shards(name, None, self._describe(value))]
            if isinstance(value, torch.Tensor):
                return self._encode_tensor(value, name, 0)
            if isinstance(value, np.ndarray):
                return [ARRAY, self._add_blob(make_source(name, value))]
        except Unsupported as error:
            raise Unsupported(f"{name or 'the tree'}: {error}") from error
        if isinstance(value, str) and type(value) is str:
            return ["@str", self._add_blob(BytesSource(name, value.encode(errors="surrogatepass"), {"type": "str"}))]
        if isinstance(value, bytes | bytearray) and type(value) in _BLOB_TAGS:
            tag = _BLOB_TAGS[type(value)]
            return [tag, self._add_blob(BytesSource(name, bytes(value), {"type": tag.removeprefix("@")}))]
        if self._allow_pickle:
            return [PICKLE, self._add_blob(BytesSource(name, pickle_value(value, name=name), {"type": "pickle"}))]
        raise refuse(value, path)

    def make_sources(self) -> Sequence[Source]:
        """Return the sources of all entries; the values must not change while the sources are in use."""
        planned: Sequence[Source] = self._plan.make()
        if not self._others:
            return planned
        rest = iter(planned)
        return [self._others[number] if number in self._others else next(rest) for number in range(self._count)]

    def encode_nodes(self, value: Json) -> EncodedJson:
        """Encode a value that contains the nodes of all leaves, in order; raises Unsupported if it is too deep."""
        try:
            # Leaves room for the head of a manifest, which will contain this value.
            return EncodedJson(canonical_json(value, depth=1, iter_deferred=self._iter_nodes))
        except ValueError as error:
            raise Unsupported(f"the tree cannot be saved: {error}; flatten it") from error

    def _iter_nodes(self) -> Iterator[list[Json]]:
        """Yield the nodes of ordinary tensors, in order; the node of a repeated tensor names its first entry."""
        firsts = {other: first for first, *others in group_equal(self._ids) for other in others}
        wanted = set(firsts.values())
        numbers: dict[int, int] = {}
        for position, number in enumerate(number for number in range(self._count) if number not in self._others):
            if position in wanted:
                numbers[position] = number
            first = firsts.get(position)
            yield [TENSOR, number] if first is None else [TENSOR, number, numbers[first]]

    def _encode_per_rank(self, value: PerRank, path: TreePath) -> Json:
        first = self._count
        node = self.encode(value.value, path)
        self.per_rank_entries.update(range(first, self._count))
        return node

    def _describe(self, value: object) -> LocalLeaf:
        return describe(value, layouts=self._layouts)

    def _add_shards(self, name: str, tensor: torch.Tensor | None, leaf: LocalLeaf) -> int:
        number = self._add_other(make_shard_source(self._choose_name(name), tensor, leaf))
        self.local_leaves[number] = leaf
        return number

    def _add_other(self, source: BytesSource | ShardSource) -> int:
        number = self._count
        self._others[number] = source
        self._count += 1
        return number

    def _encode_tensor(self, tensor: torch.Tensor, name: str, depth: int) -> Json:
        node = self._encode_value(tensor, name, depth)
        if not self._grads:
            return node
        # Reading `.grad` of a tensor that is not a leaf of autograd makes torch warn.
        grad = tensor.grad if tensor.is_leaf and tensor.requires_grad else None
        return node if grad is None else [GRAD, node, self._encode_value(grad, f"{name}.grad", depth)]

    def _encode_value(self, tensor: torch.Tensor, name: str, depth: int) -> Json:
        if depth > _MAX_PARTS_DEPTH:
            raise Unsupported("it is made of tensors that are made of tensors, nested too deep")
        number = self._count
        has_bytes = has_own_bytes(tensor)
        leaf = None if has_bytes else self._describe(tensor)
        if leaf is not None and leaf.kind in ("shards", "replica"):
            self._kept.append(tensor)
            self._add_shards(name, tensor, leaf)
            first = self._first.setdefault(id(tensor), number)
            return [TENSOR, number] if first == number else [TENSOR, number, first]
        parts = None if has_bytes else split(tensor, types=self._types, encode_value=self._encode_plain)
        if parts is None:
            self._plan.add(self._choose_name(name), tensor)
            self._count += 1
            self._ids.append(id(tensor))
            return DEFERRED
        self._kept.append(tensor)
        first = self._first.setdefault(id(tensor), number)
        nodes: list[Json] = [PARTS, parts.kind, parts.meta, None if first == number else first]
        for role, part in parts.tensors.items():
            nodes += [role, self._encode_value(part, f"{name}.{role}", depth + 1)]
        return nodes

    def _encode_plain(self, value: object) -> Json:
        def refuse_leaf(leaf: object, path: TreePath) -> Json:
            raise refuse(leaf, ("its context", *path))

        return encode_tree(value, types=self._types, encode_leaf=refuse_leaf)

    def _add_blob(self, source: BytesSource) -> int:
        return self._add_other(replace(source, name=self._choose_name(source.name)))

    def _choose_name(self, name: str) -> str:
        """Return `name`, or a variant of it if another entry has that name."""
        # Keys may contain text that is not valid Unicode; names of entries must be valid.
        clean = (name if name.isascii() else name.encode(errors="backslashreplace").decode()) or "value"
        chosen, names = clean, self._names
        count = 1
        while chosen in names:
            count += 1
            chosen = f"{clean}#{count}"
        names.add(chosen)
        return chosen


def is_ordinary_node(node: Json) -> bool:
    """Return whether a node has the usual form of an ordinary tensor. Fast path; does not validate."""
    return len(node) == 2 and node[0] == TENSOR and type(node[1]) is int


def iter_entry_numbers(node: Json, *, what: str) -> Iterator[int]:
    """Yield the numbers of the entries in a leaf's node, and check its form; yields nothing for a plain value."""
    if not isinstance(node, list) or not str(node[0]).startswith("@"):
        return
    yield from _iter_numbers(node, what, 0)


def _iter_numbers(node: Json, what: str, depth: int) -> Iterator[int]:
    if not isinstance(node, list) or not node or type(node[0]) is not str or depth > _MAX_PARTS_DEPTH + 2:
        raise _malformed(what)
    tag, rest = node[0], node[1:]
    if tag in _ENTRY_TAGS:
        if not 1 <= len(rest) <= (2 if tag == TENSOR else 1) or not all(type(number) is int for number in rest):
            raise _malformed(what)
        yield rest[0]
    elif tag == GRAD and len(rest) == 2:
        yield from _iter_numbers(rest[0], what, depth + 1)
        yield from _iter_numbers(rest[1], what, depth + 1)
    elif tag == PARTS and len(rest) >= 3 and len(rest) % 2 == 1:
        if type(rest[0]) is not str or not (rest[2] is None or type(rest[2]) is int):
            raise _malformed(what)
        for child in rest[4::2]:
            yield from _iter_numbers(child, what, depth + 1)
    else:
        raise _malformed(what)


def _malformed(what: str) -> Corrupt:
    return Corrupt(f"{what}: the stored tree has a malformed leaf; run `holdfast check`", key=what)


def list_parts(node: Sequence[Json], *, what: str) -> list[tuple[str, Json]]:
    """Return the roles and nodes of the tensors that a composite tensor consists of."""
    roles = node[4::2]
    if not all(isinstance(role, str) for role in roles) or len(set(roles)) != len(roles):
        raise _malformed(what)
    return [(str(role), child) for role, child in zip(roles, node[5::2], strict=True)]


def renumber(node: Json, numbers: Mapping[int, int]) -> Json:
    """Return an encoded tree with the entry numbers of its leaves replaced."""
    if not isinstance(node, list) or not node:
        return node
    tag = node[0]
    if not isinstance(tag, str) or not tag.startswith("@"):
        return [renumber(item, numbers) if isinstance(item, list) else item for item in node]
    if tag == PARTS:
        first = node[3] if node[3] is None else numbers[node[3]]
        rest = [renumber(item, numbers) if at % 2 else item for at, item in enumerate(node[4:])]
        return [*node[:3], first, *rest]
    if tag == GRAD:
        return [tag, *(renumber(item, numbers) for item in node[1:])]
    if tag == TENSOR:
        return [tag, *(numbers[number] for number in node[1:])]
    return [tag, numbers[node[1]]]


def decode_plain(node: Json, types: Types) -> Any:
    """Return a plain value, for example the key of a dict."""

    def refuse_leaf(leaf: list[Json], path: TreePath) -> object:
        raise Corrupt("a leaf where only plain values can be")

    return decode_tree(node, types=types, decode_leaf=refuse_leaf)


def describe_node(node: Json) -> str:
    """Describe a node in words, for an error."""
    if node is None:
        return "None"
    if not isinstance(node, list):
        name = type(node).__name__
        return _KIND_NAMES.get(name, f"a {name}")
    if node[0] == PARTS:
        return f"a {node[1]} tensor"
    return _KIND_NAMES.get(node[0], f"a {str(node[0]).lstrip('@')}")
