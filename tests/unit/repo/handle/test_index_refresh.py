"""An index that stays open: it reads what is new, forgets what is gone, and may be asked from any thread."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.digest import Digest
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import INDEX
from holdfast.repo.handle import index as index_module
from holdfast.repo.handle.index import TIER, ChunkIndex, merge_tiers, write_fragment
from tests.kit.saving import Watched, keys, placed, rot

BUDGET = 1 << 20


def digests(count: int, seed: int = 0) -> list[Digest]:
    rng = random.Random(seed)
    return [Digest(rng.randbytes(32)) for _ in range(count)]


def put(store: MemoryStore, *found: Digest) -> str:
    """Write a fragment that knows these digests."""
    return write_fragment(store, [placed(digest) for digest in found])


def read_keys(watched: Watched) -> list[str]:
    """Return which objects were read since the last call."""
    found = [key for key, _, _ in watched.reads]
    watched.reads.clear()
    return found


@pytest.fixture
def watched(store: MemoryStore) -> Watched:
    return Watched(store)


@pytest.fixture
def index(watched: Watched) -> ChunkIndex:
    return ChunkIndex(watched, limit_bytes=BUDGET)


@pytest.fixture(params=["searched", "guided"])
def lead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Never, or always, have a guide."""
    monkeypatch.setattr(index_module, "_SEARCHES_PER_ROW", 1e9 if request.param == "searched" else 0)
    return str(request.param)


def test_nothing_is_known_before_the_first_refresh(index: ChunkIndex, store: MemoryStore, watched: Watched) -> None:
    (digest,) = digests(1)
    put(store, digest)
    assert (len(index), index.find(digest, 1000)) == (0, [])
    assert read_keys(watched) == []


def test_only_new_fragments_are_opened(index: ChunkIndex, store: MemoryStore, watched: Watched) -> None:
    first, second = (put(store, digest) for digest in digests(2))
    index.refresh()
    assert sorted(read_keys(watched)) == sorted([first, second])
    index.refresh()
    assert read_keys(watched) == []
    third = put(store, *digests(1, seed=1))
    index.refresh()
    assert read_keys(watched) == [third]
    assert len(index) == 3


@pytest.mark.usefixtures("lead")
def test_new_fragments_are_found(index: ChunkIndex, store: MemoryStore) -> None:
    before, after = digests(2)
    put(store, before)
    index.refresh()
    assert [len(index.find(digest, 1000)) for digest in (before, after)] == [1, 0]
    put(store, after)
    assert index.find(after, 1000) == []
    index.refresh()
    assert [len(index.find(digest, 1000)) for digest in (before, after)] == [1, 1]


@pytest.mark.usefixtures("lead")
def test_what_was_merged_is_forgotten_and_found_in_its_new_place(
    index: ChunkIndex, store: MemoryStore, watched: Watched
) -> None:
    found = digests(TIER)
    for digest in found:
        put(store, digest)
    index.refresh()
    assert [len(index.find(digest, 1000)) for digest in found] == [1] * TIER
    merge_tiers(store)
    read_keys(watched)
    index.refresh()
    assert read_keys(watched) == keys(store, INDEX)
    assert len(index) == 1
    assert [len(index.find(digest, 1000)) for digest in found] == [1] * TIER


@pytest.mark.usefixtures("lead")
def test_deleted_fragments_are_not_found(index: ChunkIndex, store: MemoryStore) -> None:
    gone, kept = digests(2)
    key = put(store, gone)
    put(store, kept)
    index.refresh()
    assert len(index.find(gone, 1000)) == 1
    store.delete(key)
    index.refresh()
    assert [len(index.find(digest, 1000)) for digest in (gone, kept)] == [0, 1]
    assert len(index) == 1


def test_damaged_fragments_are_not_opened_again(index: ChunkIndex, store: MemoryStore, watched: Watched) -> None:
    bad, good = digests(2)
    key = put(store, bad)
    put(store, good)
    rot(store, key, 70)
    index.refresh()
    assert (index.damaged, len(index)) == ({key}, 1)
    read_keys(watched)
    index.refresh()
    assert read_keys(watched) == []


def test_damage_that_was_removed_is_forgotten(index: ChunkIndex, store: MemoryStore) -> None:
    (digest,) = digests(1)
    key = put(store, digest)
    rot(store, key, 70)
    index.refresh()
    store.delete(key)
    assert index.refresh().damaged == set()
    put(store, digest)
    assert len(index.refresh().find(digest, 1000)) == 1


