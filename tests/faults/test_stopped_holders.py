"""Processes that are stopped while they hold the lock of a store: the others go on, and nothing is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import pytest

from holdfast.errors import LeaseLost
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.names.leases import Lease
from holdfast.repo.names.roots import iter_needed
from holdfast.repo.names.snapshots import delete_snapshot, read_snapshot
from holdfast.repo.upkeep.collect import Rules, collect, publish_mark
from tests.faults.scenario import Content, check_store, holds, random_bytes, read_state, save_content
from tests.faults.stopping import IMPATIENT, CountingStore, Stopped

DEAD: Final[Content] = {"dead": random_bytes("dead", 5_000)}
KEPT: Final[Content] = {"kept": random_bytes("kept", 5_000)}
NEW: Final[Content] = {**DEAD, "new": random_bytes("new", 3_000)}
"""What shares a chunk with a pack that nothing needs."""
EAGER: Final = Rules(min_age_s=0.0, expire_s=0.0)


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A store with `kept`, a pack that nothing needs any more, and what killed processes have left.

    That is a lease, and a mark on what is needed again: so a collector does something each time that it is alone.
    """
    place = str(tmp_path / "store")
    store = LocalStore(place)
    if store.traits.shared_by_hosts:
        pytest.skip("the temporary directory is not on a local filesystem: nobody is ever alone")
    save_content(store, "gone", DEAD)
    save_content(store, "kept", KEPT)
    delete_snapshot(store, "gone")
    Lease(store, purpose="killed")
    needed = frozenset(iter_needed(store, read_snapshot(store, "kept")))
    publish_mark(store, [info for info in store.iter_objects("") if info.key in needed])
    return place


def copy_store(root: str) -> str:
    place = f"{root}-copy"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(root, place)
    return place


def save_new(store: ObjectStore) -> object:
    return save_content(store, "new", NEW)


def collect_plainly(store: ObjectStore) -> object:
    return collect(store)


def collect_eagerly(store: ObjectStore) -> object:
    return collect(store, EAGER)


def verify_intact(place: str) -> None:
    store = LocalStore(place, lock_wait=IMPATIENT)
    state = read_state(store)
    assert holds(state, "kept", KEPT)
    assert holds(state, "new", NEW)
    assert [found for found in check_store(store) if found.severity == "error"] == []


def list_stops(root: str) -> tuple[list[int], int]:
    """Return at which operations a collector is alone, and how many operations it does."""
    counting = CountingStore(LocalStore(copy_store(root)))
    collect(counting)
    assert len(counting.while_alone) > 5
    return counting.while_alone, counting.count


def is_held_alone(place: str) -> bool:
    """Tell whether a process has the lock for itself.

    A collector that stops at a later operation may not: how many there are before depends on random names.
    """
    with LocalStore(place, lock_wait=IMPATIENT).hold(exclusive=False) as is_shared:
        return not is_shared


def find_commit(root: str) -> int:
    """Return which operation of a save creates its record."""
    (commit,) = [number for number, key in _read_created(root).items() if key.startswith("snapshots/")]
    return commit


def find_renewal(root: str) -> int:
    """Return which operation of a save renews its lease before the commit."""
    commit = find_commit(root)
    created = _read_created(root)
    return max(number for number, key in created.items() if key.startswith("leases/") and number < commit)


def _read_created(root: str) -> dict[int, str]:
    counting = CountingStore(LocalStore(copy_store(root)))
    save_new(counting)
    return counting.created


def test_a_save_beside_a_collector_that_is_stopped_anywhere_with_the_lock_goes_on_and_keeps_its_bytes(
    root: str,
) -> None:
    stops, _ = list_stops(root)
    for stop in stops[::2]:
        place = copy_store(root)
        with Stopped(place, collect_plainly, stop_at=stop) as collector:
            assert collector.is_stopped
            save_new(LocalStore(place, lock_wait=IMPATIENT))
            assert collector.finish() == 0
        verify_intact(place)


def test_a_save_without_the_lock_that_is_stopped_before_its_commit_keeps_its_bytes(root: str) -> None:
    stops, _ = list_stops(root)
    commit = find_commit(root)
    for stop in stops[::3]:
        place = copy_store(root)
        with (
            Stopped(place, collect_plainly, stop_at=stop) as collector,
            Stopped(place, save_new, stop_at=commit) as saver,
        ):
            assert saver.is_stopped
            assert collector.finish() == 0
            collect_plainly(LocalStore(place, lock_wait=IMPATIENT))
            assert saver.finish() == 0
        verify_intact(place)


@pytest.mark.slow
def test_a_second_collector_beside_one_that_is_stopped_with_the_lock_leaves_the_rest_to_the_next(root: str) -> None:
    stops, _ = list_stops(root)
    times_alone = 0
    for stop in stops:
        place = copy_store(root)
        with Stopped(place, collect_plainly, stop_at=stop) as collector:
            is_alone = is_held_alone(place)
            save_new(LocalStore(place, lock_wait=IMPATIENT))
            outcome = collect(LocalStore(place, lock_wait=IMPATIENT), EAGER)
            if is_alone:
                times_alone += 1
                assert outcome.pending_marks > 0
                assert "another collection, which holds the lock" in outcome.waiting_for
            assert collector.finish() == 0
        verify_intact(place)
        collect(LocalStore(place))
        verify_intact(place)
    assert times_alone > 5


def test_a_collector_beside_a_save_that_is_stopped_with_the_lock_goes_by_its_lease(root: str) -> None:
    commit = find_commit(root)
    place = copy_store(root)
    with Stopped(place, save_new, stop_at=commit) as saver:
        outcome = collect(LocalStore(place), Rules(min_age_s=0.0))
        assert outcome.deleted == 0
        assert outcome.pending_marks > 0
        # The stopped save, and a killed one whose lease is young.
        assert outcome.waiting_for[0].startswith("2 under way")
        assert saver.finish() == 0
    verify_intact(place)
    assert collect(LocalStore(place)).pending_marks == 0


def test_a_save_that_is_stopped_with_the_lock_for_too_long_is_fenced_and_told(root: str) -> None:
    def save_and_be_told(store: ObjectStore) -> object:
        with pytest.raises(LeaseLost):
            save_new(store)
        return None

    renewal = find_renewal(root)
    place = copy_store(root)
    with Stopped(place, save_and_be_told, stop_at=renewal) as saver:
        outcome = collect(LocalStore(place), EAGER)
        assert outcome.deleted > 0
        assert saver.finish() == 0
    save_new(LocalStore(place))
    verify_intact(place)


def test_a_collector_that_was_killed_while_it_was_alone_blocks_nobody(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    stops, _ = list_stops(root)
    place = copy_store(root)
    Stopped(place, collect_plainly, stop_at=stops[len(stops) // 2]).kill()
    save_new(LocalStore(place, lock_wait=IMPATIENT))
    assert not caplog.records
    verify_intact(place)


@pytest.mark.slow
def test_a_save_beside_a_collector_that_is_stopped_anywhere_at_all_keeps_its_bytes(root: str) -> None:
    _, count = list_stops(root)
    for stop in range(1, count + 1):
        place = copy_store(root)
        with Stopped(place, collect_eagerly, stop_at=stop) as collector:
            save_new(LocalStore(place, lock_wait=IMPATIENT))
            assert collector.finish() == 0
        verify_intact(place)
