"""Checks, collections, copies, repacks and repairs know that a delta needs its base."""

from __future__ import annotations

from holdfast.objects.memory import MemoryStore
from holdfast.progress import Silent
from holdfast.repo.format.chunk import BLOSC2, DELTA
from holdfast.repo.format.layout import PACKS
from holdfast.repo.format.rank_manifests import read_manifests
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import delete_snapshot, read_name
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.upkeep.repair import apply_repair, plan_repair, rebuild_index
from holdfast.repo.upkeep.transfer import apply_repack, copy_snapshot, move_snapshot, plan_repack
from holdfast.repo.upkeep.usage import find_stored_bytes, read_freed_bytes, read_usage
from tests.kit.deltas import bases, delta_repo, save_step, trained
from tests.kit.encoded import codecs
from tests.kit.saving import MIB, codes, keys, load_bytes, new_repo, noise, pack_of, rot, snapshot_of

AT_ONCE = Rules(min_age_s=0)


def check(repo: Repository) -> dict[str, int]:
    return dict(codes(list(Checker(repo.store, read=True).iter_findings())))


def base_pack(repo: Repository, name: str) -> str:
    (pack_id,) = {base.location.pack_id for base in bases(repo, name) if base}
    return pack_id


def test_a_check_reads_deltas_with_their_bases() -> None:
    assert check(delta_repo()) == {}


def test_a_damaged_base_is_named_with_all_that_depends_on_it() -> None:
    repo = delta_repo()
    at = pack_of(repo, "run/0", "w")
    rot(repo.store, PACKS + at.pack_id, at.offset + 100)
    findings = list(Checker(repo.store, read=True).iter_findings())
    assert dict(codes(findings)) == {"chunk-damaged": 1, "chunk-lost": 3}
    lost = [finding for finding in findings if finding.code == "chunk-lost"]
    assert [finding.snapshot for finding in lost] == ["run/0", "run/1", "run/2"]
    assert all("it is a delta, and of its base" in finding.message for finding in lost[1:])
    assert all(at.pack_id in finding.message for finding in lost)


def test_a_missing_base_is_found_without_reading_everything() -> None:
    repo = delta_repo()
    repo.store.delete(PACKS + base_pack(repo, "run/1"))
    findings = list(Checker(repo.store).iter_findings())
    assert {finding.snapshot for finding in findings if finding.code == "chunk-lost"} == {"run/0", "run/1", "run/2"}


def test_a_damaged_delta_concerns_only_its_own_snapshot() -> None:
    repo = delta_repo()
    at = pack_of(repo, "run/1", "w")
    rot(repo.store, PACKS + at.pack_id, at.offset + 100)
    findings = list(Checker(repo.store, read=True).iter_findings())
    assert {finding.snapshot for finding in findings if finding.code == "chunk-lost"} == {"run/1"}


def test_a_base_stays_as_long_as_a_delta_lives() -> None:
    repo = delta_repo()
    freed = read_freed_bytes(repo.store, read_live(repo.store).current, [snapshot_of(repo, "run/0")])
    assert freed < 10_000, "only its manifest"
    for name in ("run/0", "run/1"):
        delete_snapshot(repo.store, name)
        collect(repo.store, AT_ONCE)
    assert load_bytes(repo, "run/2")["w"] == trained(2)
    assert check(repo) == {}
    delete_snapshot(repo.store, "run/2")
    collect(repo.store, AT_ONCE)
    assert keys(repo.store, PACKS) == []


def test_usage_counts_bases() -> None:
    repo = delta_repo()
    usage = read_usage(repo.store, read_live(repo.store).current)
    first, second, third = usage.snapshots
    assert usage.reclaimable_bytes == 0
    assert first.own_bytes < 0.01 * first.stored_bytes, "its chunks are bases"
    assert second.shared_bytes == third.shared_bytes > 5 * second.own_bytes
    stored = find_stored_bytes(read_manifests(repo.store, snapshot_of(repo, "run/1").manifest))
    assert stored.deltas == 3
    assert stored.base_bytes == sum(base.location.stored_bytes for base in bases(repo, "run/1") if base)
    assert stored.packed_bytes < 0.2 * stored.base_bytes


def test_a_copy_of_one_snapshot_is_whole() -> None:
    repo, target = delta_repo(), new_repo(MemoryStore())
    copy_snapshot(repo, snapshot_of(repo, "run/2"), target)
    assert codecs(target, "run/2", "w") == [BLOSC2, BLOSC2, BLOSC2]
    assert load_bytes(target, "run/2")["w"] == trained(2)
    assert check(target) == {}


