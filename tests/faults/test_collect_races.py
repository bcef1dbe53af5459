"""Other processes act between two steps of prune, gc, repack or copy: no saved data is lost, and no one is blocked."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from holdfast.errors import LeaseLost, NotFound
from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import MARKS, PACKS, find_shelf, generation_key, lease_stem, snapshot_stem
from holdfast.repo.format.record import encode_record
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.generations import create_generation
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import delete_snapshot, read_name, read_snapshot, set_tag
from holdfast.repo.read.reader import open_snapshot
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.upkeep.prune import Keep, apply_prune, read_prune_plan
from holdfast.repo.upkeep.transfer import apply_repack, copy_snapshot, plan_repack
from tests.faults.damage import flip, replace
from tests.faults.hooked_store import HookedStore, once
from tests.faults.scenario import Content, check_store, random_bytes, read_content, save_content

NOW = Rules(min_age_s=0.0)
OLD: Content = {"shared": random_bytes("shared", 3_000), "own": random_bytes("old", 50_000)}
NEW: Content = {"shared": OLD["shared"], "own": random_bytes("new", 2_000)}


def collect_now(store: ObjectStore) -> None:
    collect(store, NOW)


def show(store: ObjectStore, name: str) -> dict[str, bytes]:
    return read_content(store, read_snapshot(store, name))


@pytest.mark.parametrize("moment", ["list", "create"])
def test_prune_spares_what_was_saved_since_it_was_planned(moment: str) -> None:
    store = MemoryStore()
    save_content(store, "run/1", OLD)
    save_content(store, "run/2", OLD)
    plan = read_prune_plan(store, "run/", Keep(last=1))
    for count in range(1, 6):
        clean = store.clone()
        left = [count]

        def overwrite(met: str, key: str, clean: ObjectStore = clean, left: list[int] = left) -> None:
            if met == moment and key.startswith(snapshot_stem("run/1")):
                left[0] -= 1
                if left[0] == 0:
                    save_content(clean, "run/1", NEW, overwrite=True)

        deleted = apply_prune(HookedStore(clean, before=overwrite), plan).deleted
        if left[0] <= 0:
            assert [snapshot.digest for snapshot in deleted] in ([], [plan.delete[0].digest])
            assert show(clean, "run/1") == NEW, f"the {count}-th {moment}"


def test_prune_passes_over_what_somebody_else_deleted() -> None:
    store = MemoryStore()
    save_content(store, "run/1", OLD)
    save_content(store, "run/2", OLD)
    save_content(store, "run/3", OLD)
    plan = read_prune_plan(store, "run/", Keep(last=1))
    delete_snapshot(store, "run/1")
    assert [snapshot.name for snapshot in apply_prune(store, plan).deleted] == ["run/2"]


def damaged_mark(store: ObjectStore, data: bytes, generation: int = 0) -> str:
    key = generation_key(MARKS + "0" * 26, generation)
    store.create(key, data)
    return key


@pytest.mark.parametrize("data", [b"", b"\0" * 300, b"holdfast-record damaged" + bytes(200)])
@pytest.mark.parametrize("generation", [0, 1])
def test_a_mark_that_power_has_spoilt_does_not_stop_collection(data: bytes, generation: int) -> None:
    store = MemoryStore()
    save_content(store, "a", OLD)
    save_content(store, "a", NEW, overwrite=True)
    if generation:
        damaged_mark(store, encode_record({"kind": "mark", "write_id": "x", "keys": [], "leases": [], "generation": 0}))
    damaged_mark(store, data, generation)
    collect_now(store)
    assert len(store.list(PACKS)) == 2  # OLD's pack holds the shared entry
    assert show(store, "a") == NEW
    save_content(store, "a", {"other": b"x" * 9_000}, overwrite=True)
    collect_now(store)
    assert len(store.list(PACKS)) == 1


def test_a_list_of_leases_whose_mark_is_gone_is_removed() -> None:
    store = MemoryStore()
    save_content(store, "a", OLD)
    # Two collectors: one removed the mark between the other's look at it and its list of leases.
    record = {"kind": "mark", "write_id": "x", "keys": [], "leases": [], "generation": 1}
    damaged_mark(store, encode_record(record), 1)
    collect_now(store)
    assert store.list(MARKS) == []


def test_a_torn_record_above_a_name_keeps_its_number_taken() -> None:
    store = MemoryStore()
    save_content(store, "a", OLD)
    delete_snapshot(store, "a")
    stem = snapshot_stem("a")
    store.create(generation_key(stem, 2), b"")
    # A writer has looked at the name; its record will be the third generation.
    state = read_name(store, "a")
    assert state.next_generation == 3
    collect_now(store)
    assert read_name(store, "a").next_generation == 3, "two writers would both win"


def resurrect(store: MemoryStore) -> None:
    """Bring back what was deleted and not fsynced: the record that was replaced, and a lease that was released."""
    save_content(store, "a", OLD)
    first = store.contents()[generation_key(snapshot_stem("a"), 0)]
    save_content(store, "a", {"other": b"x" * 9_000}, overwrite=True)
    collect_now(store)
    lease_id = read_snapshot(store, "a").lease_id
    store.create(generation_key(snapshot_stem("a"), 0), first)
    fields = {"kind": "lease", "lease": lease_id, "state": "live", "write_id": "x", "purpose": "", "host": "here"}
    create_generation(store, lease_stem(lease_id), 0, {**fields, "pid": 1, "time": 0.0})


def test_a_deletion_that_power_undid_in_part_does_not_stop_collection() -> None:
    store = MemoryStore()
    resurrect(store)
    collect_now(store)
    save_content(store, "b", OLD)
    delete_snapshot(store, "b")
    # The lease that reappeared has no owner: it is fenced in time.
    assert collect(store, Rules(min_age_s=0.0, expire_s=0.0)).deleted == 2
    assert show(store, "a") == {"other": b"x" * 9_000}


class MeanwhileFiles(PosixFiles):
    """Calls a function just before a temporary file gets its name."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act

    def link(self, source: str, target: str) -> None:
        act = self._act
        if act is not None and not os.path.basename(target).startswith("."):
            self._act = None
            act()
        super().link(source, target)


