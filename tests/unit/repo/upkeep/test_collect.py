"""Garbage collection: what goes, what stays, what waits for the next run, and when nothing may be touched."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from holdfast.errors import Corrupt, HoldfastError, NewerFormat
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.objects.protocol import ObjectStore, StoreTraits
from holdfast.repo.format.layout import (
    BAD,
    CONFIG,
    INDEX,
    LEASES,
    MARKS,
    MAX_GENERATION,
    PACKS,
    SNAPSHOTS,
    new_write_id,
    pack_key,
)
from holdfast.repo.handle.index import ChunkIndex
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.generations import create_generation
from holdfast.repo.names.leases import EXPIRE_S, Lease
from holdfast.repo.names.snapshots import CommittedSnapshot, delete_snapshot, delete_tag, set_tag
from holdfast.repo.upkeep.collect import STALE_LISTING_S, Rules, collect, plan_collect
from tests.kit.saving import (
    PACK_ID,
    Watched,
    keys,
    load_bytes,
    new_repo,
    noise,
    pack_of,
    read_entries,
    record_key,
    rot,
    save_bytes,
    snapshot_of,
)
from tests.kit.standing import (
    LEASE_ID,
    NOW,
    collect_now,
    data_keys,
    put_lease,
    put_mark,
    put_under_lease,
    show_lease,
)


@pytest.fixture
def dead(repo: Repository) -> set[str]:
    """Save `a` and `gone`, delete the latter; returns the keys that nothing needs."""
    save_bytes(repo, "a", {"x": noise(2000, 1)})
    needed = data_keys(repo.store)
    save_bytes(repo, "gone", {"x": noise(3000, 2)})
    delete_snapshot(repo.store, "gone")
    return data_keys(repo.store) - needed


# --- the plan


def test_a_plan_names_what_nothing_needs_and_changes_nothing(
    repo: Repository, store: MemoryStore, dead: set[str]
) -> None:
    before = store.contents()
    plan = plan_collect(store, min_age_s=0.0)
    assert {info.key for info in plan.dead} == dead
    assert plan.dead_bytes == sum(len(before[key]) for key in dead)
    assert plan.live_bytes == sum(len(before[key]) for key in data_keys(store) - dead)
    assert store.contents() == before


def test_young_files_are_kept(repo: Repository, clock: VirtualClock, dead: set[str]) -> None:
    clock.advance(99)
    assert plan_collect(repo.store, min_age_s=100.0).dead == ()
    clock.advance(1)
    assert {info.key for info in plan_collect(repo.store, min_age_s=100.0).dead} == dead


def test_files_of_a_save_under_way_are_not_dead(store: MemoryStore, repo: Repository) -> None:
    repo.verify_may_write()
    lease = Lease(store, purpose="save")
    key = f"{PACKS}{lease.lease_id}-{'0' * 16}"
    store.create(key, b"pack")
    assert plan_collect(store, min_age_s=0.0).dead == ()
    lease.release()
    assert [info.key for info in plan_collect(store, min_age_s=0.0).dead] == [key]


def test_files_not_named_like_a_pack_are_not_deleted(store: MemoryStore, repo: Repository) -> None:
    repo.verify_may_write()
    for key in ("packs/notes.txt", "manifests/" + "g" * 41, "packs/deep/" + PACK_ID):
        store.create(key, b"mine")
    assert plan_collect(store, min_age_s=0.0).dead == ()


# --- what goes


def test_what_nothing_needs_goes_and_all_else_stays(repo: Repository, dead: set[str]) -> None:
    kept = data_keys(repo.store) - dead
    freed = plan_collect(repo.store, min_age_s=0.0).dead_bytes
    outcome = collect_now(repo.store)
    assert (outcome.deleted, outcome.freed_bytes) == (len(dead), freed)
    assert data_keys(repo.store) == kept
    assert load_bytes(repo, "a") == {"x": noise(2000, 1)}
    assert keys(repo.store, MARKS) == keys(repo.store, LEASES) == []


def test_a_second_run_finds_nothing_to_do(repo: Repository, store: MemoryStore, dead: set[str]) -> None:
    collect_now(store)
    before = store.contents()
    outcome = collect_now(store)
    assert (outcome.deleted, outcome.records, outcome.pending_marks) == (0, 0, 0)
    assert store.contents() == before


def test_a_pack_lives_while_one_snapshot_uses_part_of_it(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000, 1), "y": noise(2000, 2)})
    save_bytes(repo, "b", {"x": noise(2000, 1)})
    delete_snapshot(repo.store, "a")
    collect_now(repo.store)
    assert load_bytes(repo, "b") == {"x": noise(2000, 1)}


def test_without_min_age_the_default_keeps_young_files(repo: Repository, clock: VirtualClock, dead: set[str]) -> None:
    assert collect(repo.store).deleted == 0
    clock.advance(3600)
    assert collect(repo.store).deleted == len(dead)


def test_dead_records_go_lowest_first_and_the_tombstone_stays(repo: Repository) -> None:
    for seed in range(3):
        save_bytes(repo, "a", {"x": noise(2000, seed)}, overwrite=True)
    delete_snapshot(repo.store, "a")
    set_tag(repo.store, "t", save_and_find(repo, "b"))
    delete_tag(repo.store, "t")
    watched = Deletions(repo.store)
    assert collect_now(watched).records == 4
    assert [key for key in watched.deleted if key.startswith(SNAPSHOTS)] == [
        record_key("a", generation) for generation in range(3)
    ]
    assert set(keys(repo.store, SNAPSHOTS)) == {record_key("a", 3), record_key("b")}
    assert keys(repo.store, "tags/") == ["tags/t@00000001"]
    assert save_bytes(repo, "a", {"x": b"again"}).generation == 4


def save_and_find(repo: Repository, name: str) -> CommittedSnapshot:
    save_bytes(repo, name, {"x": noise(2000, 9)})
    return snapshot_of(repo, name)


class Deletions(Watched):
    """Remembers what is deleted."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.deleted: list[str] = []

    def delete(self, key: str) -> None:
        self.deleted.append(key)
        super().delete(key)


