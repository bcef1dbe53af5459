"""Other copies of a chunk are found by the index, then by the footer of every pack that can be read."""

from __future__ import annotations

import pytest

from holdfast.digest import hash_bytes
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.chunk import ChunkRef, Location
from holdfast.repo.format.pack import PackBuilder
from holdfast.repo.handle.index import write_fragment
from holdfast.repo.handle.repository import Repository
from holdfast.repo.read.any_copy import Copies, iter_footers
from tests.kit.saving import Watched, append_run, keys, new_repo, noise, rot

DATA = noise(5000)
PACKS = [f"{number:024x}-{number:016x}" for number in range(3)]


@pytest.fixture
def copied(repo: Repository, store: MemoryStore) -> list[Location]:
    """Three packs that hold DATA; the index knows the second."""
    places = []
    for number, pack_id in enumerate(PACKS):
        pack = PackBuilder(store, pack_id)
        chunks = [noise(600, number), DATA]
        places.append(append_run(pack, [(hash_bytes(data), memoryview(data)) for data in chunks], alignment=64)[1])
        pack.seal()
        if number == 1:
            write_fragment(store, pack.rows)
    return places


def ref(location: Location, data: bytes = DATA) -> ChunkRef:
    return ChunkRef(hash_bytes(data), len(data), location)


def test_every_copy_but_the_hint_is_yielded_once_and_those_of_the_index_first(
    repo: Repository, copied: list[Location]
) -> None:
    assert list(Copies(repo).iter_copies(ref(copied[0]))) == [copied[1], copied[2]]
    assert list(Copies(repo).iter_copies(ref(copied[1]))) == [copied[0], copied[2]]


def test_copies_are_found_without_an_index(repo: Repository, store: MemoryStore, copied: list[Location]) -> None:
    for key in keys(store, "index/"):
        store.delete(key)
    assert list(Copies(repo).iter_copies(ref(copied[2]))) == [copied[0], copied[1]]


def test_a_chunk_of_another_size_is_no_copy(repo: Repository, copied: list[Location]) -> None:
    assert list(Copies(repo).iter_copies(ChunkRef(hash_bytes(DATA), 4999, copied[0]))) == []


def test_packs_whose_footer_cannot_be_read_are_passed_over(store: MemoryStore, copied: list[Location]) -> None:
    rot(store, f"packs/{PACKS[0]}", store.stat(f"packs/{PACKS[0]}").size_bytes - 70)
    store.create("packs/unknown", b"")
    watched = Watched(store)
    watched.failing.add(f"packs/{PACKS[1]}")
    assert [pack_id for pack_id, _ in iter_footers(watched)] == [PACKS[2]]
    (found,) = Copies(new_repo_over(watched, store)).iter_copies(ref(copied[0]))
    assert found == copied[2]


def new_repo_over(watched: Watched, store: MemoryStore) -> Repository:
    """Open a store of packs alone, without a look at what it holds."""
    for key in keys(store, "index/"):
        store.delete(key)
    return Repository(watched, new_repo().config)
