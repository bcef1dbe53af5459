"""The check of records: each kind of damage is found, weighed, and does not hide the next."""

from __future__ import annotations

import pytest

from holdfast.digest import fingerprint
from holdfast.repo.check_records import Roots, check_records
from holdfast.repo.findings import Finding, Tally
from holdfast.repo.layout import generation_key
from holdfast.repo.leases import EXPIRE_S, Lease
from holdfast.repo.record import Json, encode_record
from holdfast.repo.repository import Repository
from holdfast.repo.snapshots import delete_snapshot
from holdfast.repo.tags import set_tag
from holdfast.store.memory import MemoryStore, VirtualClock
from holdfast.store.protocol import ObjectStore
from tests.unit.repo.saving import PACK_ID, Watched, codes, keys, replace_object, rot, save_bytes, snapshot_of


def check(store: ObjectStore) -> list[Finding]:
    return list(check_records(store, Roots(), Tally()))


def roots(store: ObjectStore) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    found = Roots()
    list(check_records(store, found, Tally()))
    return (
        [(snapshot.name, snapshot.generation) for snapshot in found.current],
        [(snapshot.name, snapshot.generation) for snapshot in found.superseded],
    )


@pytest.fixture
def saved(repo: Repository) -> MemoryStore:
    """Snapshots `a` (overwritten once), `b` and `gone` (deleted), and a tag."""
    save_bytes(repo, "a", {"x": b"old"})
    save_bytes(repo, "a", {"x": b"new"}, overwrite=True)
    for name in ("b", "gone"):
        save_bytes(repo, name, {"x": b"1"})
    delete_snapshot(repo.store, "gone")
    set_tag(repo.store, "best", snapshot_of(repo, "b"))
    assert isinstance(repo.store, MemoryStore)
    return repo.store


def test_a_clean_store_has_no_findings(saved: MemoryStore) -> None:
    assert check(saved) == []


def test_the_roots_are_what_names_hold_now_and_held_before(saved: MemoryStore) -> None:
    assert roots(saved) == ([("a", 1), ("b", 0)], [("a", 0), ("gone", 0)])


def test_every_record_is_counted(saved: MemoryStore) -> None:
    tally = Tally()
    list(check_records(saved, Roots(), tally))
    prefixes = ("config/", "snapshots/", "tags/", "leases/", "marks/", "bad/")
    assert tally.objects == sum(len(keys(saved, prefix)) for prefix in prefixes)


def test_a_store_without_config_is_an_error(saved: MemoryStore) -> None:
    saved.delete("config/00000000")
    saved.delete("config/00000001")
    (finding,) = check(saved)
    assert (finding.severity, finding.code) == ("error", "config-missing")


def test_a_damaged_config_is_an_error_and_the_rest_is_still_checked(saved: MemoryStore) -> None:
    rot(saved, "config/00000001", 130)
    rot(saved, "snapshots/b@00000000", 130)
    found = check(saved)
    assert [(finding.severity, finding.code) for finding in found] == [
        ("error", "config-damaged"),
        ("error", "record-damaged"),
    ]


def test_a_damaged_newest_record_is_an_error_and_an_older_one_a_warning(saved: MemoryStore) -> None:
    rot(saved, "snapshots/a@00000000", 130)
    rot(saved, "snapshots/b@00000000", 5)
    rot(saved, "tags/best@00000000", 130)
    assert [(finding.severity, finding.code, finding.key) for finding in check(saved)] == [
        ("warning", "record-damaged", "snapshots/a@00000000"),
        ("error", "record-damaged", "snapshots/b@00000000"),
        ("error", "record-damaged", "tags/best@00000000"),
    ]


def test_a_torn_record_is_a_warning_and_what_it_was_to_replace_counts(saved: MemoryStore) -> None:
    saved.create("snapshots/b@00000001", b"holdfast-record 0000")
    (finding,) = check(saved)
    assert (finding.severity, finding.code, finding.key) == ("warning", "record-torn", "snapshots/b@00000001")
    assert ("b", 0) in roots(saved)[0]


@pytest.mark.parametrize(
    "changes",
    [{"kind": "tag"}, {"generation": 7}, {"name": "other"}, {"state": "odd"}, {"digest": "x"}, {"manifest": "x"}],
)
def test_a_record_of_the_wrong_shape_is_damage(saved: MemoryStore, changes: dict[str, Json]) -> None:
    fields = {
        "kind": "snapshot",
        "name": "new",
        "generation": 0,
        "state": "live",
        "write_id": "w",
        "lease": "l",
        "time": 1,
        "manifest": PACK_ID,
        "manifest_digest": "00" * 32,
        "manifest_bytes": 1,
        "digest": "00" * 32,
        "entries": 0,
        "logical_bytes": 0,
        "metadata": {},
    }
    saved.create("snapshots/new@00000000", encode_record({**fields, **changes}))
    (finding,) = check(saved)
    assert (finding.severity, finding.code, finding.snapshot) == ("error", "record-damaged", "new")


