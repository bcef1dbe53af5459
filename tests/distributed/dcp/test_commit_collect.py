"""DCP checkpoints while garbage is collected: a save in progress keeps its files, an abandoned one loses them."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

import holdfast
from holdfast.dcp import StorageReader, StorageWriter
from holdfast.distributed.dcp import writer as commit
from holdfast.errors import CommitUnknown, LeaseLost, Mismatch, NameInUse
from holdfast.repo.names import leases
from holdfast.repo.names.roots import read_leases
from holdfast.repo.upkeep.collect import Rules, fence, publish_mark
from tests.distributed.dcp_states import dcp
from tests.kit.patience import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
AT_ONCE = Rules(min_age_s=0.0)
HARSH = Rules(min_age_s=0.0, expire_s=0.0)


class Ranks:
    """Two ranks that save by hand, step by step, each with a handle of its own on one store."""

    def __init__(self, path: Path, name: str, value: float, **options: Any) -> None:
        self.planners = [DefaultSavePlanner(), DefaultSavePlanner()]
        self.writers = [StorageWriter(holdfast.open(path), name, **options) for _ in range(2)]
        self.plans: list[SavePlan] = []
        self.metadata = Metadata({})
        self._states = [{f"w{rank}": torch.full((200_000,), value + rank)} for rank in range(2)]

    def plan(self) -> None:
        plans = []
        for rank, (writer, planner) in enumerate(zip(self.writers, self.planners, strict=True)):
            planner.set_up_planner(self._states[rank], writer.storage_meta(), is_coordinator=rank == 0)
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        planned, self.metadata = self.planners[0].create_global_plan(plans)
        self.plans = self.writers[0].prepare_global_plan(planned)

    def write(self, rank: int) -> list[WriteResult]:
        planner = self.planners[rank]
        return self.writers[rank].write_data(planner.finish_plan(self.plans[rank]), planner).value()

    def finish(self, results: list[list[WriteResult]]) -> None:
        self.writers[0].finish(self.metadata, results)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[holdfast.Store]:
    with holdfast.open(path) as store:
        yield store


def list_leases(store: holdfast.Store) -> list[str]:
    return [lease.state for lease in read_leases(store.repository.store).values()]


def fence_all(store: holdfast.Store, purpose: str) -> None:
    found = read_leases(store.repository.store).values()
    fenced = [fence(store.repository.store, lease) for lease in found if lease.purpose == purpose]
    assert fenced == [True]


def mark_all(store: holdfast.Store, prefix: str) -> None:
    publish_mark(store.repository.store, list(store.repository.store.iter_objects(prefix)))


@pytest.mark.parametrize("rules", [AT_ONCE, HARSH], ids=["at once", "harsh"])
@pytest.mark.parametrize("when", ["planned", "one", "both"])
def test_a_collection_at_any_step_takes_nothing_away(
    path: Path, store: holdfast.Store, when: str, rules: Rules
) -> None:
    ranks = Ranks(path, "a", 1.0)
    ranks.plan()
    results: list[list[WriteResult]] = []
    for step in ("planned", "one", "both"):
        if when == step and rules is AT_ONCE:
            store.gc(rules)
        if when == step and rules is HARSH:
            # Ranks may be taken for dead while they wait for others; the coordinator's lease is what counts.
            fence_all(store, "save 'a' for torch, rank 0") if results else None
            mark_all(store, "packs/")
        if step != "both":
            results.append(ranks.write(len(results)))

    ranks.finish(results)
    store.gc(AT_ONCE)

    assert [store.load("a")[f"w{rank}"][0].item() for rank in range(2)] == [1.0, 2.0]
    assert not [finding for finding in store.check(read=True) if finding.severity == "error"]


def test_what_a_rank_reuses_stays_as_long_as_the_coordinator_lives(path: Path, store: holdfast.Store) -> None:
    dcp.save({"w1": torch.full((200_000,), 2.0)}, storage_writer=StorageWriter(store, "old"))
    store.delete("old")
    ranks = Ranks(path, "a", 1.0)
    ranks.plan()
    results = [ranks.write(0), ranks.write(1)]

    fence_all(store, "save 'a' for torch, rank 1")
    collected = store.gc(AT_ONCE)
    ranks.finish(results)
    store.gc(AT_ONCE)

    assert collected.pending_marks == 1
    assert store.load("a")["w1"][0].item() == 2.0


def count_generations(path: Path) -> int:
    """Return how many records of leases there are; what begins with a dot is not named yet."""
    return sum(not name.startswith(".") for name in os.listdir(path / "leases"))


def test_the_lease_is_renewed_while_the_coordinator_waits_for_others(
    path: Path, store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_KEEP_EVERY_S", 0.001)
    monkeypatch.setattr(leases, "RENEW_S", 0.0)
    ranks = Ranks(path, "a", 1.0)
    ranks.plan()
    deadline = time.monotonic() + PATIENCE_S

    while time.monotonic() < deadline and count_generations(path) < 3:
        os.sched_yield()

    assert count_generations(path) >= 3
    ranks.finish([ranks.write(0), ranks.write(1)])
    assert list_leases(store) == []


def test_a_checkpoint_leaves_no_lease(path: Path, store: holdfast.Store) -> None:
    ranks = Ranks(path, "a", 1.0)
    ranks.plan()
    results = [ranks.write(0), ranks.write(1)]
    under_way = list_leases(store)

    ranks.finish(results)

    assert under_way == ["live"] * 3
    assert list_leases(store) == []


def test_a_coordinator_that_was_fenced_commits_nothing(path: Path, store: holdfast.Store) -> None:
    ranks = Ranks(path, "a", 1.0)
    ranks.plan()
    results = [ranks.write(0), ranks.write(1)]
    fence_all(store, "save 'a' for torch")

    with pytest.raises(LeaseLost, match="Save again"):
        ranks.finish(results)

    assert store.latest() is None


def test_what_a_dead_pack_holds_is_written_anew_if_it_is_marked_meanwhile(
    path: Path, store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"w0": torch.full((200_000,), 1.0)}, storage_writer=StorageWriter(store, "old"))
    store.delete("old")
    old = set((path / "packs").iterdir())
    ranks = Ranks(path, "a", 1.0)
    ranks.plan()
    resolve = ranks.planners[0].resolve_data

    def mark_then_resolve(item: Any) -> Any:
        if not marked:
            marked.append(True)
            mark_all(store, "packs/")
        return resolve(item)

    marked: list[bool] = []
    monkeypatch.setattr(ranks.planners[0], "resolve_data", mark_then_resolve)
    results = [ranks.write(0), ranks.write(1)]
    ranks.finish(results)
    store.gc(AT_ONCE)

    assert store.load("a")["w0"][0].item() == 1.0
    assert not old & set((path / "packs").iterdir())


def test_what_one_rank_gave_up_is_forgotten_when_the_writer_begins_again(path: Path, store: holdfast.Store) -> None:
    ranks = Ranks(path, "a", 1.0)
    ranks.plan()
    ranks.write(0)

    ranks.writers[0].set_up_storage_writer(True, rank=0, use_collectives=True)

    assert "save 'a' for torch" not in [lease.purpose for lease in read_leases(store.repository.store).values()]
    store.gc(AT_ONCE)
    assert store.latest() is None


def test_what_was_given_up_is_forgotten_with_the_writer(path: Path, store: holdfast.Store) -> None:
    ranks = Ranks(path, "a", 1.0)
    ranks.plan()

    ranks.writers.clear()
    gc.collect()

    assert list_leases(store) == []


def test_a_save_that_was_given_up_cannot_be_finished(path: Path) -> None:
    ranks = Ranks(path, "a", 1.0)
    ranks.plan()
    results = [ranks.write(0), ranks.write(1)]
    ranks.writers[0].close()

    with pytest.raises(Mismatch, match="abandoned"):
        ranks.finish(results)


def test_of_two_saves_of_one_name_the_first_wins(path: Path, store: holdfast.Store) -> None:
    first, second = Ranks(path, "a", 1.0), Ranks(path, "a", 2.0)
    for ranks in (first, second):
        ranks.plan()
    results = [[ranks.write(0), ranks.write(1)] for ranks in (first, second)]

    first.finish(results[0])
    with pytest.raises((NameInUse, CommitUnknown)):
        second.finish(results[1])

    assert store.load("a")["w0"][0].item() == 1.0


def test_a_rank_that_wrote_nothing_of_what_was_planned_is_noticed(path: Path, store: holdfast.Store) -> None:
    ranks = Ranks(path, "a", 1.0)
    ranks._states[1] = {"note": "text"}  # type: ignore[dict-item]  # any state will do
    ranks.plan()

    with pytest.raises(Mismatch, match="note was planned, but no rank has written it"):
        ranks.finish([ranks.write(0)])

    assert store.latest() is None


def test_a_tensor_that_is_not_covered_is_refused(path: Path, store: holdfast.Store) -> None:
    ranks = Ranks(path, "a", 1.0)
    ranks.plan()
    planned: Any = ranks.metadata.state_dict_metadata["w1"]
    planned.chunks.clear()

    with pytest.raises(Mismatch, match="w1: the ranks have planned 0 of its 200000 items"):
        ranks.finish([ranks.write(0), ranks.write(1)])

    assert store.latest() is None


def test_ranks_that_opened_different_generations_are_told(path: Path, store: holdfast.Store) -> None:
    readers = [StorageReader(store, "a"), StorageReader(store, "a")]
    plans = []
    for value, reader in enumerate(readers):
        dcp.save({"w": torch.full((3,), float(value))}, storage_writer=StorageWriter(store, "a", overwrite=True))
        planner = DefaultLoadPlanner()
        planner.set_up_planner({"w": torch.zeros(3)}, reader.read_metadata(), is_coordinator=value == 0)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))

    with pytest.raises(Mismatch, match=r"rank 0 'a' \(generation 0\), rank 1 'a' \(generation 1\)"):
        readers[0].prepare_global_plan(plans)
