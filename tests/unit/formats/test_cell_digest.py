"""The digest of a tensor over its cells: as the format says, from bytes in any pieces, and from stored chunks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.digest import hash_bytes
from holdfast.formats.digests import CellDigest, cut_cells, find_stored_digest
from holdfast.repo.format.chunk import ChunkRef
from holdfast.repo.format.entry import Entry
from tests.kit.cells import digest_bytes, digest_tensor, find_cell_sizes

_SHAPES = [(), (0,), (7,), (300_000,), (1000, 1000), (3, 400_000), (2, 3, 262_145), (5, 0), (1, 1 << 19), (777, 999)]


def digest_items(dtype: torch.dtype, shape: tuple[int, ...], pieces: Sequence[memoryview]) -> bytes:
    """Return the digest of a tensor by its bytes in C order."""
    cells = CellDigest(dtype, shape)
    for piece in pieces:
        cells.update(piece)
    return cells.digest()


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_cells_end_where_the_format_says(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ends = cut_cells(dtype, shape)

    assert [stop - start for start, stop in zip([0, *ends], ends, strict=False)] == find_cell_sizes(
        shape, dtype.itemsize
    )


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 3000), row=st.integers(1, 2000), seed=st.integers(0, 9))
def test_pieces_of_any_size_give_the_same_digest(rows: int, row: int, seed: int) -> None:
    source = random.Random(seed)
    data = source.randbytes(rows * row * 2)
    cells, at = CellDigest(torch.bfloat16, (rows, row)), 0

    while at < len(data):
        stop = at + source.randint(1, 1 << 21)
        cells.update(memoryview(data)[at:stop])
        at = stop

    assert cells.digest() == digest_bytes(data, (rows, row), 2)


def test_one_cell_is_hashed_as_it_is() -> None:
    data = random.Random(0).randbytes(1 << 20)

    assert digest_items(torch.uint8, (1 << 20,), [memoryview(data)]) == blake3(data).digest()
    assert digest_items(torch.uint8, (0, 4), []) == blake3(b"").digest()


def test_a_changed_byte_and_swapped_cells_change_the_digest() -> None:
    data = bytearray(random.Random(0).randbytes(3 << 20))
    shape = (3, 1 << 20)
    first = digest_items(torch.uint8, shape, [memoryview(bytes(data))])
    swapped = data[1 << 20 :] + data[: 1 << 20]
    data[2_500_000] ^= 1

    assert digest_items(torch.uint8, shape, [memoryview(data)]) != first
    assert digest_items(torch.uint8, shape, [memoryview(swapped)]) != first


def _store(data: bytes, sizes: list[int], *, dims: int = 0, boxes: Sequence[tuple[int, ...]] | None = None) -> Entry:
    chunks, at = [], 0
    for number, size in enumerate(sizes):
        box = boxes[number] if boxes else ()
        chunks.append(ChunkRef(hash_bytes(data[at : at + size]), size, None, b"", box))
        at += size
    return Entry("x", len(data), tuple(chunks), dims=dims)


def test_stored_chunks_tell_the_digest_if_they_are_the_cells() -> None:
    data, sizes = random.Random(1).randbytes(3 << 20), [1 << 20] * 3
    shape = (3, 1 << 20)
    expected = digest_bytes(data, shape, 1)
    spans = [(0, 1 << 20), (1 << 20, 1 << 20), (2 << 20, 1 << 20)]
    boxes = [(row, 0, 1, 1 << 20) for row in range(3)]

    assert find_stored_digest(_store(data, sizes), torch.uint8, shape) == expected
    assert find_stored_digest(_store(data, sizes, dims=1, boxes=spans), torch.uint8, shape) == expected
    assert find_stored_digest(_store(data, sizes, dims=2, boxes=boxes), torch.uint8, shape) == expected


def test_stored_chunks_in_another_order_are_sorted_by_their_place() -> None:
    data = random.Random(1).randbytes(3 << 20)
    parts = [data[row << 20 : (row + 1) << 20] for row in (2, 0, 1)]
    spans = [(2 << 20, 1 << 20), (0, 1 << 20), (1 << 20, 1 << 20)]
    entry = _store(b"".join(parts), [1 << 20] * 3, dims=1, boxes=spans)

    assert find_stored_digest(entry, torch.uint8, (3, 1 << 20)) == digest_bytes(data, (3, 1 << 20), 1)


@pytest.mark.parametrize("sizes", [[1 << 20, 1 << 19, 1 << 19, 1 << 20], [1 << 20, 1 << 20, (1 << 20) - 1]])
def test_other_chunks_do_not_tell_it(sizes: list[int]) -> None:
    data = random.Random(1).randbytes(sum(sizes))

    assert find_stored_digest(_store(data, sizes), torch.uint8, (3, 1 << 20)) is None


def test_boxes_that_are_not_the_cells_do_not_tell_it() -> None:
    data = random.Random(1).randbytes(3 << 20)
    halves = [(row, column, 1, 1 << 19) for row in range(3) for column in (0, 1 << 19)]
    gapped = [(0, 1 << 20), (1 << 20, 1 << 20), (3 << 20, 1 << 20)]

    boxed = _store(data, [1 << 19] * 6, dims=2, boxes=halves)
    assert find_stored_digest(boxed, torch.uint8, (3, 1 << 20)) is None
    assert find_stored_digest(_store(data, [1 << 20] * 3, dims=1, boxes=gapped), torch.uint8, (3, 1 << 20)) is None


def test_a_receipt_states_the_digest_of_the_file_and_of_the_snapshot(tmp_path: Path) -> None:
    state = {"large": torch.randn(900, 700), "turned": torch.randn(700, 900).t(), "small": torch.arange(5)}
    torch.save(state, tmp_path / "state.pt")
    store = holdfast.open(tmp_path / "store")

    imported = store.import_(tmp_path / "state.pt", "m").receipt
    exported = store.export("m", tmp_path / "out.safetensors").receipt

    expected = {name: digest_tensor(tensor) for name, tensor in state.items()}
    assert {tensor.name: tensor.source.digest for tensor in imported.tensors} == expected
    assert {tensor.name: tensor.result.digest for tensor in exported.tensors} == expected
