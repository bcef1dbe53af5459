"""On network filesystems no lock proves that no process writes: collectors mark, wait for leases, and sweep."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import VirtualClock
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import LEASES, MARKS, PACKS, lease_stem, new_lease_id
from holdfast.repo.names.generations import create_generation
from holdfast.repo.names.snapshots import delete_snapshot, read_snapshot
from holdfast.repo.upkeep.collect import STALE_LISTING_S, Rules, collect
from tests.faults.hooked_store import HookedStore, once
from tests.faults.scenario import Content, check_store, random_bytes, read_content, save_content
from tests.faults.unsynced import UnsyncedFiles

CONTENT: Content = {"own": random_bytes("own", 5_000)}
OTHER: Content = {"own": random_bytes("other", 5_000)}


class NetworkFiles(UnsyncedFiles):
    """Files of a filesystem that other hosts reach."""

    def read_filesystem_type(self, path: str) -> str:
        return "nfs4"


class ClockedStore(HookedStore):
    """A store whose clock advances only when a process waits; records requests for the exclusive lock."""

    def __init__(self, inner: ObjectStore, clock: VirtualClock) -> None:
        super().__init__(inner)
        self.held_alone: list[bool] = []
        self._clock = clock

    def clock(self) -> float:
        return self.inner.clock() + self._clock.now()

    def hold(self, *, exclusive: bool) -> AbstractContextManager[bool]:
        held = super().hold(exclusive=exclusive)
        if exclusive:
            with held as is_held:
                self.held_alone.append(is_held)
            held = super().hold(exclusive=True)
        return held


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(start_s=0.0)


@pytest.fixture
def store(tmp_path: Path, clock: VirtualClock) -> ClockedStore:
    return ClockedStore(LocalStore(tmp_path, files=NetworkFiles()), clock)


def save_and_delete(store: ObjectStore) -> None:
    save_content(store, "stays", OTHER)
    save_content(store, "goes", CONTENT)
    delete_snapshot(store, "goes")


def test_nobody_is_alone_on_a_network_and_the_grace_is_waited_for(store: ClockedStore, clock: VirtualClock) -> None:
    save_and_delete(store)
    outcome = collect(store, Rules(min_age_s=0.0))
    assert outcome.deleted == 0
    assert outcome.pending_marks == 1
    assert "grace" in outcome.waiting_for[0]
    clock.advance(STALE_LISTING_S - 5.0)
    assert collect(store, Rules(min_age_s=0.0)).deleted == 0
    clock.advance(6.0)
    assert collect(store, Rules(min_age_s=0.0)).deleted == 2
    assert store.held_alone
    assert not any(store.held_alone)
    assert store.list(MARKS) == []


def test_a_shorter_grace_is_not_granted_on_a_network(store: ClockedStore) -> None:
    save_and_delete(store)
    assert collect(store, Rules(min_age_s=0.0, grace_s=1.0)).pending_marks == 1


def test_who_waits_sweeps_when_the_grace_is_over(store: ClockedStore, clock: VirtualClock) -> None:
    save_and_delete(store)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        clock.advance(10.0)

    assert collect(store, Rules(min_age_s=0.0, wait_s=600.0, sleep=sleep)).deleted == 2
    assert 10.0 * len(waited) >= STALE_LISTING_S


def test_two_collectors_on_a_network_wait_for_the_same_save_and_take_nothing_from_it(
    store: ClockedStore, clock: VirtualClock
) -> None:
    save_and_delete(store)
    first, second = Rules(min_age_s=0.0), Rules(min_age_s=0.0)

    def collect_both() -> None:
        for rules in (first, second):
            outcome = collect(store, rules)
            assert outcome.deleted == 0
            assert "under way" in outcome.waiting_for[0]
        # The grace is over, but the save is not.
        clock.advance(STALE_LISTING_S + 1.0)
        assert collect(store, first).deleted == 0

    # The save has chosen to rely on what is dead, and then both collectors mark it.
    hook = once("create", "manifests/", collect_both)
    save_content(HookedStore(store, before=hook), "later", CONTENT)
    assert hook.has_acted
    clock.advance(STALE_LISTING_S + 1.0)
    collect(store, first)
    collect(store, second)
    assert read_content(store, read_snapshot(store, "later")) == CONTENT
    assert not any(store.held_alone)
    assert [finding for finding in check_store(store) if finding.severity == "error"] == []


def leave_lease(store: ObjectStore, host: str) -> str:
    lease_id = new_lease_id()
    fields = {"kind": "lease", "lease": lease_id, "state": "live", "write_id": "x", "purpose": "save", "host": host}
    create_generation(store, lease_stem(lease_id), 0, {**fields, "pid": 1, "time": 0.0}, durable=False)
    return lease_id


@pytest.mark.parametrize("host", ["another-host", ""])
def test_on_local_files_too_a_lease_of_another_host_is_waited_for(host: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=UnsyncedFiles())
    save_and_delete(store)
    lease_id = leave_lease(store, host)
    outcome = collect(store, Rules(min_age_s=0.0))
    assert outcome.deleted == 0
    assert "1 under way: save" in outcome.waiting_for
    assert len(store.list(PACKS)) == 2
    # It has shown nothing for long: it is fenced, and its fence stays in case its owner only sleeps.
    assert collect(store, Rules(min_age_s=0.0, expire_s=0.0)).deleted == 2
    collect(store, Rules(min_age_s=0.0, expire_s=0.0))
    assert {info.key.partition("@")[0] for info in store.list(LEASES)} == {lease_stem(lease_id)}


def test_on_local_files_a_lease_of_this_host_that_nobody_holds_is_not_waited_for(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=UnsyncedFiles())
    save_and_delete(store)
    leave_lease(store, socket.gethostname())
    assert collect(store, Rules()).deleted == 2
    assert store.list(LEASES) == []
