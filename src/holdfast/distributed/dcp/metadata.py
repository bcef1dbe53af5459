"""Converts the metadata of torch.distributed.checkpoint to JSON and back, exactly and without pickle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.errors import Corrupt, NewerFormat, Unsupported
from holdfast.json_text import Json
from holdfast.repo.format.boxes import Box, volume, whole
from holdfast.tensors.spec import dtype_name, find_dtype
from holdfast.trees.encoding import decode_tree, encode_tree, refuse
from holdfast.trees.outline import TreePath
from holdfast.trees.registered import Types

KEY: Final = "dcp"
"""Key of the metadata in a snapshot's spec, and of the ids of checkpoint and save in its environment."""
VERSION: Final = "1.0.0"
"""The version that torch writes into its metadata, and expects to read."""
_FORM: Final = 1
_LAYOUTS: Final = {
    str(layout).removeprefix("torch."): layout
    for layout in (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.jagged)
}
_MEMORY_FORMATS: Final = {
    str(each).removeprefix("torch."): each
    for each in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
}
Stored = TensorStorageMetadata | BytesStorageMetadata


def encode_metadata(metadata: Metadata) -> Json:
    """Return the metadata of a checkpoint as JSON; raise Unsupported for planner data that is not plain."""
    return {
        "form": _FORM,
        "version": VERSION,
        "state": [[fqn, _encode_stored(fqn, stored)] for fqn, stored in metadata.state_dict_metadata.items()],
        "planner": _encode_planner(metadata.planner_data),
    }


def decode_metadata(value: Json, *, ids: Json, load_id: str, what: str) -> Metadata:
    """Return the metadata of a checkpoint from JSON; `ids` are the ids that were recorded when it was saved."""
    if not isinstance(value, dict) or type(value.get("form")) is not int:
        raise _malformed(what)
    if value["form"] > _FORM:
        raise NewerFormat(
            f"{what} has checkpoint metadata of form {value['form']}, this version reads form {_FORM}: upgrade Holdfast"
        )
    state = value.get("state")
    if not isinstance(state, list) or not all(isinstance(each, list) and len(each) == 2 for each in state):
        raise _malformed(what)
    return make_metadata(
        {_text(fqn, what): _decode_stored(stored, what) for fqn, stored in state},
        _decode_planner(value.get("planner"), what),
        make_storage_meta(ids, load_id),
        version=_text(value.get("version"), what),
    )


def make_metadata(
    state: dict[str, Stored], planner_data: Any, storage_meta: StorageMeta, *, version: str = VERSION
) -> Metadata:
    """Return torch's metadata of a checkpoint; without the version if this torch writes none."""
    made = Metadata(state, planner_data, {}, storage_meta)
    if "version" in _list_fields(Metadata):
        made.version = version
    return made


def make_storage_meta(ids: Json, load_id: str) -> StorageMeta:
    """Return the ids of a checkpoint, as far as they were recorded."""
    known = ids if isinstance(ids, dict) else {}
    ids_of_torch: dict[str, Any] = {
        "checkpoint_id": known.get("checkpoint_id"),
        "save_id": known.get("save_id"),
        "load_id": load_id,
        "modules": list(known.get("modules", ())),
    }
    names = _list_fields(StorageMeta)  # some versions of torch have no modules
    return StorageMeta(**{name: value for name, value in ids_of_torch.items() if name in names})


def _list_fields(cls: Any) -> list[str]:
    return [each.name for each in dataclasses.fields(cls)]


def is_covered(stored: TensorStorageMetadata) -> bool:
    """Return whether the chunks of a tensor cover all of it, judged by their sizes."""
    boxes = {find_box(chunk) for chunk in stored.chunks}
    return sum(map(volume, boxes)) >= math.prod(stored.size)


def find_box(chunk: ChunkStorageMetadata) -> Box:
    """Return the box of a chunk."""
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _encode_stored(fqn: str, stored: Stored) -> Json:
    if isinstance(stored, BytesStorageMetadata):
        return {"type": "bytes"}
    found, plain = stored.properties, TensorProperties(dtype=stored.properties.dtype)
    fields: dict[str, Json] = {"type": "tensor", "dtype": dtype_name(found.dtype), "size": list(stored.size)}
    for name, table in (("layout", _LAYOUTS), ("memory_format", _MEMORY_FORMATS)):
        value = getattr(found, name)
        if value != getattr(plain, name):
            fields[name] = str(value).removeprefix("torch.")
            if fields[name] not in table:
                raise Unsupported(f"{fqn}: a tensor with {name} {value} cannot be saved through DCP; use Store.save")
    for name in ("requires_grad", "pin_memory"):
        if getattr(found, name):
            fields[name] = True
    boxes = [find_box(chunk) for chunk in stored.chunks]
    if boxes != [whole(tuple(stored.size))]:
        fields["chunks"] = [[*box.starts, *box.sizes] for box in boxes]
    return fields


def _decode_stored(value: Json, what: str) -> Stored:
    if not isinstance(value, dict):
        raise _malformed(what)
    if value.get("type") == "bytes":
        return BytesStorageMetadata()
    if value.get("type") != "tensor":
        kind = str(value.get("type"))[:40]
        raise NewerFormat(f"{what} contains an item of type {kind!r}, unknown to this version: upgrade Holdfast")
    size = _sizes(value.get("size"), what)
    chunks = value.get("chunks", [[0] * len(size) + list(size)])
    if not isinstance(chunks, list):
        raise _malformed(what)
    boxes = [_box(each, len(size), what) for each in chunks]
    properties = TensorProperties(
        dtype=find_dtype(value.get("dtype")),
        layout=_find(_LAYOUTS, value.get("layout", "strided"), what),
        requires_grad=value.get("requires_grad") is True,
        memory_format=_find(_MEMORY_FORMATS, value.get("memory_format", "contiguous_format"), what),
        pin_memory=value.get("pin_memory") is True,
    )
    stored = [ChunkStorageMetadata(torch.Size(box.starts), torch.Size(box.sizes)) for box in boxes]
    return TensorStorageMetadata(properties, torch.Size(size), stored)


def _encode_planner(data: Any) -> Json:
    def refuse_leaf(leaf: object, path: TreePath) -> Json:
        raise refuse(leaf, ("the planner's data", *path))

    return encode_tree(data, types=Types(()), encode_leaf=refuse_leaf)


def _decode_planner(value: Json, what: str) -> Any:
    def refuse_leaf(leaf: list[Json], path: TreePath) -> object:
        raise _malformed(what)

    return decode_tree(value, types=Types(()), decode_leaf=refuse_leaf)


def _find(table: dict[str, Any], name: Json, what: str) -> Any:
    if not isinstance(name, str) or name not in table:
        raise NewerFormat(
            f"{what} contains a tensor that is {str(name)[:40]!r}, unknown to this version: upgrade Holdfast"
        )
    return table[name]


def _sizes(value: Json, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 1 << 60 for each in value):
        raise _malformed(what)
    return tuple(value)


def _box(value: Json, dims: int, what: str) -> Box:
    numbers: Sequence[int] = _sizes(value, what)
    if len(numbers) != 2 * dims:
        raise _malformed(what)
    return Box(tuple(numbers[:dims]), tuple(numbers[dims:]))


def _text(value: Json, what: str) -> str:
    if not isinstance(value, str):
        raise _malformed(what)
    return value


def _malformed(what: str) -> Corrupt:
    return Corrupt(f"{what}: the checkpoint metadata is damaged; run `holdfast check`", key=what)
