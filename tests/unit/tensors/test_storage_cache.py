"""Cached storages are found by key and device while they are in use, are not kept alive, and know what was read."""

from __future__ import annotations

import gc
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.tensors.storage import ByteSpan, FilledBytes, StorageCache, find_span_at, iter_gaps, join_span

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_storage_in_use_is_found_again() -> None:
    cache = StorageCache()
    tensor = torch.arange(3)
    cache.keep("a", tensor.untyped_storage())
    found = cache.find("a", CPU)
    assert found is not None
    assert found.storage.data_ptr() == tensor.untyped_storage().data_ptr()


def test_a_storage_that_is_not_used_is_gone() -> None:
    cache = StorageCache()
    tensor = torch.arange(3)
    cache.keep("a", tensor.untyped_storage())
    del tensor
    gc.collect()
    assert cache.find("a", CPU) is None


def test_a_view_is_enough_to_keep_it() -> None:
    cache = StorageCache()
    view = torch.arange(30)[3:5]
    cache.keep("a", view.untyped_storage())
    gc.collect()
    assert cache.find("a", CPU) is not None


def test_keys_and_devices_are_apart() -> None:
    cache = StorageCache()
    one, other = torch.arange(3), torch.empty(3, device="meta")
    cache.keep("a", one.untyped_storage())
    cache.keep("a", other.untyped_storage())
    found = cache.find("a", META)
    assert found is not None
    assert found.storage.device == META
    assert cache.find("b", CPU) is None


def test_what_is_gone_does_not_pile_up() -> None:
    cache = StorageCache()
    for number in range(1000):
        cache.keep(number, torch.empty(1).untyped_storage())
    assert len(cache._refs) <= 256


def test_bytes_that_were_read_are_forgotten_with_their_storage() -> None:
    cache = StorageCache()
    tensor = torch.arange(3)
    filled = FilledBytes([ByteSpan(0, 8)])
    cache.keep("a", tensor.untyped_storage(), filled)
    found = cache.find("a", CPU)
    assert found is not None
    assert found.filled is filled
    del tensor, found
    gc.collect()
    assert cache.find("a", CPU) is None


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12))), st.tuples(st.integers(0, 40), st.integers(1, 20)))
def test_joined_spans_contain_exactly_what_was_added(parts: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    spans: list[ByteSpan] = []
    for start, length in parts:
        join_span(spans, ByteSpan(start, start + length))
    expected = {at for start, length in parts for at in range(start, start + length)}
    start, stop = asked[0], asked[0] + asked[1]

    assert {at for span in spans for at in range(span.start, span.stop)} == expected
    assert all(one.stop <= other.start for one, other in pairwise(spans))
    assert {at for low, high in iter_gaps(spans, start, stop) for at in range(low, high)} == {
        at for at in range(start, stop) if at not in expected
    }
    assert (find_span_at(spans, start) is not None) == (start in expected)


def test_spans_that_only_touch_stay_apart_and_one_that_is_added_twice_is_not_joined() -> None:
    spans = [ByteSpan(0, 4)]
    join_span(spans, ByteSpan(4, 8))
    join_span(spans, ByteSpan(4, 8))

    assert spans == [ByteSpan(0, 4), ByteSpan(4, 8)]
    join_span(spans, ByteSpan(5, 6))
    assert spans == [ByteSpan(0, 4), ByteSpan(4, 8, is_joined=True)]