@pytest.mark.usefixtures("lead")
def test_damage_met_while_searching_is_not_opened_again(
    index: ChunkIndex, store: MemoryStore, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_FIRST_READ_BYTES", 64)
    bad, good = digests(2)
    key = put(store, bad)
    put(store, good)
    index.refresh()
    rot(store, key, store.stat(key).size_bytes - 1)
    assert [len(index.find(digest, 1000)) for digest in (bad, good)] == [0, 1]
    read_keys(watched)
    index.refresh()
    assert (index.damaged, read_keys(watched)) == ({key}, [])
    assert [len(index.find(digest, 1000)) for digest in (bad, good)] == [0, 1]


def test_a_prefix_block_that_rots_before_there_is_a_guide_loses_only_its_fragment(
    index: ChunkIndex, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_FIRST_READ_BYTES", 64)
    monkeypatch.setattr(index_module, "_SEARCHES_PER_ROW", 0)
    bad, good = digests(2)
    key = put(store, bad)
    put(store, good)
    index.refresh()
    rot(store, key, store.stat(key).size_bytes - 73)
    assert [len(index.find(digest, 1000)) for digest in (bad, good)] == [0, 1]
    assert index.damaged == {key}


def test_a_guide_is_made_when_it_pays_and_searches_one_fragment_for_a_hit_and_none_in_vain(
    index: ChunkIndex, store: MemoryStore, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_FIRST_READ_BYTES", 64)
    held = [digests(16, seed=number) for number in range(10)]
    for found in held:
        put(store, *found)
    index.refresh()
    index.find(held[0][0], 1000)
    assert index._guide is None
    index.find(held[0][0], 1000)
    read_keys(watched)
    assert len(index.find(held[7][3], 1000)) == 1
    assert len(read_keys(watched)) == 1
    assert [index.find(digest, 1000) for digest in digests(20, seed=99_999)] == [[]] * 20
    assert read_keys(watched) == []


def test_a_guide_that_has_become_too_small_is_rebuilt(index: ChunkIndex, store: MemoryStore) -> None:
    first = digests(4)
    put(store, *first)
    index.refresh()
    for digest in first:
        index.find(digest, 1000)
    small = index._guide
    assert small
    more = digests(400, seed=1)
    put(store, *more)
    index.refresh()
    for digest in more:
        assert len(index.find(digest, 1000)) == 1
    assert index._guide
    assert index._guide.num_slots > 4 * 404 > small.num_slots


def test_guide_and_blocks_together_stay_in_the_budget(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_FIRST_READ_BYTES", 64)
    monkeypatch.setattr(index_module, "_PREFIXES_PER_BLOCK", 64)
    monkeypatch.setattr(index_module, "_ROWS_PER_BLOCK", 8)
    found = digests(3000)
    put(store, *found)
    index = ChunkIndex(store, limit_bytes=20_000).refresh()
    for digest in found:
        assert len(index.find(digest, 1000)) == 1
        assert index._cache._blocks.size + (index._guide.num_slots if index._guide else 0) <= 20_000
    assert index._guide


@pytest.fixture
def busy() -> Iterator[None]:
    """Change threads as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("busy")
def test_two_that_refresh_at_once_open_each_fragment_once(
    index: ChunkIndex, store: MemoryStore, watched: Watched
) -> None:
    written = {put(store, digest) for digest in digests(100)}
    start = threading.Barrier(2)

    def refresh() -> None:
        start.wait()
        index.refresh()

    with ThreadPoolExecutor(2) as pool:
        for task in [pool.submit(refresh) for _ in range(2)]:
            task.result()
    assert sorted(read_keys(watched)) == sorted(written)
    assert len(index) == 100


@pytest.mark.usefixtures("busy", "lead")
def test_searching_goes_on_while_another_thread_refreshes(index: ChunkIndex, store: MemoryStore) -> None:
    found = digests(3 * TIER)
    put(store, found[0])
    index.refresh()
    is_done = threading.Event()

    def search() -> int:
        rounds = 0
        while not is_done.is_set():
            assert all(len(index.find(digest, 1000)) <= 2 for digest in found)
            assert index.find(found[0], 1000)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(search)
        for digest in found[1:]:
            put(store, digest)
            index.refresh()
            merge_tiers(store)
            index.refresh()
        is_done.set()
        assert task.result() > 0
    assert [len(index.find(digest, 1000)) for digest in found] == [1] * len(found)
