"""What a reader finds in a source: a tree of values and of placeholders for tensors, and what is left out."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

import numpy as np
import torch

from holdfast.errors import BadFile, TooLarge
from holdfast.formats.reading.byte_ranges import ByteReader
from holdfast.formats.receipt import LeftOut
from holdfast.json_text import Json
from holdfast.repo.files import FileSource
from holdfast.tensors.spec import MAX_DIMS, TensorRole, find_span, give_role, item_bytes
from holdfast.trees.outline import MAX_TREE_DEPTH, TreePath, join_name

_MAX_STORAGE_BYTES: Final = 1 << 46
"""Address space of a process ends at 1 << 47."""
_RESERVED_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class StoredStorage:
    """A storage in files, and the storage in memory that stands for it."""

    reader: ByteReader
    storage: torch.UntypedStorage
    dtype: torch.dtype | None = None
    """The dtype of its items in the files, if they are cast; then `cast_to` is set."""
    cast_to: torch.dtype | None = None


class Placeholders:
    """Makes the placeholders of one checkpoint, and finds the bytes that belong to them."""

    def __init__(self) -> None:
        self._stored: dict[int, StoredStorage] = {}
        self._reserved: list[mmap.mmap] = []
        self._reserved_bytes = 0
        self._address = 0

    def add_storage(self, reader: ByteReader) -> StoredStorage:
        """Return a storage that stands for the bytes of `reader`."""
        return self._add(reader, reader.size_bytes, None, None)

    def add_cast(self, found: StoredStorage, dtype: torch.dtype, cast_to: torch.dtype) -> StoredStorage:
        """Return a storage that stands for the items of another one, cast from `dtype` to `cast_to`."""
        items = found.reader.size_bytes // item_bytes(dtype)
        return self._add(found.reader, items * item_bytes(cast_to), dtype, cast_to)

    def find(self, tensor: torch.Tensor) -> StoredStorage | None:
        """Return the storage in files of a placeholder; None for any other tensor."""
        return None if tensor.is_meta else self._stored.get(tensor.untyped_storage()._cdata)

    def _add(
        self, reader: ByteReader, size_bytes: int, dtype: torch.dtype | None, cast_to: torch.dtype | None
    ) -> StoredStorage:
        stored = StoredStorage(reader, self._reserve(size_bytes), dtype, cast_to)
        self._stored[stored.storage._cdata] = stored
        return stored

    def _reserve(self, size_bytes: int) -> torch.UntypedStorage:
        """Return a new storage over the address range that all placeholders share."""
        if size_bytes > _MAX_STORAGE_BYTES:
            raise TooLarge(f"a tensor of {size_bytes} bytes is larger than this process can address")
        if size_bytes > self._reserved_bytes:
            self._reserved_bytes = max(size_bytes, _RESERVED_BYTES)
            # Private and read-only: the kernel does not count it as memory, however large it is.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._reserved.append(mmap.mmap(-1, self._reserved_bytes, flags=flags, prot=mmap.PROT_READ))
            self._address = np.frombuffer(self._reserved[-1], np.uint8).ctypes.data
        if not size_bytes:
            return torch.empty(0, dtype=torch.uint8).untyped_storage()
        # By address, so that torch does not warn of memory that it cannot write: nothing writes to a placeholder.
        memory = (ctypes.c_ubyte * size_bytes).from_address(self._address)
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The geometry of a tensor in its storage, as a file states it; nothing about it is trusted yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    role: TensorRole = "tensor"
    requires_grad: bool = False


def make_tensor(stored: StoredStorage, form: TensorForm, *, what: str) -> torch.Tensor:
    """Return a placeholder; raises BadFile if it would reach beyond its storage."""
    if len(form.shape) != len(form.stride) or len(form.shape) > MAX_DIMS or min((0, *form.shape, *form.stride)) < 0:
        raise BadFile(f"{what} has the shape {form.shape} and the strides {form.stride}, which do not fit")
    items = find_span(form.shape, form.stride)
    offset = form.offset if items else 0
    needed = (offset + items) * item_bytes(form.dtype)
    if form.offset < 0 or needed > stored.storage.nbytes():
        raise BadFile(f"{what} needs {needed} bytes, and its storage has {stored.storage.nbytes()}")
    try:
        tensor = torch.empty(0, dtype=form.dtype).set_(stored.storage, offset, form.shape, form.stride)
        return give_role(tensor, form.role, requires_grad=form.requires_grad)
    except RuntimeError as error:
        raise BadFile(f"{what} is a tensor that torch refuses: {error}") from error


SourceFormat = Literal["safetensors", "hf", "torch", "dcp", "content-store", "deepspeed"]
_MAX_REPEATED: Final = 10_000
_MAX_REPEATED_SHARE: Final = 16
"""A container may be in the tree this many times on average, beyond the number above."""
SOURCE_FORMATS: Final[tuple[SourceFormat, ...]] = get_args(SourceFormat)


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint of another library, opened: no byte of a tensor has been read yet."""

    format: SourceFormat
    tree: Any
    placeholders: Placeholders
    metadata: Mapping[str, Json] = field(default_factory=dict)
    """What the files say about themselves, to be kept with the snapshot."""
    files: tuple[FileSource, ...] = ()
    """Other files of the folder, to be carried along."""
    left_out: tuple[LeftOut, ...] = ()