@pytest.mark.parametrize("verb", ["delete", "tag", "collect"])
def test_gc_does_not_take_the_temporary_file_of_who_is_at_work(verb: str, tmp_path: Path) -> None:
    save_content(LocalStore(tmp_path), "a", OLD)
    save_content(LocalStore(tmp_path), "a", NEW, overwrite=True)
    save_content(LocalStore(tmp_path), "b", OLD)
    acts: dict[str, Callable[[ObjectStore], object]] = {
        "delete": lambda store: delete_snapshot(store, "b"),
        "tag": lambda store: set_tag(store, "t", read_snapshot(store, "b")),
        "collect": lambda store: collect(store, NOW),
    }
    acts[verb](LocalStore(tmp_path, files=MeanwhileFiles(lambda: collect(LocalStore(tmp_path), NOW))))
    assert [finding for finding in check_store(LocalStore(tmp_path)) if finding.severity != "note"] == []


def test_who_was_fenced_on_another_host_stays_fenced_whoever_is_alone_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is exported: a writer elsewhere holds no lock that this host knows of."""
    store = LocalStore(tmp_path)
    save_content(store, "a", OLD)

    def collect_twice() -> None:
        monkeypatch.setattr("socket.gethostname", lambda: "here")
        # It has been silent for long.
        assert collect(store, Rules(min_age_s=0.0, expire_s=0.0)).pending_marks == 0
        collect(store, NOW)
        monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")

    class Elsewhere(HookedStore):
        def hold(self, *, exclusive: bool) -> AbstractContextManager[bool]:
            # Locks do not reach the other host.
            return MemoryStore().hold(exclusive=exclusive)

    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    hooked = Elsewhere(store, before=once("create", "manifests/", collect_twice))
    with pytest.raises(LeaseLost):
        save_content(hooked, "b", NEW)
    assert [finding for finding in check_store(store) if finding.severity == "error"] == []


def prepare_sparse(store: ObjectStore) -> None:
    """Leave a pack of which only a little is needed, by two names."""
    save_content(store, "a", OLD)
    save_content(store, "b", {**NEW, "own": b"b" * 3_000})
    save_content(store, "c", {**NEW, "own": b"c" * 3_000})
    delete_snapshot(store, "a")
    collect_now(store)


@pytest.mark.parametrize("operation", ["list", "read", "read_into", "create"])
def test_repack_passes_over_what_was_deleted_meanwhile(operation: str) -> None:
    base = MemoryStore()
    prepare_sparse(base)
    for count in range(1, 12):
        store = base.clone()
        plan = plan_repack(open_repository(store), read_live(store).current)
        first, second = (snapshot.name for snapshot in plan.snapshots)
        assert {first, second} == {"b", "c"}
        left = [count]

        def delete(met: str, _key: str, store: ObjectStore = store, left: list[int] = left, name: str = first) -> None:
            left[0] -= met == operation
            if left[0] == 0:
                left[0] = -1
                delete_snapshot(store, name)
                collect_now(store)

        moved = apply_repack(open_repository(HookedStore(store, before=delete)), plan)
        assert second in [snapshot.name for snapshot in moved]
        assert [finding for finding in check_store(store) if finding.severity == "error"] == []


def test_a_copy_does_not_rely_on_a_record_that_may_be_withdrawn() -> None:
    source, target = MemoryStore("memory://source"), MemoryStore("memory://target")
    save_content(source, "a", OLD)
    save_content(target, "a", OLD)
    held = read_snapshot(target, "a")
    for generation, state in enumerate(("live", "fenced")):
        fields = {"kind": "lease", "lease": held.lease_id, "state": state, "write_id": state, "purpose": ""}
        create_generation(target, lease_stem(held.lease_id), generation, {**fields, "host": "", "pid": 0, "time": 0.0})
    result = copy_snapshot(open_repository(source), read_snapshot(source, "a"), open_repository(target))
    assert not result.existed
    assert read_snapshot(target, "a").generation == held.generation + 1
    assert result.new_bytes == 0


def test_a_copy_that_finds_all_of_it_makes_sure_that_it_lasts() -> None:
    source, target = MemoryStore("memory://source"), MemoryStore("memory://target")
    save_content(source, "a", OLD)
    save_content(target, "a", OLD)
    met: list[tuple[str, str]] = []
    hooked = HookedStore(target, before=lambda name, key: met.append((name, key)))
    assert copy_snapshot(open_repository(source), read_snapshot(source, "a"), open_repository(hooked)).existed
    assert ("sync", find_shelf("a")) in met


def test_a_copy_restores_what_is_rotten_in_the_target() -> None:
    source, target = MemoryStore("memory://source"), MemoryStore("memory://target")
    save_content(source, "a", OLD)
    save_content(target, "a", OLD)
    (pack,) = target.list(PACKS)
    replace(target, pack.key, flip(target.contents()[pack.key], 5_000))
    result = copy_snapshot(open_repository(source), read_snapshot(source, "a"), open_repository(target))
    assert not result.existed
    assert show(target, "a") == OLD


def test_a_reader_follows_a_repack_and_learns_of_a_deletion() -> None:
    store = MemoryStore(clock=VirtualClock())
    prepare_sparse(store)
    repo = open_repository(store)
    with open_snapshot(repo, read_snapshot(store, "b")) as reader, open_snapshot(repo, read_snapshot(store, "c")) as c:
        apply_repack(repo, plan_repack(repo, read_live(store).current))
        collect_now(store)
        assert bytes(reader.read_entry("shared")) == NEW["shared"]
        delete_snapshot(store, "b")
        delete_snapshot(store, "c")
        collect_now(store)
        for each in (reader, c):
            with pytest.raises(NotFound, match="deleted or overwritten"):
                each.read_entry("own")


def test_who_opens_what_was_repacked_since_it_was_listed_opens_what_is_there_now() -> None:
    store = MemoryStore()
    prepare_sparse(store)
    listed = read_snapshot(store, "b")
    repo = open_repository(store)
    apply_repack(repo, plan_repack(repo, read_live(store).current))
    collect_now(store)
    assert read_content(store, listed) == {**NEW, "own": b"b" * 3_000}
