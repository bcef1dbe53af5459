"""Storages: their memory taken and given back in place, under the tensors that use it, and seen as bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from holdfast.errors import Mismatch, Unsupported
from holdfast.tensors.dtypes import items_per_byte
from holdfast.tensors.memory import view_memory


def alloc_storage(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Give the storage under `tensor` memory for `shape`, of any content; return whether there was none before."""
    storage = _find_storage(tensor)
    size_bytes = _count_bytes(shape, tensor.dtype)
    if storage.nbytes() == size_bytes:
        return False
    if storage.nbytes():
        raise Mismatch(
            f"the storage of a {_describe(tensor)} has {storage.nbytes()} bytes, not 0 or the {size_bytes} "
            f"of shape {tuple(shape)}; free it first"
        )
    if _span_bytes(tensor) > size_bytes:
        raise Mismatch(
            f"a {_describe(tensor)} needs {_span_bytes(tensor)} bytes of storage, more than the {size_bytes} "
            f"of shape {tuple(shape)}; give the shape of the tensor that owns the storage"
        )
    _resize(storage, size_bytes, tensor)
    return True


def free_storage(tensor: torch.Tensor) -> bool:
    """Give back the memory under `tensor`, which must be all of its storage; return whether there was any."""
    storage = _find_storage(tensor)
    if tensor.storage_offset() != 0:
        raise Unsupported(
            f"a {_describe(tensor)} starts {tensor.storage_offset()} elements into its storage, which others may use; "
            "free the tensor that it is a view of"
        )
    if storage.nbytes() == 0:
        return False
    held_bytes = _count_bytes(tensor.shape, tensor.dtype)
    if not storage.nbytes() == held_bytes == _span_bytes(tensor):
        raise Unsupported(
            f"a {_describe(tensor)} is {held_bytes} bytes of a storage of {storage.nbytes()}, which others may use; "
            "free the tensor that it is a view of"
        )
    _resize(storage, 0, tensor)
    return True


def is_allocated(tensor: torch.Tensor) -> bool:
    """Tell whether there is memory under `tensor`; not so if it was freed, is empty or on the meta device."""
    return _has_memory(_find_storage(tensor))


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a uint8 tensor over the whole of a storage on the CPU, without a copy."""
    if storage.device.type != "cpu":
        raise Unsupported(f"the bytes of a storage on {storage.device} are not at hand; copy it to the CPU first")
    if storage.nbytes() and not _has_memory(storage):
        raise Unsupported(
            f"a storage of {storage.nbytes()} bytes has no memory; the tensors inside of its tensor have, use those"
        )
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def tensor_bytes(tensor: torch.Tensor, size_bytes: int) -> memoryview:
    """Return bytes of a CPU tensor's memory, from its first item on: no copy, and good as long as the tensor lives."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    # Torch has no way for every dtype, and none this fast; there may be many tensors.
    return view_memory(tensor.untyped_storage(), start, start + size_bytes)


def _has_memory(storage: torch.UntypedStorage) -> bool:
    # Fake tensors, whose storages are on the meta device, do not like to be asked for a pointer.
    if storage.device.type == "meta" or storage.nbytes() == 0:
        return False
    try:
        return storage.data_ptr() != 0
    except RuntimeError:
        # The storage of a tensor that is made of others is a mere shell, and says so.
        return False


def _find_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise Unsupported(f"an {type(tensor).__name__} has no storage yet; run its module once")
    is_made_of_others = getattr(tensor, "__tensor_flatten__", None) is not None
    if tensor.layout != torch.strided or tensor.is_nested or is_made_of_others:
        raise Unsupported(f"a {_describe(tensor)} has no storage of its own; use the tensors that it is made of")
    return tensor.untyped_storage()


def _resize(storage: torch.UntypedStorage, size_bytes: int, tensor: torch.Tensor) -> None:
    if not storage.resizable():
        raise Unsupported(
            f"the memory of a {_describe(tensor)} is not torch's to resize (numpy, a file, another library); clone it"
        )
    storage.resize_(size_bytes)


def _count_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return what a contiguous tensor takes."""
    if items_per_byte(dtype) == 1 or not shape:
        return math.prod(shape) * dtype.itemsize
    *rows, columns = shape
    return math.prod(rows) * -(-columns // items_per_byte(dtype))


def _span_bytes(tensor: torch.Tensor) -> int:
    """Return how far into its storage a tensor reaches."""
    if tensor.numel() == 0:
        return 0
    if items_per_byte(tensor.dtype) > 1:
        return _count_bytes(tensor.shape, tensor.dtype)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.dtype.itemsize


def _describe(tensor: torch.Tensor) -> str:
    """Name a tensor by what can always be asked."""
    layout = "" if tensor.layout == torch.strided else f" of layout {tensor.layout}"
    return f"{type(tensor).__name__}{layout} of {tensor.dtype}"
