"""Reading the manifests of many snapshots: as one by one, in order, with errors in their place, and ahead."""

from __future__ import annotations

import pytest

from holdfast.errors import Corrupt, NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import ManifestRef, manifest_key
from holdfast.repo.format.rank_manifests import (
    Manifests,
    iter_manifests,
    iter_needs,
    read_manifests,
    read_needs,
    take_read,
)
from holdfast.repo.format.source import BytesSource
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.repo.write.transaction import ManifestPart
from holdfast.repo.write.writer import Placement, Request, SaveResult, save
from tests.kit.rounds import count_rounds
from tests.kit.saving import new_repo, noise, rot, save_bytes
from tests.kit.thread_ranks import ThreadRanks, run_threads
from tests.kit.waiting_store import WaitingStore

RANKS = 3


def fill(store: MemoryStore) -> list[ManifestRef]:
    """Save snapshots of one and of several ranks in turn, and return where their manifests are."""
    repo = new_repo(store)
    for number in range(6):
        name = f"run/{number}"
        if number % 2:
            save_bytes(repo, name, {"x": noise(700, number)})
            continue

        def act(ranks: ThreadRanks, name: str = name) -> SaveResult:
            own = BytesSource("own", noise(700, ranks.rank))
            root = ManifestPart({"tree": 1}, [Entry("own", 700, (), dims=1)])
            return save(
                repo, Request(name, [own], places={0: Placement(700, 0, (), ranks.rank)}, root=root), ranks=ranks
            )

        run_threads(RANKS, act)
    return [read_snapshot(store, f"run/{number}").manifest for number in range(6)]


@pytest.mark.parametrize("kind", [MemoryStore, WaitingStore])
def test_each_snapshot_has_what_reading_it_alone_gives(kind: type[MemoryStore]) -> None:
    store = kind()
    refs = fill(store)

    found = [take_read(each) for each in iter_manifests(store, refs)]
    needs = [take_read(each) for each in iter_needs(store, refs)]

    assert [each.digest() for each in found] == [read_manifests(store, ref).digest() for ref in refs]
    assert [len(each.parts) for each in found] == [RANKS, 0, RANKS, 0, RANKS, 0]
    assert [each.size_bytes for each in found] == [read_manifests(store, ref).size_bytes for ref in refs]
    assert needs == [read_needs(store, ref) for ref in refs]
    assert [len(each.manifests) for each in needs] == [1 + RANKS, 1, 1 + RANKS, 1, 1 + RANKS, 1]


@pytest.mark.parametrize("kind", [MemoryStore, WaitingStore])
def test_an_error_takes_the_place_of_one_snapshot(kind: type[MemoryStore]) -> None:
    store = kind()
    refs = fill(store)
    part = take_read(next(iter(iter_manifests(store, refs[2:])))).root.parts[1].manifest
    store.delete(manifest_key(part.manifest_id))
    rot(store, manifest_key(refs[3].manifest_id), 50)

    found = list(iter_manifests(store, refs))

    kinds = [Manifests, Manifests, NotFound, Corrupt, Manifests, Manifests]
    assert all(isinstance(each, kind) for each, kind in zip(found, kinds, strict=True))
    with pytest.raises(NotFound):
        take_read(found[2])


def test_no_snapshots_have_no_manifests() -> None:
    assert list(iter_manifests(WaitingStore(), [])) == []


def test_roots_and_parts_take_a_round_each_however_many_there_are() -> None:
    store = WaitingStore()
    refs = fill(store)
    with count_rounds(MemoryStore, "read") as rounds:
        assert len(list(iter_needs(store, refs))) == 6
    assert (rounds.greatest, len(rounds.requests)) == (2, 6 + 3 * RANKS)


def test_a_caller_that_stops_early_leaves_nothing_running() -> None:
    store = WaitingStore()
    found = iter_manifests(store, fill(store))
    next(found)
    found.close()
    assert list(found) == []
