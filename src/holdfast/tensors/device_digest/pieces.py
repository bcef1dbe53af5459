"""The bytes to hash: where they are on their device, and how they are cut into parts and batches of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from holdfast.errors import Unsupported
from holdfast.tensors.composite import has_own_bytes, verify_readable, verify_unwrapped
from holdfast.tensors.device_digest.side_stream import Integers
from holdfast.tensors.dtypes import items_per_byte
from holdfast.tensors.memory import gather_items, view_raw, view_storage
from holdfast.tensors.spec import count_bytes

LEAF_BYTES: Final = 1024
"""The bytes of one leaf of BLAKE3's tree, which its specification calls a chunk."""
PART_BYTES: Final = 8 << 20
"""A longer piece is hashed in parts of this size. A power of two, so that each part is a subtree."""
SCRATCH_BYTES: Final = 64 << 20
"""The limit of the scratch memory of one batch; no part needs more."""


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes on a device: memory without gaps, or the items of a tensor in C order, which are gathered when read."""

    items: torch.Tensor
    size_bytes: int
    is_gappy: bool = False

    @classmethod
    def from_memory(cls, memory: torch.Tensor) -> DeviceBytes:
        """Return the bytes of a contiguous one-dimensional tensor of bytes."""
        return cls(memory, memory.numel())

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> DeviceBytes:
        """Return the bytes of a tensor's values in C order; raises Unsupported if it has no memory of its own."""
        if tensor.is_meta:
            raise Unsupported("a meta tensor has no bytes, so it has no digest")
        verify_unwrapped(tensor)
        if not has_own_bytes(tensor):
            raise Unsupported(f"a {type(tensor).__name__} that is made of other tensors has no digest: hash these")
        # A conjugated or negated view has the bytes of other values than its own.
        tensor = tensor.detach().resolve_conj().resolve_neg()
        verify_readable(tensor)
        size = count_bytes(tensor.dtype, tensor.numel())
        if size and not tensor.is_contiguous():
            if items_per_byte(tensor.dtype) > 1:
                raise Unsupported(f"a slice of a {tensor.dtype} tensor has no digest: its items share bytes")
            return cls(view_raw(tensor), size, is_gappy=True)
        start = int(tensor.storage_offset()) * tensor.element_size() if size else 0
        return cls(view_storage(tensor.untyped_storage(), start, start + size, tensor.device), size)

    @property
    def device(self) -> torch.device:
        """The device of the bytes."""
        return self.items.device

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the bytes from `start` to `stop` as a tensor on the device: a view, or a copy without the gaps."""
        if not self.is_gappy:
            return self.items[start:stop]
        item_bytes = self.items.element_size()
        first, last = start // item_bytes, -(-stop // item_bytes)
        found = gather_items(self.items, first, last).view(torch.uint8)
        return found[start - first * item_bytes : stop - first * item_bytes]


class DevicePiece(NamedTuple):
    """The bytes from `start` to `stop` of `data`, whose digest is wanted."""

    data: DeviceBytes
    start: int
    stop: int


class Part(NamedTuple):
    """A piece, or a subtree of a longer one."""

    data: DeviceBytes
    start: int
    stop: int
    first_leaf: int
    """The number of its first leaf in its piece."""
    is_piece: bool
    """Whether it is a whole piece, so that its node is a digest."""

    @property
    def num_leaves(self) -> int:
        """The number of leaves; no bytes are one leaf, too."""
        return max(1, -(-(self.stop - self.start) // LEAF_BYTES))


def cut_pieces(pieces: Iterable[DevicePiece]) -> Iterator[Part]:
    """Yield the parts of each piece, in order."""
    for data, start, stop in pieces:
        is_piece = stop - start <= PART_BYTES
        for at in range(start, max(stop, start + 1), PART_BYTES):
            yield Part(data, at, min(at + PART_BYTES, stop), (at - start) // LEAF_BYTES, is_piece)


def count_parts(piece: DevicePiece) -> int:
    """Return the number of parts that `cut_pieces` cuts a piece into."""
    return max(1, -(-(piece.stop - piece.start) // PART_BYTES))


def find_addresses(memories: Iterable[torch.Tensor]) -> Integers:
    """Return the address of each tensor as 64 bits with a sign: Intel's GPUs have addresses above 2^63."""
    return np.array([memory.data_ptr() for memory in memories], dtype=np.uint64).view(np.int64)


def group_parts(parts: Iterable[Part], leaf_scratch_bytes: int) -> Iterator[Sequence[Part]]:
    """Yield batches whose scratch memory is bounded: a number of bytes for each leaf, and copies of gappy bytes."""
    batch: list[Part] = []
    used = 0
    for part in parts:
        needed = part.num_leaves * leaf_scratch_bytes + 2 * (part.stop - part.start if part.data.is_gappy else 0)
        if batch and used + needed > SCRATCH_BYTES:
            yield batch
            batch, used = [], 0
        batch.append(part)
        used += needed
    if batch:
        yield batch