def test_the_index_forgets_packs_that_are_gone(repo: Repository, dead: set[str]) -> None:
    here = read_entries(repo, "a")["x"].chunks[0]
    collect_now(repo.store)
    index = ChunkIndex(repo.store, limit_bytes=1 << 20).refresh()
    assert index.find(here.digest, here.size_bytes) == [here.location]
    assert {pack for fragment in index._fragments.values() for pack in fragment.packs} == {
        pack_of(repo, "a", "x").pack_id
    }
    assert keys(repo.store, INDEX)


def test_records_of_bad_packs_that_are_gone_go_too(repo: Repository, dead: set[str]) -> None:
    kept = BAD + pack_of(repo, "a", "x").pack_id + "@00000000"
    repo.store.create(kept, b"")
    repo.store.create(f"{BAD}{PACK_ID}@00000000", b"")
    collect_now(repo.store)
    assert keys(repo.store, BAD) == [kept]


# --- leases


def test_only_released_leases_lose_their_files(repo: Repository) -> None:
    repo.verify_may_write()
    for number, state in enumerate(["live", "released", "fenced"]):
        show_lease(repo.store, "live", str(number) * 24)
        if state != "live":
            show_lease(repo.store, state, str(number) * 24)
    assert collect_now(repo.store).leases == 1
    assert {key.removeprefix(LEASES)[0] for key in keys(repo.store, LEASES)} == {"0", "2"}


def test_a_save_that_shows_nothing_is_fenced_and_its_files_go(repo: Repository, clock: VirtualClock) -> None:
    repo.verify_may_write()
    lease = Lease(repo.store, purpose="save")
    key = f"{PACKS}{lease.lease_id}-{'0' * 16}"
    repo.store.create(key, b"pack")
    clock.advance(EXPIRE_S - 1)
    assert collect_now(repo.store).deleted == 0
    clock.advance(1)
    assert collect_now(repo.store).deleted == 1
    assert keys(repo.store, PACKS) == []


