"""Repacking: the content stays what it was, the packs that were mostly dead are needed no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.digest import hash_bytes
from holdfast.errors import DigestMismatch
from holdfast.progress import Silent
from holdfast.repo.format.layout import LEASES, PACKS
from holdfast.repo.format.manifest import read_manifest
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import commit_snapshot, delete_snapshot
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.transfer import RepackPlan, apply_repack, plan_repack
from tests.kit.saving import MIB, keys, load_bytes, noise, pack_of, read_entries, save_bytes, snapshot_of
from tests.kit.standing import collect_now


def plan(repo: Repository, **options: float) -> RepackPlan:
    return plan_repack(repo, read_live(repo.store).current, **options)


@pytest.fixture
def half(repo: Repository) -> Repository:
    """A repository with `b` and `c`, which use a small part of the pack that `a` has left."""
    save_bytes(repo, "a", {"x": noise(2000, 1), "y": noise(9000, 2), "shared": noise(1000, 3)})
    save_bytes(repo, "b", {"x": noise(2000, 1), "s": noise(1000, 3)}, metadata={"k": [1]}, spec={"tree": "b"})
    save_bytes(repo, "c", {"s": noise(1000, 3), "own": noise(800, 4), "tiny": b"inline"})
    delete_snapshot(repo.store, "a")
    collect_now(repo.store)
    return repo


def test_a_plan_names_mostly_dead_packs_and_the_snapshots_that_use_them(half: Repository) -> None:
    found = plan(half)
    assert found.victims == {pack_of(half, "b", "x").pack_id}
    assert sorted(snapshot.name for snapshot in found.snapshots) == ["b", "c"]
    assert (found.live_bytes, found.freed_bytes) == (3000, 9000)


def test_how_dead_is_dead_can_be_said(half: Repository) -> None:
    assert plan(half, dead_share=0.74).victims
    assert not plan(half, dead_share=0.76).victims


@pytest.mark.parametrize("size", [513, 600, 2000])
def test_a_small_pack_that_is_fully_used_is_not_repacked(repo: Repository, size: int) -> None:
    save_bytes(repo, "a", {"x": noise(size)})
    assert plan(repo) == RepackPlan(frozenset(), (), 0, 0)


def test_a_pack_that_nothing_uses_is_for_the_collector(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    delete_snapshot(repo.store, "a")
    assert plan(repo).victims == frozenset()


def test_content_time_and_metadata_stay(half: Repository) -> None:
    old = {name: snapshot_of(half, name) for name in "bc"}
    content = {name: load_bytes(half, name) for name in "bc"}
    moved = apply_repack(half, plan(half))
    assert sorted(snapshot.name for snapshot in moved) == ["b", "c"]
    for name, before in old.items():
        after = snapshot_of(half, name)
        assert after in moved
        assert (after.digest, after.time_s, after.metadata) == (before.digest, before.time_s, before.metadata)
        assert (after.num_entries, after.logical_bytes) == (before.num_entries, before.logical_bytes)
        assert after.generation == before.generation + 1
        assert load_bytes(half, name) == content[name]


def test_the_spec_and_the_notes_stay(half: Repository) -> None:
    before = read_manifest(half.store, snapshot_of(half, "b").manifest)
    apply_repack(half, plan(half))
    after = read_manifest(half.store, snapshot_of(half, "b").manifest)
    assert after.spec == before.spec == {"tree": "b"}
    assert [(entry.name, entry.note) for entry in after.iter_entries()] == [
        (entry.name, entry.note) for entry in before.iter_entries()
    ]


def test_what_does_not_hold_what_its_record_states_is_not_given_another_digest(half: Repository) -> None:
    old = snapshot_of(half, "c")
    commit_snapshot(half.store, replace(old, generation=old.generation + 1, digest=hash_bytes(b"other"), lease_id=""))
    with pytest.raises(DigestMismatch, match="'c' in memory:// does not have the content that its record states"):
        apply_repack(half, plan(half))
    assert snapshot_of(half, "c").digest == hash_bytes(b"other")


def test_the_victims_are_needed_no_more_and_collecting_frees_them(half: Repository) -> None:
    found = plan(half)
    apply_repack(half, found)
    assert not {f"{PACKS}{pack_id}" for pack_id in found.victims} & set(read_live(half.store).needs)
    collect_now(half.store)
    assert not found.victims & {key.removeprefix(PACKS) for key in keys(half.store, PACKS)}
    assert load_bytes(half, "b") == {"x": noise(2000, 1), "s": noise(1000, 3)}
    assert all(finding.severity == "note" for finding in Checker(half.store, read=True).iter_findings())


def test_a_second_repack_finds_nothing_to_do(half: Repository) -> None:
    apply_repack(half, plan(half))
    collect_now(half.store)
    assert plan(half).victims == frozenset()


def test_what_several_snapshots_share_is_copied_once(half: Repository) -> None:
    apply_repack(half, plan(half))
    assert read_entries(half, "b")["s"].chunks[0].location == read_entries(half, "c")["s"].chunks[0].location


def test_chunks_in_other_packs_are_not_moved(half: Repository) -> None:
    before = read_entries(half, "c")["own"]
    apply_repack(half, plan(half))
    assert read_entries(half, "c")["own"] == before


def test_a_large_entry_stays_in_one_run(repo: Repository) -> None:
    save_bytes(repo, "a", {"big": noise(2 * MIB + 5000), "y": noise(5 * MIB, 2)})
    save_bytes(repo, "b", {"big": noise(2 * MIB + 5000)})
    delete_snapshot(repo.store, "a")
    apply_repack(repo, plan(repo))
    places = [chunk.location for chunk in read_entries(repo, "b")["big"].chunks]
    assert len(places) == 3
    first = places[0]
    assert first is not None
    assert first.offset % 4096 == 0
    assert [at and at.offset - first.offset for at in places] == [0, MIB, 2 * MIB]


def test_a_name_that_changed_since_the_plan_is_passed_over(half: Repository) -> None:
    found = plan(half)
    save_bytes(half, "b", {"x": b"new"}, overwrite=True)
    delete_snapshot(half.store, "c")
    assert apply_repack(half, found) == []
    assert load_bytes(half, "b") == {"x": b"new"}


class Overwriting(Silent):
    """Somebody overwrites `b` while it is being repacked."""

    def __init__(self, repo: Repository) -> None:
        self.repo = repo

    def begin(self, task: str, total_bytes: int) -> None:
        if "repack b" in task:
            save_bytes(self.repo, "b", {"x": b"new"}, overwrite=True)


def test_a_name_that_changes_after_the_plan_is_skipped(half: Repository) -> None:
    moved = apply_repack(half, plan(half), progress=Overwriting(half))
    assert [snapshot.name for snapshot in moved] == ["c"]
    assert load_bytes(half, "b") == {"x": b"new"}
    assert keys(half.store, LEASES) == []
