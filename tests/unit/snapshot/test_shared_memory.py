"""Tensors that are read one by one share memory while it is in use, as they did when they were saved."""

from __future__ import annotations

import gc

import pytest
import torch

from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import PACKS
from holdfast.store import Store
from tests.kit.loading import noise
from tests.kit.saving import Watched


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def watched() -> Watched:
    return Watched(MemoryStore())


def count_reads(watched: Watched) -> int:
    return sum(key.startswith(PACKS) for key, _, _ in watched.reads)


def test_what_is_read_twice_is_one_storage_while_it_is_in_use(watched: Watched) -> None:
    store = Store(watched)
    store.save("x", {"a": noise(5000)})
    snap = store.snapshot("x")
    first = snap["a"].read()
    reads = count_reads(watched)

    second = snap["a"].read()

    assert storage_of(second) == storage_of(first)
    assert count_reads(watched) == reads
    del first, second
    gc.collect()
    again = snap["a"].read()
    assert count_reads(watched) == 2 * reads
    assert torch.equal(again, noise(5000))


def test_fresh_memory_is_shared_with_nobody(store: Store) -> None:
    base = noise(10)
    store.save("x", {"a": base, "b": base})
    snap = store.snapshot("x")
    first = snap["a"].read()

    fresh = snap["a"].read(aliases="fresh")
    fresh.zero_()

    assert torch.equal(first, base)
    assert torch.equal(snap["b"].read(), base)
    with pytest.raises(ValueError, match="aliases must be 'preserve' or 'fresh', not 'other'"):
        snap["a"].read(aliases="other")


def test_tied_tensors_share_and_equal_ones_do_not(store: Store) -> None:
    base = noise(10)
    store.save("x", {"a": base, "b": base, "view": base[2:5], "equal": base.clone()})
    snap = store.snapshot("x")
    a, b, view, equal = (snap[name].read() for name in ("a", "b", "view", "equal"))

    a[3] = 7

    assert storage_of(a) == storage_of(b) == storage_of(view) != storage_of(equal)
    assert view[1] == 7
    assert equal[3] == base[3]


def test_a_change_is_not_undone_by_reading_what_overlaps(store: Store) -> None:
    base = noise(100)
    store.save("x", {"front": base[:60], "back": base[40:], "all": base})
    snap = store.snapshot("x")
    front = snap["front"].read()
    front.zero_()

    back, everything = snap["back"].read(), snap["all"].read()

    assert back[:20].count_nonzero() == 0
    assert torch.equal(back[20:], base[60:])
    assert everything[:60].count_nonzero() == 0
    assert torch.equal(everything[60:], base[60:])


def test_of_a_group_only_what_is_asked_for_is_read(watched: Watched) -> None:
    store = Store(watched)
    base = noise(300_000)
    store.save("x", {"front": base[:1000], "all": base, "back": base[-1000:]})
    snap = store.snapshot("x")
    watched.reads.clear()

    front = snap["front"].read()

    assert torch.equal(front, base[:1000])
    assert sum(size for key, _, size in watched.reads if key.startswith(PACKS)) == 4000


@pytest.mark.parametrize("make", [lambda: noise(6, 8)[:, ::2], lambda: noise(6, 1).expand(6, 4)])
def test_tied_tensors_with_gaps_share_too(store: Store, make: object) -> None:
    gappy: torch.Tensor = make()  # type: ignore[operator]  # it is a function
    store.save("x", {"a": gappy, "b": gappy})
    snap = store.snapshot("x")
    a, b = snap["a"].read(), snap["b"].read()

    assert storage_of(a) == storage_of(b)
    assert a.stride() == gappy.stride()
    assert torch.equal(b, gappy)


def test_two_snapshots_share_no_memory(store: Store) -> None:
    store.save("x", {"a": noise(10)})
    store.save("y", {"a": noise(10)})

    first, second = store.snapshot("x")["a"].read(), store.snapshot("y")["a"].read()
    first.zero_()

    assert torch.equal(second, noise(10))


@pytest.mark.parametrize("device", ["cpu", "cpu:0", None, "saved", torch.device("cpu")])
def test_every_spelling_of_a_device_is_one_device(store: Store, device: object) -> None:
    base = noise(10)
    store.save("x", {"a": base, "part": base[:3], "alone": noise(4)})
    snap = store.snapshot("x")
    held = {name: snap[name].read() for name in snap}

    for name, tensor in held.items():
        assert storage_of(snap[name].read(device=device)) == storage_of(tensor)


def test_parameters_come_back_as_parameters(store: Store) -> None:
    store.save("x", {"p": torch.nn.Parameter(noise(3))})
    lazy = store.snapshot("x")["p"]

    assert isinstance(lazy.read(), torch.nn.Parameter)
    assert lazy.read().requires_grad