def test_what_a_commit_replaced_stays_until_it_is_settled(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000, 1)})
    save_bytes(repo, "a", {"x": noise(2000, 2)}, overwrite=True)
    show_lease(repo.store, "live")
    put_under_lease(repo.store, "a")
    before = data_keys(repo.store)
    assert collect_now(repo.store).deleted == 0
    assert data_keys(repo.store) == before
    show_lease(repo.store, "released")
    assert collect_now(repo.store).deleted == 2


# --- what waits


def test_a_mark_waits_for_saves_under_way_and_says_so(repo: Repository, dead: set[str]) -> None:
    lease = Lease(repo.store, purpose="save 'slow'")
    outcome = collect_now(repo.store)
    assert (outcome.deleted, outcome.pending_marks) == (0, 1)
    assert outcome.pending_bytes == sum(repo.store.stat(key).size_bytes for key in dead)
    assert outcome.waiting_for == ["1 under way: save 'slow'"]
    assert len(keys(repo.store, MARKS)) == 2
    lease.release()
    assert collect_now(repo.store).deleted == len(dead)
    assert keys(repo.store, MARKS) == []


def test_a_save_that_began_after_the_mark_does_not_hold_it_up(repo: Repository, dead: set[str]) -> None:
    lease = Lease(repo.store, purpose="first")
    collect_now(repo.store)
    Lease(repo.store, purpose="second")
    lease.release()
    assert collect_now(repo.store).deleted == len(dead)


def test_waiting_ends_as_soon_as_the_save_does(repo: Repository, dead: set[str], clock: VirtualClock) -> None:
    lease = Lease(repo.store, purpose="slow")
    naps = []

    def nap(seconds: float) -> None:
        clock.advance(seconds)
        naps.append(seconds)
        if len(naps) == 3:
            lease.release()

    assert collect(repo.store, Rules(min_age_s=0.0, wait_s=60.0, sleep=nap)).deleted == len(dead)
    assert len(naps) == 3


def test_grace_is_waited_for(repo: Repository, dead: set[str], clock: VirtualClock) -> None:
    rules = Rules(min_age_s=0.0, grace_s=30.0)
    assert collect(repo.store, rules).waiting_for == ["30 s of grace"]
    clock.advance(30)
    assert collect(repo.store, rules).deleted == len(dead)


class OnNetwork(Watched):
    """A store that other hosts reach, and whose listings may be stale."""

    stale_listings = True

    @property
    def traits(self) -> StoreTraits:
        return replace(self.inner.traits, shared_by_hosts=True, stale_listings=self.stale_listings)


class InBucket(OnNetwork):
    """A store that other hosts reach, and whose listings are never stale."""

    stale_listings = False


def test_where_listings_are_never_stale_there_is_no_grace(repo: Repository, dead: set[str]) -> None:
    assert collect_now(InBucket(repo.store)).deleted == len(dead)


def test_where_listings_may_be_stale_there_is_always_some_grace(
    repo: Repository, dead: set[str], clock: VirtualClock
) -> None:
    store = OnNetwork(repo.store)
    assert collect_now(store).waiting_for == [f"{STALE_LISTING_S:.0f} s of grace"]
    clock.advance(STALE_LISTING_S)
    assert collect_now(store).deleted == len(dead)


def test_the_mark_of_another_collector_is_swept_too(repo: Repository, dead: set[str]) -> None:
    put_mark(repo.store, sorted(dead))
    assert collect_now(repo.store).deleted == len(dead)
    assert keys(repo.store, MARKS) == []


def test_marked_files_are_not_marked_again(repo: Repository, dead: set[str]) -> None:
    put_mark(repo.store, sorted(dead))
    Lease(repo.store, purpose="slow")
    assert collect_now(repo.store).pending_marks == 1


