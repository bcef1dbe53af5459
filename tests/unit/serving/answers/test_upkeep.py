"""Space and health: the figures of du, prune, gc and check, as plans and findings."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.errors import BadName
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.serving.answers.upkeep import (
    describe_activity,
    describe_prune,
    describe_usage,
    iter_check,
    read_shared,
)
from holdfast.serving.request import parse_request
from tests.kit.saving import new_repo, save_bytes

COMMON = random.Random(1).randbytes(300_000)
OTHER = random.Random(2).randbytes(200_000)


@pytest.fixture
def repo() -> Repository:
    """Two series that share an entry, and a snapshot that was deleted."""
    made = new_repo(MemoryStore())
    for step in (1, 2):
        save_bytes(made, f"a/{step}", {"x": COMMON}, metadata={"loss": step})
    save_bytes(made, "b/1", {"x": COMMON, "y": OTHER})
    save_bytes(made, "gone", {"z": random.Random(3).randbytes(100_000)})
    delete_snapshot(made.store, "gone")
    return made


def test_usage_is_that_of_du(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with holdfast.open(tmp_path / "store") as store:
        save_bytes(store.repository, "a", {"x": COMMON})
        save_bytes(store.repository, "b", {"x": COMMON, "y": OTHER})
        found = describe_usage(store.repository)
    assert main(["-s", str(tmp_path / "store"), "du", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)

    for each in expected["snapshots"]:
        shown = next(row for row in found["snapshots"] if row["name"] == each["name"])
        assert shown == {name: each[name] for name in shown}
    assert [found[name] for name in ("logical_bytes", "stored_bytes", "reclaimable_bytes")] == [
        expected[name] for name in ("logical_bytes", "stored_bytes", "reclaimable_bytes")
    ]


def test_series_share_what_both_use(repo: Repository) -> None:
    names, shared = read_shared(repo, read_live(repo.store).current)

    assert names == ["a/", "b/"]
    assert shared == [[300_000, 300_000], [300_000, 500_000]]


def test_gc_would_free_what_was_deleted(repo: Repository) -> None:
    found = describe_usage(repo)["gc"]

    assert found["dead_bytes"] >= 100_000
    assert found["files"] >= 2


def test_prune_is_a_plan_with_reasons_and_bytes(repo: Repository) -> None:
    found = describe_prune(repo, parse_request("/x?keep_last=1&keep_best=loss"))

    by_name = {verdict["name"]: verdict["reasons"] for verdict in found["verdicts"]}
    assert (found["keep"], found["delete"]) == (2, 1)
    assert by_name["a/2"] == []
    assert 0 < found["freed_bytes"] < 10_000
    assert {each.name for each in read_live(repo.store).current} == {"a/1", "a/2", "b/1"}


@pytest.mark.parametrize("query", ["keep_last=x", "keep_within=soon", ""])
def test_rules_that_cannot_be_meant_are_refused(repo: Repository, query: str) -> None:
    with pytest.raises(BadName):
        describe_prune(repo, parse_request("/x" + (f"?{query}" if query else "")))


def test_a_save_at_work_is_shown(repo: Repository) -> None:
    found = describe_activity(repo)

    assert found["marked"] == 0
    assert found["bad_packs"] == []
    assert all(lease["standing"] != "live" for lease in found["leases"])


@pytest.mark.parametrize("read", [True, False])
def test_a_check_streams_findings_and_ends_with_what_was_checked(repo: Repository, read: bool) -> None:
    *findings, last = iter_check(repo, read=read)

    assert last["checked"]["snapshots"] == 3
    assert (last["checked"]["bytes_read"] > 0) == read
    assert all(line["finding"]["severity"] == "note" for line in findings)
