"""Memory as bytes: views without copies, copies that keep every bit, and sparse memory."""

from __future__ import annotations

import pytest
import torch

from holdfast.tensors.memory import (
    RAW_DTYPES,
    copy_items,
    gather_items,
    new_memory,
    new_sparse_memory,
    view_bytes,
    view_items,
    view_raw,
    view_storage,
    wrap_memory,
)
from tests.kit.memory import measure_rise_kib

CPU = torch.device("cpu")


def test_bytes_of_a_storage_are_seen_without_a_copy() -> None:
    tensor = torch.zeros(4, dtype=torch.int16)
    view_bytes(view_storage(tensor.untyped_storage(), 2, 6))[:] = b"\x01\x00\x02\x00"
    assert tensor.tolist() == [0, 1, 2, 0]


def test_memory_of_no_bytes_is_fine() -> None:
    assert view_bytes(new_memory(0, CPU)).nbytes == 0
    assert wrap_memory(memoryview(bytearray())).numel() == 0


@pytest.mark.parametrize("size", RAW_DTYPES)
def test_strided_items_keep_every_bit(size: int) -> None:
    data = bytes(range(256))
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    items = view_items(memory, size, (3, 2), (4, 1), 1)
    picked = b"".join(data[(1 + 4 * row + at) * size :][:size] for row in range(3) for at in range(2))
    assert copy_items(items, 0, 6).view(torch.uint8).numpy().tobytes() == picked


@pytest.mark.parametrize(("first", "last"), [(0, 24), (0, 1), (5, 7), (11, 13), (23, 24), (3, 20)])
def test_any_run_of_items_is_copied_in_order(first: int, last: int) -> None:
    raw = torch.arange(48).view(2, 3, 8).permute(2, 0, 1)[::2]
    assert copy_items(raw, first, last).tolist() == raw.reshape(-1)[first:last].tolist()
    assert gather_items(raw, first, last).tolist() == raw.reshape(-1)[first:last].tolist()


def test_a_raw_view_knows_no_conjugation_and_no_gradient() -> None:
    tensor = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 4j])).conj()
    raw = view_raw(tensor)
    assert not raw.requires_grad
    assert raw.view(torch.complex64).tolist() == [1 + 2j, 3 - 4j]


def test_sparse_memory_is_zero_and_takes_what_is_written() -> None:
    def write_little() -> None:
        memory = new_sparse_memory(1 << 34)
        memory[:: 1 << 30] = 7
        assert memory[(1 << 30) - 1 : (1 << 30) + 2].tolist() == [0, 7, 0]

    assert measure_rise_kib(write_little) < 64 << 10


def test_more_memory_than_there_can_be_is_refused() -> None:
    with pytest.raises(MemoryError, match=f"{1 << 62} bytes of memory cannot be allocated"):
        new_sparse_memory(1 << 62)
