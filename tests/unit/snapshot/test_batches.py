"""Items are put into batches within a limit, and memory is filled from any offset of an entry."""

from __future__ import annotations

import pytest
import torch

from holdfast.snapshot.batches import iter_batches, read_to_memory, view_tensor_memory
from holdfast.store import Store
from holdfast.tensors.memory import new_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [([], []), ([3, 3, 3], [[3, 3], [3]]), ([9, 1, 1], [[9], [1, 1]]), ([1, 9, 1], [[1], [9], [1]])],
)
def test_an_item_that_exceeds_the_limit_is_a_batch_by_itself(sizes: list[int], batches: list[list[int]]) -> None:
    assert list(iter_batches(sizes, lambda size: size, 6)) == batches


@pytest.mark.parametrize("items", [100, 1_000_000])
@pytest.mark.parametrize("start", [0, 40])
def test_memory_is_filled_with_the_bytes_from_an_offset_on(store: Store, items: int, start: int) -> None:
    tensor = torch.arange(items, dtype=torch.int32)
    store.save("run", {"x": tensor})
    opened = store.snapshot("run").open()
    memory = new_memory(200, CPU)
    read_to_memory(opened.reader, opened.entry(0), start, memory)

    assert memory.numpy().tobytes() == tensor.numpy().tobytes()[start : start + 200]


def test_the_memory_of_a_view_begins_with_its_first_item() -> None:
    base = torch.arange(10, dtype=torch.int16)

    assert view_tensor_memory(base[3:], 4).tolist() == [3, 0, 4, 0]
