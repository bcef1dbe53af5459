"""Upkeep: what prune would delete, what check finds, and who is at work."""

from __future__ import annotations

import random
import socket

import pytest

from holdfast.errors import BadName
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.write.transaction import Transaction
from holdfast.serving.answer import parse_request
from holdfast.serving.answers.sharing import LedgerReader
from holdfast.serving.answers.upkeep import (
    PlannedPrune,
    describe_activity,
    describe_prune,
    describe_requests,
    iter_check,
    parse_keep,
    plan_prune,
)
from tests.kit.s3_server import serve_s3
from tests.kit.saving import new_repo, save_bytes
from tests.kit.standing import collect_now
from tests.unit.objects.cloud.servers import open_cloud

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


def plan(repo: Repository, query: str) -> PlannedPrune:
    request = parse_request("/x" + (f"?{query}" if query else ""))
    ledger = LedgerReader(repo).read(read_live(repo.store).current)
    return plan_prune(repo, parse_keep(request), request.read_text("prefix"), ledger)


def list_doomed(repo: Repository, query: str) -> list[str]:
    return [each.snapshot.name for each in plan(repo, query).decisions if not each.reasons]


def test_prune_is_a_plan_with_reasons_and_bytes(repo: Repository) -> None:
    found = describe_prune(plan(repo, "keep_last=1&keep_best=loss"), "", 0, 100)

    by_name = {verdict["name"]: verdict["reasons"] for verdict in found["verdicts"]}
    assert (found["keep"], found["delete"]) == (2, 1)
    assert by_name["a/2"] == []
    assert 0 < found["freed_bytes"] < 10_000
    assert {each.name for each in read_live(repo.store).current} == {"a/1", "a/2", "b/1"}


@pytest.mark.parametrize(
    ("best", "doomed"),
    [("loss", ["a/2"]), ("loss:1:max", ["a/1"]), ("loss:1:min", ["a/2"]), ("loss:2", []), ("loss:2:max", [])],
)
def test_the_best_are_kept_by_number_and_mode(repo: Repository, best: str, doomed: list[str]) -> None:
    assert list_doomed(repo, f"prefix=a/&keep_best={best}") == doomed


def test_a_plan_is_sorted_and_cut_into_pages(repo: Repository) -> None:
    planned = plan(repo, "keep_best=loss")

    names = [
        describe_prune(planned, sort, 1, 1)["verdicts"][0]["name"] for sort in ("", "-name", "verdict", "-verdict")
    ]
    assert names == ["a/2", "a/2", "b/1", "a/2"]
    assert describe_prune(planned, "-verdict", 0, 1)["verdicts"][0]["name"] == "a/1"
    with pytest.raises(BadName, match="cannot be sorted by 'color'"):
        describe_prune(planned, "color", 0, 1)


@pytest.mark.parametrize(
    "query", ["keep_last=x", "keep_within=soon", "", "keep_best=loss:0", "keep_best=loss:1:best", "keep_best=nobody:1"]
)
def test_rules_that_cannot_be_meant_are_refused(repo: Repository, query: str) -> None:
    with pytest.raises(BadName):
        plan(repo, query)


def test_a_save_at_work_and_the_marks_of_a_collector_are_shown(repo: Repository) -> None:
    quiet = describe_activity(repo)
    with Transaction(repo, purpose="save 'slow'") as transaction:
        assert collect_now(repo.store).pending_marks == 1
        found = describe_activity(repo)
    after = describe_activity(repo)

    (lease,) = [lease for lease in found["leases"] if lease["standing"] == "live"]
    assert (lease["id"], lease["purpose"], lease["host"]) == (transaction.lease_id, "save 'slow'", socket.gethostname())
    assert found["marked"] >= 2
    assert (quiet["marked"], quiet["bad_packs"]) == (0, [])
    for each in (quiet, after):
        assert all(lease["standing"] != "live" for lease in each["leases"])


def test_requests_to_an_object_store_are_counted_since_the_server_started() -> None:
    with serve_s3() as server:
        store = open_cloud(server)
        made = new_repo(store)
        save_bytes(made, "a", {"x": COMMON})
        before, seen = store.count_requests(), len(server.requests)
        describe_activity(made)
        found = describe_requests(store, before, 1e9)
        later = server.requests[seen:]

    assert found is not None
    assert found["since"].startswith("2001-09-09")
    assert {kind: each["requests"] for kind, each in found["kinds"].items()} == {
        kind: sum(request.kind == kind.upper() for request in later)
        for kind in ("get", "head", "list", "put", "delete")
    }
    assert found["kinds"]["list"]["requests"] > 0
    assert found["kinds"]["put"] == {"requests": 0, "bytes": 0}


def test_a_store_without_a_server_has_no_requests(repo: Repository) -> None:
    assert describe_requests(repo.store, repo.store.count_requests(), 1e9) is None


@pytest.mark.parametrize("read", [True, False])
def test_a_check_streams_findings_and_ends_with_what_was_checked(repo: Repository, read: bool) -> None:
    *findings, last = iter_check(repo, read=read)

    assert last["checked"]["snapshots"] == 3
    assert (last["checked"]["bytes_read"] > 0) == read
    assert all(line["finding"]["severity"] == "note" for line in findings)
