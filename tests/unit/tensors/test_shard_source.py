"""Sources of shards: the bytes of boxes one after the other, cut on the grid of the global tensor."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.repo.format.source import BytesSource
from holdfast.tensors.shard_source import ShardSource, make_shard_source, pick_chunks
from holdfast.tensors.sharding import describe, shard

SHAPE = (4096, 300)


def make_global() -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int32).reshape(SHAPE)


def make_source(tensor: torch.Tensor, offsets: tuple[int, ...]) -> ShardSource:
    return make_shard_source("w", None, describe(shard(tensor, global_shape=SHAPE, offsets=offsets)))


def read_all(source: ShardSource) -> bytes:
    return b"".join(bytes(source.read(start, stop)) for start, stop in pairwise([0, *source.cuts]))


def test_shards_of_rows_have_the_chunks_of_the_whole_tensor() -> None:
    whole = make_global()
    top, bottom = make_source(whole[:2048], (0, 0)), make_source(whole[2048:], (2048, 0))
    alone = make_source(whole, (0, 0))

    assert alone.is_whole
    assert not top.is_whole
    assert max(stop - start for start, stop in pairwise([0, *alone.cuts])) <= CHUNK_BYTES
    assert read_all(top) + read_all(bottom) == read_all(alone) == whole.numpy().tobytes()
    assert {box for each in (top, bottom) for box in each.boxes} >= set(alone.boxes[:2])


def test_a_box_of_columns_is_read_in_c_order() -> None:
    columns = make_global()[:, 100:150]
    source = make_source(columns, (0, 100))

    assert source.size_bytes == columns.numel() * 4
    assert source.whole_bytes == SHAPE[0] * SHAPE[1] * 4
    assert read_all(source) == columns.contiguous().numpy().tobytes()


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (1_000_000, 2_500_000), (4_000_000, 4_915_200), (7, 7)])
def test_any_range_is_read_across_chunks(start: int, stop: int) -> None:
    whole = make_global()

    assert bytes(make_source(whole, (0, 0)).read(start, stop)) == whole.numpy().tobytes()[start:stop]


def test_a_negated_view_is_read_with_its_values() -> None:
    tensor = torch._neg_view(torch.arange(6.0).reshape(2, 3))
    source = make_shard_source("w", None, describe(shard(tensor, global_shape=(2, 3), offsets=(0, 0))))

    assert bytes(source.read(0, 24)) == tensor.resolve_neg().numpy().tobytes()


def test_some_chunks_of_a_source_are_read_as_if_they_were_all() -> None:
    data = bytes(range(100))
    picked = pick_chunks(BytesSource("x", data, {"type": "bytes"}), [(10, 20), (50, 55), (90, 100)])
    expected = data[10:20] + data[50:55] + data[90:]

    assert (picked.name, picked.size_bytes, picked.cuts) == ("x", 25, [10, 15, 25])
    assert all(
        bytes(picked.read(start, stop)) == expected[start:stop] for start in range(25) for stop in range(start, 26)
    )
