"""Builds the root manifest of a checkpoint: the whole entries that the parts make up, and their tree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from holdfast.distributed.dcp.items import PAYLOAD_SPEC, Written, encode_tensor, name_piece
from holdfast.distributed.dcp.metadata import KEY, encode_metadata, find_box, is_covered
from holdfast.errors import Mismatch
from holdfast.json_text import Json
from holdfast.repo.format.boxes import Coordinates, volume
from holdfast.repo.format.entry import Entry
from holdfast.repo.write.transaction import ManifestPart
from holdfast.snapshot.leaves import PAYLOAD, TENSOR
from holdfast.tensors.dtypes import find_dtype
from holdfast.tensors.spec import count_bytes
from holdfast.trees.outline import TREE


def make_root(metadata: Metadata, written: Written, *, alone: bool) -> ManifestPart:
    """Return the root of a checkpoint; raise Mismatch if the ranks have not written everything that was planned."""
    builder = _Builder(written, alone=alone)
    nodes = {fqn: builder.add(fqn, stored) for fqn, stored in metadata.state_dict_metadata.items()}
    spec = {TREE: nest(nodes, metadata.planner_data), KEY: encode_metadata(metadata)}
    return ManifestPart(spec, builder.entries)


class _Builder:
    """Collects the entries of a root."""

    def __init__(self, written: Written, *, alone: bool) -> None:
        self.entries: list[Entry] = []
        self._written = written
        self._alone = alone

    def add(self, fqn: str, stored: TensorStorageMetadata | BytesStorageMetadata) -> Json:
        """Add the entries of one name; return its node in the tree."""
        if isinstance(stored, BytesStorageMetadata):
            if fqn not in self._written.sizes:
                raise Mismatch(f"{fqn} was planned, but no rank has written it; nothing was committed")
            return [PAYLOAD, self._add_entry(fqn, self._written.sizes[fqn], PAYLOAD_SPEC)]
        if is_covered(stored):
            return [TENSOR, self._add_tensor(fqn, fqn, stored, tuple(stored.size))]
        if not self._alone:
            planned = sum(volume(find_box(chunk)) for chunk in stored.chunks)
            raise Mismatch(
                f"{fqn}: the ranks have planned {planned} of its {math.prod(stored.size)} items; nothing was committed."
                " Each rank must plan the shards that it holds"
            )
        node: list[Json] = ["dict"]
        for box in {find_box(chunk): None for chunk in stored.chunks}:
            name = name_piece(fqn, box.starts)
            node += [name.removeprefix(f"{fqn}@"), [TENSOR, self._add_tensor(fqn, name, stored, box.sizes)]]
        return node

    def _add_tensor(self, fqn: str, name: str, stored: TensorStorageMetadata, shape: Coordinates) -> int:
        dtype: torch.dtype = stored.properties.dtype
        if fqn in self._written.dtypes:
            dtype = find_dtype(self._written.dtypes[fqn])
        size_bytes = count_bytes(dtype, math.prod(shape))
        return self._add_entry(
            name, size_bytes, encode_tensor(shape, dtype, requires_grad=stored.properties.requires_grad)
        )

    def _add_entry(self, name: str, size_bytes: int, spec: Json) -> int:
        self.entries.append(Entry(name, size_bytes, (), spec, None, 1))
        return len(self.entries) - 1


def nest(nodes: Mapping[str, Json], planner_data: Any) -> Json:
    """Return the tree of a state dict: nested as it was before the planner flattened it; flat if it did not."""
    tree: dict[Any, Any] = {}
    for fqn in _order(nodes, planner_data):
        if not _put(tree, _find_path(fqn, planner_data), _Leaf(nodes[fqn])):
            return ["dict", *(part for fqn, node in nodes.items() for part in (fqn, node))]
    return _encode(tree)


def _order(nodes: Mapping[str, Json], planner_data: Any) -> list[str]:
    """Return the names in the order of the state dict; the metadata orders them by the rank that writes them."""
    first = [fqn for fqn in planner_data if fqn in nodes] if isinstance(planner_data, dict) else []
    return list(dict.fromkeys([*first, *nodes]))


class _Leaf:
    """Wraps a node in nested dicts, because a node is itself a list."""

    def __init__(self, node: Json) -> None:
        self.node = node


def _find_path(fqn: str, planner_data: Any) -> tuple[str | int, ...]:
    path = planner_data.get(fqn) if isinstance(planner_data, dict) else None
    if isinstance(path, tuple) and path and type(path[0]) is str and all(type(key) in (str, int) for key in path):
        return path
    return (fqn,)


def _put(tree: dict[Any, Any], path: tuple[str | int, ...], leaf: _Leaf) -> bool:
    """Put a leaf into nested dicts, in which lists have int keys; return False if the path conflicts with another."""
    parent: Any = tree
    for key in path[:-1]:
        parent = parent.setdefault(key, {})
        if isinstance(parent, _Leaf):
            return False
    if path[-1] in parent:
        return False
    parent[path[-1]] = leaf
    return len({type(key) for key in parent}) == 1


def _encode(value: Any) -> Json:
    if isinstance(value, _Leaf):
        return value.node
    keys = list(value)
    if keys and type(keys[0]) is int and min(keys) >= 0:
        # A missing index was an empty dict. Torch also restores it as None.
        return ["list", *(_encode(value[number]) if number in value else None for number in range(max(keys) + 1))]
    return ["dict", *(part for key in keys for part in (key, _encode(value[key])))]
