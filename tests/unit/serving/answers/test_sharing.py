"""Space: the figures of du, what series and snapshots share, and what gc would free, in pages."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.errors import BadName, NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.serving.answers.sharing import (
    LedgerReader,
    StoreSpace,
    describe_pairs,
    describe_shares,
    describe_usage,
    read_space,
)
from holdfast.serving.remembered import WatchedListing
from tests.kit.compile_artifacts import make_artifact, store_artifact
from tests.kit.recordings import Recording, write_recorded
from tests.kit.saving import new_repo, save_bytes

COMMON = random.Random(1).randbytes(300_000)
OTHER = random.Random(2).randbytes(200_000)


@pytest.fixture
def repo() -> Repository:
    """Two series that share an entry, and a snapshot that was deleted."""
    made = new_repo(MemoryStore())
    for step in (1, 2):
        save_bytes(made, f"a/{step}", {"x": COMMON, "n": random.Random(step).randbytes(1000)})
    save_bytes(made, "b/1", {"x": COMMON, "y": OTHER})
    save_bytes(made, "c", {"z": OTHER[::-1]})
    save_bytes(made, "gone", {"z": random.Random(3).randbytes(100_000)})
    delete_snapshot(made.store, "gone")
    return made


@pytest.fixture
def space(repo: Repository) -> StoreSpace:
    return read_space(repo, LedgerReader(repo))


def test_usage_is_that_of_du(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with holdfast.open(tmp_path / "store") as store:
        save_bytes(store.repository, "a", {"x": COMMON})
        save_bytes(store.repository, "b", {"x": COMMON, "y": OTHER})
        found = describe_usage(read_space(store.repository, LedgerReader(store.repository)), "", 0, 100)
    assert main(["-s", str(tmp_path / "store"), "du", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)

    assert len(found["snapshots"]) == len(expected["snapshots"]) == 2
    for each in expected["snapshots"]:
        shown = next(row for row in found["snapshots"] if row["name"] == each["name"])
        assert shown == {name: each[name] for name in shown}
    totals = ("logical_bytes", "stored_bytes", "reclaimable_bytes", "compression_saved_bytes")
    assert [found[name] for name in totals] == [expected[name] for name in totals]


def test_series_share_what_both_use(space: StoreSpace) -> None:
    found = describe_usage(space, "", 0, 1)

    assert found["series"] == ["a/", "b/", "c"]
    assert found["shared"] == [[302_000, 300_000, 0], [300_000, 500_000, 0], [0, 0, 200_000]]


def test_recorded_runs_are_one_series_and_compiled_graphs_another() -> None:
    repo = new_repo(MemoryStore())
    save_bytes(repo, "a/1", {"x": COMMON})
    for recording in (Recording("good"), Recording("bad", is_bad=True)):
        write_recorded(repo, recording)
    for seed in "ab":
        store_artifact(repo, make_artifact(seed))
    space = read_space(repo, LedgerReader(repo))

    names = space.series[0]
    assert [name for name in names if not name.startswith("@")] == ["a/"]
    assert len(names) == 3
    assert describe_shares(space, "a/1", "", 0, 10)["total"] == 0


@pytest.mark.parametrize(("sort", "first"), [("-own_bytes", "b/1"), ("name", "a/1"), ("-name", "c")])
def test_usage_is_sorted_and_cut_into_pages(space: StoreSpace, sort: str, first: str) -> None:
    pages = [describe_usage(space, sort, offset, 1) for offset in range(5)]

    assert [len(page["snapshots"]) for page in pages] == [1, 1, 1, 1, 0]
    assert {page["total"] for page in pages} == {4}
    assert pages[0]["snapshots"][0]["name"] == first
    with pytest.raises(BadName, match="cannot be sorted by 'color'"):
        describe_usage(space, "color", 0, 1)


def test_gc_would_free_what_was_deleted(space: StoreSpace) -> None:
    found = describe_usage(space, "", 0, 1)["gc"]

    assert found["dead_bytes"] >= 100_000
    assert found["files"] >= 2


def test_snapshots_are_paired_in_windows(repo: Repository, space: StoreSpace) -> None:
    facts = sorted(WatchedListing(repo).read().facts, key=lambda each: each.snapshot.name)

    whole = describe_pairs(space, facts, 0, 64)
    assert whole["names"] == ["a/1", "a/2", "b/1", "c"]
    assert whole["shared"][0] == [301_000, 300_000, 300_000, 0]
    assert whole["shared"][2][2] == 500_000
    window = describe_pairs(space, facts, 1, 2)
    assert (window["total"], window["names"]) == (4, ["a/2", "b/1"])
    assert window["shared"] == [[301_000, 300_000], [300_000, 500_000]]


def test_one_snapshot_shares_with_others(space: StoreSpace) -> None:
    found = describe_shares(space, "b/1", "-shared_bytes", 0, 10)

    assert found["uses_bytes"] == 500_000
    assert [(row["name"], row["shared_bytes"]) for row in found["snapshots"]] == [("a/1", 300_000), ("a/2", 300_000)]
    assert describe_shares(space, "b/1", "-name", 0, 1)["snapshots"][0]["name"] == "a/2"
    assert describe_shares(space, "c", "", 0, 10)["total"] == 0
    with pytest.raises(NotFound):
        describe_shares(space, "nobody", "", 0, 1)
