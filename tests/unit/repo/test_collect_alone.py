"""Garbage collection in a directory where nobody else is at work, and where somebody is."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from holdfast.repo.collect import collect
from holdfast.repo.layout import LEASES, MARKS
from holdfast.repo.leases import Lease
from holdfast.repo.repository import Repository
from holdfast.repo.snapshots import delete_snapshot
from holdfast.store.local import LocalStore
from tests.unit.repo.saving import keys, load_bytes, new_repo, noise, save_bytes
from tests.unit.repo.standing import LEASE_ID, data_keys, show_lease


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
