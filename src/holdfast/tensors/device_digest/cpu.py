"""Digests by the blake3 package, of bytes in the memory of the CPU or copied to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.digest import Buffer, Digest, hash_parts
from holdfast.tensors.device_digest.pieces import DevicePiece, cut_pieces
from holdfast.tensors.memory import view_bytes


def digest_on_cpu(pieces: Iterable[DevicePiece]) -> list[Digest]:
    """Return the digest of each piece; bytes of another device are copied to the host, at most PART_BYTES at a time."""
    return [hash_parts(_iter_copies(piece)) for piece in pieces]


def _iter_copies(piece: DevicePiece) -> Iterator[Buffer]:
    for part in cut_pieces([piece]):
        yield view_bytes(part.data.read(part.start, part.stop).cpu())
