"""Garbage collection in a directory where nobody else is at work, and where somebody is."""

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
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.upkeep.sweep import read_waiting
from tests.kit.saving import Watched, keys, load_bytes, new_repo, noise, pack_of, save_bytes
from tests.kit.standing import LEASE_ID, data_keys, put_mark, show_lease


@pytest.fixture
def local(tmp_path: Path) -> Repository:
    """A directory with `a`, and what is left of `gone`."""
    store = LocalStore(str(tmp_path / "store"))
    if store.traits.network:
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


def test_beside_a_writer_what_is_young_stays(local: Repository) -> None:
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


def test_a_live_lease_of_another_host_means_that_nobody_is_alone(local: Repository) -> None:
    show_lease(local.store, "live", host=socket.gethostname() + "-other")
    outcome = collect(local.store)
    assert (outcome.deleted, outcome.leases) == (0, 0)
    assert keys(local.store, LEASES) == [f"{LEASES}{LEASE_ID}@00000000"]


def test_alone_temporary_files_are_removed_whatever_their_age(local: Repository, tmp_path: Path) -> None:
    (tmp_path / "store/packs/.tmp-dead").write_bytes(b"half")
    assert collect(local.store).debris >= 1
    assert not (tmp_path / "store/packs/.tmp-dead").exists()


def test_beside_a_writer_young_temporary_files_stay(local: Repository, tmp_path: Path) -> None:
    (tmp_path / "store/packs/.tmp-young").write_bytes(b"half")
    with local.store.hold(exclusive=False):
        collect(local.store)
    assert (tmp_path / "store/packs/.tmp-young").exists()


def needed_pack(local: Repository) -> str:
    return pack_key(pack_of(local, "a", "x").pack_id)


def test_alone_a_mark_on_what_is_needed_again_is_removed_and_that_is_shared_again(local: Repository) -> None:
    put_mark(local.store, [needed_pack(local)])
    assert collect(local.store).deleted == 2
    assert keys(local.store, MARKS) == []
    save_bytes(local, "b", {"y": noise(2000, 1)})
    assert pack_key(pack_of(local, "b", "y").pack_id) == needed_pack(local)


def test_alone_a_mark_goes_once_what_nobody_needs_has_gone(local: Repository) -> None:
    put_mark(local.store, sorted(data_keys(local.store)))
    assert collect(local.store).deleted == 2
    assert keys(local.store, MARKS) == []
    assert load_bytes(local, "a") == {"x": noise(2000, 1)}


def test_beside_a_writer_a_mark_on_what_is_needed_again_stays(local: Repository) -> None:
    put_mark(local.store, [needed_pack(local)])
    with local.store.hold(exclusive=False):
        collect(local.store)
    assert len({key.partition("@")[0] for key in keys(local.store, MARKS)}) == 1


def test_beside_a_save_of_another_host_a_mark_on_what_is_needed_again_stays(local: Repository) -> None:
    put_mark(local.store, [needed_pack(local)])
    read_waiting(local.store, MARKS + "f" * 24)
    show_lease(local.store, "live", host=socket.gethostname() + "-other")
    assert collect(local.store).pending_marks == 0
    assert len({key.partition("@")[0] for key in keys(local.store, MARKS)}) == 1


class Asking(Watched):
    """Asks at each deletion of a pack whether somebody else would find itself alone."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.told: list[bool] = []

    def delete(self, key: str) -> None:
        if key.startswith(PACKS):
            with LocalStore(self.inner.url).hold(exclusive=True) as is_alone:
                self.told.append(is_alone)
        super().delete(key)


def test_nobody_is_alone_beside_a_sweep(local: Repository) -> None:
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
