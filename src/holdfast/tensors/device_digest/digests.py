"""BLAKE3-256 of tensors and of pieces of them, computed on their device: the same as of their bytes on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.digest import Digest
from holdfast.tensors.device_digest.choice import DigestBackend, choose_backend, find_backend
from holdfast.tensors.device_digest.pieces import DeviceBytes, DevicePiece


def digest(tensor: torch.Tensor, *, backend: DigestBackend | None = None) -> Digest:
    """Return the BLAKE3-256 of a tensor's values in C order, computed on the tensor's device.

    It is the digest of `tensor.contiguous()`'s bytes, on any device. A tensor without bytes has the digest of b"".

    Args:
        tensor: An ordinary tensor. It may have gaps; these are not hashed.
        backend: "cpu", "torch" or "triton". None chooses the fastest that was checked on the device.

    Raises:
        Unsupported: The tensor has no memory of its own, or the backend cannot be used on its device.
    """
    data = DeviceBytes.from_tensor(tensor)
    return digest_pieces([DevicePiece(data, 0, data.size_bytes)], backend=backend)[0]


def digest_pieces(pieces: Sequence[DevicePiece], *, backend: DigestBackend | None = None) -> list[Digest]:
    """Return the BLAKE3-256 of each piece, computed on its device; waits once for each device, when all is queued.

    The memory must not change until this returns. Of a device's memory, 32 bytes for each piece are copied to the host,
    unless the backend is "cpu". Scratch memory is bounded, however many and long the pieces are.
    """
    positions: dict[torch.device, list[int]] = {}
    for position, piece in enumerate(pieces):
        positions.setdefault(piece.data.device, []).append(position)
    found: dict[int, Digest] = {}
    for device, some in positions.items():
        compute = find_backend(backend or choose_backend(device).backend, device)
        found.update(zip(some, compute([pieces[position] for position in some]), strict=True))
    return [found[position] for position in range(len(pieces))]
