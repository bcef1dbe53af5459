"""What every backend of device digests must do; a test calls each function with the backend that it tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import strategies as st

from holdfast.digest import Digest, hash_bytes
from holdfast.tensors.device_digest import pieces
from holdfast.tensors.device_digest.choice import DigestBackend, digest, digest_pieces
from holdfast.tensors.device_digest.pieces import DeviceBytes, DevicePiece, Kernels, Part
from holdfast.tensors.device_digest.side_stream import SideStream
from tests.kit.blake3_reference import hash_leaf

CPU: Final = torch.device("cpu")
# The lengths of the official test vectors, whose inputs repeat the bytes 0 to 250.
VECTOR_LENGTHS: Final = (
    *(0, 1, 2, 3, 4, 5, 6, 7, 8, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2048, 2049, 3072, 3073, 4096, 4097),
    *(5120, 5121, 6144, 6145, 7168, 7169, 8192, 8193, 16384, 31744, 102400),
)
OFFICIAL: Final = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1023: "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    1025: "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
    2048: "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a",
    31744: "62b6960e1a44bcc1eb1a611a8d6235b6b4b78f32e7abc4fb4c6cdcce94895c47",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
}
"""Digests as the authors of BLAKE3 published them."""


def make_memory(data: bytes, misaligned: int = 0) -> DeviceBytes:
    """Return bytes that begin `misaligned` bytes after a multiple of 16, with other bytes around them."""
    memory = torch.full((len(data) + 64,), 0xEE, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + misaligned
    memory[start : start + len(data)] = torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))
    return DeviceBytes.from_memory(memory[start : start + len(data)])


def check_official_vectors(backend: DigestBackend) -> None:
    """All test vectors at once, and those whose digest is written down."""
    whole = bytes(range(251)) * (max(VECTOR_LENGTHS) // 251 + 1)
    data = make_memory(whole)

    found = digest_pieces([DevicePiece(data, 0, length) for length in VECTOR_LENGTHS], backend=backend)

    assert found == [Digest(blake3(whole[:length]).digest()) for length in VECTOR_LENGTHS]
    by_length = dict(zip(VECTOR_LENGTHS, found, strict=True))
    assert {length: by_length[length].hex() for length in OFFICIAL} == OFFICIAL


@st.composite
def piece_lists(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Draw the misalignment of some memory, and the starts and stops of pieces in it."""
    edges = st.sampled_from([0, 1, 63, 64, 65, 1023, 1024, 1025, 2047, 2048, 2049, 4096, 9000])
    lengths = draw(st.lists(st.one_of(edges, st.integers(0, 10_000)), min_size=1, max_size=12))
    spans = [(start, start + length) for length in lengths for start in [draw(st.integers(0, 400))]]
    return draw(st.integers(0, 15)), spans


def check_pieces(backend: DigestBackend, misaligned: int, spans: Sequence[tuple[int, int]]) -> None:
    """Pieces anywhere in some memory, of any length, in one call."""
    whole = random.Random(misaligned).randbytes(max(stop for _, stop in spans))
    data = make_memory(whole, misaligned)

    found = digest_pieces([DevicePiece(data, *span) for span in spans], backend=backend)

    assert found == [hash_bytes(whole[start:stop]) for start, stop in spans]


def check_parts(backend: DigestBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that are hashed in several parts, and parts in several batches, with and without gaps."""
    monkeypatch.setattr(pieces, "PART_BYTES", 2048)
    monkeypatch.setattr(pieces, "SCRATCH_BYTES", 9000)
    whole = random.Random(3).randbytes(11_000)
    data = make_memory(whole, 3)
    gappy = torch.arange(3000, dtype=torch.int32).view(30, 100)[:, ::2]
    items = gappy.contiguous().numpy().tobytes()
    gaps = DeviceBytes.from_tensor(gappy)

    found = digest_pieces(
        [DevicePiece(data, 5, 11_000), DevicePiece(gaps, 0, 6000), DevicePiece(data, 0, 4096), DevicePiece(data, 7, 7)],
        backend=backend,
    )

    assert found == [hash_bytes(each) for each in (whole[5:], items, whole[:4096], b"")]


def check_gaps(backend: DigestBackend) -> None:
    """Tensors with gaps, in another order than that of memory, expanded, conjugated, and without items."""
    base = torch.arange(6000, dtype=torch.int16).view(20, 30, 10)
    pairs = torch.complex(base[0].float(), base[1].float())
    tensors = [
        base[:, ::3, 1:],
        base.transpose(0, 2),
        base[0, 0, :1].expand(7),
        pairs.conj()[:5],
        base[:0],
        base[1, 1, 1],
    ]

    found = [digest(tensor, backend=backend) for tensor in tensors]

    raw = [tensor.resolve_conj().contiguous().numpy().tobytes() for tensor in tensors]
    assert found == [hash_bytes(each) for each in raw]
    spans = [(0, 1001), (1001, 1002), (1002, len(raw[0]))]
    data = DeviceBytes.from_tensor(tensors[0])
    cut = digest_pieces([DevicePiece(data, *span) for span in spans], backend=backend)
    assert cut == [hash_bytes(raw[0][slice(*span)]) for span in spans]


def check_far_leaf(kernels: Kernels) -> None:
    """A leaf whose counter needs more than 32 bits: counters are 64-bit."""
    data = random.Random(5).randbytes(1024)
    far = 3 * (1 << 32) + 0x8000_0001
    part = Part(make_memory(data), 0, 1024, far, is_piece=False)

    with SideStream(CPU) as link:
        found = kernels.hash_parts([part], link)

    assert hash_leaf(data, 0, is_root=True) == blake3(data).digest()
    assert found.numpy().tobytes() == hash_leaf(data, far)
