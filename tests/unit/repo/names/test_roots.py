"""What is live: which records count, the standing of leases, and when that cannot be decided."""

from __future__ import annotations

import pytest

from holdfast.digest import fingerprint
from holdfast.errors import Corrupt, NewerFormat
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.repo.format.layout import generation_key, lease_stem, manifest_key, snapshot_stem
from holdfast.repo.format.record import encode_record
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.roots import DeadRecords, read_leases, read_live
from holdfast.repo.names.snapshots import delete_snapshot, delete_tag, set_tag
from tests.kit.saving import misplaced_keys, noise, record_key, replace_object, rot, save_bytes, snapshot_of
from tests.kit.standing import LEASE_ID, data_keys, put_under_lease, show_lease

STEM = snapshot_stem("a")


def save_twice(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000, 1)})
    save_bytes(repo, "a", {"x": noise(2000, 2)}, overwrite=True)


# --- leases


@pytest.mark.parametrize(("states", "standing"), [
    (["live"], "live"), (["live", "live"], "live"), (["live", "released"], "released"), (["live", "fenced"], "fenced"),
    (["live", "on holiday"], "live"),
])  # fmt: skip
def test_the_newest_generation_decides_the_standing_of_a_lease(
    store: MemoryStore, states: list[str], standing: str
) -> None:
    for state in states:
        show_lease(store, state)
    lease = read_leases(store)[LEASE_ID]
    assert lease.state == standing
    assert lease.generations == tuple(range(len(states)))
    assert lease.is_live == (standing == "live")
    assert lease.purpose == "save 'x'"


def test_a_lease_is_as_old_as_its_newest_generation(store: MemoryStore, clock: VirtualClock) -> None:
    show_lease(store, "live")
    clock.advance(60)
    show_lease(store, "live")
    assert read_leases(store)[LEASE_ID].renewed_s == store.clock()


@pytest.mark.parametrize("data", [b"", b"\0" * 400, encode_record({"kind": "lease"}), encode_record({})[:-3]])
def test_a_lease_that_cannot_be_read_counts_as_live(store: MemoryStore, data: bytes) -> None:
    show_lease(store, "released")
    store.create(generation_key(lease_stem(LEASE_ID), 1), data)
    assert read_leases(store)[LEASE_ID].is_live


# --- records


def test_a_current_snapshot_needs_its_manifest_and_its_packs(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000), "y": b"inline"})
    live = read_live(repo.store)
    assert live.current == [snapshot_of(repo, "a")]
    assert set(live.needs) == data_keys(repo.store)
    assert all(users == live.current for users in live.needs.values())
    assert (live.superseded, live.dead_records) == ([], [])


def test_what_was_replaced_by_a_settled_commit_is_dead(repo: Repository) -> None:
    save_twice(repo)
    live = read_live(repo.store)
    assert live.current == [snapshot_of(repo, "a")]
    assert live.superseded == []
    assert live.dead_records == [DeadRecords(STEM, (0,))]
    assert len(live.needs) == 2


@pytest.mark.parametrize("state", ["live", "fenced"])
def test_what_was_replaced_by_a_commit_that_may_be_withdrawn_is_a_root(repo: Repository, state: str) -> None:
    save_twice(repo)
    show_lease(repo.store, state)
    put_under_lease(repo.store, "a")
    live = read_live(repo.store)
    assert [snapshot.generation for snapshot in live.superseded] == [0]
    assert live.dead_records == []
    assert set(live.needs) == data_keys(repo.store)
    assert LEASE_ID in live.committed_under


@pytest.mark.parametrize("states", [["released"], ["live", "released"], []])
def test_a_lease_that_was_released_or_is_gone_settles_a_commit(repo: Repository, states: list[str]) -> None:
    save_twice(repo)
    for state in states:
        show_lease(repo.store, state)
    put_under_lease(repo.store, "a")
    assert read_live(repo.store).dead_records == [DeadRecords(STEM, (0,))]


def test_a_deleted_name_needs_nothing_but_its_tombstone_stays(repo: Repository) -> None:
    save_twice(repo)
    delete_snapshot(repo.store, "a")
    live = read_live(repo.store)
    assert (live.current, live.superseded, live.needs) == ([], [], {})
    assert live.dead_records == [DeadRecords(STEM, (0, 1))]


