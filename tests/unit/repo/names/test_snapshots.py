"""Snapshots by name: commit, overwrite, delete, withdraw, and complete listings."""

from __future__ import annotations

import unicodedata
from dataclasses import replace

import pytest

from holdfast.errors import Corrupt, NameInUse, NotFound
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.repo.format.layout import generation_key, snapshot_stem
from holdfast.repo.format.record import encode_record
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.generations import read_newest
from holdfast.repo.names.snapshots import (
    CommittedSnapshot,
    DamagedName,
    commit_snapshot,
    delete_snapshot,
    iter_names,
    parse_snapshot,
    read_name,
    read_snapshot,
    withdraw_snapshot,
)
from tests.kit.saving import load_bytes, misplaced_keys, record_key, rot, save_bytes, snapshot_of


def names(store: MemoryStore, prefix: str = "") -> list[str]:
    return sorted(found.name for found in iter_names(store, prefix) if isinstance(found, CommittedSnapshot))


def rewrite(store: MemoryStore, held: str, **changes: Json) -> None:
    """Create the next generation of a name with fields changed."""
    newest = read_newest(store, snapshot_stem(held))
    assert newest.fields
    generation = newest.next_generation
    data = encode_record({**newest.fields.values, "generation": generation, **changes})
    store.create(generation_key(newest.stem, generation), data)


def test_a_committed_snapshot_is_read_back_whole(repo: Repository, clock: VirtualClock) -> None:
    clock.advance(5)
    result = save_bytes(repo, "run/1", {"x": b"12345", "y": b"6"}, metadata={"loss": 0.5})
    found = read_snapshot(repo.store, "run/1")
    assert (found.name, found.digest, found.generation) == ("run/1", result.digest, 0)
    assert (found.num_entries, found.logical_bytes, found.metadata) == (2, 6, {"loss": 0.5})
    assert found.time_s == clock.now()


def test_a_name_that_holds_nothing_is_not_found_with_the_next_step(repo: Repository) -> None:
    with pytest.raises(NotFound, match=r"^no snapshot 'a' in memory://; `holdfast ls` lists the snapshots$") as caught:
        read_snapshot(repo.store, "a")
    assert caught.value.name == "a"


def test_a_deleted_name_holds_nothing_and_can_be_used_again(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"x": b"old"})
    held = delete_snapshot(store, "a")
    assert held.generation == 0
    assert read_name(store, "a").snapshot is None
    assert names(store) == []
    assert save_bytes(repo, "a", {"x": b"new"}).generation == 2
    assert load_bytes(repo, "a") == {"x": b"new"}


def test_deleting_nothing_is_an_error_and_changes_nothing(repo: Repository, store: MemoryStore) -> None:
    before = store.contents()
    with pytest.raises(NotFound, match="nothing was deleted"):
        delete_snapshot(store, "a")
    assert store.contents() == before


def test_a_withdrawn_first_snapshot_leaves_nothing(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"x": b"1"})
    withdraw_snapshot(store, snapshot_of(repo, "a"), None)
    assert read_name(store, "a").snapshot is None


def test_a_withdrawn_overwrite_leaves_what_was_there_before(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"x": b"old"})
    before = snapshot_of(repo, "a")
    save_bytes(repo, "a", {"x": b"new"}, overwrite=True)
    withdraw_snapshot(store, snapshot_of(repo, "a"), before)
    assert load_bytes(repo, "a") == {"x": b"old"}
    assert snapshot_of(repo, "a").write_id != before.write_id


def test_a_snapshot_that_was_overwritten_since_is_not_withdrawn(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"x": b"mine"})
    mine = snapshot_of(repo, "a")
    save_bytes(repo, "a", {"x": b"theirs"}, overwrite=True)
    with pytest.raises(NameInUse):
        withdraw_snapshot(store, mine, None)
    assert load_bytes(repo, "a") == {"x": b"theirs"}


def test_two_commits_of_one_generation_have_one_winner(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"x": b"1"})
    first = snapshot_of(repo, "a")
    commit_snapshot(store, replace(first, generation=1, write_id="1"))
    with pytest.raises(NameInUse):
        commit_snapshot(store, replace(first, generation=1, write_id="2"))