def test_a_mark_stays_while_what_it_names_is_needed_again(repo: Repository, dead: set[str]) -> None:
    put_mark(repo.store, [pack_key(pack_of(repo, "a", "x").pack_id)])
    collect_now(repo.store)
    assert len({key.partition("@")[0] for key in keys(repo.store, MARKS)}) == 1
    assert load_bytes(repo, "a") == {"x": noise(2000, 1)}


def test_more_dead_files_than_a_mark_can_name_go_too(
    repo: Repository, dead: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.repo.upkeep.collect.MARK_KEYS", 1)
    lease = Lease(repo.store, purpose="slow")
    outcome = collect_now(repo.store)
    assert (outcome.pending_marks, outcome.pending_bytes) == (
        len(dead),
        sum(repo.store.stat(key).size_bytes for key in dead),
    )
    lease.release()
    assert collect_now(repo.store).deleted == len(dead)
    assert keys(repo.store, MARKS) == []


# --- when nothing may be touched


def refuse(store: MemoryStore, kind: type[HoldfastError], text: str) -> None:
    before = store.contents()
    with pytest.raises(kind, match=text):
        collect_now(store)
    assert store.contents() == before


@pytest.mark.parametrize("key", ["extra/thing", "zzz", "aaa/b/c", "packs2/" + PACK_ID])
def test_a_prefix_that_is_not_known_forbids_it(store: MemoryStore, repo: Repository, dead: set[str], key: str) -> None:
    store.create(key, b"")
    refuse(store, NewerFormat, f"contains '{re.escape(key)}', which this Holdfast does not know; nothing is collected")


def test_a_feature_that_is_not_known_forbids_it(store: MemoryStore, repo: Repository, dead: set[str]) -> None:
    fields = {"kind": "config", "store_id": "s", "write_id": new_write_id(), "format": {"major": 1, "minor": 0}}
    features = {"read": [], "write": [], "collect": ["hibernation"]}
    create_generation(store, CONFIG, 2, {**fields, "features": features})
    refuse(store, NewerFormat, "needs the feature 'hibernation' to collect")


def test_a_lost_config_forbids_it(store: MemoryStore, repo: Repository, dead: set[str]) -> None:
    for key in keys(store, CONFIG):
        store.delete(key)
    refuse(store, Corrupt, "has no config; nothing is collected")


def test_a_damaged_name_forbids_it(store: MemoryStore, repo: Repository, dead: set[str]) -> None:
    rot(store, record_key("a"), 130)
    refuse(store, Corrupt, f"record {record_key('a')}")


def test_a_lost_manifest_forbids_it(store: MemoryStore, repo: Repository, dead: set[str]) -> None:
    store.delete(f"manifests/{snapshot_of(repo, 'a').manifest.manifest_id}")
    refuse(store, Corrupt, "the manifest of snapshot .* is missing")


def test_a_store_that_is_empty_but_for_its_config_is_fine() -> None:
    store = MemoryStore()
    new_repo(store).verify_may_write()
    assert collect(store, NOW).deleted == 0


def test_an_expired_lease_that_cannot_be_fenced_is_named_and_holds_up_all_that_it_might_use(
    store: MemoryStore, repo: Repository, dead: set[str], clock: VirtualClock
) -> None:
    put_lease(store, MAX_GENERATION)
    own = f"{PACKS}{LEASE_ID}-{'0' * 16}"
    store.create(own, b"pack")
    clock.advance(EXPIRE_S)
    before = data_keys(store)
    outcome = collect_now(store)
    assert outcome.unfenced == [f"{LEASES}{LEASE_ID}@{MAX_GENERATION}"]
    assert (outcome.deleted, outcome.pending_marks) == (0, 1)
    assert data_keys(store) == before
    store.delete(f"{LEASES}{LEASE_ID}@{MAX_GENERATION}")
    collect_now(store)
    assert data_keys(store) == before - dead - {own}


def test_a_record_above_the_last_generation_does_no_harm(store: MemoryStore, repo: Repository, dead: set[str]) -> None:
    store.create(f"{LEASES}{LEASE_ID}@99999999", b"")
    assert collect_now(store).pending_marks == 1