def test_of_a_tag_only_the_newest_record_stays(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": b"1"})
    set_tag(repo.store, "best", snapshot_of(repo, "a"))
    delete_tag(repo.store, "best")
    assert read_live(repo.store).dead_records == [DeadRecords("tags/best", (0,))]


def test_a_torn_record_below_never_counted_and_goes(repo: Repository) -> None:
    repo.verify_may_write()
    repo.store.create(f"{STEM}@00000000", b"holdfast-rec")
    save_bytes(repo, "a", {"x": noise(2000)})
    live = read_live(repo.store)
    assert live.current == [snapshot_of(repo, "a")]
    assert live.dead_records == [DeadRecords(STEM, (0,))]


def test_a_torn_record_on_top_keeps_its_number(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    repo.store.create(f"{STEM}@00000001", b"")
    live = read_live(repo.store)
    assert live.current == [snapshot_of(repo, "a")]
    assert live.dead_records == []


# --- when it cannot be decided


@pytest.mark.parametrize("key", [record_key("a", 1), "tags/best@00000000"])
def test_damage_in_the_newest_record_forbids_to_decide(repo: Repository, key: str) -> None:
    save_twice(repo)
    set_tag(repo.store, "best", snapshot_of(repo, "a"))
    rot(repo.store, key, 130)
    with pytest.raises(Corrupt, match=f"record {key}"):
        read_live(repo.store)


def test_damage_in_a_record_that_was_replaced_is_passed_over(repo: Repository) -> None:
    save_twice(repo)
    rot(repo.store, f"{STEM}@00000000", 130)
    assert read_live(repo.store).current == [snapshot_of(repo, "a")]


@pytest.mark.parametrize("changes", [
    {"state": "archived"}, {"kind": "tag"}, {"name": "b"}, {"generation": 7}, {"kind": "tag", "state": "deleted"},
    {"state": "deleted", "name": "b"},
])  # fmt: skip
def test_a_record_that_is_not_its_own_forbids_to_decide(repo: Repository, changes: dict[str, str | int]) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    fields = {"kind": "snapshot", "name": "a", "state": "deleted", "write_id": "w", "time": 0, "generation": 0}
    replace_object(repo.store, f"{STEM}@00000000", encode_record({**fields, **changes}))
    with pytest.raises(Corrupt, match=f"record {STEM}@00000000"):
        read_live(repo.store)


@pytest.mark.parametrize("key", misplaced_keys("a"))
def test_a_record_on_the_wrong_shelf_forbids_to_decide(repo: Repository, key: str) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    repo.store.create(key, repo.store.read(record_key("a"), limit_bytes=10_000))
    with pytest.raises(Corrupt, match=f"record {key} has a name that belongs to another key"):
        read_live(repo.store)


def test_a_record_of_a_later_version_forbids_to_decide(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    start = b"holdfast-record 0002 00000002 " + b"0" * 64 + b" "
    replace_object(repo.store, f"{STEM}@00000000", start + fingerprint(start)[:8].hex().encode() + b"\n{}")
    with pytest.raises(NewerFormat):
        read_live(repo.store)


def test_a_lost_manifest_forbids_to_decide_and_says_what_to_do(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    repo.store.delete(manifest_key(snapshot_of(repo, "a").manifest.manifest_id))
    with pytest.raises(
        Corrupt, match=r"the manifest of snapshot 'a' is missing.*nothing was deleted.*or delete the snapshot first"
    ):
        read_live(repo.store)
    delete_snapshot(repo.store, "a")
    assert read_live(repo.store).needs == {}


def test_a_damaged_manifest_forbids_to_decide(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    rot(repo.store, manifest_key(snapshot_of(repo, "a").manifest.manifest_id), 60)
    with pytest.raises(Corrupt, match="manifests/"):
        read_live(repo.store)


def test_a_fenced_save_that_lost_its_manifest_does_not_stand_in_the_way(repo: Repository) -> None:
    save_twice(repo)
    show_lease(repo.store, "fenced")
    broken = put_under_lease(repo.store, "a")
    repo.store.delete(manifest_key(broken.manifest.manifest_id))
    live = read_live(repo.store)
    assert live.current == [broken]
    assert [snapshot.generation for snapshot in live.superseded] == [0]
    assert {user.generation for users in live.needs.values() for user in users} == {0}


def test_names_beyond_ascii_are_their_own(repo: Repository) -> None:
    for name in ("Lauf/ä", "x" * 300):
        save_bytes(repo, name, {"x": noise(2000)})
    assert {snapshot_stem(snapshot.name) for snapshot in read_live(repo.store).current} == {
        snapshot_stem("Lauf/ä"),
        snapshot_stem("x" * 300),
    }
