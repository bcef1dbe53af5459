"""Deleting, pruning and collecting through a store, and what they report."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.progress import ProgressUpdate
from holdfast.repo.format.layout import PACKS
from holdfast.repo.upkeep.collect import Rules
from holdfast.store import Store
from tests.kit.saving import keys


@pytest.fixture
def store() -> Store:
    return Store(MemoryStore())


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_deleted_pruned_and_collected_snapshots_are_gone(store: Store) -> None:
    for step in range(5):
        store.save(f"run/{step}", {"a": noise(5000, seed=step)})
    store.delete("run/4")

    plan = store.plan_prune("run/", keep_last=2)
    assert len(store.snapshots()) == 4
    store.apply_prune(plan)
    store.gc(Rules(min_age_s=0))

    assert [snap.name for snap in store.snapshots()] == ["run/2", "run/3"]
    assert len(keys(store.repository.store, PACKS)) == 2
    assert store.check(read=True) == []
    store.prune("run/", keep_within=timedelta(days=1))
    assert len(store.snapshots()) == 2
    with pytest.raises(NotFound):
        store.delete("run/4")


def test_pruning_and_collecting_report_their_progress(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path)
    for step in range(3):
        store.save(f"run/{step}", {"w": torch.full((1000,), float(step))})
    pruning: list[ProgressUpdate] = []
    collecting: list[ProgressUpdate] = []
    store.prune("run/", keep_last=1, progress=pruning.append)
    store.gc(progress=collecting.append)
    assert [(each.task, each.done_bytes, each.is_ended) for each in pruning] == [
        ("prune", 0, False),
        ("prune", 8000, False),
        ("prune", 8000, True),
    ]
    assert (collecting[-1].task, collecting[-1].is_ended) == ("gc", True)
    assert collecting[-1].done_bytes == collecting[-1].total_bytes > 8000
