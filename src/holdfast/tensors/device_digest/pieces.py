"""The bytes to hash on a device, cut into parts and batches; checks of a launch; and BLAKE3's tree above the leaves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

from holdfast.digest import DIGEST_BYTES, Digest, hash_bytes
from holdfast.errors import DeviceFault, Unsupported
from holdfast.tensors.composite import has_own_bytes, verify_readable, verify_unwrapped
from holdfast.tensors.device_digest.side_stream import HostLink, Integers, SideStream
from holdfast.tensors.memory import gather_items, view_raw, view_storage
from holdfast.tensors.spec import count_bytes, items_per_byte

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


_SIZE_BYTES: Final = LEAF_BYTES + 16
"""Two leaves, so that a pair of nodes is joined too."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """Parts to hash on a device, and the digests that the CPU has computed of them."""

    parts: tuple[Part, ...]
    expected: tuple[Digest, ...]


def make_challenge(parts: Sequence[Part], alignment: int, link: HostLink) -> Challenge:
    """Return a challenge for the launches that hash these parts.

    Kernels that treat addresses which are no multiples of `alignment` differently get one piece for each way that the
    parts need.
    """
    offsets = (0,) if alignment == 1 else sorted({each for part in parts for each in _find_offsets(part, alignment)})
    # From the system: torch's generators belong to the training.
    data = os.urandom(_SIZE_BYTES + max(offsets))
    memory = DeviceBytes.from_memory(link.upload(np.frombuffer(bytearray(data), dtype=np.uint8)))
    spans = [(start, start + _SIZE_BYTES) for start in offsets]
    return Challenge(
        tuple(Part(memory, *span, 0, is_piece=True) for span in spans),
        tuple(hash_bytes(data[start:stop]) for start, stop in spans),
    )


def make_split_challenge(link: HostLink) -> Challenge:
    """Return a challenge of two parts whose nodes are to be joined to one digest, like those of long pieces."""
    data = os.urandom(_SIZE_BYTES)
    memory = DeviceBytes.from_memory(link.upload(np.frombuffer(bytearray(data), dtype=np.uint8)))
    first = Part(memory, 0, LEAF_BYTES, 0, is_piece=False)
    return Challenge((first, Part(memory, LEAF_BYTES, _SIZE_BYTES, 1, is_piece=False)), (hash_bytes(data),))


def _find_offsets(part: Part, alignment: int) -> tuple[int, ...]:
    """Return 0 if a part's address is a multiple of `alignment`, otherwise 1; both if the address is not known yet."""
    if part.data.is_gappy:
        # Reading it gives a copy, or a view if this part has no gaps, which may begin anywhere.
        return (0, 1)
    return (min(1, (part.data.items.data_ptr() + part.start) % alignment),)


@dataclass(frozen=True, slots=True)
class QueuedDigests:
    """Digests that a device is about to compute: a row of eight words for each piece, then one for each challenge."""

    nodes: torch.Tensor
    expected: tuple[Digest, ...]
    device: torch.device

    def read(self, data: bytes) -> list[Digest]:
        """Return the digests of the pieces from the bytes of `nodes`; raises DeviceFault if a challenge failed."""
        found = [Digest(data[at : at + DIGEST_BYTES]) for at in range(0, len(data), DIGEST_BYTES)]
        count = len(found) - len(self.expected)
        if tuple(found[count:]) != self.expected:
            raise DeviceFault(
                f"{self.device} returned a wrong digest of random bytes: a kernel did not run, or computed something"
                " else, so none of its digests is used. Restart the process; if it happens again, the device or its"
                " driver is faulty, and `holdfast doctor --devices` checks it"
            )
        return found[:count]


