"""The digest of a tensor in receipts, computed from the text of the format alone, without the product's code."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from blake3 import blake3

_LIMIT = 1 << 20


def digest_tensor(tensor: torch.Tensor) -> bytes:
    """Return what a receipt must state for a tensor."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return digest_bytes(data, tuple(tensor.shape), tensor.element_size())


def digest_bytes(data: bytes, shape: tuple[int, ...], item_bytes: int) -> bytes:
    """Return what a receipt must state for the items of a tensor in C order."""
    digests, at = [], 0
    for size in find_cell_sizes(shape, item_bytes):
        digests.append(blake3(data[at : at + size]).digest())
        at += size
    assert at == len(data)
    return digests[0] if len(digests) == 1 else blake3(b"".join(digests)).digest()


def find_cell_sizes(shape: tuple[int, ...], item_bytes: int) -> list[int]:
    """Return the sizes of a tensor's cells in bytes, in order."""
    size = math.prod(shape) * item_bytes
    if size <= _LIMIT:
        return [size] if size else []
    rows, row_bytes = shape[0], math.prod(shape[1:]) * item_bytes
    if row_bytes > _LIMIT:
        return find_cell_sizes(shape[1:], item_bytes) * rows
    least = -(-rows // (_LIMIT // row_bytes))
    counts = [-(-least // step) * step for step in (2**power for power in range(40))]
    number = max(count for count in counts if count <= min(rows, least + least // 3))
    edges = [cell * rows // number for cell in range(number + 1)]
    return [(stop - start) * row_bytes for start, stop in pairwise(edges)]
