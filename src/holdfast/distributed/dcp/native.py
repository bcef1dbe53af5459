"""Presents a snapshot of `Store.save` to torch's planners, flattened in the way they flatten state dicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.distributed.dcp.metadata import VERSION, make_storage_meta
from holdfast.errors import Unsupported
from holdfast.json_text import Json
from holdfast.snapshot.leaves import GRAD, PARTS, TENSOR
from holdfast.snapshot.load.opened import Opened
from holdfast.tensors.spec import TensorSpec, decode_spec
from holdfast.trees.outline import PAIRS_START, key_text

_TENSORS: Final = (TENSOR, PARTS, GRAD)
FlatPath = tuple[str | int, ...]


def describe_tree(opened: Opened, *, ids: Json, load_id: str) -> tuple[Metadata, dict[str, Json]]:
    """Return the DCP metadata of a snapshot of a tree, and its tree node for each name."""
    if not _is_mapping(opened.tree):
        raise Unsupported(f"{opened.name!r} is not a dict, so DCP cannot load it; use Store.load")
    nodes: dict[str, Json] = {}
    paths: dict[str, FlatPath] = {}
    for path, node in _iter_flat((), opened.tree):
        fqn = ".".join(map(str, path))
        if fqn in nodes:
            raise Unsupported(f"{opened.name!r} contains two values that torch would name {fqn!r}; use Store.load")
        nodes[fqn], paths[fqn] = node, path
    stored = {fqn: _describe(opened, node) for fqn, node in nodes.items()}
    return Metadata(stored, paths, {}, make_storage_meta(ids, load_id), VERSION), nodes


def find_tensor(opened: Opened, node: Json) -> tuple[int, TensorSpec] | None:
    """Return entry number and spec of an ordinary tensor with values; None for any other node."""
    if isinstance(node, list) and node[0] == GRAD:
        node = node[1]
    if not isinstance(node, list) or node[0] != TENSOR:
        return None
    entry = opened.entry(node[1])
    spec = decode_spec(entry.spec, size_bytes=entry.size_bytes, what=f"{opened.name!r}, {entry.name}")
    return None if spec.meta or spec.quantizer is not None else (node[1], spec)


def _describe(opened: Opened, node: Json) -> TensorStorageMetadata | BytesStorageMetadata:
    found = find_tensor(opened, node)
    if found is None:
        return BytesStorageMetadata()
    spec = found[1]
    size = torch.Size(spec.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(spec.dtype, requires_grad=spec.requires_grad), size, [chunk])


def _iter_flat(path: FlatPath, node: Json) -> Iterator[tuple[FlatPath, Json]]:
    """Yield the leaves as torch's planners see them: they walk dicts, and lists that contain a tensor or a dict."""
    if _is_mapping(node):
        for key, child in _pairs(node):
            yield from _iter_flat((*path, key_text(key)), child)
    elif _is_walked(node):
        for number, child in enumerate(node[1:]):
            yield from _iter_flat((*path, number), child)
    else:
        yield path, node


def _is_mapping(node: Json) -> bool:
    return isinstance(node, list) and node[0] in PAIRS_START


def _pairs(node: list[Any]) -> Iterator[tuple[Json, Json]]:
    start = PAIRS_START[node[0]]
    return zip(node[start::2], node[start + 1 :: 2], strict=True)


def _is_walked(node: Json) -> bool:
    if not isinstance(node, list) or node[0] != "list":
        return False
    return any(_is_mapping(child) or _is_walked(child) or _is_tensor(child) for child in node[1:])


def _is_tensor(node: Json) -> bool:
    return isinstance(node, list) and node[0] in _TENSORS
