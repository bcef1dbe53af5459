"""What a save costs on an object store: requests, and rounds of requests that wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import pytest

from holdfast.cli.verbs.doctor import SMALL_SAVE_ROUNDS
from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import commit_snapshot
from holdfast.repo.write.part_writer import PlacedSource, end_lease, write_part
from holdfast.repo.write.transaction import ManifestPart
from holdfast.repo.write.writer import Placement, Request, SaveResult, save
from tests.kit.rounds import Rounds, count_rounds
from tests.kit.s3_server import Fault, S3Server, Stored, serve_s3
from tests.kit.s3_server import Request as S3Request
from tests.kit.saving import load_bytes, new_repo, noise, save_bytes, snapshot_of
from tests.kit.thread_ranks import ThreadRanks, run_threads
from tests.unit.objects.cloud.servers import open_cloud

MOST_ROUNDS: Final = 12
MOST_REQUESTS: Final = 20


@pytest.fixture
def server() -> Iterator[S3Server]:
    """An empty bucket."""
    with serve_s3() as running:
        yield running


@contextmanager
def counting(server: S3Server, *, pages: int = 0) -> Iterator[Rounds]:
    """Count rounds and requests; each request that the server gets is counted, but for `pages` of a long listing."""
    server.requests.clear()
    with count_rounds(CloudStore, "_ask") as rounds:
        yield rounds
    assert len(rounds.requests) + pages == len(server.requests)


def state(seed: int, *, count: int = 8) -> dict[str, bytes]:
    return {f"w{number}": noise(50_000, 1000 * seed + number) for number in range(count)}


def open_repo(server: S3Server) -> Repository:
    return new_repo(open_cloud(server))


def count_others(server: S3Server) -> int:
    """Return the requests that are not a HEAD of a pack."""
    return len(server.requests) - server.count("HEAD", "packs/")


def seed_names(server: S3Server, count: int) -> dict[str, bytes]:
    """Put a store with `count` snapshots of the same content into the bucket, the oldest first; return the content."""
    memory, content = MemoryStore(), state(0)
    repo = new_repo(memory)
    save_bytes(repo, "run/0", content)
    first = snapshot_of(repo, "run/0")
    for number in range(1, count):
        commit_snapshot(memory, replace(first, name=f"run/{number}", write_id=f"{number:032x}"))
    for key, data in memory.contents().items():
        server.objects[f"store/{key}"] = Stored(data, memory.stat(key).modified_s)
    return content


def test_small_saves_of_one_handle_take_few_rounds_even_if_the_index_is_merged(server: S3Server) -> None:
    repo = open_repo(server)
    save_bytes(repo, "run/0", state(0))
    was_merged = False
    for step in range(1, 18):
        with counting(server) as rounds:
            save_bytes(repo, f"run/{step}", state(step))
        assert rounds.greatest <= MOST_ROUNDS, rounds.requests
        was_merged |= server.count("DELETE", "index/") > 0
        assert was_merged or count_others(server) <= MOST_REQUESTS
    assert was_merged


def test_a_small_save_waits_as_often_as_doctor_and_the_pages_state(server: S3Server) -> None:
    repo = open_repo(server)
    for step in range(2):  # a store's first saves wait more often
        save_bytes(repo, f"run/{step}", state(step))
    found = set()
    for step, seed in ((2, 2), (3, 3), (4, 3)):  # new bytes twice, then the same again
        with counting(server) as rounds:
            save_bytes(repo, f"run/{step}", state(seed))
        found.add(rounds.greatest)

    assert found == {SMALL_SAVE_ROUNDS}


def test_an_unchanged_save_of_the_same_handle_costs_few_requests(server: S3Server) -> None:
    repo = open_repo(server)
    save_bytes(repo, "run/0", state(0))
    with counting(server) as rounds:
        result = save_bytes(repo, "run/1", state(0))
    assert (result.new_bytes, server.count("HEAD", "packs/")) == (0, 1)
    assert server.count("GET", "packs/") == 0
    assert count_others(server) <= MOST_REQUESTS, rounds.requests
    assert rounds.greatest <= MOST_ROUNDS


@pytest.mark.parametrize("count", [10, 1000])
def test_an_unchanged_save_of_a_new_handle_costs_no_more_and_reads_nothing_back(server: S3Server, count: int) -> None:
    content = seed_names(server, count)
    repo = open_repo(server)
    with counting(server) as rounds:
        result = save_bytes(repo, "run/next", content)
    assert (result.new_bytes, server.count("HEAD", "packs/")) == (0, 1)
    assert server.count("GET", "packs/") == server.count("GET", "index/") == 0
    assert count_others(server) <= MOST_REQUESTS, rounds.requests
    assert rounds.greatest <= MOST_ROUNDS


def test_a_new_handle_in_a_store_with_very_many_names_finds_chunks_through_the_index(server: S3Server) -> None:
    content = seed_names(server, 1200)
    repo = open_repo(server)
    with counting(server, pages=1) as rounds:
        result = save_bytes(repo, "run/next", content)
    assert result.new_bytes == 0
    assert server.count("GET", "packs/") == 0
    # The second page, then the names of one shelf; the index, and its fragments.
    assert rounds.greatest + 1 <= MOST_ROUNDS + 4, rounds.requests


def test_all_packs_of_the_base_are_looked_for_at_once(server: S3Server) -> None:
    repo = open_repo(server)
    content: dict[str, bytes] = {}
    for step in range(3):
        content[f"w{step}"] = noise(50_000, step)
        save_bytes(repo, f"run/{step}", content)
    with counting(server) as rounds:
        result = save_bytes(repo, "run/3", content)
    assert (result.new_bytes, server.count("HEAD", "packs/")) == (0, 3)
    assert rounds.greatest <= MOST_ROUNDS


def test_overwriting_costs_only_what_a_withdrawal_would_need_in_addition(server: S3Server) -> None:
    repo = open_repo(server)
    save_bytes(repo, "best", state(0))
    save_bytes(repo, "best", state(1), overwrite=True)
    with counting(server) as rounds:
        save_bytes(repo, "best", state(2), overwrite=True)
    assert rounds.greatest <= MOST_ROUNDS + 3, rounds.requests
    assert count_others(server) <= MOST_REQUESTS + 4


def test_the_same_save_again_reads_records_and_looks_for_packs(server: S3Server) -> None:
    repo = open_repo(server)
    save_bytes(repo, "a", state(0))
    with counting(server) as rounds:
        result = save_bytes(repo, "a", state(0))
    assert result.existed
    assert server.count("GET", "packs/") == server.count("PUT") == 0
    assert (len(rounds.requests), rounds.greatest) == (7, 5)


def test_the_same_save_again_writes_what_is_missing(server: S3Server) -> None:
    repo = open_repo(server)
    save_bytes(repo, "a", state(0))
    (pack,) = (key for key in server.objects if "/packs/" in key)
    del server.objects[pack]
    assert not save_bytes(repo, "a", state(0)).existed
    assert load_bytes(repo, "a") == state(0)


@pytest.mark.parametrize("fault", ["409", "lose reply", "503 after", "lose request"])
def test_a_pack_whose_upload_got_no_clear_answer_is_settled_or_sent_again(server: S3Server, fault: Fault) -> None:
    waiting = [fault] * 2

    def fail_packs(request: S3Request) -> Fault | None:
        return waiting.pop() if request.kind == "PUT" and "/packs/" in request.key and waiting else None

    server.fault_of = fail_packs
    repo = open_repo(server)
    save_bytes(repo, "a", state(0))
    assert load_bytes(repo, "a") == state(0)
    assert sum("/packs/" in key for key in server.objects) == 1
    assert not waiting or fault != "409"


def save_ranks(server: S3Server, name: str, repos: list[Repository]) -> list[SaveResult | BaseException]:
    def act(ranks: ThreadRanks) -> SaveResult:
        sources = [BytesSource(f"w{ranks.rank}", noise(50_000, ranks.rank))]
        place = Placement(50_000, 0, [()], ranks.rank)
        root = ManifestPart(None, [])
        request = Request(name, sources, places={0: place}, root=root)
        return save(repos[ranks.rank], request, ranks=ranks)

    return run_threads(len(repos), act)


def test_four_ranks_cost_few_requests_each(server: S3Server) -> None:
    repos = [open_repo(server) for _ in range(4)]
    assert all(isinstance(result, SaveResult) for result in save_ranks(server, "run/0", repos))
    server.requests.clear()
    results = save_ranks(server, "run/1", repos)
    assert [result.new_bytes for result in results if isinstance(result, SaveResult)] == [0] * 4
    assert server.count("GET", "packs/") == 0
    # The coordinator as a single process, and a root manifest; each other rank about half of that.
    assert count_others(server) <= MOST_REQUESTS + 6 + 3 * MOST_REQUESTS // 2, server.requests


def test_a_part_of_a_snapshot_costs_less_than_a_save(server: S3Server) -> None:
    repo = open_repo(server)
    repo.verify_may_write()

    def make() -> list[PlacedSource]:
        return [PlacedSource(BytesSource("w", noise(50_000)), Placement(50_000, 0, [()]))]

    end_lease(repo.store, write_part(repo, "run/0", [make], purpose="test").lease_id)
    with counting(server) as rounds:
        part = write_part(repo, "run/0", [make], purpose="test")
        end_lease(repo.store, part.lease_id)
    assert part.new_bytes == 0
    assert server.count("GET", "packs/") == 0
    assert rounds.greatest <= MOST_ROUNDS - 2
    assert count_others(server) <= MOST_REQUESTS - 4, rounds.requests
