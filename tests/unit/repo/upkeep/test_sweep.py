"""Marks and sweeps: marked files are deleted if no snapshot needs them, and nothing else is."""

from __future__ import annotations

import pytest

from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.repo.format.layout import MANIFESTS, MARKS, MAX_GENERATION, PACKS, manifest_key, pack_key
from holdfast.repo.format.record import MAX_RECORD_BYTES, encode_record
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.leases import EXPIRE_S, Lease, read_marked
from holdfast.repo.names.roots import Live, read_leases, read_live
from holdfast.repo.upkeep.collect import (
    MARK_KEYS,
    fence,
    fence_stale_leases,
    iter_marks,
    publish_mark,
    publish_marks,
    read_idle_marks,
    read_waiting,
    sweep,
)
from tests.kit.saving import PACK_ID, keys, noise, record_key, rot, save_bytes, snapshot_of
from tests.kit.standing import LEASE_ID, collect_now, data_keys, put_lease, put_mark, show_lease

OTHER_ID = "b" * 24


def test_a_published_mark_is_read_by_writers_and_collectors(store: MemoryStore, clock: VirtualClock) -> None:
    store.create(pack_key(PACK_ID), b"dead")
    clock.advance(5)
    stem = publish_mark(store, list(store.iter_objects(PACKS)))
    (mark,) = iter_marks(store)
    assert (mark.stem, mark.keys, mark.published_s) == (stem, (pack_key(PACK_ID),), store.clock())
    assert read_marked(store) == {pack_key(PACK_ID)}


