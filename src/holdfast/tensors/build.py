"""From bytes to tensors: how much memory a group of tensors needs, which bytes go where, and the tensors over it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from holdfast.errors import Corrupt
from holdfast.repo.format.entry import Entry
from holdfast.tensors.dtypes import item_bytes
from holdfast.tensors.memory import ALIGNMENT, new_memory, new_sparse_memory, view_bytes, view_items, view_storage
from holdfast.tensors.quantizer import make_quantised
from holdfast.tensors.roles import give_role
from holdfast.tensors.spec import TensorSpec, contiguous_stride

CPU = torch.device("cpu")
_TRAY_BYTES: Final = 16 << 10
"""Larger tensors are read straight into their own memory."""
TRAY_DTYPES: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
)
"""Whose copies keep all bits, and make torch warn of nothing: not booleans, which it makes 0 or 1."""
_MAX_SPREAD: Final = 1024
"""Of a tensor whose items lie further apart than this, on average, the memory between them is not touched."""


@dataclass(frozen=True, slots=True)
class Fill:
    """One read: all bytes of an entry, into memory that is its own for that long."""

    entry: Entry
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class Block:
    """CPU memory for tensors that share it, and what has to be read into it."""

    memory: torch.Tensor
    """Of bytes."""
    fills: tuple[Fill, ...]
    places: tuple[int, ...]
    """Where in the memory the bytes of each tensor begin."""
    scatter: tuple[TensorSpec, torch.Tensor] | None = None
    """Of packed items: the memory that they are read into, to be spread out afterwards."""

    def finish(self) -> torch.Tensor:
        """Return the memory once everything has been read into it."""
        if self.scatter:
            spec, packed = self.scatter
            spread_items(packed, spec, self.memory, 0)
        return self.memory


@dataclass(frozen=True, slots=True)
class Tray:
    """Memory that small tensors of one kind are read into side by side, before each gets memory of its own."""

    spec: TensorSpec
    memory: torch.Tensor
    """A row for each of them."""

    def cut(self) -> list[memoryview]:
        """Return the memory of each tensor."""
        size = self.memory.nbytes
        view = view_bytes(view_storage(self.memory.untyped_storage(), 0, size))
        step = size // len(self.memory)
        return [view[at : at + step] for at in range(0, size, step)]

    def build(self) -> Sequence[torch.Tensor]:
        """Return the tensors once everything has been read: one call of torch for all of them."""
        # Torch's stub knows only the variant that returns nothing.
        tensors: Sequence[torch.Tensor] = torch.unbind_copy(self.memory)  # type: ignore[func-returns-value,assignment]
        is_bare = self.spec.role == "tensor" and not self.spec.requires_grad
        return tensors if is_bare else [dress(tensor, self.spec) for tensor in tensors]


def fits_tray(spec: TensorSpec, size_bytes: int) -> bool:
    """Tell whether a tensor, which shares memory with no other, is small and nothing but dense items of a number."""
    is_small = spec.dtype in TRAY_DTYPES and 0 < size_bytes <= _TRAY_BYTES
    is_bare = not (spec.offset or spec.at or spec.packed or spec.conj or spec.neg or spec.meta)
    is_sound = not spec.requires_grad or spec.dtype.is_floating_point or spec.dtype.is_complex
    if not (is_small and is_bare and is_sound) or spec.stride != contiguous_stride(spec.shape):
        return False
    return math.prod(spec.shape) * spec.dtype.itemsize == size_bytes


def plan_tray(spec: TensorSpec, count: int) -> Tray:
    """Take memory for so many tensors."""
    return Tray(spec, torch.empty((count, *spec.shape), dtype=spec.dtype, device=CPU))


def plan_block(members: Sequence[tuple[Entry, TensorSpec]], *, what: str) -> Block:
    """Take memory for tensors of one alias group (or for one alone) and say what to read into it."""
    first_entry, first = members[0]
    if any(spec.packed for _, spec in members):
        if not all(spec.packed and _are_alike(spec, first) for _, spec in members):
            raise Corrupt(f"{what}: tensors that share memory do not agree on it", key=what)
        packed = new_memory(first_entry.size_bytes, CPU)
        memory = spread_memory(first, first_entry.size_bytes, what)
        return Block(memory, (Fill(first_entry, view_bytes(packed)),), (0,) * len(members), (first, packed))
    places, size = _place([(spec.at, entry.size_bytes) for entry, spec in members])
    memory = new_memory(size, CPU)
    view = view_bytes(memory)
    # Tied tensors are one and the same bytes: read once.
    spans = {(at, entry.size_bytes): entry for at, (entry, _) in zip(places, members, strict=True) if entry.size_bytes}
    fills = tuple(Fill(entry, view[at : at + size]) for (at, size), entry in spans.items())
    return Block(memory, fills, places)


def measure_block(members: Sequence[tuple[Entry, TensorSpec]]) -> tuple[tuple[int, ...], int]:
    """Return where in the memory of `plan_block` the tensors begin, and its size in bytes; takes no memory."""
    if members[0][1].packed:
        return (0,) * len(members), members[0][1].span_bytes
    return _place([(spec.at, entry.size_bytes) for entry, spec in members])


def _place(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], int]:
    """Return where bytes that lay at (start, size) go, and how much memory that takes.

    What overlaps stays as it lay. What is nobody's is left out: of a whole group there is nothing, but if only a part
    of it is loaded, or the store lies, it may be more than there is memory.
    """
    if len(spans) == 1:
        return (0,), spans[0][1]
    places = [0] * len(spans)
    reach = shift = end = 0
    for number in sorted(range(len(spans)), key=spans.__getitem__):
        start, size = spans[number]
        if start >= reach:
            shift = end + (start - end) % ALIGNMENT - start
        reach = max(reach, start + size)
        places[number] = start + shift
        end = reach + shift
    return tuple(places), end


def _are_alike(spec: TensorSpec, other: TensorSpec) -> bool:
    return (spec.dtype, spec.shape, spec.stride) == (other.dtype, other.shape, other.stride)


def spread_memory(spec: TensorSpec, size_bytes: int, what: str) -> torch.Tensor:
    """Take memory for packed items and what lies between them, which no bytes of the store stand for."""
    if spec.span_bytes <= _MAX_SPREAD * size_bytes:
        return torch.zeros(spec.span_bytes, dtype=torch.uint8)
    try:
        return new_sparse_memory(spec.span_bytes)
    except MemoryError as error:
        raise Corrupt(f"{what}: its items lie too far apart: {error}", key=what) from error


def spread_items(packed: torch.Tensor, spec: TensorSpec, memory: torch.Tensor, offset: int) -> None:
    """Copy packed items to where they lie in memory, a tensor of bytes; `offset` is in items."""
    size = item_bytes(spec.dtype)
    stride = tuple(step for size, step in zip(spec.shape, spec.stride, strict=True) if step or size == 1)
    target = view_items(memory, size, spec.packed_shape, stride, offset)
    target.copy_(view_items(packed, size, spec.packed_shape, contiguous_stride(spec.packed_shape), 0))


def build_tensor(spec: TensorSpec, memory: torch.Tensor, *, what: str) -> torch.Tensor:
    """Return the tensor that `spec` describes over `memory`, the bytes of its alias group on any device."""
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
    return dress(tensor, spec)


def new_empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor without items, whose memory is still to be set."""
    if dtype != torch.complex32:
        return torch.empty(0, dtype=dtype, device=device)
    with warnings.catch_warnings():
        # That torch can do little with this dtype is not for whoever loads it to hear.
        warnings.simplefilter("ignore", UserWarning)
        return torch.empty(0, dtype=dtype, device=device)


def dress(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return `tensor` with the flags and the role that `spec` states."""
    if spec.conj:
        tensor = torch.conj(tensor)
    if spec.neg:
        tensor = torch._neg_view(tensor)
    return give_role(tensor, spec.role, requires_grad=spec.requires_grad)