PARENT: Final = 4
ROOT: Final = 8
"""Flags of BLAKE3: the node has two children; the node is the digest."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of adjacent nodes; each run is to be joined to one node, which replaces its first one."""

    first_rows: Integers
    counts: Integers
    is_digest: Integers
    """1 for a run whose last node is a digest, 0 for one that is a subtree."""


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """The pairs of nodes of one level. Nodes of a run are `stride` rows apart, so no pair overwrites another one."""

    stride: int
    first_pairs: Integers
    """The number of each run's first pair."""
    first_rows: Integers
    flags: Integers
    num_pairs: int


class Kernels(Protocol):
    """Hashes on one kind of device. A node is a row of eight int32 words. Nothing here may wait for the device."""

    leaf_scratch_bytes: int
    """The scratch memory that one leaf takes."""
    alignment: int
    """Parts whose addresses are no multiples of this take another kernel; 1 if all take the same."""

    def hash_parts(self, parts: Sequence[Part], link: HostLink) -> torch.Tensor:
        """Return one node for each part."""

    def join_runs(self, nodes: torch.Tensor, runs: Runs, link: HostLink) -> torch.Tensor:
        """Return one node for each run; may overwrite `nodes`."""


def plan_levels(runs: Runs) -> Iterator[TreeLevel]:
    """Yield the levels that join each run to one node, lowest first. An odd last node waits for the next level."""
    first_rows, counts, is_digest, stride = runs.first_rows, runs.counts, runs.is_digest, 1
    while True:
        is_joined = counts > 1
        first_rows, counts, is_digest = first_rows[is_joined], counts[is_joined], is_digest[is_joined]
        if not len(counts):
            return
        pairs = counts // 2
        flags = np.where((counts == 2) & (is_digest == 1), PARENT | ROOT, PARENT)
        yield TreeLevel(stride, number_firsts(pairs), first_rows, flags, int(pairs.sum()))
        counts = counts - pairs
        stride *= 2


def number_firsts(counts: Integers) -> Integers:
    """Return the number of the first item of each group, if items are numbered through all groups."""
    return np.cumsum(counts) - counts


def queue_digests(pieces: Sequence[DevicePiece], kernels: Kernels, link: HostLink) -> QueuedDigests:
    """Queue the digests of pieces on the current stream, without waiting for the device.

    The memory of the pieces must not change before the device has reached what is queued here.
    """
    counts = np.array([count_parts(piece) for piece in pieces], dtype=np.int64)
    parts: Iterable[Part] = cut_pieces(pieces)
    expected: list[Digest] = []
    is_joined = bool((counts > 1).any())
    if is_joined:
        split = make_split_challenge(link)
        expected += split.expected
        counts = np.append(counts, len(split.parts))
        parts = chain(parts, split.parts)
    # Zeros, so that a kernel that writes nothing leaves no digest of an earlier call.
    nodes = torch.zeros((int(counts.sum()), 8), dtype=torch.int32, device=link.device)
    answers: list[torch.Tensor] = []
    row = 0
    for batch in group_parts(parts, kernels.leaf_scratch_bytes):
        challenge = make_challenge(batch, kernels.alignment, link)
        found = kernels.hash_parts([*batch, *challenge.parts], link)
        nodes[row : row + len(batch)] = found[: len(batch)]
        answers.append(found[len(batch) :])
        expected += challenge.expected
        row += len(batch)
    if is_joined:
        nodes = kernels.join_runs(nodes, Runs(number_firsts(counts), counts, np.ones_like(counts)), link)
    return QueuedDigests(torch.cat([nodes, *answers]), tuple(expected), link.device)


def digest_by_tree(pieces: Sequence[DevicePiece], kernels: Kernels, device: torch.device) -> list[Digest]:
    """Return the digest of each piece; waits for the device once, at the end.

    32 bytes for each piece are copied to the host, and 32 to 64 for each challenge.
    """
    if not pieces:
        return []
    with SideStream(device) as link:
        queued = queue_digests(pieces, kernels, link)
        found = link.download(queued.nodes)
    return queued.read(found.numpy().tobytes())