def test_more_files_than_fit_into_one_mark_need_several(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.repo.upkeep.collect.MARK_KEYS", 2)
    dead = {f"{PACKS}{'0' * 24}-{number:016x}" for number in range(5)}
    for key in dead:
        store.create(key, b"dead")
    stems = publish_marks(store, list(store.iter_objects(PACKS)))
    assert sorted(len(mark.keys) for mark in iter_marks(store)) == [1, 2, 2]
    assert {mark.stem for mark in iter_marks(store)} == set(stems)
    assert read_marked(store) == dead


def test_a_full_mark_fits_into_a_record() -> None:
    longest = MANIFESTS + PACK_ID
    fields = {"kind": "mark", "write_id": "0" * 32, "generation": 0, "keys": [longest] * MARK_KEYS, "leases": []}
    assert len(encode_record(fields)) < MAX_RECORD_BYTES


@pytest.mark.parametrize("data", [b"", b"\0" * 300, encode_record({"kind": "lease", "keys": []}),
                                  encode_record({"kind": "mark", "keys": "packs"})])  # fmt: skip
def test_a_mark_that_cannot_be_believed_is_passed_over(store: MemoryStore, data: bytes) -> None:
    store.create(f"{MARKS}{OTHER_ID}@00000000", data)
    good = put_mark(store, [])
    assert [mark.stem for mark in iter_marks(store)] == [good]


def test_a_sweep_deletes_dead_files_and_then_the_mark(store: MemoryStore) -> None:
    store.create(pack_key(PACK_ID), b"dead")
    put_mark(store, [pack_key(PACK_ID), manifest_key(PACK_ID)])
    (mark,) = iter_marks(store)
    read_waiting(store, mark.stem)
    assert sweep(store, mark, Live()) == [pack_key(PACK_ID)]
    assert keys(store, "") == []


def test_a_mark_stays_while_something_it_names_is_needed_again(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    needed = data_keys(repo.store)
    repo.store.create(pack_key(PACK_ID), b"dead")
    put_mark(repo.store, [*needed, pack_key(PACK_ID)])
    (mark,) = iter_marks(repo.store)
    assert sweep(repo.store, mark, read_live(repo.store)) == [pack_key(PACK_ID)]
    assert list(iter_marks(repo.store)) == [mark]
    assert data_keys(repo.store) == needed


def test_a_mark_is_idle_if_all_that_is_left_of_what_it_names_is_needed(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    needed = sorted(data_keys(repo.store))
    repo.store.create(pack_key(PACK_ID), b"dead")
    idle = put_mark(repo.store, [needed[0], manifest_key(PACK_ID)], "a" * 24)
    put_mark(repo.store, [needed[0], pack_key(PACK_ID)], "b" * 24)
    put_mark(repo.store, [manifest_key(PACK_ID)], "c" * 24)
    assert read_idle_marks(repo.store, read_live(repo.store)) == [idle]


HOSTILE: list[Json] = [
    record_key("a"), "config/00000000", "config/00000001", "tags/best@00000000", "index/" + "0" * 64,
    "packs/", "packs/../config/00000000", "../outside", "/etc/passwd", "", "packs", "packs/" + PACK_ID + "/x",
    "PACKS/" + PACK_ID, "manifests/" + PACK_ID.upper(), "packs/" + PACK_ID + "\n", "\x00", "packs/%2e%2e",
    "a" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("key", HOSTILE, ids=lambda key: repr(key[:30]))
def test_a_mark_cannot_make_a_collector_delete_anything_but_packs_and_manifests(repo: Repository, key: str) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    before = {info.key for info in repo.store.iter_objects("")}
    put_mark(repo.store, [key])
    outcome = collect_now(repo.store)
    assert {info.key for info in repo.store.iter_objects("")} == before
    assert (outcome.deleted, outcome.pending_marks) == (0, 0)


def test_a_mark_on_live_files_deletes_nothing(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    before = data_keys(repo.store)
    put_mark(repo.store, sorted(before))
    assert collect_now(repo.store).deleted == 0
    assert data_keys(repo.store) == before


# --- which leases have to be waited for


def test_a_mark_waits_for_those_alive_when_it_was_published_and_no_others(store: MemoryStore) -> None:
    stem = put_mark(store, [])
    show_lease(store, "live")
    show_lease(store, "released", OTHER_ID)
    assert read_waiting(store, stem) == {LEASE_ID}
    show_lease(store, "live", "c" * 24)
    assert read_waiting(store, stem) == {LEASE_ID}


@pytest.mark.parametrize("damage", ["torn", "rotten"])
def test_a_damaged_list_of_leases_is_replaced_by_the_leases_that_are_live_now(store: MemoryStore, damage: str) -> None:
    stem = put_mark(store, [])
    read_waiting(store, stem)
    if damage == "torn":
        store.delete(f"{stem}@00000001")
        store.create(f"{stem}@00000001", b"holdfast-")
    else:
        rot(store, f"{stem}@00000001", 130)
    show_lease(store, "live")
    assert read_waiting(store, stem) == {LEASE_ID}


def test_those_that_ended_do_not_block(store: MemoryStore) -> None:
    show_lease(store, "released")
    show_lease(store, "fenced", OTHER_ID)
    assert fence_stale_leases(store, [LEASE_ID, OTHER_ID, "c" * 24], expire_s=EXPIRE_S) == []


def test_one_that_lives_blocks_until_it_has_shown_nothing_for_long(store: MemoryStore, clock: VirtualClock) -> None:
    lease = Lease(store, purpose="save")
    clock.advance(EXPIRE_S - 1)
    assert [view.lease_id for view in fence_stale_leases(store, [lease.lease_id], expire_s=EXPIRE_S)] == [
        lease.lease_id
    ]
    clock.advance(1)
    assert fence_stale_leases(store, [lease.lease_id], expire_s=EXPIRE_S) == []
    assert read_leases(store)[lease.lease_id].state == "fenced"


def test_a_lease_that_is_renewed_at_the_same_moment_is_not_fenced(store: MemoryStore) -> None:
    lease = Lease(store, purpose="save")
    view = read_leases(store)[lease.lease_id]
    lease.renew()
    assert not fence(store, view)
    assert read_leases(store)[lease.lease_id].is_live


def test_a_fence_on_a_lease_that_is_gone_leaves_no_trace(store: MemoryStore) -> None:
    lease = Lease(store, purpose="save")
    view = read_leases(store)[lease.lease_id]
    lease.release()
    lease.forget()
    fence(store, view)
    assert keys(store, "leases/") == []


@pytest.mark.parametrize("generations", [(MAX_GENERATION,), (0, MAX_GENERATION)])
def test_a_lease_whose_generations_are_used_up_cannot_be_fenced_and_counts_as_alive(
    store: MemoryStore, clock: VirtualClock, generations: tuple[int, ...]
) -> None:
    for generation in generations:
        put_lease(store, generation)
    clock.advance(EXPIRE_S)
    before = store.contents()
    (view,) = fence_stale_leases(store, [LEASE_ID], expire_s=EXPIRE_S)
    assert (view.lease_id, view.is_exhausted) == (LEASE_ID, True)
    assert store.contents() == before


def test_the_snapshot_stays_whatever_is_swept(repo: Repository) -> None:
    save_bytes(repo, "a", {"x": noise(2000)})
    put_mark(repo.store, [record_key("a"), *data_keys(repo.store)])
    collect_now(repo.store)
    assert snapshot_of(repo, "a").num_entries == 1
