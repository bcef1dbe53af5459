"""Raw views and copies of storages and strided items, of any dtype and on any device."""

from __future__ import annotations

import math
import mmap
from ctypes import c_ubyte, string_at
from typing import Final

import torch

ALIGNMENT: Final = 16
"""The size of the largest item: a multiple of it is a valid storage offset for every dtype."""
RAW_DTYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""For each item size, a dtype that every torch operation supports; copying it keeps all bits."""


def new_memory(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised memory as a tensor of bytes."""
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def new_sparse_memory(size_bytes: int) -> torch.Tensor:
    """Return zeros as a tensor of bytes, of which only written pages take memory; raises MemoryError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, size_bytes, flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size_bytes} bytes of memory cannot be allocated") from error
    # With huge pages, one written item would take two megabytes.
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return wrap_memory(memoryview(pages))


def view_storage(
    storage: torch.UntypedStorage, start: int, stop: int, device: torch.device | None = None
) -> torch.Tensor:
    """Return bytes of a storage as a tensor, without a copy; a fake storage does not know its `device`: pass it."""
    empty = torch.empty(0, dtype=torch.uint8, device=device or storage.device)
    return empty.set_(storage, start, (stop - start,), (1,))


def copy_bytes(storage: torch.UntypedStorage, start: int, stop: int) -> bytes:
    """Return a copy of some bytes of a CPU storage."""
    if stop > storage.nbytes():
        raise ValueError(f"bytes up to {stop} of a storage that has {storage.nbytes()}")
    return string_at(storage.data_ptr() + start, stop - start)


def view_memory(storage: torch.UntypedStorage, start: int, stop: int) -> memoryview:
    """Return bytes of a CPU storage without a copy; valid while the storage is alive and is not resized."""
    if stop > storage.nbytes():
        raise ValueError(f"bytes up to {stop} of a storage that has {storage.nbytes()}")
    return memoryview((c_ubyte * (stop - start)).from_address(storage.data_ptr() + start)).cast("B")


def view_bytes(memory: torch.Tensor) -> memoryview:
    """Return a CPU tensor of bytes as a memoryview, without a copy."""
    return memoryview(memory.numpy().data) if memory.numel() else memoryview(bytearray())


def view_items(
    memory: torch.Tensor, item_bytes: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return a tensor of bytes as strided items of a raw dtype, without a copy."""
    empty = torch.empty(0, dtype=RAW_DTYPES[item_bytes], device=memory.device)
    return empty.set_(memory.untyped_storage(), offset, shape, stride)


def view_raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the items of an ordinary tensor as a raw dtype, without conjugation, gradient, quantizer or copy."""
    empty = torch.empty(0, dtype=RAW_DTYPES[tensor.element_size()], device=tensor.device)
    geometry = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return empty.set_(tensor.untyped_storage(), *geometry)


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


def gather_items(raw: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return the items from `first` to `last`, counted in C order, on their device; a view if there are no gaps.

    A copy takes at most twice the memory of these items, however large the rows are.
    """
    if raw.dim() <= 1 or first == last:
        return raw.reshape(-1)[first:last].contiguous() if raw.dim() <= 1 else raw.new_empty(0)
    inner = math.prod(raw.shape[1:])
    low, high = -(-first // inner), last // inner
    if low > high:
        return gather_items(raw[high], first - high * inner, last - high * inner)
    parts = [raw[low:high].reshape(-1).contiguous()] if low < high else []
    if first < low * inner:
        parts.insert(0, gather_items(raw[low - 1], first - (low - 1) * inner, inner))
    if high * inner < last:
        parts.append(gather_items(raw[high], 0, last - high * inner))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def wrap_memory(buffer: memoryview) -> torch.Tensor:
    """Return a writable buffer as a tensor of bytes that keeps it alive, without a copy."""
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer.nbytes else torch.empty(0, dtype=torch.uint8)
