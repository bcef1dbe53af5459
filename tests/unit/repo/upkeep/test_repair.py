"""Repair: what can be mended is, what is lost is named and kept, and a second repair finds nothing to do."""

from __future__ import annotations

import pytest

from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import BAD, INDEX, LEASES, PACKS, TAGS, manifest_key, pack_key
from holdfast.repo.handle.index import ChunkIndex
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import delete_snapshot, read_snapshot, set_tag
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.repair import Action, RepairPlan, apply_repair, plan_repair, rebuild_index
from tests.kit.saving import (
    keys,
    load_bytes,
    noise,
    pack_of,
    read_entries,
    record_key,
    rot,
    save_bytes,
    snapshot_of,
)
from tests.kit.standing import collect_now

CONTENT = {"x": noise(2000, 1), "y": noise(3000, 2), "tiny": b"inline"}


def kinds(plan: RepairPlan) -> list[str]:
    return [action.kind for action in plan.actions]


def severities(repo: Repository) -> set[str]:
    return {finding.severity for finding in Checker(repo.store, read=True).iter_findings()}


@pytest.fixture
def twice(repo: Repository, store: MemoryStore) -> Repository:
    """A repository that holds the chunks of `a` twice: in its own pack, and in that of `b`."""
    save_bytes(repo, "a", CONTENT)
    key = pack_key(pack_of(repo, "a", "x").pack_id)
    data = store.contents()[key]
    store.delete(key)
    save_bytes(repo, "b", {"x": CONTENT["x"], "y": CONTENT["y"]})
    store.create(key, data)
    return repo


def spoil(repo: Repository, how: str) -> str:
    """Damage the pack of `a`; returns its id."""
    at = pack_of(repo, "a", "x")
    key = pack_key(at.pack_id)
    if how == "missing":
        repo.store.delete(key)
    else:
        rot(repo.store, key, {"chunk": at.offset + 9, "footer": -150, "header": 3, "trailer": -1}[how])
    return at.pack_id


DAMAGES = ["chunk", "footer", "header", "trailer", "missing"]


def test_a_sound_store_needs_nothing(twice: Repository) -> None:
    assert plan_repair(twice) == RepairPlan((), ())


@pytest.mark.parametrize("how", DAMAGES)
def test_planning_changes_nothing(twice: Repository, store: MemoryStore, how: str) -> None:
    spoil(twice, how)
    before = store.contents()
    plan_repair(twice)
    assert store.contents() == before


@pytest.mark.parametrize("how", DAMAGES)
def test_a_snapshot_is_moved_off_a_bad_pack(twice: Repository, how: str) -> None:
    bad = spoil(twice, how)
    before = snapshot_of(twice, "a")
    plan = plan_repair(twice)
    assert plan.losses == ()
    assert [action.target for action in plan.actions if action.kind == "heal"] == ["a"]
    assert apply_repair(twice, plan) == list(plan.actions)
    after = snapshot_of(twice, "a")
    assert (after.digest, after.time_s, after.generation) == (before.digest, before.time_s, 1)
    assert load_bytes(twice, "a") == CONTENT
    assert {chunk.location.pack_id for e in read_entries(twice, "a").values() for chunk in e.chunks if chunk.location}
    assert pack_of(twice, "a", "x").pack_id != bad
    assert pack_of(twice, "a", "y").pack_id != bad


@pytest.mark.parametrize("how", DAMAGES)
def test_a_second_repair_finds_nothing_to_do(twice: Repository, how: str) -> None:
    spoil(twice, how)
    apply_repair(twice, plan_repair(twice))
    assert plan_repair(twice) == RepairPlan((), ())


@pytest.mark.parametrize("how", DAMAGES)
def test_once_it_is_collected_the_store_is_sound_again(twice: Repository, how: str) -> None:
    spoil(twice, how)
    apply_repair(twice, plan_repair(twice))
    collect_now(twice.store)
    assert severities(twice) <= {"note"}
    assert load_bytes(twice, "a") == CONTENT
    assert keys(twice.store, BAD) == []


def test_a_plan_may_be_carried_out_twice(twice: Repository) -> None:
    spoil(twice, "chunk")
    plan = plan_repair(twice)
    apply_repair(twice, plan)
    assert not [action for action in apply_repair(twice, plan) if action.kind == "quarantine"]
    assert load_bytes(twice, "a") == CONTENT


def test_nothing_new_is_built_on_a_bad_pack(twice: Repository) -> None:
    bad = spoil(twice, "chunk")
    apply_repair(twice, plan_repair(twice))
    assert [key.partition("@")[0] for key in keys(twice.store, BAD)] == [BAD + bad]
    save_bytes(twice, "c", {"y": CONTENT["y"]})
    assert pack_of(twice, "c", "y").pack_id != bad


# --- losses


def test_a_loss_names_snapshot_and_entry(repo: Repository) -> None:
    save_bytes(repo, "a", CONTENT)
    bad = spoil(repo, "chunk")
    plan = plan_repair(repo)
    assert [(loss.snapshot, loss.entry) for loss in plan.losses] == [("a", "x")]
    assert "no other copy is in the store" in plan.losses[0].reason
    assert plan.actions == (Action("quarantine", bad, plan.actions[0].reason),)


