"""Which commits can still be undone, and what a withdrawal would bring back."""

from __future__ import annotations

import pytest

from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import manifest_key, pack_key, snapshot_stem
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.generations import read_newest
from holdfast.repo.names.roots import (
    is_present,
    is_settled,
    iter_needed,
    read_deleted,
    read_lease_state,
    read_live,
    read_rollback_target,
)
from holdfast.repo.names.snapshots import CommittedSnapshot, delete_snapshot, read_name
from tests.kit.saving import Watched, noise, pack_of, record_key, replace_object, save_bytes, snapshot_of
from tests.kit.standing import LEASE_ID, put_mark, put_under_lease, show_lease


def save_twice(repo: Repository, states: list[str]) -> None:
    """Save `a` and overwrite it under a lease that went through `states`."""
    save_bytes(repo, "a", {"x": noise(2000, 1)})
    save_bytes(repo, "a", {"x": noise(2000, 2)}, overwrite=True)
    for state in states:
        show_lease(repo.store, state)
    put_under_lease(repo.store, "a")


@pytest.mark.parametrize(("states", "standing"), [
    ([], "gone"), (["live"], "live"), (["live", "released"], "released"), (["live", "fenced"], "fenced"),
    (["live", "odd"], "live"),
])  # fmt: skip
def test_a_lease_stands_as_its_newest_generation_says(store: MemoryStore, states: list[str], standing: str) -> None:
    for state in states:
        show_lease(store, state)
    assert read_lease_state(store, LEASE_ID) == standing


def test_no_lease_at_all_has_ended_well(store: MemoryStore) -> None:
    assert read_lease_state(store, "") == "gone"


def delete_and_read(repo: Repository, states: list[str]) -> CommittedSnapshot | None:
    """Save `a` under a lease that went through `states`, delete it, and return what the deletion removed."""
    save_twice(repo, states)
    delete_snapshot(repo.store, "a")
    return read_deleted(repo.store, read_newest(repo.store, snapshot_stem("a")))


def test_a_deletion_shows_what_it_removed(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000, 1)})
    before = snapshot_of(repo, "a")
    delete_snapshot(repo.store, "a")
    assert read_deleted(repo.store, read_newest(repo.store, snapshot_stem("a"))) == before


@pytest.mark.parametrize(("states", "shows"), [(["released"], True), (["live"], False), (["fenced"], False)])
def test_a_commit_that_its_save_may_have_withdrawn_was_deleted_by_nobody(
    repo: Repository, states: list[str], shows: bool
) -> None:
    assert (delete_and_read(repo, states) is not None) == shows


def test_the_lease_of_a_withdrawn_commit_is_kept_with_its_record(repo: Repository) -> None:
    assert delete_and_read(repo, ["fenced"]) is None
    assert LEASE_ID in read_live(repo.store).committed_under


def test_a_torn_record_below_a_deletion_is_passed_over(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000, 1)})
    first = snapshot_of(repo, "a")
    repo.store.create(record_key("a", 1), b"torn")
    delete_snapshot(repo.store, "a")
    assert read_deleted(repo.store, read_newest(repo.store, snapshot_stem("a"))) == first


def test_a_damaged_record_below_a_deletion_shows_nothing(repo: Repository) -> None:
    save_twice(repo, [])
    delete_snapshot(repo.store, "a")
    replace_object(repo.store, record_key("a", 1), bytes(300))
    assert read_deleted(repo.store, read_newest(repo.store, snapshot_stem("a"))) is None


@pytest.mark.parametrize("data", [b"", bytes(300)])
def test_a_lease_that_cannot_be_read_is_waited_for(store: MemoryStore, data: bytes) -> None:
    show_lease(store, "released")
    store.create(f"leases/{LEASE_ID}@00000001", data)
    assert read_lease_state(store, LEASE_ID) == "live"


class Forgetting(Watched):
    """A lease is removed by its owner just when it is read."""

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        self.inner.delete(key)
        return super().read(key, limit_bytes=limit_bytes)


def test_a_lease_removed_while_it_is_read_is_gone(store: MemoryStore) -> None:
    show_lease(store, "released")
    assert read_lease_state(Forgetting(store), LEASE_ID) == "gone"


@pytest.mark.parametrize(
    ("states", "settled"), [([], True), (["released"], True), (["live"], False), (["fenced"], False)]
)
def test_a_commit_is_settled_once_its_lease_was_released(repo: Repository, states: list[str], settled: bool) -> None:
    save_twice(repo, states)
    assert is_settled(repo.store, snapshot_of(repo, "a")) == settled


def test_a_settled_record_is_brought_back(repo: Repository) -> None:
    save_twice(repo, ["released"])
    assert read_rollback_target(repo.store, read_name(repo.store, "a")) == snapshot_of(repo, "a")


def test_an_unsettled_one_that_is_complete_is_brought_back(repo: Repository) -> None:
    save_twice(repo, ["fenced"])
    assert read_rollback_target(repo.store, read_name(repo.store, "a")) == snapshot_of(repo, "a")


@pytest.mark.parametrize("lost", ["pack", "manifest"])
def test_an_unsettled_one_that_has_lost_bytes_is_passed_over(repo: Repository, lost: str) -> None:
    save_twice(repo, ["fenced"])
    key = pack_key(pack_of(repo, "a", "x").pack_id)
    repo.store.delete(key if lost == "pack" else manifest_key(snapshot_of(repo, "a").manifest.manifest_id))
    before = read_rollback_target(repo.store, read_name(repo.store, "a"))
    assert before not in (None, "undecided")
    assert getattr(before, "generation", None) == 0


def test_an_unsettled_snapshot_with_marked_files_is_undecided(repo: Repository) -> None:
    save_twice(repo, ["fenced"])
    put_mark(repo.store, [pack_key(pack_of(repo, "a", "x").pack_id)])
    assert read_rollback_target(repo.store, read_name(repo.store, "a")) == "undecided"


def test_below_a_tombstone_there_is_nothing(repo: Repository) -> None:
    save_twice(repo, ["released"])
    delete_snapshot(repo.store, "a")
    assert read_rollback_target(repo.store, read_name(repo.store, "a")) is None


def test_a_name_without_records_has_no_rollback_target(repo: Repository) -> None:
    assert read_rollback_target(repo.store, read_name(repo.store, "never")) is None


def test_what_came_after_the_state_was_read_does_not_count(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000, 1)})
    state = read_name(repo.store, "a")
    save_bytes(repo, "a", {"x": noise(2000, 2)}, overwrite=True)
    assert read_rollback_target(repo.store, state) == state.snapshot


def test_a_torn_record_is_passed_over(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000, 1)})
    repo.store.create(record_key("a", 1), b"torn")
    assert read_rollback_target(repo.store, read_name(repo.store, "a")) == snapshot_of(repo, "a")


def test_a_snapshot_needs_its_manifest_then_its_packs(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    snapshot = snapshot_of(repo, "a")
    needed = list(iter_needed(repo.store, snapshot))
    assert needed == [manifest_key(snapshot.manifest.manifest_id), pack_key(pack_of(repo, "a", "x").pack_id)]
    assert all(is_present(repo.store, key) for key in needed)
    repo.store.delete(needed[0])
    assert not is_present(repo.store, needed[0])
    assert list(iter_needed(repo.store, snapshot)) == []