class _Visits:
    """Limits how often a walk meets the same containers: a few lists that share lists can stand for any number."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._count = 0

    def add(self, container: object, path: TreePath) -> None:
        """Count a container; raises BadFile if it is nested too deep, or there are too many repetitions."""
        verify_depth(path)
        self._known.add(id(container))
        self._count += 1
        if self._count > _MAX_REPEATED + _MAX_REPEATED_SHARE * len(self._known):
            raise BadFile("the file has lists that contain the same lists again and again: it is damaged or hostile")


def iter_named_tensors(tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a tree with its name, in the order in which a save encodes them, repeated ones too."""
    for path, value in _iter_leaves(tree, (), _Visits()):
        if isinstance(value, torch.Tensor):
            yield join_name(path), value


def _iter_leaves(value: Any, path: TreePath, visits: _Visits) -> Iterator[tuple[TreePath, Any]]:
    if isinstance(value, dict):
        visits.add(value, path)
        for key, child in value.items():
            yield from _iter_leaves(child, (*path, key), visits)
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        visits.add(value, path)
        for number, child in enumerate(value):
            yield from _iter_leaves(child, (*path, number), visits)
    else:
        yield path, value


Rename = Callable[[Mapping[Any, Any]], Mapping[str, str]]
"""Returns the new names of the keys of a dict, those that are texts."""


def map_tree(tree: Any, change: Callable[[Any], Any], *, rename: Rename = lambda found: {}) -> Any:
    """Return a copy of a tree with every leaf changed, and the keys of every dict renamed."""
    return _Mapping(change, rename).apply(tree, ())


class _Mapping:
    """A copy of a tree in progress."""

    def __init__(self, change: Callable[[Any], Any], rename: Rename) -> None:
        self._change, self._rename = change, rename
        self._visits = _Visits()

    def apply(self, value: Any, path: TreePath) -> Any:
        """Return the copy of a part of the tree."""
        if isinstance(value, dict):
            self._visits.add(value, path)
            names = self._rename(value)
            pairs = [(names.get(key, key), self.apply(child, (*path, key))) for key, child in value.items()]
            # A copy keeps the class, the factory of a defaultdict, and the attributes of an OrderedDict.
            copied = copy(value)
            copied.clear()
            copied.update(pairs)
            return copied
        if type(value) in (list, tuple):
            self._visits.add(value, path)
            return type(value)(self.apply(child, (*path, number)) for number, child in enumerate(value))
        return self._change(value)


def verify_depth(path: TreePath) -> None:
    """Raise BadFile if containers are nested too deep, or contain themselves."""
    if len(path) > MAX_TREE_DEPTH:
        raise BadFile("the file has containers that are nested too deep, or that contain themselves")
