"""Collection on a store that deletes many objects at once, in no order: what comes first is a request of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from holdfast.repo.format.layout import LEASES, MANIFESTS, MARKS, PACKS, SNAPSHOTS, split_generation
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.upkeep.collect import collect
from tests.kit.saving import keys, load_bytes, new_repo, noise, save_bytes
from tests.kit.standing import NOW, put_lease
from tests.kit.waiting_store import WaitingStore


class Bulk(WaitingStore):
    """Remembers which objects each request deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[list[str]] = []

    def delete(self, key: str) -> None:
        self.deleted.append([key])
        super().delete(key)

    def delete_many(self, keys: Sequence[str]) -> None:
        self.deleted += [list(keys)] if keys else []
        for key in keys:
            super().delete(key)

    def find_requests(self, prefix: str) -> list[list[str]]:
        """Return what each request deleted below a prefix."""
        found = ([key for key in request if key.startswith(prefix)] for request in self.deleted)
        return [request for request in found if request]


@pytest.fixture
def store() -> Bulk:
    return Bulk()


@pytest.fixture
def repo(store: Bulk) -> Repository:
    return new_repo(store)


def test_dead_records_of_a_name_are_deleted_lowest_first_and_those_of_several_names_together(
    repo: Repository, store: Bulk
) -> None:
    for number in range(4):
        for name in ("a", "b", "c")[number % 2 :]:
            save_bytes(repo, name, {"x": noise(700, number)}, overwrite=True)
    store.deleted.clear()

    collected = collect(store, NOW)

    requests = [[split_generation(key) for key in request] for request in store.find_requests(SNAPSHOTS)]
    numbers = [{split[1] for split in request if split} for request in requests]
    assert [len(request) for request in requests] == [3, 2, 2]
    assert numbers == [{0}, {1}, {2}]
    assert collected.records == 7
    assert all(max(Counter(split[0] for split in request if split).values()) == 1 for request in requests)
    assert load_bytes(repo, "b") == {"x": noise(700, 3)}


def test_the_highest_file_of_a_lease_is_deleted_after_the_others(store: Bulk, repo: Repository) -> None:
    save_bytes(repo, "a", {"x": b"x"})
    for lease_id in ("a" * 24, "b" * 24):
        for generation, state in enumerate(("live", "live", "released")):
            put_lease(store, generation, state, lease_id)
    store.deleted.clear()

    collected = collect(store, NOW)

    lower, highest = store.find_requests(LEASES)
    assert {key[-1] for key in lower} == {"0", "1"}
    assert {key[-1] for key in highest} == {"2"}
    assert (len(lower), len(highest), collected.leases) == (4, 2, 2)


def test_a_mark_is_deleted_after_its_files(store: Bulk, repo: Repository) -> None:
    for name in ("a", "b", "c"):
        save_bytes(repo, name, {"x": noise(700, ord(name))})
    for name in ("a", "b"):
        delete_snapshot(store, name)
    store.deleted.clear()

    assert collect(store, NOW).deleted == 4

    wanted = (PACKS, MANIFESTS, MARKS)
    order = [request for request in store.deleted if request[0].startswith(wanted)]
    assert [len(request) for request in order] == [4, 1, 1]
    assert [request[0].rpartition("@")[2] for request in order[1:]] == ["00000001", "00000000"]
    assert keys(store, MARKS) == []
