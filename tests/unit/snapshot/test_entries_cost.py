"""The memory that each of many tiny tensors costs besides itself when it is saved and loaded."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.chunk import ChunkRef, Location
from holdfast.repo.format.entry import ChunkRows, EntryRows
from holdfast.repo.format.manifest import encode_manifest
from holdfast.repo.format.source import BytesSource, cut_sources
from holdfast.snapshot import batches as batches_module
from holdfast.snapshot.batches import SmallTensors
from holdfast.store import OpenOptions, Store
from holdfast.tensors.spec import describe

COUNT = 4000
SAVE_BYTES = 680
LOAD_BYTES = 570
INTO_BYTES = 1305
"""Python's own bytes for each tensor of 60; most of a load's are there while the manifest's head is decoded.

The table of a manifest, 220 bytes, is mapped memory and not counted here; the compressor's output is, at its largest
possible size. What is resident at the peak is measured by bench/suites/peak.py.
"""


LIMITS = (SAVE_BYTES, LOAD_BYTES, INTO_BYTES)


@pytest.fixture
def traced() -> Iterator[Callable[[Callable[[], Any]], tuple[float, Any]]]:
    """Return what tells how much memory an act takes at its peak, for each entry, besides what it returns."""

    def measure(act: Callable[[], Any]) -> tuple[float, Any]:
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        result = act()
        after, peak = tracemalloc.get_traced_memory()
        returned = after - before if result is not None else 0
        return (peak - before - returned) / COUNT, result

    tracemalloc.start(1)
    yield measure
    tracemalloc.stop()


def make_state() -> dict[str, torch.Tensor]:
    return {f"layers.{number}.weight": row.clone() for number, row in enumerate(torch.randn(COUNT, 15))}


def save(store: Store, state: dict[str, torch.Tensor]) -> None:
    store.save("x", state)


def fill(store: Store, target: dict[str, torch.Tensor]) -> None:
    store.load_into("x", target)


@pytest.mark.slow
def test_the_cost_of_an_entry_is_bounded(traced: Any) -> None:
    state = make_state()
    with Store(MemoryStore(), OpenOptions(budget_bytes=64 << 20)) as store:
        store.save("warm", {"a": torch.ones(3)})  # imports and caches
        store.load("warm")
        store.load_into("warm", {"a": torch.zeros(3)})

        saving, _ = traced(lambda: save(store, state))
        loading, found = traced(lambda: store.load("x"))
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        filling, _ = traced(lambda: fill(store, target))

    assert torch.equal(found["layers.7.weight"], state["layers.7.weight"])
    assert torch.equal(target["layers.7.weight"], state["layers.7.weight"])
    # The store itself is memory: the manifest that it holds is not what a save takes.
    costs = (saving, loading, filling)
    assert [cost <= limit for cost, limit in zip(costs, LIMITS, strict=True)] == [True, True, True], costs


def test_what_is_filled_in_several_batches_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "_READ_AT_ONCE", 3)
    tied = torch.randn(4)
    saved = {f"t{number}": torch.randn(5) for number in range(7)} | {"tied": tied, "again": tied}
    memory = torch.zeros(4)
    target = {f"t{number}": torch.zeros(5) for number in range(7)} | {"tied": memory, "again": memory}
    store = Store(MemoryStore())
    store.save("x", saved)

    store.load_into("x", target)

    assert all(torch.equal(target[name], value) for name, value in saved.items())


def test_saving_leaves_no_attributes_on_tensors() -> None:
    state = make_state()

    Store(MemoryStore()).save("x", state)

    # A tensor has a dict from the first time that somebody asks for it; this is asked of the collector instead.
    assert not any(isinstance(each, dict) for each in gc.get_referents(state["layers.7.weight"]))


def test_rows_give_back_what_was_put_in() -> None:
    sources = [BytesSource("a", b"x" * 10), BytesSource("empty", b""), BytesSource("b", bytes(3 << 20), {"type": "b"})]
    pieces = cut_sources(sources)
    refs = ChunkRows()
    from_pieces = [_make_ref(piece.stop - piece.start, number) for number, piece in enumerate(pieces)]
    refs.extend(from_pieces)
    entries = EntryRows(sources, refs)

    assert list(refs) == from_pieces == refs[:]
    assert refs[-1] == from_pieces[-1]
    assert [entry.name for entry in entries] == ["a", "empty", "b"]
    assert [len(entry.chunks) for entry in entries[:]] == [1, 0, 3]
    assert entries[-1].chunks == tuple(from_pieces[1:])
    with pytest.raises(IndexError):
        entries[3]
    listed = list(entries)
    assert encode_manifest(None, entries) == encode_manifest(None, listed)
    assert list(refs.iter_digests()) == [ref.digest for ref in from_pieces]


def _make_ref(size_bytes: int, number: int) -> Any:
    digest: Any = bytes([number]) * 32
    if size_bytes <= 512:
        return ChunkRef(digest, size_bytes, None, b"y" * size_bytes)
    return ChunkRef(digest, size_bytes, Location("pack", 8 * number, size_bytes, 0, bytes(16)))


def test_small_tensors_come_in_order_within_limits_and_once() -> None:
    specs = [describe(torch.zeros(4)), describe(torch.zeros(2))]
    small = SmallTensors()
    for number in (5, 6, 7, 9, 5):
        small.add(number, specs[number % 2])

    batches = list(small.iter_batches(32, limit_count=100))

    numbers = [[number for _, own in batch for number in own] for batch in batches]
    assert sorted(number for own in numbers for number in own) == [5, 6, 7, 9]
    assert all(sum(spec.span_bytes * len(own) for spec, own in batch) <= 32 for batch in batches)
    assert small.find(5) is None


def test_a_batch_of_small_tensors_is_limited_in_number() -> None:
    small = SmallTensors()
    spec = describe(torch.zeros(4))
    for number in range(5):
        small.add(number, spec)

    batches = list(small.iter_batches(1 << 20, limit_count=2))

    assert [numbers for batch in batches for _, numbers in batch] == [[0, 1], [2, 3], [4]]
