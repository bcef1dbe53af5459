"""Reads directories of torch.distributed.checkpoint: its metadata without unpickling, and its items in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from holdfast.errors import BadFile, Untrusted
from holdfast.formats.reading.byte_ranges import FileBytes, Geometry, Piece, assemble, open_file_in
from holdfast.formats.reading.found import FoundCheckpoint, Placeholders, TensorForm, make_tensor, verify_depth
from holdfast.formats.reading.pickle_reader import MAX_PICKLE_BYTES, PickledObject, make_inert, read_pickle
from holdfast.formats.reading.torch_file import TorchObjects, read_torch_object
from holdfast.repo.files import SourceFolder
from holdfast.repo.format.boxes import Box
from holdfast.tensors.spec import contiguous_stride, item_bytes

METADATA_NAME: Final = ".metadata"
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_CLASSES: Final = frozenset(
    {
        *(f"{_METADATA}.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *(f"{_METADATA}.{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
        f"{_METADATA}._MEM_FORMAT_ENCODING",
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        *(f"pathlib.{name}" for name in ("PosixPath", "PurePosixPath", "Path", "WindowsPath", "PureWindowsPath")),
        *(f"pathlib._local.{name}" for name in ("PosixPath", "PurePosixPath", "Path")),
    }
)
"""The classes that the metadata of torch 2.6 to 2.15 consists of. None of them is made: see `PickledObject`."""

_MAX_HOLES: Final = 1000


@dataclass(frozen=True, slots=True)
class _Item:
    """Where one value, or one shard of a tensor, is stored."""

    offset_in_tensor: tuple[int, ...] | None
    file_name: str
    offset: int
    length: int


def read_dcp_folder(folder: SourceFolder) -> FoundCheckpoint:
    """Open a DCP directory; sharded tensors become one tensor each, and nested keys a nested tree."""
    return _Folder(folder, _read_metadata(folder)).read()


def _read_metadata(folder: SourceFolder) -> PickledObject:
    data, path = open_file_in(folder, METADATA_NAME), folder.join(METADATA_NAME)
    if data.size_bytes > MAX_PICKLE_BYTES:
        raise BadFile(f"{path} has {data.size_bytes} bytes, more than {MAX_PICKLE_BYTES}", path=path)

    def refuse_storage(*_: object) -> FileBytes:
        raise BadFile(f"{path} is damaged: metadata refers to no storage", path=path)

    plain = TorchObjects(Placeholders(), refuse_storage, where=path)

    def find_global(module: str, name: str) -> object:
        full = f"{module}.{name}"
        return make_inert(full) if full in _CLASSES else plain.find_global(module, name)

    try:
        found = read_pickle(bytes(data.read(0, data.size_bytes)), find_global, refuse_storage, where=path)
    except Untrusted as error:
        raise Untrusted(
            f"{path} contains {error.name[:120]!r}, which is no part of the metadata of DCP: loading it could run code."
            " Nothing was imported; get the checkpoint from somebody you trust",
            name=error.name,
        ) from error
    if not isinstance(found, PickledObject) or found.class_name != f"{_METADATA}.Metadata":
        raise BadFile(f"{path} is not the metadata of a DCP checkpoint", path=path)
    return found


class _Folder:
    """One DCP directory."""

    def __init__(self, folder: SourceFolder, metadata: PickledObject) -> None:
        self._folder = folder
        self._state = metadata.find("state_dict_metadata")
        self._planner = metadata.find("planner_data")
        self._placeholders = Placeholders()
        self._open = cache(self._open_once)
        storage = metadata.find("storage_data")
        if not isinstance(self._state, dict) or not isinstance(storage, dict):
            raise self._damaged("it does not list the state or the files")
        self._items: dict[str, list[_Item]] = {}
        for index, info in storage.items():
            self._add_item(index, info)

    def read(self) -> FoundCheckpoint:
        """Return the tree: flat, if the planner did not record the paths of its values."""
        values = {fqn: self._read_value(fqn, stored) for fqn, stored in self._state.items()}
        tree = _nest(values, self._planner) if self._planner else values
        return FoundCheckpoint("dcp", tree, self._placeholders)

    def _add_item(self, index: object, info: object) -> None:
        if not isinstance(index, PickledObject) or not isinstance(info, PickledObject):
            raise self._damaged("a stored item has no place")
        if info.find("transform_descriptors"):
            raise BadFile(
                f"{self._folder.path} is compressed by extensions of DCP; load and save it again without them"
            )
        fqn, at, name = index.find("fqn"), index.find("offset"), info.find("relative_path")
        offset, length = info.find("offset"), info.find("length")
        if not isinstance(fqn, str) or not isinstance(name, str) or not _are_counts((offset, length)):
            raise self._damaged("a stored item has no valid place")
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise self._damaged(f"an item is stored in {name[:80]!r}, which is not a file of this directory")
        if at is not None and not _are_counts(at):
            raise self._damaged("a shard has no valid offset")
        self._items.setdefault(fqn, []).append(_Item(None if at is None else tuple(at), name, offset, length))

    def _open_once(self, name: str) -> FileBytes:
        if not self._folder.has(name):
            where = self._folder.path
            raise BadFile(f"{where} lacks the file {name}; copy the whole directory", path=self._folder.join(name))
        return open_file_in(self._folder, name)

    def _find_data(self, fqn: str, item: _Item) -> FileBytes:
        data = self._open(item.file_name)
        if item.offset + item.length > data.size_bytes:
            raise BadFile(f"{self._folder.path}: {item.file_name} is cut off, so that {fqn!r} is not complete")
        return data.narrow(item.offset, item.offset + item.length)

    def _read_value(self, fqn: Any, stored: Any) -> Any:
        items = self._items.get(fqn, [])
        if not isinstance(stored, PickledObject) or not isinstance(fqn, str):
            raise self._damaged("a value has no description")
        kind = stored.class_name.rpartition(".")[2]
        if kind == "TensorStorageMetadata":
            return self._read_tensor(fqn, stored, items)
        if kind != "BytesStorageMetadata" or len(items) != 1:
            raise self._damaged(f"{fqn!r} is not stored exactly once")
        where = f"{self._folder.join(items[0].file_name)} ({fqn})"
        return read_torch_object(self._find_data(fqn, items[0]), self._placeholders, where=where)

    def _read_tensor(self, fqn: str, stored: PickledObject, items: list[_Item]) -> torch.Tensor:
        properties, shape, chunks = stored.find("properties"), stored.find("size"), stored.find("chunks")
        dtype = _find_dtype(properties)
        if dtype is None or not _are_counts(shape) or not isinstance(chunks, list):
            raise self._damaged(f"the description of {fqn!r} is malformed")
        boxes = [_find_box(chunk) for chunk in chunks]
        places = {item.offset_in_tensor or (0,) * len(shape): item for item in items}
        pieces = []
        for box in boxes:
            item = places.get(box.starts) if box is not None else None
            if box is None or item is None:
                raise self._damaged(f"a shard of {fqn!r} is not stored")
            pieces.append(self._read_piece(fqn, box, dtype, item))
        what = f"{self._folder.path}: {fqn!r}"
        reader = assemble(tuple(shape), item_bytes(dtype), pieces, what=what)
        form = TensorForm(dtype, tuple(shape), contiguous_stride(shape))
        return make_tensor(self._placeholders.add_storage(reader), form, what=what)

    def _read_piece(self, fqn: str, box: Box, dtype: torch.dtype, item: _Item) -> Piece:
        scratch = Placeholders()
        where = f"{self._folder.join(item.file_name)} ({fqn})"
        tensor = read_torch_object(self._find_data(fqn, item), scratch, where=where)
        stored = scratch.find(tensor) if isinstance(tensor, torch.Tensor) else None
        if stored is None or tensor.dtype != dtype or tuple(tensor.shape) != box.sizes:
            raise BadFile(f"{where}: the file has another shape or dtype than {METADATA_NAME} says")
        geometry = Geometry(item_bytes(dtype), box.sizes, tensor.stride(), int(tensor.storage_offset()))
        return Piece(box, stored.reader, geometry)

    def _damaged(self, why: str) -> BadFile:
        return BadFile(f"{self._folder.join(METADATA_NAME)} is damaged: {why}")


def _are_counts(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(each) is int and 0 <= each < 1 << 60 for each in value)


def _find_dtype(properties: Any) -> torch.dtype | None:
    """Return the dtype of a tensor's properties, which older versions pickle as a dict and newer ones as a tuple."""
    if not isinstance(properties, PickledObject):
        return None
    state = properties.state
    found = state[0] if isinstance(state, tuple) and state else properties.find("dtype")
    return found if isinstance(found, torch.dtype) else None