def test_a_record_that_cannot_be_read_is_an_error_and_the_next_one_is_checked(saved: MemoryStore) -> None:
    watched = Watched(saved)
    watched.failing |= {"snapshots/a@00000001", "tags/best@00000000", "config/00000001"}
    rot(saved, "snapshots/b@00000000", 130)
    assert {finding.key: finding.severity for finding in check(watched)} == {
        "config/00000001": "error",
        "snapshots/a@00000001": "error",
        "snapshots/b@00000000": "error",
        "tags/best@00000000": "error",
    }


def test_a_record_of_a_later_version_is_an_error_that_says_so(saved: MemoryStore) -> None:
    data = saved.contents()["snapshots/b@00000000"]
    replace_object(saved, "snapshots/b@00000000", _later(data))
    (finding,) = check(saved)
    assert (finding.severity, finding.code) == ("error", "record-damaged")
    assert "upgrade" in finding.message


def _later(data: bytes) -> bytes:
    start = data[:16] + b"0001" + data[20:95]
    return start + fingerprint(start)[:8].hex().encode() + data[111:]


class TestLeases:
    def test_a_save_that_runs_is_no_finding(self, saved: MemoryStore, clock: VirtualClock) -> None:
        lease = Lease(saved, purpose="save 'x'")
        for _ in range(20):
            clock.advance(EXPIRE_S / 4)
            lease.renew()
        assert check(saved) == []

    def test_a_save_that_died_is_one_note_when_its_lease_has_expired(
        self, saved: MemoryStore, clock: VirtualClock
    ) -> None:
        lease = Lease(saved, purpose="save 'x'")
        lease.renew()
        assert check(saved) == []
        clock.advance(EXPIRE_S + 1)
        (finding,) = check(saved)
        assert (finding.severity, finding.code) == ("note", "lease-abandoned")
        assert finding.key == generation_key(f"leases/{lease.lease_id}", 1)
        assert "save 'x'" in finding.message

    def test_a_lease_that_was_released_is_not_abandoned(self, saved: MemoryStore, clock: VirtualClock) -> None:
        Lease(saved, purpose="save 'x'").release()
        clock.advance(EXPIRE_S + 1)
        assert check(saved) == []

    def test_a_damaged_lease_is_a_warning(self, saved: MemoryStore) -> None:
        lease = Lease(saved, purpose="save 'x'")
        rot(saved, f"leases/{lease.lease_id}@00000000", 130)
        (finding,) = check(saved)
        assert (finding.severity, finding.code) == ("warning", "record-damaged")

    def test_a_torn_lease_is_a_note(self, saved: MemoryStore) -> None:
        saved.create(f"leases/{'0' * 24}@00000000", b"")
        (finding,) = check(saved)
        assert (finding.severity, finding.code) == ("note", "record-torn")


def test_a_damaged_mark_is_a_warning(saved: MemoryStore) -> None:
    saved.create("marks/0", encode_record({"kind": "mark", "keys": []}))
    assert check(saved) == []
    saved.create("marks/1", encode_record({"kind": "odd", "keys": []}))
    rot(saved, "marks/0", 120)
    assert [(finding.severity, finding.code) for finding in check(saved)] == [("warning", "record-damaged")] * 2


def test_objects_that_nobody_writes_are_warnings(saved: MemoryStore) -> None:
    strange = [
        "weights.bin",
        "packs/x",
        "manifests/y",
        "snapshots/a",
        "index/z",
        "leases/x@00000000",
        "config/x",
        "zoo/x",
    ]
    for key in strange:
        saved.create(key, encode_record({}))
    found = [finding for finding in check(saved) if finding.code == "unknown-object"]
    assert sorted(finding.key for finding in found) == sorted(strange)
    assert {finding.severity for finding in found} == {"warning"}


def test_many_damages_at_once_are_all_told(repo: Repository, store: MemoryStore) -> None:
    for number in range(20):
        save_bytes(repo, f"s{number}", {"x": b"1"})
        rot(store, f"snapshots/s{number}@00000000", 100 + number)
    assert codes(check(store)) == {"record-damaged": 20}
