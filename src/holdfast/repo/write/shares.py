"""Divides the memory budget of a save between hashing and packs that are being uploaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from holdfast.objects.local.block_io import BLOCK_BYTES
from holdfast.objects.protocol import StoreTraits
from holdfast.repo.format.chunk import UNIT_BYTES

_FEWEST_PACKS: Final = 3
"""How many packs the uploads have room for at least: one that is being filled and two that are being sent."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The bytes that each part of a save may have in memory."""

    hash_bytes: int
    """For chunks that are being read and hashed."""
    batch_bytes: int
    """The size of a batch of chunks that are hashed together."""
    staged_bytes: int
    """The size from which on a batch of new chunks is copied into a block, hashed there and written from there."""
    huge_pages: bool = True
    """Whether these blocks are in huge pages. Not if there are so many that the system has to move memory for them."""
    pack_bytes: int | None = None
    """The size at which a pack is complete; None for that of the format."""
    packs_in_flight: int = 0
    """How many packs are sent at a time, while the next is being filled; 0 if each is written while it is filled."""


def plan_shares(traits: StoreTraits, budget_bytes: int) -> Shares:
    """Return the shares of a save: half for hashing, or three quarters for uploads that the store keeps in memory."""
    batch_bytes = min(UNIT_BYTES, budget_bytes // 8)
    if traits.upload_bytes is None:
        return Shares(budget_bytes // 2, batch_bytes, BLOCK_BYTES)
    room = budget_bytes * 3 // 4
    whole = min(traits.upload_bytes, room // _FEWEST_PACKS)
    # A pack is complete before a further batch could make it larger than `whole`.
    return Shares(
        hash_bytes=budget_bytes - room,
        batch_bytes=batch_bytes // 2,
        # Of a block that the store keeps until the pack is sent, at most a quarter is unused.
        staged_bytes=batch_bytes // 2 * 3 // 4,
        huge_pages=False,
        pack_bytes=max(whole - batch_bytes // 2, 1),
        packs_in_flight=min(room // whole - 1, traits.requests_at_once),
    )
