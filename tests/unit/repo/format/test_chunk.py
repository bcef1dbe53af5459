"""Bytes are cut on a fixed grid, and a chunk that is not itself is refused."""

from __future__ import annotations

import pytest

from holdfast.digest import hash_bytes
from holdfast.errors import DigestMismatch
from holdfast.repo.format.chunk import CHUNK_BYTES, cut, verify_chunk


@pytest.mark.parametrize(
    ("size", "spans"),
    [
        (0, []),
        (1, [(0, 1)]),
        (CHUNK_BYTES, [(0, CHUNK_BYTES)]),
        (CHUNK_BYTES + 1, [(0, CHUNK_BYTES), (CHUNK_BYTES, CHUNK_BYTES + 1)]),
        (3 * CHUNK_BYTES, [(i * CHUNK_BYTES, (i + 1) * CHUNK_BYTES) for i in range(3)]),
    ],
)
def test_a_span_is_cut_at_multiples_of_a_mebibyte(size: int, spans: list[tuple[int, int]]) -> None:
    assert cut(size) == spans


def test_the_right_bytes_pass() -> None:
    verify_chunk(memoryview(b"abc"), hash_bytes(b"abc"), what="x")


@pytest.mark.parametrize("data", [b"", b"abd", b"abc\0"])
def test_other_bytes_are_refused_and_what_they_are_is_named(data: bytes) -> None:
    with pytest.raises(
        DigestMismatch, match=r"^entry 'x': the stored bytes have digest [0-9a-f]{12}, not 6437b3ac3846"
    ):
        verify_chunk(memoryview(data), hash_bytes(b"abc"), what="entry 'x'")