def _find_box(chunk: Any) -> Box | None:
    if not isinstance(chunk, PickledObject):
        return None
    starts, sizes = chunk.find("offsets"), chunk.find("sizes")
    return Box(tuple(starts), tuple(sizes)) if _are_counts(starts) and _are_counts(sizes) else None


class _Branch(dict[Any, Any]):
    """A container of the nested tree while it is built: a dict if its keys are texts, a list if they are numbers."""


def _nest(values: Mapping[str, Any], paths: Any) -> Any:
    """Return the nested tree; `paths` are the keys that lead to each value, as DCP's planner records them."""
    root = _Branch()
    for fqn, value in values.items():
        path = paths.get(fqn) if isinstance(paths, dict) else None
        if not isinstance(path, tuple) or not path or not all(type(key) in (str, int) for key in path):
            path = (fqn,)
        verify_depth(path)
        at: Any = root
        for key in path[:-1]:
            at = at.setdefault(key, _Branch())
            if type(at) is not _Branch:
                raise BadFile(f"{fqn!r} is below another value of the checkpoint")
        if path[-1] in at:
            raise BadFile(f"{fqn!r} is in the checkpoint twice")
        at[path[-1]] = value
    return _convert(root)


def _convert(branch: Any) -> Any:
    """Return a branch as a dict or list; DCP stores nothing for empty containers in a list, which become None."""
    if type(branch) is not _Branch:
        return branch
    children = {key: _convert(child) for key, child in branch.items()}
    if not children or not any(type(key) is int for key in children):
        return children
    if not all(type(key) is int and 0 <= key < 2 * len(children) + _MAX_HOLES for key in children):
        raise BadFile("a list of the checkpoint has keys that are no positions")
    return [children.get(number) for number in range(max(children) + 1)]
