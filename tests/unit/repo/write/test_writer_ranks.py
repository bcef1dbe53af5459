"""Snapshots of many parts: what ranks write together is one snapshot for everybody, or none at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pkgutil import resolve_name

import pytest

from holdfast.errors import CommitUnknown, Corrupt, NotShared, RankError
from holdfast.objects.memory import MemoryStore
from holdfast.progress import Silent
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import LEASES, MANIFESTS, PACKS, SNAPSHOTS, manifest_key
from holdfast.repo.format.rank_manifests import read_manifests, read_needs, read_view
from holdfast.repo.format.record import encode_record
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import delete_snapshot, read_snapshot
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.upkeep.transfer import apply_repack, copy_snapshot, plan_repack
from holdfast.repo.upkeep.usage import read_usage
from holdfast.repo.write.transaction import ManifestPart
from holdfast.repo.write.writer import Placement, Request, SaveResult, WriteOptions, save
from tests.kit.hooking import Hook
from tests.kit.saving import MIB, Meanwhile, keys, load_bytes, new_repo, noise, rot, save_bytes
from tests.kit.thread_ranks import ThreadRanks, run_threads

WHOLE = noise(3 * MIB + 5, 1)
GRID = noise(64, 2)
"""An 8 x 8 tensor of bytes."""


def make_request(rank: int, world_size: int, *, name: str = "run/1", salt: int = 0) -> Request:
    """Return a rank's share of a span, its columns of a grid, and a value of its own."""
    edges = [len(WHOLE) * at // world_size for at in range(world_size + 1)]
    start, stop = edges[rank], edges[rank + 1]
    cuts = [*range((start // MIB + 1) * MIB, stop, MIB), stop]
    spans = list(zip([start, *cuts[:-1]], cuts, strict=True))
    columns = [8 * at // world_size for at in range(world_size + 1)]
    first, last = columns[rank], columns[rank + 1]
    grid = b"".join(GRID[row * 8 + first : row * 8 + last] for row in range(8))
    sources = [
        BytesSource("span", WHOLE[start:stop], cuts=[end - start for end in cuts]),
        BytesSource("grid", grid),
        BytesSource("own", noise(600, 100 * salt + rank)),
    ]
    places = {
        0: Placement(len(WHOLE), 1, [(low, high - low) for low, high in spans]),
        1: Placement(64, 2, [(0, first, 8, last - first)]),
        2: Placement(600, 0, (), rank),
    }
    root = ManifestPart(
        {"tree": 1},
        [
            Entry("span", len(WHOLE), (), dims=1),
            Entry("grid", 64, (), dims=1),
            Entry("own", 600, (), dims=1),
        ],
    )
    return Request(name, sources, places=places, root=root)


def save_together(
    repos: Repository | Sequence[Repository],
    world_size: int,
    change: Callable[[int, Request], Request] = lambda rank, request: request,
) -> list[SaveResult | BaseException]:
    def act(ranks: ThreadRanks) -> SaveResult:
        repo = repos if isinstance(repos, Repository) else repos[ranks.rank]
        return save(repo, change(ranks.rank, make_request(ranks.rank, world_size)), ranks=ranks)

    return run_threads(world_size, act)


def problems(repo: Repository) -> list[str]:
    return [finding.message for finding in Checker(repo.store, read=True).iter_findings()]


@pytest.fixture
def repo() -> Repository:
    return new_repo()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_parts_of_all_ranks_are_one_snapshot(repo: Repository, world_size: int) -> None:
    results = save_together(repo, world_size)

    assert {type(result) for result in results} == {SaveResult}
    assert len({result.digest for result in results if isinstance(result, SaveResult)}) == 1
    assert load_bytes(repo, "run/1") == {"span": WHOLE, "grid": GRID, "own": noise(600, 0)}
    assert problems(repo) == []


def test_every_rank_gets_its_own_back_and_others_get_that_of_the_lowest(repo: Repository) -> None:
    save_together(repo, 3)

    manifests = read_manifests(repo.store, read_snapshot(repo.store, "run/1").manifest)

    own = [manifests.view(rank).find_entry("own").chunks[0].digest for rank in range(3)]
    assert len(set(own)) == 3
    assert manifests.view().find_entry("own").chunks[0].digest == own[0]


def test_a_world_of_one_has_one_manifest_and_many_have_a_root(repo: Repository) -> None:
    save_bytes(repo, "alone", {"x": b"1"})
    before = len(keys(repo.store, MANIFESTS))

    save_together(repo, 3)

    assert before == 1
    assert len(keys(repo.store, MANIFESTS)) == before + 4


def test_a_repeated_save_finds_the_same_and_writes_nothing(repo: Repository) -> None:
    save_together(repo, 2)
    before = keys(repo.store, "")

    results = save_together(repo, 2)

    assert all(isinstance(result, SaveResult) and result.existed for result in results)
    assert keys(repo.store, "") == before


def test_other_content_under_the_name_is_refused_on_all_ranks(repo: Repository) -> None:
    save_together(repo, 2)

    results = save_together(repo, 2, lambda rank, request: replace(request, options=WriteOptions(metadata={"k": "v"})))

    assert all(isinstance(result, RankError) and "is in use" in str(result) for result in results)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_if_one_rank_cannot_save_no_rank_saves(repo: Repository, failing: int) -> None:
    class Broken(BytesSource):
        def read(self, start: int, stop: int) -> memoryview:
            raise OSError("the memory is gone")

    def change(rank: int, request: Request) -> Request:
        broken = [Broken("span", WHOLE[:100], cuts=[100]), *request.sources[1:]]
        return replace(request, sources=broken, places={**request.places, 0: Placement(len(WHOLE), 1, [(0, 100)])}) \
            if rank == failing else request  # fmt: skip

    results = save_together(repo, 3, change)

    assert all(isinstance(result, RankError) and list(result.failures) == [failing] for result in results)
    assert keys(repo.store, SNAPSHOTS) == []
    assert keys(repo.store, LEASES) == []
    assert {type(result) for result in save_together(repo, 3)} == {SaveResult}


def test_a_store_of_each_node_is_refused_and_left_empty() -> None:
    stores = [MemoryStore(), MemoryStore()]

    results = save_together([new_repo(store) for store in stores], 2)

    assert all(isinstance(result, RankError) and "local to each node" in str(result) for result in results)
    assert any(isinstance(result, BaseException) and isinstance(result.__cause__, NotShared) for result in results)
    assert stores[1].contents() == {}


@pytest.mark.parametrize("stale", [0, 1])
def test_a_handle_of_any_rank_that_means_another_store_is_a_refusal_on_all(stale: int) -> None:
    store = MemoryStore()
    repos = [new_repo(store) for _ in range(2)]
    repos[1 - stale].verify_may_write()
    repos[stale].identity.store_id = "the store that was there before"

    results = save_together(repos, 2)

    assert all(isinstance(result, RankError) and "StoreGone" in str(result) for result in results)
    assert keys(store, SNAPSHOTS) == keys(store, LEASES) == []


def test_the_loss_of_the_coordinator_during_the_commit_is_commit_unknown(repo: Repository, hook: Hook) -> None:
    def die(store: object, snapshot: object) -> None:
        raise CommitUnknown("the reply was lost", name="run/1")

    hook(resolve_name("holdfast.repo.write.transaction"), "commit_snapshot", die)

    results = save_together(repo, 2)

    assert all(isinstance(result, CommitUnknown) for result in results)
    assert keys(repo.store, LEASES) != []


@pytest.mark.parametrize("missing", ["span", "grid"])
def test_parts_that_do_not_make_up_the_whole_are_damage(repo: Repository, missing: str) -> None:
    def change(rank: int, request: Request) -> Request:
        number = ["span", "grid"].index(missing)
        size, dims, boxes, _ = request.places[number]
        wrong = [(box[0] + rank, *box[1:]) for box in boxes] if dims == 1 else boxes[:0]
        if dims == 1:
            return replace(request, places={**request.places, number: Placement(size, dims, wrong)})
        sources = list(request.sources)
        sources[number] = BytesSource(missing, b"" if rank else sources[number].read(0, 32))
        return replace(
            request,
            sources=sources,
            places={**request.places, number: Placement(size, dims, boxes if not rank else [])},
        )

    save_together(repo, 2, change)

    with pytest.raises(Corrupt, match=f"{missing!r}: the parts of the snapshot do not add up to"):
        load_bytes(repo, "run/1")
    assert any("do not add up to" in text for text in problems(repo))


def test_a_collector_keeps_all_that_parts_need(repo: Repository) -> None:
    save_together(repo, 3)
    needs = read_needs(repo.store, read_snapshot(repo.store, "run/1").manifest)

    collect(repo.store, Rules(min_age_s=0.0))

    assert sorted(keys(repo.store, PACKS)) == sorted(f"{PACKS}{pack}" for pack in needs.packs)
    assert sorted(keys(repo.store, MANIFESTS)) == sorted(map(manifest_key, needs.manifests))
    assert load_bytes(repo, "run/1")["span"] == WHOLE


def test_a_collector_frees_all_parts_of_what_was_deleted(repo: Repository) -> None:
    save_together(repo, 3)
    delete_snapshot(repo.store, "run/1")

    collect(repo.store, Rules(min_age_s=0.0))

    assert keys(repo.store, PACKS) == []
    assert keys(repo.store, MANIFESTS) == []


def test_usage_counts_all_parts(repo: Repository) -> None:
    save_together(repo, 3)

    usage = read_usage(repo.store, [read_snapshot(repo.store, "run/1")])

    assert usage.reclaimable_bytes == 0
    assert usage.live_manifest_bytes == usage.manifest_bytes


def test_a_copy_has_the_same_digest_and_parts(repo: Repository) -> None:
    save_together(repo, 3)
    target = new_repo()

    copy_snapshot(repo, read_snapshot(repo.store, "run/1"), target)

    found = read_snapshot(target.store, "run/1")
    assert found.digest == read_snapshot(repo.store, "run/1").digest
    assert len(read_manifests(target.store, found.manifest).parts) == 3
    assert load_bytes(target, "run/1") == load_bytes(repo, "run/1")
    assert problems(target) == []


def test_repacking_moves_parts_and_keeps_the_digest(repo: Repository) -> None:
    save_together(repo, 2)
    before = read_snapshot(repo.store, "run/1")

    plan = plan_repack(repo, [before], dead_share=-1.0)
    apply_repack(repo, plan, progress=Silent())

    after = read_snapshot(repo.store, "run/1")
    assert after.generation > before.generation
    assert after.digest == before.digest
    assert not set(plan.victims) & set(read_needs(repo.store, after.manifest).packs)
    assert load_bytes(repo, "run/1")["grid"] == GRID


def test_the_next_save_reuses_what_all_ranks_have_written(repo: Repository) -> None:
    save_together(repo, 2)

    def act(ranks: ThreadRanks) -> SaveResult:
        return save(repo, make_request(ranks.rank, 2, name="run/2"), ranks=ranks)

    results = run_threads(2, act)

    # What is inline in manifests, and no more.
    assert all(isinstance(result, SaveResult) and result.new_bytes <= 2000 for result in results)


def test_rot_in_a_part_is_found_and_named(repo: Repository) -> None:
    save_together(repo, 2)
    part = read_manifests(repo.store, read_snapshot(repo.store, "run/1").manifest).root.parts[1]
    rot(repo.store, manifest_key(part.manifest.manifest_id), 100)

    with pytest.raises(Corrupt, match=part.manifest.manifest_id):
        read_view(repo.store, read_snapshot(repo.store, "run/1").manifest)
    assert any("cannot be read" in text for text in problems(repo))


def test_boxes_that_are_whole_rows_become_a_row_of_bytes(repo: Repository) -> None:
    rows = Entry("t", 64, (), dims=1)

    def act(ranks: ThreadRanks) -> SaveResult:
        first = 4 * ranks.rank
        source = BytesSource("t", GRID[8 * first : 8 * first + 32])
        place = Placement(64, 2, [(first, 0, 4, 8)])
        return save(repo, Request("t", [source], places={0: place}, root=ManifestPart(None, [rows])), ranks=ranks)

    run_threads(2, act)

    entry = read_view(repo.store, read_snapshot(repo.store, "t").manifest).find_entry("t")
    assert entry.dims == 0
    assert [chunk.box for chunk in entry.chunks] == [(), ()]
    assert load_bytes(repo, "t") == {"t": GRID}


def test_a_rank_whose_chunks_are_not_marked_does_not_read_its_sources_again() -> None:
    store = MemoryStore()
    first = make_request(0, 2)
    save(new_repo(store), Request("old", first.sources[:1]))
    (marked,) = keys(store, PACKS)
    reads = []

    class Counted(BytesSource):
        def read(self, start: int, stop: int) -> memoryview:
            reads.append((start, stop))
            return super().read(start, stop)

    def change(rank: int, request: Request) -> Request:
        span, grid, own = request.sources
        if rank == 0:
            return request
        return replace(request, sources=[span, grid, Counted("own", own.read(0, own.size_bytes))])

    def mark() -> None:
        store.create("marks/0", encode_record({"kind": "mark", "keys": [marked]}))

    results = save_together([new_repo(Meanwhile(store, MANIFESTS, mark)), new_repo(store)], 2, change)

    assert {type(result) for result in results} == {SaveResult}
    assert reads == [(0, 600)]
    assert load_bytes(new_repo(store), "run/1") == {"span": WHOLE, "grid": GRID, "own": noise(600, 0)}
    assert marked.rpartition("/")[2] not in str(read_needs(store, read_snapshot(store, "run/1").manifest))
