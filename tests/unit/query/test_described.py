"""Records as JSON."""

from __future__ import annotations

from holdfast.errors import Corrupt
from holdfast.objects.memory import MemoryStore
from holdfast.query.facts import describe_damage, describe_snapshot, split_damaged
from holdfast.repo.names.snapshots import CommittedSnapshot, DamagedName, read_snapshot, set_tag
from tests.kit.saving import new_repo, save_bytes


def test_a_record_is_described_with_its_own_tags() -> None:
    repo = new_repo(MemoryStore())
    save_bytes(repo, "a", {"x": b"123"}, metadata={"n": 1})
    save_bytes(repo, "b", {"x": b"123"})
    tags = [set_tag(repo.store, tag, read_snapshot(repo.store, name)) for tag, name in (("t", "a"), ("u", "b"))]

    found = describe_snapshot(read_snapshot(repo.store, "a"), tags)

    assert (found["name"], found["tags"], found["metadata"], found["logical_bytes"]) == ("a", ["t"], {"n": 1}, 3)


def test_damaged_names_are_split_off_and_described() -> None:
    repo = new_repo(MemoryStore())
    save_bytes(repo, "a", {"x": b"1"})
    damaged, intact = DamagedName("snapshots/x", Corrupt("torn")), read_snapshot(repo.store, "a")
    found: list[CommittedSnapshot | DamagedName] = [damaged, intact]

    assert split_damaged(found) == ([intact], [damaged])
    assert describe_damage(damaged) == {"key": "snapshots/x", "error": "torn"}
