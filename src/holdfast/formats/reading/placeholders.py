"""Placeholders: tensors that have the geometry and the ties of tensors in files, but no memory of their own.

The save path plans chunks, views and shared storages from tensors. A placeholder is an ordinary CPU tensor over address
space that is reserved once, never written and never backed by memory; its bytes are read from the file instead.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from holdfast.errors import BadFile, TooLarge
from holdfast.formats.reading.byte_ranges import ByteReader
from holdfast.tensors.dtypes import item_bytes
from holdfast.tensors.spec import MAX_DIMS, TensorRole, find_span, give_role

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