def test_a_copy_of_a_series_keeps_its_deltas() -> None:
    repo, target = delta_repo(), new_repo(MemoryStore())
    sizes = [copy_snapshot(repo, snapshot_of(repo, f"run/{step}"), target).stored_bytes for step in range(3)]
    assert sizes[1] < 0.2 * sizes[0]
    assert [base.digest for base in bases(target, "run/2") if base] == [
        base.digest for base in bases(repo, "run/2") if base
    ]
    assert base_pack(target, "run/2") == pack_of(target, "run/0", "w").pack_id
    assert load_bytes(target, "run/2")["w"] == trained(2)
    assert check(target) == {}


def test_a_repack_moves_a_base_once_and_keeps_the_deltas() -> None:
    repo = new_repo()
    save_step(repo, "run/0", {"w": trained(0), "rest": noise(4 * MIB, 1)})
    for step in (1, 2):
        save_step(repo, f"run/{step}", {"w": trained(step)})
    before = base_pack(repo, "run/1")
    own = pack_of(repo, "run/1", "w")
    delete_snapshot(repo.store, "run/0")
    plan = plan_repack(repo, read_live(repo.store).current)
    assert plan.victims == {before}
    assert len(apply_repack(repo, plan)) == 2
    assert base_pack(repo, "run/1") == base_pack(repo, "run/2") != before
    assert pack_of(repo, "run/1", "w")[:2] == own[:2], "the deltas stay where they are"
    collect(repo.store, AT_ONCE)
    assert PACKS + before not in keys(repo.store, PACKS)
    for step in (1, 2):
        assert load_bytes(repo, f"run/{step}")["w"] == trained(step)
    assert check(repo) == {}


def test_a_repack_of_deltas_keeps_them() -> None:
    repo = delta_repo(steps=1)
    save_step(repo, "run/1", {"w": trained(1), "rest": noise(MIB, 1)})
    again = save_step(repo, "run/2", {"w": trained(1)})
    assert again.new_bytes == 0
    delete_snapshot(repo.store, "run/1")
    plan = plan_repack(repo, read_live(repo.store).current)
    apply_repack(repo, plan)
    collect(repo.store, AT_ONCE)
    assert codecs(repo, "run/2", "w") == [DELTA, DELTA, DELTA]
    assert base_pack(repo, "run/2") == pack_of(repo, "run/0", "w").pack_id
    assert load_bytes(repo, "run/2")["w"] == trained(1)
    assert check(repo) == {}


def test_a_move_out_of_the_packs_of_delta_and_base() -> None:
    repo = delta_repo(steps=2)
    victims = frozenset({base_pack(repo, "run/1"), pack_of(repo, "run/1", "w").pack_id})
    move_snapshot(repo, read_name(repo.store, "run/1"), snapshot_of(repo, "run/1"), victims, Silent())
    assert not victims & {base_pack(repo, "run/1"), pack_of(repo, "run/1", "w").pack_id}
    assert codecs(repo, "run/1", "w") == [DELTA, DELTA, DELTA]
    assert load_bytes(repo, "run/1")["w"] == trained(1)


def test_a_repair_finds_another_copy_of_a_damaged_base() -> None:
    store = MemoryStore()
    repo = delta_repo(store)
    at = pack_of(repo, "run/0", "w")
    rot(store, PACKS + at.pack_id, at.offset + 100)
    save_step(open_repository(store), "other", {"w": trained(0)}, delta="off", compression=None)
    plan = plan_repair(repo)
    assert plan.losses == ()
    apply_repair(repo, plan)
    assert at.pack_id not in {base.location.pack_id for step in (1, 2) for base in bases(repo, f"run/{step}") if base}
    for step in range(3):
        assert load_bytes(repo, f"run/{step}")["w"] == trained(step)


def test_a_repair_from_another_store_restores_bases_and_deltas() -> None:
    store = MemoryStore()
    repo, backup = delta_repo(store), new_repo(MemoryStore())
    for step in range(3):
        copy_snapshot(repo, snapshot_of(repo, f"run/{step}"), backup)
    store.delete(PACKS + base_pack(repo, "run/1"))
    plan = plan_repair(repo, source=backup)
    assert plan.losses == ()
    apply_repair(repo, plan, source=backup)
    for step in range(3):
        assert load_bytes(repo, f"run/{step}")["w"] == trained(step)
    assert not {"chunk-lost", "chunk-hit"} & check(repo).keys()


def test_the_index_of_deltas_is_rebuilt_from_the_packs() -> None:
    store = MemoryStore()
    delta_repo(store)
    for key in keys(store, "index/"):
        store.delete(key)
    repo = open_repository(store)
    assert rebuild_index(repo) == 3
    assert save_step(repo, "other", {"w": trained(2)}, delta="off").new_bytes == 0
