"""Storages held weakly: found as long as somebody uses them, by key and device, and never kept alive."""

from __future__ import annotations

import gc

import torch

from holdfast.tensors.weak import StorageCache

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_storage_in_use_is_found_again() -> None:
    cache = StorageCache()
    tensor = torch.arange(3)
    cache.keep("a", tensor.untyped_storage())
    found = cache.find("a", CPU)
    assert found is not None
    assert found.data_ptr() == tensor.untyped_storage().data_ptr()


def test_a_storage_that_nobody_uses_is_gone() -> None:
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
    assert found.device == META
    assert cache.find("b", CPU) is None


def test_what_is_gone_does_not_pile_up() -> None:
    cache = StorageCache()
    for number in range(1000):
        cache.keep(number, torch.empty(1).untyped_storage())
    assert len(cache._refs) <= 256
