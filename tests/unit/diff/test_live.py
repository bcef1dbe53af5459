"""A snapshot is compared with a tree in memory; `test_compare.py` compares every kind of tree in this way, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.diff.changes import LiveTree
from holdfast.errors import NotFound, Unsupported
from holdfast.objects.memory import MemoryStore
from holdfast.store import Store
from holdfast.store import open as open_store
from holdfast.tensors.sharding import shard
from tests.kit.saving import Watched
from tests.kit.tensors import TENSORS


@pytest.fixture
def watched() -> Watched:
    return Watched(MemoryStore())


@pytest.fixture
def store(watched: Watched) -> Store:
    return Store(watched)


def make_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 1}


def test_a_state_equals_what_was_saved_of_it_and_no_pack_is_read(store: Store, watched: Watched) -> None:
    state = make_state()
    saved = store.save("a", state)
    watched.reads.clear()

    diff = store.diff("a", state)

    assert diff.is_equal
    assert isinstance(diff.b, LiveTree)
    assert (diff.b.digest, diff.b.logical_bytes) == (saved.digest, saved.logical_bytes)
    assert not [key for key, _, _ in watched.reads if key.startswith("packs/")]
    assert repr(diff) == f"<Diff 'a' -> '(the tree in memory)': 0 added, 0 removed, 0 changed, {diff.equal} equal>"


def test_objects_are_expanded_as_a_save_does(store: Store) -> None:
    state = make_state()
    store.save("a", state)
    with torch.no_grad():
        state["model"].weight[3, 5] += 2.0

    diff = store.diff("a", state | {"step": 2}, values=True)

    assert [change.name for change in diff.changes] == ["model.weight", "step"]
    (distance,) = diff.changes[0].distances
    assert (distance.mismatches, distance.at) == (1, (3, 5))
    assert distance.max_abs == pytest.approx(2.0)


def test_distances_are_those_of_two_snapshots(store: Store) -> None:
    some = [make() for name, make in TENSORS.items() if "subclass" not in name][::7]
    before, after = dict(enumerate(some)), dict(enumerate([*some[1:], some[0]]))
    store.save("a", before)
    store.save("b", after)

    live, stored = store.diff("a", after, values=True), store.diff("a", "b", values=True)

    assert live.changes == stored.changes
    assert any(change.distances for change in live.changes)


def test_nothing_is_written(tmp_path: Path) -> None:
    with open_store(tmp_path / "ckpts") as store:
        store.save("a", {"w": torch.zeros(1000)})
        before = sorted(tmp_path.rglob("*"))

        store.diff("a", {"w": torch.ones(1000)}, values=True)

        assert sorted(tmp_path.rglob("*")) == before


def test_gradients_are_compared_if_the_snapshot_has_them(store: Store) -> None:
    weight = torch.ones(4, requires_grad=True)
    weight.grad = torch.ones(4)
    store.save("with", {"w": weight}, grads=True)
    store.save("without", {"w": weight})

    weight.grad = torch.zeros(4)

    assert [change.aspects[0].part for change in store.diff("with", {"w": weight}).changes] == ["grad"]
    assert store.diff("without", {"w": weight}).is_equal


class Custom:
    """A class that only pickle can save."""


def test_pickled_values_are_compared_if_the_snapshot_has_them(store: Store) -> None:
    value = Custom()
    store.save("with", {"x": value}, allow_pickle=True)
    store.save("without", {"x": 1})

    assert store.diff("with", {"x": value}).is_equal
    with pytest.raises(Unsupported, match="x"):
        store.diff("without", {"x": value})


def test_only_some_leaves_are_compared(store: Store) -> None:
    store.save("a", {"model": {"w": torch.zeros(4)}, "step": 1})

    diff = store.diff("a", {"model": {"w": torch.ones(4)}}, only="model.*")

    assert [(change.kind, change.name) for change in diff.changes] == [("changed", "model.w")]
    assert store.diff("a", {"step": 1}, only=["step"]).is_equal
    with pytest.raises(NotFound, match=r"no leaf of 'a' or of the tree matches 'modle\.\*'"):
        store.diff("a", {"step": 2}, only="modle.*")


def test_names_and_patterns_work_for_two_snapshots(store: Store) -> None:
    store.save("a", {"w": 1, "step": 1})
    store.save("b", {"w": 2, "step": 2})

    assert [change.name for change in store.diff("a", store.snapshot("b"), only="w").changes] == ["w"]


def test_a_part_of_a_tensor_is_refused(store: Store) -> None:
    store.save("a", {"w": torch.zeros(8)})
    part = shard(torch.zeros(4), global_shape=(8,), offsets=(0,))

    with pytest.raises(
        Unsupported, match=r"w: this process has 16 of 32 bytes of it; a part of a tensor cannot be compared"
    ):
        store.diff("a", {"w": part})
