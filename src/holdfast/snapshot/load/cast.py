"""Casting during a load: which tensors are cast, and their memory, cast once for all tensors that share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from holdfast.errors import Unsupported
from holdfast.repo.format.entry import Entry
from holdfast.repo.read.reader import SnapshotReader
from holdfast.tensors.build import (
    CPU,
    SMALL_BATCH_DTYPES,
    MemoryBlock,
    SmallTensorBatch,
    build_tensor,
    spread_items,
    spread_memory,
)
from holdfast.tensors.memory import new_memory, view_bytes, view_storage
from holdfast.tensors.spec import TensorSpec
from holdfast.trees.move import PACKED_FLOAT, cast_floating, move_to_device


def verify_dtype(dtype: torch.dtype | None) -> None:
    """Raise if no tensor can be cast to this dtype, before anything is read."""
    if not isinstance(dtype, torch.dtype | None):
        raise ValueError(f"dtype must be a dtype of torch or None, not {dtype!r}")
    cast_floating(torch.empty(0), dtype)


def is_cast(spec: TensorSpec, dtype: torch.dtype | None) -> bool:
    """Return whether a tensor of this spec changes if floating tensors are cast."""
    return dtype is not None and spec.dtype.is_floating_point and spec.dtype not in (dtype, PACKED_FLOAT)


def cast_spec(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    """Return the spec of a tensor after its memory was cast."""
    return replace(spec, dtype=dtype, at=spec.at // spec.dtype.itemsize * dtype.itemsize)


def verify_group(members: Sequence[tuple[Entry, TensorSpec, bool]], dtype: torch.dtype) -> bool:
    """Return whether shared memory is cast; raises if some of its tensors are to be cast and others not."""
    first, spec, should_cast = members[0]
    for entry, other, should_too in members[1:]:
        if (should_cast or should_too) and (should_cast, spec.dtype) != (should_too, other.dtype):
            raise Unsupported(
                f"{first.name} ({spec.dtype}) and {entry.name} ({other.dtype}) share memory, which cannot be cast to"
                f' {dtype} for both; pass aliases="fresh" to give each its own memory, or leave dtype= out'
            )
    return should_cast


def cast_memory(memory: torch.Tensor, saved: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """Return memory, a tensor of bytes on any device, with its items cast to another dtype."""
    items = memory.numel() // saved.itemsize
    cast = cast_floating(build_tensor(TensorSpec(saved, (items,), (1,)), memory, what="memory"), dtype)
    return view_storage(cast.untyped_storage(), 0, cast.nbytes)


def cast_and_move(memory: torch.Tensor, saved: torch.dtype, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory cast and on another device; cast on the side where fewer bytes are moved."""
    if dtype.itemsize > saved.itemsize:
        return cast_memory(move_to_device(memory, device), saved, dtype)
    return move_to_device(cast_memory(memory, saved, dtype), device)


def cast_packed(block: MemoryBlock, dtype: torch.dtype, *, what: str) -> torch.Tensor:
    """Return the memory of packed items cast to another dtype; bytes between them are not touched."""
    assert block.scatter is not None
    spec, packed = block.scatter
    cast, items = cast_spec(spec, dtype), cast_memory(packed, spec.dtype, dtype)
    memory = spread_memory(cast, items.numel(), what)
    spread_items(items, cast, memory, 0)
    return memory


def read_cast(
    reader: SnapshotReader, entry: Entry, saved: torch.dtype, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Read an entry that is larger than half of the budget, and cast it piece by piece; returns its new memory."""
    items = entry.size_bytes // saved.itemsize
    memory = new_memory(items * dtype.itemsize, device)
    step = max(1, reader.budget_bytes // 2 // saved.itemsize)
    buffer = new_memory(min(items, step) * saved.itemsize, CPU)
    for first in range(0, items, step):
        last = min(items, first + step)
        piece = buffer[: (last - first) * saved.itemsize]
        reader.read_into(entry, first * saved.itemsize, view_bytes(piece))
        memory[first * dtype.itemsize : last * dtype.itemsize] = cast_and_move(piece, saved, dtype, device)
    return memory


def can_cast_small_batch(dtype: torch.dtype | None) -> bool:
    """Return whether small tensors may be cast together."""
    return dtype is None or dtype in SMALL_BATCH_DTYPES


def cast_small_batch(batch: SmallTensorBatch, dtype: torch.dtype | None) -> SmallTensorBatch:
    """Return a filled batch with its tensors cast, if they are floating."""
    if dtype is None or not is_cast(batch.spec, dtype):
        return batch
    return SmallTensorBatch(cast_spec(batch.spec, dtype), cast_floating(batch.memory, dtype))
