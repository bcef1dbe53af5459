"""The check of records: each kind of damage is found, weighed, and does not hide the next."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.digest import fingerprint
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import CONFIG, generation_key, new_write_id
from holdfast.repo.format.record import encode_record
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.generations import create_generation
from holdfast.repo.names.leases import EXPIRE_S, Lease
from holdfast.repo.names.snapshots import delete_snapshot, set_tag
from holdfast.repo.upkeep.check import Finding, Roots, Tally, check_records
from tests.kit.saving import (
    PACK_ID,
    Watched,
    codes,
    keys,
    misplaced_keys,
    record_key,
    replace_object,
    rot,
    save_bytes,
    snapshot_of,
)


def check(store: ObjectStore) -> list[Finding]:
    return list(check_records(store, Roots(), Tally()))


def roots(store: ObjectStore) -> list[tuple[str, int]]:
    found = Roots()
    list(check_records(store, found, Tally()))
    return [(snapshot.name, snapshot.generation) for snapshot in found.current]


def state_config(store: ObjectStore, generation: int, *, major: int = 1, features: Sequence[str] = ()) -> None:
    format_ = {"major": major, "minor": 0}
    needed = {"read": list(features), "write": [], "collect": []}
    fields = {"kind": "config", "store_id": "s", "write_id": new_write_id(), "format": format_, "features": needed}
    create_generation(store, CONFIG, generation, fields)


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


def test_the_roots_are_what_names_hold_now(saved: MemoryStore) -> None:
    assert sorted(roots(saved)) == [("a", 1), ("b", 0)]


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
    rot(saved, record_key("b"), 130)
    found = check(saved)
    assert [(finding.severity, finding.code) for finding in found] == [
        ("error", "config-damaged"),
        ("error", "record-damaged"),
    ]


@pytest.mark.parametrize(
    ("major", "features", "text"),
    [(9, [], "has format 9.0, this Holdfast reads up to 1"), (1, ["tides"], "needs the feature 'tides' to read")],
)
def test_a_newer_format_is_not_called_damage_and_nothing_else_is_judged(
    saved: MemoryStore, major: int, features: list[str], text: str
) -> None:
    state_config(saved, 2, major=major, features=features)
    state_config(saved, 3, major=major, features=features)
    rot(saved, keys(saved, "tags/")[0], 130)
    saved.create("later/thing", b"")
    found = Roots()
    (finding,) = check_records(saved, found, Tally())
    assert (finding.severity, finding.code, finding.key) == ("error", "newer-format", "config/00000003")
    assert text in finding.message
    assert finding.advice == "upgrade Holdfast; nothing else was checked, because this version does not know the format"
    assert found.is_newer
    assert found.current == []


def test_a_config_that_was_newer_once_does_not_count(saved: MemoryStore) -> None:
    state_config(saved, 2, major=9)
    state_config(saved, 3)
    assert check(saved) == []


def test_a_newer_config_below_one_that_is_torn_or_damaged_counts(saved: MemoryStore) -> None:
    state_config(saved, 2, major=9)
    saved.create("config/00000003", b"holdfast")
    assert [finding.code for finding in check(saved)] == ["record-torn", "newer-format"]
    replace_object(saved, "config/00000003", bytes(300))
    assert [finding.code for finding in check(saved)] == ["config-damaged", "newer-format"]


def test_a_damaged_newest_record_is_an_error_and_an_older_one_a_warning(saved: MemoryStore) -> None:
    rot(saved, record_key("a"), 130)
    rot(saved, record_key("b"), 5)
    rot(saved, "tags/best@00000000", 130)
    found = check(saved)
    assert {finding.code for finding in found} == {"record-damaged"}
    assert {finding.key: finding.severity for finding in found} == {
        record_key("a"): "warning",
        record_key("b"): "error",
        "tags/best@00000000": "error",
    }


def test_a_torn_record_is_a_warning_and_what_it_was_to_replace_counts(saved: MemoryStore) -> None:
    saved.create(record_key("b", 1), b"holdfast-record 0001")
    (finding,) = check(saved)
    assert (finding.severity, finding.code, finding.key) == ("warning", "record-torn", record_key("b", 1))
    assert ("b", 0) in roots(saved)


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
    saved.create(record_key("new"), encode_record({**fields, **changes}))
    (finding,) = check(saved)
    assert (finding.severity, finding.code, finding.snapshot) == ("error", "record-damaged", "new")


@pytest.mark.parametrize("key", misplaced_keys("b"))
def test_a_record_on_the_wrong_shelf_is_damage(saved: MemoryStore, key: str) -> None:
    saved.create(key, saved.contents()[record_key("b")])
    (finding,) = check(saved)
    assert (finding.severity, finding.code, finding.key) == ("error", "record-damaged", key)
    assert "belongs to another key" in finding.message


def test_a_record_that_cannot_be_read_is_an_error_and_the_next_one_is_checked(saved: MemoryStore) -> None:
    watched = Watched(saved)
    watched.failing |= {record_key("a", 1), "tags/best@00000000", "config/00000001"}
    rot(saved, record_key("b"), 130)
    assert {finding.key: finding.severity for finding in check(watched)} == {
        "config/00000001": "error",
        record_key("a", 1): "error",
        record_key("b"): "error",
        "tags/best@00000000": "error",
    }


def test_a_record_of_a_later_version_is_an_error_that_says_so(saved: MemoryStore) -> None:
    data = saved.contents()[record_key("b")]
    replace_object(saved, record_key("b"), _later(data))
    (finding,) = check(saved)
    assert (finding.severity, finding.code) == ("error", "record-damaged")
    assert "upgrade" in finding.message


def _later(data: bytes) -> bytes:
    start = data[:16] + b"0002" + data[20:95]
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


def test_unknown_objects_are_warnings(saved: MemoryStore) -> None:
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


def test_many_problems_at_once_are_all_reported(repo: Repository, store: MemoryStore) -> None:
    for number in range(20):
        save_bytes(repo, f"s{number}", {"x": b"1"})
        rot(store, record_key(f"s{number}"), 100 + number)
    assert codes(check(store)) == {"record-damaged": 20}
