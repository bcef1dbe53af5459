"""What a save may build upon: the newest neighbour first, never what is marked, bad, rotten, short or gone."""

from __future__ import annotations

import pytest

from holdfast.digest import hash_bytes
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.objects.protocol import PAGE_LIMIT, ObjectInfo, ObjectStore
from holdfast.repo.format.layout import INDEX, MANIFESTS, SNAPSHOTS, pack_key, snapshot_stem
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.write.existing import ExistingChunks, WantedChunk, read_base, read_bases
from tests.kit.saving import (
    Watched,
    keys,
    new_repo,
    noise,
    only_pack,
    pack_of,
    record_key,
    replace_object,
    rot,
    save_bytes,
    snapshot_of,
)

DATA = noise(5000)
WANTED = WantedChunk(hash_bytes(DATA), len(DATA), memoryview(DATA))


@pytest.fixture
def held(repo: Repository) -> Repository:
    """A snapshot `run/1` that holds DATA in a pack."""
    save_bytes(repo, "run/1", {"x": DATA})
    return repo


def holdings(repo: Repository, *, base: str = "", avoid: frozenset[str] = frozenset()) -> ExistingChunks:
    bases = read_bases(repo.store, [snapshot_of(repo, base)]) if base else []
    repo.index.refresh()
    return ExistingChunks(repo, bases, avoid=avoid)


def test_a_chunk_is_found_in_the_base(held: Repository, store: MemoryStore) -> None:
    for key in keys(store, "index/"):
        store.delete(key)
    assert holdings(held).find(hash_bytes(DATA), len(DATA)) == []
    assert holdings(held, base="run/1").find(hash_bytes(DATA), len(DATA)) == [pack_of(held, "run/1", "x")]


def test_a_chunk_is_found_in_the_index(held: Repository) -> None:
    assert holdings(held).find(hash_bytes(DATA), len(DATA)) == [pack_of(held, "run/1", "x")]


def test_a_chunk_that_is_not_stored_is_not_found(held: Repository) -> None:
    assert holdings(held, base="run/1").find(hash_bytes(b"other"), 5) == []


def test_a_chunk_of_another_size_is_another_chunk(held: Repository) -> None:
    assert holdings(held, base="run/1").find(hash_bytes(DATA), len(DATA) - 1) == []


def test_a_pack_to_avoid_counts_as_absent(held: Repository) -> None:
    key = pack_key(pack_of(held, "run/1", "x").pack_id)
    assert holdings(held, base="run/1", avoid=frozenset({key})).find(hash_bytes(DATA), len(DATA)) == []


def test_a_pack_that_is_gone_is_not_relied_on(held: Repository, store: MemoryStore) -> None:
    searched = holdings(held, base="run/1")
    store.delete(only_pack(store))
    assert searched.find(hash_bytes(DATA), len(DATA)) == []


def test_a_pack_that_was_cut_short_is_not_relied_on(held: Repository, store: MemoryStore) -> None:
    searched = holdings(held, base="run/1")
    replace_object(store, only_pack(store), store.contents()[only_pack(store)][:2000])
    assert searched.find(hash_bytes(DATA), len(DATA)) == []


def test_a_copy_is_intact_only_as_long_as_its_bytes_are(held: Repository, store: MemoryStore) -> None:
    searched = holdings(held)
    location = pack_of(held, "run/1", "x")
    assert searched.is_intact(location, WANTED)
    rot(store, only_pack(store), location.offset + 100)
    assert not searched.is_intact(location, WANTED)
    store.delete(only_pack(store))
    assert not searched.is_intact(location, WANTED)


def test_a_copy_on_a_bad_sector_is_not_intact(held: Repository, store: MemoryStore) -> None:
    location = pack_of(held, "run/1", "x")
    watched = Watched(store)
    watched.failing.add(pack_key(location.pack_id))
    assert not holdings(new_repo(watched)).is_intact(location, WANTED)


def test_bases_that_are_gone_or_damaged_are_none(held: Repository, store: MemoryStore) -> None:
    for name in ("run/2", "run/3"):
        save_bytes(held, name, {"x": DATA, "name": name.encode()})
    candidates = [snapshot_of(held, f"run/{number}") for number in (1, 2, 3, 1)]
    store.delete(f"manifests/{candidates[0].manifest.manifest_id}")
    rot(store, f"manifests/{candidates[1].manifest.manifest_id}", 50)
    assert len(read_bases(store, [*candidates, None])) == 1