def test_a_prefix_lists_the_names_that_start_with_it(repo: Repository, store: MemoryStore) -> None:
    for name in ("run", "run/1", "run/2", "run2/1", "Run/1", ".run", "caf\u00e9/1"):
        save_bytes(repo, name, {"x": b"1"})
    assert names(store, "run/") == ["run/1", "run/2"]
    assert names(store, "run") == ["run", "run/1", "run/2", "run2/1"]
    assert names(store, "R") == ["Run/1"]
    assert names(store, ".") == [".run"]
    assert names(store, "caf\u00e9") == ["caf\u00e9/1"]
    assert len(names(store)) == 7


def test_a_prefix_lists_long_names_too(repo: Repository, store: MemoryStore) -> None:
    long = "run/" + "x" * 300
    for name in (long, "run/1", "other/" + "x" * 300):
        save_bytes(repo, name, {"x": b"1"})
    assert names(store, "run/") == ["run/1", long]
    assert names(store, long[:250]) == [long]
    assert len(list(iter_names(store, ""))) == 3


def test_a_prefix_in_another_spelling_lists_the_same_names(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "caf\u00e9/1", {"x": b"1"})
    assert names(store, unicodedata.normalize("NFD", "caf\u00e9")) == ["caf\u00e9/1"]


def test_a_prefix_that_no_name_can_have_lists_nothing(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"x": b"1"})
    assert names(store, "\ud800") == []


def test_a_damaged_name_is_listed_as_such_beside_the_others(repo: Repository, store: MemoryStore) -> None:
    for name in ("a", "b", "c"):
        save_bytes(repo, name, {"x": b"1"})
    rot(store, record_key("b"), 130)
    found = list(iter_names(store))
    assert [item.stem for item in found if isinstance(item, DamagedName)] == [snapshot_stem("b")]
    assert names(store) == ["a", "c"]


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "tag"},
        {"state": "odd"},
        {"name": "b"},
        {"manifest": "../../etc/passwd"},
        {"manifest_digest": "00"},
        {"manifest_bytes": -1},
        {"digest": None},
        {"time": "now"},
        {"entries": 1.5},
        {"metadata": []},
        {"lease": 5},
    ],
)
def test_a_record_of_the_wrong_shape_is_damage(repo: Repository, store: MemoryStore, changes: dict[str, Json]) -> None:
    save_bytes(repo, "a", {"x": b"1"})
    rewrite(store, "a", **changes)
    with pytest.raises(Corrupt, match=record_key("a", 1)):
        read_name(store, "a")
    assert [type(found) for found in iter_names(store)] == [DamagedName]


def test_a_record_under_the_name_of_another_is_damage(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"x": b"1"})
    store.create(record_key("b"), store.read(record_key("a"), limit_bytes=10_000))
    with pytest.raises(Corrupt, match="belongs to another key"):
        read_name(store, "b")
    assert names(store) == ["a"]
    (damaged,) = (found for found in iter_names(store) if isinstance(found, DamagedName))
    assert "belongs to another key" in str(damaged.error)


@pytest.mark.parametrize("key", misplaced_keys("a"))
def test_a_record_on_the_wrong_shelf_is_damage_and_does_not_change_its_name(
    repo: Repository, store: MemoryStore, key: str
) -> None:
    save_bytes(repo, "a", {"x": b"1"})
    store.create(key, store.read(record_key("a"), limit_bytes=10_000))
    assert names(store) == ["a"]
    (damaged,) = (found for found in iter_names(store) if isinstance(found, DamagedName))
    assert str(damaged.error) == f"record {key} has the name 'a', which belongs to another key"
    store.delete(record_key("a"))
    assert read_name(store, "a").snapshot is None


def test_a_record_with_fields_of_a_later_version_is_read(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"x": b"1"})
    rewrite(store, "a", later_field=[1, 2])
    assert load_bytes(repo, "a") == {"x": b"1"}


def test_a_snapshot_survives_its_record(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"x": b"1"}, metadata={"deep": {"list": [1, 2.5, None]}})
    fields = read_newest(store, snapshot_stem("a")).fields
    assert fields
    assert parse_snapshot(fields) == snapshot_of(repo, "a")
