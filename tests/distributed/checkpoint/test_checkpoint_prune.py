"""Collective pruning: one rank deletes, and all ranks return the same result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import holdfast
from holdfast.distributed.checkpoint.checkpoint import prune_together
from holdfast.distributed.talk.collectives import Collectives
from holdfast.errors import RankError
from holdfast.objects.memory import MemoryStore
from holdfast.repo.upkeep.prune import Keep, Pruned, PrunePlan, apply_prune, read_prune_plan
from holdfast.testing.faults import Crashed, Fault, FaultyStore
from tests.distributed.conftest import World
from tests.distributed.thread_worlds import connect, run_thread_ranks
from tests.kit.saving import new_repo, save_bytes


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


class Joined:
    """A world whose ranks have met already."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks

    def join(self, name: str) -> Collectives:
        return self._ranks


def list_left(store: MemoryStore) -> list[str]:
    return [verdict.snapshot.name for verdict in read_prune_plan(store, "", Keep(last=1)).verdicts]


def test_what_a_coordinator_that_died_has_not_deleted_is_deleted_when_it_is_called_again() -> None:
    store = MemoryStore()
    for step in range(4):
        save_bytes(new_repo(store), f"run/step-{step}", {"x": b"%d" % step})
    rehearsal = FaultyStore(store.clone())
    apply_prune(rehearsal, read_prune_plan(store, "run/", Keep(last=1)))
    middle = [number for number, met in enumerate(rehearsal.log, 1) if met.name == "create"][1]
    connections = connect(2)

    def act(ranks: Collectives) -> Pruned:
        def apply(plan: PrunePlan) -> Pruned:
            try:
                return apply_prune(FaultyStore(store, fault=Fault.CRASH, at=middle), plan)
            finally:
                for connection in connections:
                    connection.cut()

        world: Any = Joined(ranks)
        return prune_together(lambda: read_prune_plan(store, "run/", Keep(last=1)), apply, world)

    dead, outcome = run_thread_ranks(connections, act, timeout_s=60.0)

    assert isinstance(dead, Crashed)
    assert isinstance(outcome, RankError)
    assert list_left(store) == ["run/step-1", "run/step-2", "run/step-3"]
    apply_prune(store, read_prune_plan(store, "run/", Keep(last=1)))
    assert list_left(store) == ["run/step-3"]
