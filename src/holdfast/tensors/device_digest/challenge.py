"""Random bytes that are hashed beside the pieces of a launch, to notice one that did nothing or something wrong."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from holdfast.digest import DIGEST_BYTES, Digest, hash_bytes
from holdfast.errors import DeviceFault
from holdfast.tensors.device_digest.pieces import LEAF_BYTES, DeviceBytes, Part
from holdfast.tensors.device_digest.side_stream import HostLink

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
