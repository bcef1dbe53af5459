"""Verbs on stores of many snapshots in a bucket: how often they wait for the server, and how many requests they make.

A round is the time of one request: the requests of a round are in flight together, at most 64 of them. Reading the
records of 1,000 snapshots takes 16 rounds, and such turns are what most bounds consist of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.objects.cloud.cloud_store import REQUESTS_AT_ONCE, CloudStore
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.upkeep.collect import Rules, collect, plan_collect, verify_may_collect
from holdfast.repo.upkeep.prune import Keep, apply_prune, read_prune_plan
from holdfast.store import Store
from tests.cli.runs import Cli
from tests.kit.many_snapshots import fill_server
from tests.kit.rounds import Rounds, count_rounds
from tests.kit.s3_server import BUCKET, S3Server, serve_s3
from tests.unit.objects.cloud.servers import open_cloud

MANY, SOME = 1000, 256


def turns(count: int) -> int:
    """Return the rounds in which one object of each snapshot is read."""
    return -(-count // REQUESTS_AT_ONCE)


class Counted:
    """What an operation cost, as the server and the client saw it."""

    def __init__(self) -> None:
        self.rounds = 0
        self.requests = 0


@contextmanager
def count_cost(server: S3Server) -> Iterator[Counted]:
    """Count the rounds of an operation; each call of the client that counts as one is one request to the server."""
    cost = Counted()
    server.requests.clear()
    counted: Rounds
    with count_rounds(CloudStore, "_ask") as counted:
        yield cost
    cost.rounds = max(counted.greatest, counted.count_waves(REQUESTS_AT_ONCE))
    cost.requests = len(server.requests)
    assert cost.requests == len(counted.requests), "a listing of several pages counts as one round"


@pytest.fixture
def server() -> Iterator[S3Server]:
    with serve_s3() as running:
        yield running


@pytest.fixture
def full(server: S3Server) -> S3Server:
    """A server with a store of many snapshots."""
    fill_server(server, MANY)
    return server


@pytest.fixture
def some(server: S3Server) -> S3Server:
    """A server with a store of some snapshots."""
    fill_server(server, SOME)
    return server


@pytest.fixture
def cli(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Cli:
    """The command line on such a store, without records remembered from an earlier command."""
    settings = {"ENDPOINT_URL": server.endpoint, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}
    for name, value in (*settings.items(), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Cli(tmp_path, capsysbinary)
    made.store = f"s3://{BUCKET}/store"  # type: ignore[assignment]  # a path everywhere else
    return made


def test_opening_takes_one_round(full: S3Server) -> None:
    with count_cost(full) as cost:
        open_repository(open_cloud(full))
    # A listing, and the two records of which one is mostly the newest.
    assert (cost.rounds, cost.requests) == (1, 3)


@pytest.mark.parametrize("count", [10, MANY])
def test_opening_and_finding_the_latest_takes_three_rounds(server: S3Server, count: int) -> None:
    fill_server(server, count)
    with count_cost(server) as cost:
        latest = Store(open_cloud(server)).latest("run/")
    assert latest is not None
    assert latest.name == f"run/step-{count - 1}"
    assert cost.rounds == 3
    # The config three times, 32 shelves and what is beside them, and the records of a quarter of an hour: one a minute.
    assert cost.requests <= 3 + 33 + 17


def test_a_look_for_new_snapshots_takes_one_request_for_a_thousand(some: S3Server) -> None:
    store, writer = Store(open_cloud(some)), Store(open_cloud(some))
    follower = store.follow("run/")
    with count_cost(some) as first:
        assert follower.poll() is not None
    with count_cost(some) as idle:
        assert follower.poll() is None
    writer.save("run/new", {"n": 1})
    with count_cost(some) as new:
        found = follower.poll()

    assert found is not None
    assert found.name == "run/new"
    assert (idle.rounds, idle.requests) == (1, 1)
    assert (new.rounds, new.requests) == (2, 2), "the listing and the record"
    # The records of a quarter of an hour, of which there is one a minute.
    assert first.requests <= 1 + 17


def test_a_publisher_needs_few_requests_besides_those_of_the_save(server: S3Server) -> None:
    store = Store(open_cloud(server))
    store.publish("p", {"n": 1}, keep=3)
    with count_cost(server) as save:
        store.save("q/1", {"n": 2})
    with count_cost(server) as publish:
        store.publish("p", {"n": 3}, keep=3)

    # The listing and a record for the number; the same, the tags and the config before anything is deleted.
    assert publish.requests <= save.requests + 2 + 4


def test_a_snapshot_is_found_by_name_in_one_round_after_opening(full: S3Server) -> None:
    store = Store(open_cloud(full))
    with count_cost(full) as cost:
        assert store.snapshot("run/step-500").name == "run/step-500"
    assert (cost.rounds, cost.requests) == (1, 2)


def test_listing_snapshots_takes_twenty_rounds_and_a_second_time_one(full: S3Server) -> None:
    store = Store(open_cloud(full))
    with count_cost(full) as cost:
        assert len(store.snapshots("run/")) == MANY
    assert cost.rounds <= turns(MANY) + 1
    assert cost.requests == MANY + 33
    with count_cost(full) as cost:
        assert store.best("run/", "loss").name == f"run/step-{MANY - 1}"
        assert len(store.snapshots(where="loss < 0.01")) == MANY - 100
    assert (cost.rounds, cost.requests) == (2, 66)


@pytest.mark.parametrize("verb", [("ls",), ("log", "--limit", "3"), ("ls", "--where", "loss < 0.01")])
def test_ls_and_log_take_twenty_rounds(cli: Cli, full: S3Server, verb: tuple[str, ...]) -> None:
    with count_cost(full) as cost:
        cli.ok(*verb)
    assert cost.rounds <= 20  # opening 1, tags 1, listing 1, records 16
    assert cost.requests <= MANY + 40


def test_tags_and_show_take_no_round_for_each_tag(cli: Cli, some: S3Server) -> None:
    for step in range(20):
        cli.ok("tag", f"t{step}", f"run/step-{step}")
    with count_cost(some) as tags:
        assert cli.ok("tag").count("ok") == 20
    assert tags.rounds <= 4  # opening, listing, records, and the snapshots of all tags
    with count_cost(some) as show:
        cli.ok("show", "run/step-7")
    assert show.rounds <= 7  # opening, two for the tags, the record, the manifest, the pack


def test_planning_a_collection_takes_sixty_rounds(full: S3Server) -> None:
    store = open_cloud(full)
    for step in range(0, 20, 2):
        delete_snapshot(store, f"run/step-{step}")
    with count_cost(full) as cost:
        verify_may_collect(store)
        plan = plan_collect(store, min_age_s=0.0)
    assert len(plan.dead) == 20
    assert cost.rounds <= 2 * turns(MANY) + 12  # records and manifests; the rest are the config and listings
    assert cost.requests <= 2 * MANY + 60


@pytest.mark.slow
def test_collecting_takes_a_hundred_and_fifty_rounds(full: S3Server) -> None:
    store = open_cloud(full)
    plan = read_prune_plan(store, "run/", Keep(last=800))
    assert len(apply_prune(store, plan).deleted) == 200
    age(full)
    with count_cost(full) as cost:
        collected = collect(store, Rules(min_age_s=0.0))
    assert (collected.deleted, collected.records, collected.pending_marks) == (400, 200, 0)
    # Records and manifests are read by the plan, and again before anything is deleted.
    assert cost.rounds <= 4 * turns(MANY) + 60 <= 150
    assert cost.requests <= 4 * MANY + 2 * 200 + 100  # of 200 names, the record and the one that deletes it
    assert full.count("DELETE", "packs/") == 1


def age(server: S3Server) -> None:
    """Let a day pass: everything becomes older."""
    for stored in server.objects.values():
        stored.modified_s -= 86400


def test_check_reads_what_it_needs_at_once(cli: Cli, some: S3Server) -> None:
    with count_cost(some) as cost:
        assert "nothing to report" in cli.ok("check")
    # Of each snapshot the record and the manifest, of its pack the header and the footer.
    assert cost.rounds <= 4 * turns(SOME) + 20
    assert cost.requests <= 4 * SOME + 150


def test_du_reads_what_it_needs_at_once(cli: Cli, some: S3Server) -> None:
    with count_cost(some) as cost:
        cli.ok("du", "run/step-99")
    # As check does, and manifests twice: for the files that the roots need, and then for their chunks.
    assert cost.rounds <= 5 * turns(SOME) + 10
    assert cost.requests <= 5 * SOME + 60


def test_prune_deletes_names_at_once(cli: Cli, some: S3Server) -> None:
    with count_cost(some) as cost:
        assert cli("prune", "--keep-last", "192", "--yes").code == 0
    # Planned as `ls` does it. Then of each name: list, read, create, list again.
    assert cost.rounds <= turns(SOME) + 4 * turns(64) + 12
    assert cost.requests <= SOME + 5 * 64 + 60


def test_rm_deletes_names_at_once(cli: Cli, some: S3Server) -> None:
    with count_cost(some) as cost:
        assert cli.ok("rm", "run/step-11?", "run/step-12?", "--yes").count("deleted run/") == 20
    # The names for both globs; then what other snapshots use: records, and manifests twice.
    assert cost.rounds <= 4 * turns(SOME) + 30
    assert cost.requests <= 4 * SOME + 300