def save_at(store: MemoryStore, clock: VirtualClock, *names: str) -> None:
    """Save names one second after the other, each by a process of its own."""
    for name in names:
        clock.advance(1)
        save_bytes(new_repo(store), name, {"x": name.encode()})


def base_of(store: MemoryStore, name: str) -> str | None:
    """Return the base that a process finds which knows of no index."""
    found = read_base(new_repo(store), name)
    return found.name if found else None


def test_an_empty_store_has_no_base(store: MemoryStore) -> None:
    assert base_of(store, "run/1") is None


def test_the_newest_snapshot_under_the_same_prefix_is_the_base(store: MemoryStore, clock: VirtualClock) -> None:
    save_at(store, clock, "run/2", "run/1", "other/1", "run", "running/1")
    assert base_of(store, "run/3") == "run/1"
    assert base_of(store, "other/9") == "other/1"
    assert base_of(store, "none/1") is None


def test_a_name_without_a_slash_builds_on_the_newest_of_all(store: MemoryStore, clock: VirtualClock) -> None:
    save_at(store, clock, "a", "run/1")
    assert base_of(store, "b") == "run/1"


def test_a_name_too_long_for_its_key_is_a_base_as_any_other(store: MemoryStore, clock: VirtualClock) -> None:
    long = "run/" + "x" * 300
    save_at(store, clock, "run/1", long, "other/" + "y" * 300)
    assert base_of(store, "run/2") == long


def test_after_the_newest_was_deleted_the_one_before_is_the_base(store: MemoryStore, clock: VirtualClock) -> None:
    save_at(store, clock, "run/1", "run/2", "run/3")
    clock.advance(1)
    delete_snapshot(store, "run/1")
    assert base_of(store, "run/4") == "run/3"


def test_a_damaged_newest_is_passed_over(store: MemoryStore, clock: VirtualClock) -> None:
    save_at(store, clock, "run/1", "run/2")
    rot(store, record_key("run/2"), 130)
    assert base_of(store, "run/3") == "run/1"


def test_what_this_handle_saved_last_is_the_base(store: MemoryStore, clock: VirtualClock) -> None:
    repo = new_repo(store)
    save_bytes(repo, "run/1", {"x": b"1"})
    save_at(store, clock, "run/2")
    found = read_base(repo, "run/3")
    assert found is not None
    assert found.name == "run/1"


def test_who_has_an_index_to_ask_does_not_list_names_for_a_base(store: MemoryStore, clock: VirtualClock) -> None:
    save_bytes(new_repo(store), "run/1", {"x": DATA})
    repo = new_repo(store)
    repo.index.refresh()
    assert read_base(repo, "run/2") is None


class Listings(Watched):
    """Notes every listing."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.listed: list[str] = []

    def list(self, prefix: str, *, after: str = "", limit: int = PAGE_LIMIT) -> list[ObjectInfo]:
        self.listed.append(prefix)
        return super().list(prefix, after=after, limit=limit)


def test_a_fresh_handle_reuses_chunks_through_the_index_without_listing_names(held: Repository) -> None:
    for number in range(2, 40):
        save_bytes(held, f"run/{number}", {"x": DATA, "number": noise(600, number)})
    watched = Listings(held.store)
    result = save_bytes(new_repo(watched), "run/new", {"x": DATA, "y": noise(3000, 1)})
    assert result.new_bytes == 3000
    about_names = [prefix for prefix in watched.listed if prefix.startswith(SNAPSHOTS)]
    assert set(about_names) == {snapshot_stem("run/new") + "@"}
    read = {key for key, _, _ in watched.reads if key.startswith((SNAPSHOTS, MANIFESTS))}
    assert read == set()


def test_a_fresh_handle_without_an_index_reuses_chunks_through_the_base(held: Repository) -> None:
    for key in keys(held.store, INDEX):
        held.store.delete(key)
    watched = Listings(held.store)
    result = save_bytes(new_repo(watched), "run/new", {"x": DATA, "y": noise(3000, 1)})
    assert result.new_bytes == 3000
    assert SNAPSHOTS in watched.listed


def test_a_handle_lists_all_names_at_most_once_even_without_an_index(held: Repository) -> None:
    watched = Listings(held.store)
    repo = new_repo(watched)
    for number in range(3):
        for key in keys(held.store, INDEX):
            held.store.delete(key)
        assert save_bytes(repo, f"run/new-{number}", {"x": DATA, "number": noise(600, number)}).new_bytes == 600
    assert watched.listed.count(SNAPSHOTS) == 1
