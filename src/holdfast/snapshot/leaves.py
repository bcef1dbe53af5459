"""Leaves of a tree as entries: tensors, arrays and long values become nodes that name entries by number, and back.

The nodes, which stand in the tree where the values stood::

    ["@tensor", entry]                          an ordinary tensor
    ["@tensor", entry, first]                   the same object as the tensor of entry `first`
    ["@parts", kind, meta, first, role, node, ...]   a tensor made of others; `first` is null, or the entry with
                                                which the same object began
    ["@grad", node, node]                       a tensor and its gradient
    ["@array" | "@str" | "@bytes" | "@bytearray" | "@pickle", entry]
    ["@torch_save", entry]                      what torch.save wrote for somebody else; decoded only when it is loaded
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from holdfast.errors import Corrupt, Unsupported
from holdfast.repo.record import Json
from holdfast.repo.source import BytesSource, Source
from holdfast.snapshot.pickled import pickle_value
from holdfast.tensors.arrays import make_source
from holdfast.tensors.meshes import Layouts
from holdfast.tensors.parts import has_own_bytes, split
from holdfast.tensors.shard_source import ShardSource, make_shard_source
from holdfast.tensors.sharded import Held, PerRank, Shard, describe
from holdfast.tensors.sources import SourcePlan, group_equal
from holdfast.trees.encoding import decode_tree, encode_tree, refuse
from holdfast.trees.outline import Path, join_name
from holdfast.trees.registered import Types

TENSOR: Final = "@tensor"
PARTS: Final = "@parts"
GRAD: Final = "@grad"
ARRAY: Final = "@array"
PICKLE: Final = "@pickle"
PAYLOAD: Final = "@torch_save"
BLOBS: Final = {"@str": str, "@bytes": bytes, "@bytearray": bytearray}
_BLOB_TAGS: Final = {kind: tag for tag, kind in BLOBS.items()}
_ENTRY_TAGS: Final = frozenset({TENSOR, ARRAY, PICKLE, PAYLOAD, *BLOBS})
_MAX_PARTS_DEPTH: Final = 8


class LeafWriter:
    """Collects the leaves of one tree; the order in which they come is the order of the entries."""

    def __init__(self, types: Types, *, allow_pickle: bool = False, grads: bool = False) -> None:
        """Begin with no entries; with `grads`, gradients of tensors are kept, too."""
        self._types = types
        self._allow_pickle = allow_pickle
        self._grads = grads
        self._plan = SourcePlan()
        # None stands for the next tensor of the plan.
        self._slots: list[BytesSource | ShardSource | None] = []
        self._layouts = Layouts()
        self.held: dict[int, Held] = {}
        """Entries, by number, that other ranks have a part in, or are declared to have the same of."""
        self.own: set[int] = set()
        """Entries that are declared to be this rank's own."""
        self._names: set[str] = set()
        # By identity, which holds because the plan keeps every ordinary tensor alive, and `_kept` the others.
        self._ids = array("Q")
        self._nodes: list[list[Json]] = []
        # Of tensors that are no ordinary ones, which are few.
        self._first: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []

    def encode(self, value: object, path: Path) -> Json:
        """Return the node of a leaf, having taken its bytes up; raises Unsupported, naming the leaf.

        `make_sources` completes the nodes of tensors that occur more than once.
        """
        name = join_name(path)
        if isinstance(value, PerRank):
            return self._encode_own(value, path)
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

    def make_sources(self) -> list[Source]:
        """Return the sources of all entries; the values must stay as they are while these are in use.

        Call it when all leaves are encoded: it completes the nodes of tensors that occur more than once.
        """
        for first, *others in group_equal(self._ids):
            for other in others:
                self._nodes[other].append(self._nodes[first][1])
        self._ids, self._nodes = array("Q"), []
        planned = iter(self._plan.make())
        return [next(planned) if slot is None else slot for slot in self._slots]

    def _encode_own(self, value: PerRank, path: Path) -> Json:
        first = len(self._slots)
        node = self.encode(value.value, path)
        self.own.update(range(first, len(self._slots)))
        return node

    def _describe(self, value: object) -> Held:
        return describe(value, layouts=self._layouts)

    def _add_shards(self, name: str, tensor: torch.Tensor | None, held: Held) -> int:
        number = len(self._slots)
        self._slots.append(make_shard_source(self._choose_name(name), tensor, held))
        self.held[number] = held
        return number

    def _encode_tensor(self, tensor: torch.Tensor, name: str, depth: int) -> Json:
        node = self._encode_value(tensor, name, depth)
        if not self._grads:
            return node
        # Asking others for their gradient makes torch warn.
        grad = tensor.grad if tensor.is_leaf and tensor.requires_grad else None
        return node if grad is None else [GRAD, node, self._encode_value(grad, f"{name}.grad", depth)]

    def _encode_value(self, tensor: torch.Tensor, name: str, depth: int) -> Json:
        if depth > _MAX_PARTS_DEPTH:
            raise Unsupported("it is made of tensors that are made of tensors, too deep")
        number = len(self._slots)
        has_bytes = has_own_bytes(tensor)
        held = None if has_bytes else self._describe(tensor)
        if held is not None and held.kind in ("shards", "replica"):
            self._kept.append(tensor)
            self._add_shards(name, tensor, held)
            first = self._first.setdefault(id(tensor), number)
            return [TENSOR, number] if first == number else [TENSOR, number, first]
        parts = None if has_bytes else split(tensor, types=self._types, encode_value=self._encode_plain)
        if parts is None:
            self._plan.add(self._choose_name(name), tensor)
            self._slots.append(None)
            self._ids.append(id(tensor))
            node: list[Json] = [TENSOR, number]
            self._nodes.append(node)  # to be completed if the tensor occurs again
            return node
        self._kept.append(tensor)
        first = self._first.setdefault(id(tensor), number)
        nodes: list[Json] = [PARTS, parts.kind, parts.meta, None if first == number else first]
        for role, part in parts.tensors.items():
            nodes += [role, self._encode_value(part, f"{name}.{role}", depth + 1)]
        return nodes

    def _encode_plain(self, value: object) -> Json:
        def refuse_leaf(leaf: object, path: Path) -> Json:
            raise refuse(leaf, ("its context", *path))

        return encode_tree(value, types=self._types, encode_leaf=refuse_leaf)

    def _add_blob(self, source: BytesSource) -> int:
        self._slots.append(replace(source, name=self._choose_name(source.name)))
        return len(self._slots) - 1

    def _choose_name(self, name: str) -> str:
        """Return `name`, or one like it if another leaf has the same: entries must be told apart, leaves have paths."""
        # Keys may be text that is not valid Unicode; entries must have names that are.
        clean = (name if name.isascii() else name.encode(errors="backslashreplace").decode()) or "value"
        chosen, names = clean, self._names
        count = 1
        while chosen in names:
            count += 1
            chosen = f"{clean}#{count}"
        names.add(chosen)
        return chosen


def is_one_entry(node: Json) -> bool:
    """Tell whether a node is an ordinary tensor's, in the form that nearly all leaves have: a look, not a check."""
    return len(node) == 2 and node[0] == TENSOR and type(node[1]) is int


def iter_entry_numbers(node: Json, *, what: str) -> Iterator[int]:
    """Yield the entries that a leaf's node names, checking its form; nothing for a plain value."""
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
    return Corrupt(f"{what}: the stored tree has a leaf that makes no sense; run `holdfast check`", key=what)


def list_parts(node: Sequence[Json], *, what: str) -> list[tuple[str, Json]]:
    """Return the roles and nodes of what a tensor is made of."""
    roles = node[4::2]
    if not all(isinstance(role, str) for role in roles) or len(set(roles)) != len(roles):
        raise _malformed(what)
    return [(str(role), child) for role, child in zip(roles, node[5::2], strict=True)]


def decode_plain(node: Json, types: Types) -> Any:
    """Return a plain value, the key of a dict for instance."""

    def refuse_leaf(leaf: list[Json], path: Path) -> object:
        raise Corrupt("a leaf where only plain values can be")

    return decode_tree(node, types=types, decode_leaf=refuse_leaf)
