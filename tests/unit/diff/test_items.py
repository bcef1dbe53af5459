"""The layout of items in entries: equal items are found equal in every layout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from holdfast.diff.facts import (
    ItemLayout,
    ReadableEntry,
    count_item_bytes,
    find_layout,
    find_stride,
    is_same,
    iter_tiles,
)
from holdfast.objects.memory import MemoryStore
from holdfast.repo.read.reader import SnapshotReader
from holdfast.repo.read.stream import ReadAhead
from holdfast.store import Store
from tests.kit.saving import snapshot_of
from tests.kit.tensors import raw_bytes

# --- items


def test_a_dtype_has_its_size_in_its_name() -> None:
    dtypes = {found for found in vars(torch).values() if isinstance(found, torch.dtype)}

    assert {str(dtype) for dtype in dtypes if count_item_bytes(str(dtype)[6:]) != dtype.itemsize} == set()


def _views(base: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors of one shape whose items lie in different ways, all with the same values."""
    padded = torch.zeros(6, 9, 5, dtype=base.dtype)
    padded[1:5, ::3, :] = base
    return [
        base,
        base.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        base.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        padded[1:5, ::3, :],
        padded.transpose(0, 2).contiguous().transpose(0, 2)[1:5, ::3, :],
    ]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.complex128])
@pytest.mark.parametrize("limit_bytes", [1, 100, 1 << 20])
def test_items_are_the_same_in_every_layout(dtype: torch.dtype, limit_bytes: int) -> None:
    base = torch.arange(60).reshape(4, 3, 5).to(dtype)
    other = base.clone()
    other[2, 1, 3] += 1
    tensors = [*_views(base), *_views(other)]
    store = Store(MemoryStore())
    store.save("x", [tensor.clone() if tensor._base is None else tensor for tensor in tensors])
    with SnapshotReader(store.repository, snapshot_of(store.repository, "x")) as reader:
        entries = [
            ReadableEntry(ReadAhead(reader), entry, find_layout(entry)) for entry in reader.manifest.iter_entries()
        ]

        for i, a in enumerate(entries):
            for j, b in enumerate(entries[i:], start=i):
                is_equal = raw_bytes(tensors[i]) == raw_bytes(tensors[j])
                assert is_same(a, b, limit_bytes=limit_bytes) == is_equal, (i, j)


def test_tiles_cover_every_item_once() -> None:
    a = ItemLayout(4, (5, 6, 7), find_stride((5, 6, 7)))
    b = ItemLayout(4, (5, 6, 7), (1, 35, 5))

    covered = np.zeros((5, 6, 7), dtype=int)
    for tile in iter_tiles(a, b, limit_bytes=200, limit_items=20):
        assert math.prod(tile.shape) <= 20
        covered[tuple(slice(at, at + size) for at, size in zip(tile.start, tile.shape, strict=True))] += 1

    assert (covered == 1).all()
