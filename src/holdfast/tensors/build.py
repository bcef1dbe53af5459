"""Builds tensors from bytes: plans the memory of a group, the reads that fill it, and the tensors over it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from holdfast.errors import Corrupt
from holdfast.repo.format.entry import Entry
from holdfast.tensors.memory import ALIGNMENT, new_memory, new_sparse_memory, view_bytes, view_items, view_storage
from holdfast.tensors.spec import TensorSpec, contiguous_stride, give_role, item_bytes, make_quantised

CPU = torch.device("cpu")
_SMALL_BYTES: Final = 16 << 10
"""Larger tensors are read directly into their own memory."""
SMALL_BATCH_DTYPES: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
)
"""Dtypes that torch copies bit by bit and without a warning; not bool, which it normalises to 0 or 1."""
_MAX_SPREAD: Final = 1024
"""If a tensor spans more than this many times the bytes of its items, its memory is allocated sparsely."""


@dataclass(frozen=True, slots=True)
class Fill:
    """One read: all bytes of an entry, into a buffer that nothing else uses during the read."""

    entry: Entry
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """CPU memory for tensors that share it, and the reads that fill it."""

    memory: torch.Tensor
    """A tensor of bytes."""
    fills: tuple[Fill, ...]
    offsets: tuple[int, ...]
    """The offset in the memory of each tensor's bytes."""
    scatter: tuple[TensorSpec, torch.Tensor] | None = None
    """For packed items: their spec and the memory that they are read into, before they are spread out."""

    def finish(self) -> torch.Tensor:
        """Return the memory once everything has been read into it."""
        if self.scatter:
            spec, packed = self.scatter
            spread_items(packed, spec, self.memory, 0)
        return self.memory


@dataclass(frozen=True, slots=True)
class SmallTensorBatch:
    """Memory for small tensors of one spec, read side by side before each is copied to separate memory."""

    spec: TensorSpec
    memory: torch.Tensor
    """One row for each tensor."""

    def list_buffers(self) -> list[memoryview]:
        """Return the memory of each tensor."""
        size = self.memory.nbytes
        view = view_bytes(view_storage(self.memory.untyped_storage(), 0, size))
        step = size // len(self.memory)
        return [view[start : start + step] for start in range(0, size, step)]

    def build(self) -> Sequence[torch.Tensor]:
        """Return the tensors once everything has been read, by one call of torch."""
        # torch's stub has only the overload that returns None.
        tensors: Sequence[torch.Tensor] = torch.unbind_copy(self.memory)  # type: ignore[func-returns-value,assignment]
        is_bare = self.spec.role == "tensor" and not self.spec.requires_grad
        return tensors if is_bare else [apply_flags(tensor, self.spec) for tensor in tensors]


def fits_small_batch(spec: TensorSpec, size_bytes: int) -> bool:
    """Return whether a tensor that shares no memory fits: it is small, contiguous and of a plain dtype."""
    is_small = spec.dtype in SMALL_BATCH_DTYPES and 0 < size_bytes <= _SMALL_BYTES
    is_sound = not spec.requires_grad or spec.dtype.is_floating_point or spec.dtype.is_complex
    return is_small and is_sound and is_contiguous_alone(spec, size_bytes)


def is_contiguous_alone(spec: TensorSpec, size_bytes: int) -> bool:
    """Return whether the bytes of an entry are the items of a tensor in C order, and nothing else."""
    is_bare = not (spec.offset or spec.at or spec.packed or spec.conj or spec.neg or spec.meta)
    if not is_bare or spec.stride != contiguous_stride(spec.shape):
        return False
    return math.prod(spec.shape) * spec.dtype.itemsize == size_bytes


def plan_small_batch(spec: TensorSpec, count: int) -> SmallTensorBatch:
    """Allocate memory for `count` small tensors of one spec."""
    return SmallTensorBatch(spec, torch.empty((count, *spec.shape), dtype=spec.dtype, device=CPU))


