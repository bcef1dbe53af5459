"""What takes the space: the sums add up, sharing is seen, and nothing that is needed is called reclaimable."""

from __future__ import annotations

import pytest

from holdfast.repo.format.layout import MANIFESTS, PACKS
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.upkeep.usage import Usage, read_freed_bytes, read_usage
from tests.kit.saving import noise, only_pack, pack_of, rot, save_bytes, snapshot_of
from tests.kit.standing import collect_now


def usage_of(repo: Repository) -> Usage:
    return read_usage(repo.store, read_live(repo.store).current)


def taken(repo: Repository) -> int:
    return sum(info.size_bytes for prefix in (PACKS, MANIFESTS) for info in repo.store.iter_objects(prefix))


def test_an_empty_store_takes_nothing(repo: Repository) -> None:
    usage = usage_of(repo)
    assert (usage.logical_bytes, usage.stored_bytes, usage.live_bytes, usage.reclaimable_bytes) == (0, 0, 0, 0)


def test_the_sums_are_those_of_the_files(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000), "y": b"small"})
    save_bytes(repo, "b", {"x": noise(2000), "z": noise(700, 1)})
    usage = usage_of(repo)
    assert usage.logical_bytes == 2005 + 2700
    assert usage.stored_bytes == taken(repo)
    assert usage.live_bytes + usage.reclaimable_bytes == usage.stored_bytes


def test_what_two_use_is_shared_and_the_rest_is_their_own(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    save_bytes(repo, "b", {"x": noise(2000), "z": noise(700, 1)})
    one, other = sorted(usage_of(repo).snapshots, key=lambda usage: usage.snapshot.name)
    assert (one.shared_bytes, one.own_bytes) == (2000, one.snapshot.manifest.size_bytes)
    assert (other.shared_bytes, other.own_bytes) == (2000, 700 + other.snapshot.manifest.size_bytes)


def test_a_chunk_used_twice_by_one_snapshot_counts_once(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000), "y": noise(2000)})
    (usage,) = usage_of(repo).snapshots
    assert usage.stored_bytes == usage.own_bytes == 2000 + usage.snapshot.manifest.size_bytes


@pytest.mark.parametrize("size", [600, 3000, 70_000])
def test_fully_used_packs_have_nothing_to_reclaim(repo: Repository, size: int) -> None:
    save_bytes(repo, "a", {"x": noise(size)})
    usage = usage_of(repo)
    assert usage.reclaimable_bytes == 0
    assert [pack.dead_share for pack in usage.packs] == [0.0]


def test_deleted_snapshots_can_be_reclaimed_and_collecting_does(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    save_bytes(repo, "b", {"x": noise(900, 1)})
    before = taken(repo)
    delete_snapshot(repo.store, "b")
    reclaimable = usage_of(repo).reclaimable_bytes
    assert collect_now(repo.store).freed_bytes == reclaimable
    assert taken(repo) == before - reclaimable
    assert usage_of(repo).reclaimable_bytes == 0


def test_of_a_pack_that_is_partly_dead_the_dead_chunks_count(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000), "y": noise(5000, 1)})
    save_bytes(repo, "b", {"x": noise(2000)})
    delete_snapshot(repo.store, "a")
    collect_now(repo.store)
    (pack,) = usage_of(repo).packs
    assert (pack.pack_id, pack.live_bytes, pack.dead_bytes) == (pack_of(repo, "b", "x").pack_id, 2000, 5000)
    assert pack.dead_share == 5 / 7


def test_a_pack_with_a_damaged_footer_is_not_called_dead(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    rot(repo.store, only_pack(repo.store), -5)
    assert usage_of(repo).packs[0].dead_bytes == 0


def test_freed_is_what_only_the_doomed_use(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    save_bytes(repo, "b", {"x": noise(2000), "z": noise(700, 1)})
    a, b = snapshot_of(repo, "a"), snapshot_of(repo, "b")
    assert read_freed_bytes(repo.store, [a, b], [b]) == 700 + b.manifest.size_bytes
    assert read_freed_bytes(repo.store, [a, b], [a]) == a.manifest.size_bytes
    assert read_freed_bytes(repo.store, [a, b], [a, b]) == 2700 + a.manifest.size_bytes + b.manifest.size_bytes
    assert read_freed_bytes(repo.store, [a, b], []) == 0


def test_a_snapshot_that_was_collected_after_it_was_listed_makes_no_sum_negative(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    save_bytes(repo, "b", {"x": noise(900, 1)})
    listed = [snapshot_of(repo, "a"), snapshot_of(repo, "b")]
    delete_snapshot(repo.store, "b")
    collect_now(repo.store)
    usage = read_usage(repo.store, listed)
    assert (usage.reclaimable_bytes, usage.live_bytes) == (0, usage.stored_bytes)
    assert usage.snapshots[1].stored_bytes == 0
