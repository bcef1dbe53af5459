"""A collector that runs in the middle of a save in a bucket waits for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.repo.names.snapshots import delete_snapshot
from tests.faults.hooked_store import HookedStore, once
from tests.faults.scenario import FIRST, SECOND, check_store, holds, read_state, save_content
from tests.servers.collecting import CollectTask
from tests.servers.places import ServerPlace, serve_small


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerPlace]:
    with serve_small(tmp_path_factory.mktemp("server")) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


def save_and_delete(store: CloudStore) -> None:
    save_content(store, "stays", FIRST)
    save_content(store, "goes", SECOND)
    delete_snapshot(store, "goes")


@pytest.mark.parametrize("moment", ["leases/", "manifests/", "snapshots/"])
def test_what_a_save_relies_on_is_not_deleted(place: ServerPlace, moment: str) -> None:
    store = place.open("store")
    save_and_delete(store)
    ends: list[str] = []

    def collect_twice() -> None:
        ends.extend(CollectTask(place.url("store")).run() for _ in range(2))

    save_content(HookedStore(store, before=once("create", moment, collect_twice)), "again", SECOND)

    assert len(ends) == 2
    state = read_state(store)
    assert holds(state, "again", SECOND)
    assert holds(state, "stays", FIRST)
    # Before the lease, no save is under way.
    assert (ends == ["deleted 0"] * 2) == (moment != "leases/")
    assert [str(finding) for finding in check_store(store) if finding.severity != "note"] == []


def test_what_nobody_needs_is_deleted(place: ServerPlace) -> None:
    save_and_delete(place.open("store"))

    deleted = [CollectTask(place.url("store")).run() for _ in range(2)]

    assert deleted != ["deleted 0"] * 2
    assert holds(read_state(place.open("store")), "stays", FIRST)