def plan_block(members: Sequence[tuple[Entry, TensorSpec]], *, what: str) -> MemoryBlock:
    """Allocate memory for the tensors of one alias group, or for a single tensor, and plan what to read into it."""
    first_entry, first = members[0]
    if any(spec.packed for _, spec in members):
        if not all(spec.packed and _are_alike(spec, first) for _, spec in members):
            raise Corrupt(f"{what}: tensors that share memory do not agree on it", key=what)
        packed = new_memory(first_entry.size_bytes, CPU)
        memory = spread_memory(first, first_entry.size_bytes, what)
        return MemoryBlock(memory, (Fill(first_entry, view_bytes(packed)),), (0,) * len(members), (first, packed))
    offsets, size = _plan_offsets([(spec.at, entry.size_bytes) for entry, spec in members])
    memory = new_memory(size, CPU)
    view = view_bytes(memory)
    # Tied tensors have the same bytes, which are read once.
    spans = {(at, entry.size_bytes): entry for at, (entry, _) in zip(offsets, members, strict=True) if entry.size_bytes}
    fills = tuple(Fill(entry, view[at : at + size]) for (at, size), entry in spans.items())
    return MemoryBlock(memory, fills, offsets)


def measure_block(members: Sequence[tuple[Entry, TensorSpec]]) -> tuple[tuple[int, ...], int]:
    """Return the offsets and the size in bytes that `plan_block` would use, without allocating."""
    if members[0][1].packed:
        return (0,) * len(members), members[0][1].span_bytes
    return _plan_offsets([(spec.at, entry.size_bytes) for entry, spec in members])


def _plan_offsets(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], int]:
    """Return an offset in new memory for each (start, size) of the old, and the size of the new memory.

    Spans that overlap keep their relative offsets. Gaps are left out: a whole group has none, but if a part of it is
    loaded, or the offsets in the store are damaged, the gaps may be larger than the memory.
    """
    if len(spans) == 1:
        return (0,), spans[0][1]
    offsets = [0] * len(spans)
    reach = shift = end = 0
    for number in sorted(range(len(spans)), key=spans.__getitem__):
        start, size = spans[number]
        if start >= reach:
            shift = end + (start - end) % ALIGNMENT - start
        reach = max(reach, start + size)
        offsets[number] = start + shift
        end = reach + shift
    return tuple(offsets), end


def _are_alike(spec: TensorSpec, other: TensorSpec) -> bool:
    return (spec.dtype, spec.shape, spec.stride) == (other.dtype, other.shape, other.stride)


def spread_memory(spec: TensorSpec, size_bytes: int, what: str) -> torch.Tensor:
    """Allocate memory for packed items and the gaps between them, which have no bytes in the store."""
    if spec.span_bytes <= _MAX_SPREAD * size_bytes:
        return torch.zeros(spec.span_bytes, dtype=torch.uint8)
    try:
        return new_sparse_memory(spec.span_bytes)
    except MemoryError as error:
        raise Corrupt(f"{what}: the gaps between its items are too large: {error}", key=what) from error


def spread_items(packed: torch.Tensor, spec: TensorSpec, memory: torch.Tensor, offset: int) -> None:
    """Copy packed items to their strided positions in `memory`, a tensor of bytes; `offset` is in items."""
    size = item_bytes(spec.dtype)
    stride = tuple(step for size, step in zip(spec.shape, spec.stride, strict=True) if step or size == 1)
    target = view_items(memory, size, spec.packed_shape, stride, offset)
    target.copy_(view_items(packed, size, spec.packed_shape, contiguous_stride(spec.packed_shape), 0))


def build_tensor(spec: TensorSpec, memory: torch.Tensor, *, what: str) -> torch.Tensor:
    """Return the tensor that `spec` describes; `memory` has the bytes of its alias group, on any device."""
    if spec.requires_grad and not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        raise Corrupt(f"{what} cannot require a gradient", key=what)
    if spec.meta:
        tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    else:
        if spec.quantizer is not None:
            tensor = make_quantised(spec.shape, spec.dtype, spec.quantizer, device=memory.device, what=what)
        else:
            tensor = new_empty(spec.dtype, memory.device)
        offset = spec.offset + spec.at // item_bytes(spec.dtype)
        tensor.set_(memory.untyped_storage(), offset, spec.shape, spec.stride)
    return apply_flags(tensor, spec)


def new_empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor without items; the caller sets its memory."""
    if dtype != torch.complex32:
        return torch.empty(0, dtype=dtype, device=device)
    with warnings.catch_warnings():
        # torch warns that it supports few operations for this dtype, which does not help a user who loads it.
        warnings.simplefilter("ignore", UserWarning)
        return torch.empty(0, dtype=dtype, device=device)


def apply_flags(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return `tensor` with the flags and the role in `spec`."""
    if spec.conj:
        tensor = torch.conj(tensor)
    if spec.neg:
        tensor = torch._neg_view(tensor)
    return give_role(tensor, spec.role, requires_grad=spec.requires_grad)
