"""Memory as bytes: raw views of storages and of strided items, whatever their dtype or device."""

from __future__ import annotations

import math
import mmap
from ctypes import c_ubyte, string_at
from typing import Final

import torch

ALIGNMENT: Final = 16
"""The largest item: what begins at a multiple of it can be any dtype's storage offset."""
RAW_DTYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A dtype of each item size that every operation of torch knows; copies of it keep all bits."""


def new_memory(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Return new memory as a tensor of bytes; what is in it is undefined."""
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def new_sparse_memory(size_bytes: int) -> torch.Tensor:
    """Return zeros as a tensor of bytes; only pages that are written to take memory. Raises MemoryError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, size_bytes, flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size_bytes} bytes of memory cannot be had") from error
    # One item must not cost two megabytes.
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return wrap_memory(memoryview(pages))


def view_storage(
    storage: torch.UntypedStorage, start: int, stop: int, device: torch.device | None = None
) -> torch.Tensor:
    """Return bytes of a storage as a tensor; no copy. A fake storage does not know the `device` that it claims."""
    empty = torch.empty(0, dtype=torch.uint8, device=device or storage.device)
    return empty.set_(storage, start, (stop - start,), (1,))


def copy_bytes(storage: torch.UntypedStorage, start: int, stop: int) -> bytes:
    """Return a copy of bytes that a CPU storage has."""
    if stop > storage.nbytes():
        raise ValueError(f"bytes up to {stop} of a storage that has {storage.nbytes()}")
    return string_at(storage.data_ptr() + start, stop - start)


def view_memory(storage: torch.UntypedStorage, start: int, stop: int) -> memoryview:
    """Return bytes that a CPU storage has: no copy, and good as long as somebody holds the storage at its size."""
    if stop > storage.nbytes():
        raise ValueError(f"bytes up to {stop} of a storage that has {storage.nbytes()}")
    return memoryview((c_ubyte * (stop - start)).from_address(storage.data_ptr() + start)).cast("B")


def view_bytes(memory: torch.Tensor) -> memoryview:
    """Return CPU memory, given as a tensor of bytes, as what reads and writes can use; no copy."""
    return memoryview(memory.numpy().data) if memory.numel() else memoryview(bytearray())


def view_items(
    memory: torch.Tensor, item_bytes: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return memory, given as a tensor of bytes, as strided items of a raw dtype; no copy."""
    empty = torch.empty(0, dtype=RAW_DTYPES[item_bytes], device=memory.device)
    return empty.set_(memory.untyped_storage(), offset, shape, stride)


def view_raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the items of an ordinary tensor as a raw dtype: no conjugation, no gradient, no quantizer; no copy."""
    empty = torch.empty(0, dtype=RAW_DTYPES[tensor.element_size()], device=tensor.device)
    place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return empty.set_(tensor.untyped_storage(), *place)


def copy_items(raw: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return the items from `first` to `last`, counted in C order, in new contiguous CPU memory."""
    while raw.dim() > 1:
        inner = math.prod(raw.shape[1:])
        low, high = first // inner, -(-last // inner)
        raw, first, last = raw[low:high], first - low * inner, last - low * inner
        if high - low > 1:
            return raw.reshape(-1)[first:last].cpu().clone()
        raw = raw[0]
    return raw.reshape(-1)[first:last].cpu().clone()


def wrap_memory(buffer: memoryview) -> torch.Tensor:
    """Return writable memory that belongs to somebody else as a tensor of bytes, which keeps it alive; no copy."""
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer.nbytes else torch.empty(0, dtype=torch.uint8)
