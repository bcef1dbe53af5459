"""Garbage collection in a directory, with the exclusive lock and while another process writes."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import LEASES, MARKS, PACKS, pack_key
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.leases import Lease
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.upkeep.collect import Rules, collect, read_waiting
from tests.kit.saving import Watched, keys, load_bytes, new_repo, noise, pack_of, save_bytes
from tests.kit.standing import LEASE_ID, data_keys, put_mark, show_lease


@pytest.fixture
def local(tmp_path: Path) -> Repository:
    """A directory with `a`, and what is left of `gone`."""
    store = LocalStore(str(tmp_path / "store"))
    if store.traits.shared_by_hosts:
        pytest.skip("the temporary directory is not on a local filesystem")
    repo = new_repo(store)
    save_bytes(repo, "a", {"x": noise(2000, 1)})
    save_bytes(repo, "gone", {"x": noise(3000, 2)})
    delete_snapshot(store, "gone")
    return repo


def test_alone_space_is_freed_at_once_however_young(local: Repository) -> None:
    assert collect(local.store).deleted == 2
    assert len(data_keys(local.store)) == 2
    assert load_bytes(local, "a") == {"x": noise(2000, 1)}


def test_while_a_process_writes_young_files_are_kept(local: Repository) -> None:
    with local.store.hold(exclusive=False):
        assert collect(local.store).deleted == 0
    assert collect(local.store).deleted == 2


def test_alone_the_lease_of_a_dead_save_is_removed_and_its_files_go(local: Repository) -> None:
    lease = Lease(local.store, purpose="killed")
    local.store.create(f"packs/{lease.lease_id}-{'0' * 16}", b"half")
    outcome = collect(local.store)
    assert (outcome.leases, outcome.deleted) == (1, 3)
    assert keys(local.store, LEASES) == []


def test_beside_a_writer_no_live_lease_is_removed(local: Repository) -> None:
    Lease(local.store, purpose="at work")
    with local.store.hold(exclusive=False):
        collect(local.store)
    assert len(keys(local.store, LEASES)) == 1


def test_a_live_lease_of_another_host_rules_out_exclusive_work(local: Repository) -> None:
    show_lease(local.store, "live", host=socket.gethostname() + "-other")
    outcome = collect(local.store)
    assert (outcome.deleted, outcome.leases) == (0, 0)
    assert keys(local.store, LEASES) == [f"{LEASES}{LEASE_ID}@00000000"]


def test_with_the_exclusive_lock_temporary_files_of_any_age_are_removed(local: Repository, tmp_path: Path) -> None:
    (tmp_path / "store/packs/.tmp-dead").write_bytes(b"half")
    assert collect(local.store).debris >= 1
    assert not (tmp_path / "store/packs/.tmp-dead").exists()


def test_while_a_process_writes_young_temporary_files_are_kept(local: Repository, tmp_path: Path) -> None:
    (tmp_path / "store/packs/.tmp-young").write_bytes(b"half")
    with local.store.hold(exclusive=False):
        collect(local.store)
    assert (tmp_path / "store/packs/.tmp-young").exists()


def needed_pack(local: Repository) -> str:
    return pack_key(pack_of(local, "a", "x").pack_id)


def test_with_the_exclusive_lock_a_mark_on_needed_files_is_removed_and_they_are_reused(local: Repository) -> None:
    put_mark(local.store, [needed_pack(local)])
    assert collect(local.store).deleted == 2
    assert keys(local.store, MARKS) == []
    save_bytes(local, "b", {"y": noise(2000, 1)})
    assert pack_key(pack_of(local, "b", "y").pack_id) == needed_pack(local)


def test_with_the_exclusive_lock_a_mark_is_removed_when_its_dead_files_are_deleted(local: Repository) -> None:
    put_mark(local.store, sorted(data_keys(local.store)))
    assert collect(local.store).deleted == 2
    assert keys(local.store, MARKS) == []
    assert load_bytes(local, "a") == {"x": noise(2000, 1)}


def test_while_a_process_writes_a_mark_on_needed_files_is_kept(local: Repository) -> None:
    put_mark(local.store, [needed_pack(local)])
    with local.store.hold(exclusive=False):
        collect(local.store)
    assert len({key.partition("@")[0] for key in keys(local.store, MARKS)}) == 1


def test_during_a_save_on_another_host_a_mark_on_needed_files_is_kept(local: Repository) -> None:
    put_mark(local.store, [needed_pack(local)])
    read_waiting(local.store, MARKS + "f" * 24)
    show_lease(local.store, "live", host=socket.gethostname() + "-other")
    assert collect(local.store).pending_marks == 0
    assert len({key.partition("@")[0] for key in keys(local.store, MARKS)}) == 1


class Asking(Watched):
    """Checks at each deletion of a pack whether another process could get the exclusive lock."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.told: list[bool] = []

    def delete(self, key: str) -> None:
        if key.startswith(PACKS):
            with LocalStore(self.inner.url).hold(exclusive=True) as is_alone:
                self.told.append(is_alone)
        super().delete(key)


def test_during_a_sweep_there_is_no_exclusive_lock(local: Repository) -> None:
    store = Asking(local.store)
    assert collect(store).deleted == 2
    assert store.told == [False]


def test_a_mark_that_another_collector_removed_while_we_waited_is_not_swept(local: Repository) -> None:
    """Who saves since then has not seen it, and may be about to rely on what it named."""
    pack = needed_pack(local)
    put_mark(local.store, [pack])
    show_lease(local.store, "live")
    other = LocalStore(local.store.url)
    writer = ExitStack()
    writer.enter_context(other.hold(exclusive=False))

    def nap(_seconds: float) -> None:
        writer.close()
        collect(other)
        delete_snapshot(other, "a")
        writer.enter_context(other.hold(exclusive=False))

    with writer:
        assert collect(local.store, Rules(wait_s=60.0, sleep=nap)).deleted == 0
    assert keys(local.store, MARKS) == []
    assert pack in data_keys(local.store)


@pytest.mark.parametrize("data", [b"", b"\0" * 500, b"holdfast-record damaged" + bytes(200)])
def test_alone_damaged_marks_are_removed(local: Repository, data: bytes) -> None:
    local.store.create(f"{MARKS}{'e' * 24}@00000000", data)
    collect(local.store)
    assert keys(local.store, MARKS) == []


def test_beside_a_writer_a_damaged_mark_stays(local: Repository) -> None:
    local.store.create(f"{MARKS}{'e' * 24}@00000000", b"\0" * 500)
    with local.store.hold(exclusive=False):
        collect(local.store)
    assert keys(local.store, MARKS) == [f"{MARKS}{'e' * 24}@00000000"]
