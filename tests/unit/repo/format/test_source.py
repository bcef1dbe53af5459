"""Sources are cut in order, and batched within a limit."""

from __future__ import annotations

from array import array

import pytest

from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.repo.format.source import BytesSource, SourceChunk, SourceChunks, cut_sources, group_chunks

SOURCES = [
    BytesSource("a", bytes(CHUNK_BYTES + 5)),
    BytesSource("empty", b""),
    BytesSource("b", bytearray(b"123")),
]


def spans(pieces: list[SourceChunk]) -> list[tuple[int, int, int]]:
    return [(piece.position, piece.start, piece.stop) for piece in pieces]


def test_sources_are_cut_in_order_and_an_empty_one_has_no_pieces() -> None:
    assert spans(cut_sources(SOURCES)) == [(0, 0, CHUNK_BYTES), (0, CHUNK_BYTES, CHUNK_BYTES + 5), (2, 0, 3)]


def test_bytes_are_read_without_a_copy_whatever_their_type() -> None:
    numbers = array("I", [1, 2, 3])
    source = BytesSource("n", memoryview(numbers))
    assert source.size_bytes == 12
    assert bytes(source.read(4, 8)) == numbers.tobytes()[4:8]


def test_pieces_are_grouped_in_order_within_the_limit() -> None:
    pieces = cut_sources([BytesSource(str(size), bytes(size)) for size in (5 * CHUNK_BYTES, 10, 2 * CHUNK_BYTES)])
    batches = group_chunks(pieces, limit_bytes=2 * CHUNK_BYTES)
    assert [piece for batch in batches for piece in batch] == pieces
    assert all(sum(piece.stop - piece.start for piece in batch) <= 2 * CHUNK_BYTES for batch in batches)
    assert [len(batch) for batch in batches] == [2, 2, 2, 2]


@pytest.mark.parametrize("limit", [1, CHUNK_BYTES])
def test_a_batch_holds_at_least_one_chunk(limit: int) -> None:
    pieces = cut_sources([BytesSource("a", bytes(2 * CHUNK_BYTES))])
    assert [len(batch) for batch in group_chunks(pieces, limit_bytes=limit)] == [1, 1]


def test_no_pieces_make_no_batches() -> None:
    assert group_chunks([], limit_bytes=CHUNK_BYTES) == []


def test_repeated_sources_are_skipped() -> None:
    assert spans(list(SourceChunks([*SOURCES, SOURCES[0]], repeats={3: 0}))) == spans(cut_sources(SOURCES))