def test_snapshots_with_losses_are_kept(repo: Repository) -> None:
    save_bytes(repo, "a", CONTENT)
    spoil(repo, "chunk")
    apply_repair(repo, plan_repair(repo))
    collect_now(repo.store)
    assert read_snapshot(repo.store, "a").num_entries == 3
    assert len(keys(repo.store, PACKS)) == 1
    assert [(loss.snapshot, loss.entry) for loss in plan_repair(repo).losses] == [("a", "x")]


def test_a_missing_pack_names_every_entry_in_it(repo: Repository) -> None:
    save_bytes(repo, "a", CONTENT)
    spoil(repo, "missing")
    assert [loss.entry for loss in plan_repair(repo).losses] == ["x", "y"]


@pytest.mark.parametrize("how", ["missing", "rotten"])
def test_a_lost_manifest_loses_the_whole_snapshot(repo: Repository, how: str) -> None:
    save_bytes(repo, "a", CONTENT)
    key = manifest_key(snapshot_of(repo, "a").manifest.manifest_id)
    if how == "missing":
        repo.store.delete(key)
    else:
        rot(repo.store, key, 60)
    plan = plan_repair(repo)
    assert [(loss.snapshot, loss.entry) for loss in plan.losses] == [("a", "")]
    assert plan.actions == ()


def test_a_damaged_record_is_a_loss_and_is_kept(repo: Repository) -> None:
    save_bytes(repo, "a", CONTENT)
    rot(repo.store, record_key("a"), 130)
    plan = plan_repair(repo)
    assert [loss.snapshot for loss in plan.losses] == ["a"]
    apply_repair(repo, plan)
    assert keys(repo.store, "snapshots/") == [record_key("a")]


def test_a_damaged_tag_is_a_separate_loss_and_a_snapshot_of_that_name_is_healed(twice: Repository) -> None:
    set_tag(twice.store, "a", snapshot_of(twice, "b"))
    rot(twice.store, keys(twice.store, TAGS)[0], 130)
    spoil(twice, "chunk")
    plan = plan_repair(twice)
    assert [(loss.tag, loss.snapshot, loss.entry) for loss in plan.losses] == [("a", "", "")]
    assert [action.target for action in plan.actions if action.kind == "heal"] == ["a"]
    apply_repair(twice, plan)
    assert len(keys(twice.store, TAGS)) == 1


def test_others_are_healed_beside_a_loss(twice: Repository) -> None:
    save_bytes(twice, "alone", {"z": noise(2500, 9)})
    twice.store.delete(pack_key(pack_of(twice, "alone", "z").pack_id))
    spoil(twice, "chunk")
    plan = plan_repair(twice)
    assert [loss.snapshot for loss in plan.losses] == ["alone"]
    apply_repair(twice, plan)
    assert load_bytes(twice, "a") == CONTENT


# --- the index, and what is torn


def test_a_lost_index_is_rebuilt_from_the_packs(repo: Repository) -> None:
    save_bytes(repo, "a", CONTENT)
    for key in keys(repo.store, INDEX):
        repo.store.delete(key)
    plan = plan_repair(repo)
    assert kinds(plan) == ["reindex"]
    apply_repair(repo, plan)
    here = read_entries(repo, "a")["y"].chunks[0]
    assert ChunkIndex(repo.store, limit_bytes=1 << 20).refresh().find(here.digest, here.size_bytes) == [here.location]
    assert plan_repair(repo) == RepairPlan((), ())


@pytest.mark.parametrize("position", [3, 60, -20])
def test_a_damaged_fragment_is_discarded_and_rebuilt(repo: Repository, position: int) -> None:
    save_bytes(repo, "a", CONTENT)
    rot(repo.store, keys(repo.store, INDEX)[0], position)
    plan = plan_repair(repo)
    assert kinds(plan) == ["discard", "reindex"]
    apply_repair(repo, plan)
    assert plan_repair(repo) == RepairPlan((), ())
    assert severities(repo) == set()


def test_rebuilding_the_index_writes_only_missing_packs(repo: Repository) -> None:
    save_bytes(repo, "a", CONTENT)
    assert rebuild_index(repo) == 0
    for key in keys(repo.store, INDEX):
        repo.store.delete(key)
    assert rebuild_index(repo) == 1


def test_a_torn_lease_is_left_to_the_collector(repo: Repository) -> None:
    save_bytes(repo, "a", CONTENT)
    key = f"{LEASES}{'a' * 24}@00000000"
    repo.store.create(key, b"holdfast-rec")
    apply_repair(repo, plan_repair(repo))
    assert keys(repo.store, LEASES) == [key]


def test_a_name_deleted_since_the_plan_is_passed_over(twice: Repository) -> None:
    spoil(twice, "chunk")
    plan = plan_repair(twice)
    delete_snapshot(twice.store, "a")
    assert [action.kind for action in apply_repair(twice, plan)] == ["quarantine"]
