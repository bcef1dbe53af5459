"""Pruning by all ranks: one deletes, and all are told the same."""

from __future__ import annotations

from pathlib import Path

import holdfast
from tests.distributed.conftest import World


def prune(rank: int, path: Path) -> tuple[list[str], list[str]]:
    with holdfast.open(path) as store:
        for step in range(4):
            store.save(f"run/step-{step}", {"step": step})
        pruned = store.prune("run/", keep_last=2)
        return [snapshot.name for snapshot in pruned.deleted], [each.name for each in store.snapshots()]


def test_one_rank_deletes_and_all_are_told(world: World, tmp_path: Path) -> None:
    results = world(3)(prune, tmp_path)

    deleted, left = ["run/step-0", "run/step-1"], ["run/step-2", "run/step-3"]
    assert results == [(deleted, left)] * 3


def prune_alone(rank: int, path: Path) -> int:
    with holdfast.open(path) as store:
        store.save("run/1", {"step": 1})
        return len(store.prune("run/", keep_last=1, collective=False).deleted) if rank == 0 else 0


def test_one_rank_may_prune_by_itself(world: World, tmp_path: Path) -> None:
    assert world(2)(prune_alone, tmp_path) == [0, 0]
