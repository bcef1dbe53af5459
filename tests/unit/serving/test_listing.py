"""The listing is read at most once a second, and its mark changes with the store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import StoreGone
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.repo.names.snapshots import read_snapshot, set_tag
from holdfast.serving.remembered import WatchedListing
from tests.kit.recordings import Recording, write_recorded
from tests.kit.saving import new_repo, save_bytes


def test_the_store_is_read_once_a_second_and_the_mark_follows_it() -> None:
    clock = VirtualClock(start_s=1e9)
    repo = new_repo(MemoryStore(clock=clock))
    save_bytes(repo, "run/1", {"x": b"1"})
    listing = WatchedListing(repo)
    first = listing.read()
    save_bytes(repo, "run/2", {"x": b"2"})

    assert listing.read() is first
    clock.advance(1.5)
    second = listing.read()
    assert {each.snapshot.name for each in second.facts} == {"run/1", "run/2"}
    assert second.mark != first.mark
    clock.advance(1.5)
    assert listing.read().mark == second.mark
    set_tag(repo.store, "best", read_snapshot(repo.store, "run/1"))
    clock.advance(1.5)
    third = listing.read()
    assert third.mark != second.mark
    assert [tag.name for tag in third.tags["run/1"]] == ["best"]


def test_a_recorded_run_changes_its_own_mark_and_is_no_snapshot() -> None:
    clock = VirtualClock(start_s=1e9)
    repo = new_repo(MemoryStore(clock=clock))
    save_bytes(repo, "a", {"x": b"1"})
    listing = WatchedListing(repo)
    first = listing.read()
    write_recorded(repo, Recording("run", level="digest", steps=1))
    clock.advance(1.5)
    second = listing.read()

    assert second.runs_mark != first.runs_mark
    assert second.mark == first.mark
    assert [each.snapshot.name for each in second.facts] == ["a"]


def test_a_store_that_was_deleted_is_gone(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        store.save("a", {"n": 1})
        listing = WatchedListing(store.repository)
        shutil.rmtree(tmp_path / "store")

        with pytest.raises(StoreGone):
            listing.read()
