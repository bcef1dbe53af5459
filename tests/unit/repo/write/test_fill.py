"""From sources to references: stored chunks are not written again, and new ones can be mapped."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence

import pytest

from holdfast.digest import Buffer, hash_bytes
from holdfast.errors import HoldfastError
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.repo.engine import Engine, Stages
from holdfast.repo.format.chunk import CHUNK_BYTES, Location
from holdfast.repo.format.pack import HEADER, parse_pack_key, read_footer
from holdfast.repo.format.source import BytesSource, SourceChunk, cut_sources
from holdfast.repo.handle.repository import Repository
from holdfast.repo.write.fill import Hasher
from holdfast.repo.write.writer import Request, save
from tests.kit.saving import MIB, iter_gaps, keys, load_bytes, noise, only_pack, read_entries, save_bytes


def places(repo: Repository, entries: Mapping[str, Buffer]) -> dict[str, list[Location]]:
    """Save entries and return the locations of their chunks."""
    save_bytes(repo, "places", entries)
    found = read_entries(repo, "places")
    return {name: [chunk.location for chunk in found[name].chunks if chunk.location] for name in entries}


def test_pieces_come_hashed_in_order() -> None:
    pieces = cut_sources([BytesSource("a", noise(3 * MIB + 5)), BytesSource("b", b"12")])
    with Engine("test", budget_bytes=4 * MIB, waits=False) as engine:
        hasher = Hasher(engine, Stages(), batch_bytes=MIB)
        hashed = [item for batch in hasher.iter_batches(pieces) for item in batch.items]
        refs = list(hasher.iter_digests(pieces))
    assert [item.chunk for item in hashed] == pieces
    assert all(item.digest == hash_bytes(item.data) for item in hashed)
    assert [ref.digest for ref in refs] == [item.digest for item in hashed]


def test_a_large_run_starts_on_a_page_and_a_small_one_on_a_line(repo: Repository) -> None:
    sizes = {"a": 600, "b": 65535, "c": 65536, "d": 3 * MIB + 7, "e": 5000, "f": 100_000}
    found = places(repo, {name: noise(size, size) for name, size in sizes.items()})
    for name, size in sizes.items():
        assert found[name][0].offset % (4096 if size >= 65536 else 64) == 0, name
    assert found["a"][0].offset == HEADER.size
    assert found["b"][0].offset % 4096 != 0


def test_the_chunks_of_one_entry_are_adjacent(repo: Repository) -> None:
    found = places(repo, {"a": noise(700), "b": noise(20 * MIB + 100, 1), "c": noise(2 * MIB, 2)})
    for name in ("b", "c"):
        offsets = [at.offset for at in found[name]]
        assert offsets == [offsets[0] + number * CHUNK_BYTES for number in range(len(offsets))]


def test_all_padding_is_zero(repo: Repository, store: MemoryStore) -> None:
    places(repo, {str(size): noise(size, size) for size in (600, 70_000, 513, 2 * MIB + 1, 999)})
    data = store.contents()[only_pack(store)]
    pack_id = parse_pack_key(only_pack(store))
    assert pack_id
    for start, stop in iter_gaps(read_footer(store, pack_id)):
        assert not any(data[start:stop])


def test_a_run_that_goes_on_in_another_pack_starts_on_a_page_there(
    repo: Repository, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.repo.format.pack.PACK_LIMIT_BYTES", 4 * MIB)
    found = places(repo, {"a": noise(20 * MIB)})["a"]
    firsts = {at.pack_id: at.offset for at in reversed(found)}
    assert len(firsts) == len(keys(store, "packs/")) == 3
    assert [offset % 4096 for offset in firsts.values()] == [0, 0, 0]


def test_a_chunk_that_comes_twice_in_one_save_is_written_once(repo: Repository, store: MemoryStore) -> None:
    one = noise(MIB)
    found = places(repo, {"a": one * 12, "b": one, "c": one[:600]})
    assert len({at for name in "ab" for at in found[name]}) == 1
    assert store.stat(only_pack(store)).size_bytes < MIB + 10_000
    assert load_bytes(repo, "places") == {"a": one * 12, "b": one, "c": one[:600]}


def test_after_a_reused_chunk_a_new_run_starts(repo: Repository) -> None:
    old, new = noise(MIB), noise(MIB, 1)
    save_bytes(repo, "before", {"x": old})
    found = places(repo, {"a": new + old + noise(MIB, 2) + noise(MIB, 3)})["a"]
    assert [at.offset % 4096 for at in found] == [0, 0, 0, 0]
    assert found[3].offset == found[2].offset + MIB
    assert found[1].pack_id != found[0].pack_id


class Shrinking:
    """A source that has fewer bytes than it said."""

    name, size_bytes, spec, note, alias = "shrinking", 1000, None, None, 0
    cuts: Sequence[int] = ()
    item_bytes = 1

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(b"few")


def test_a_source_that_shrinks_is_an_error_that_names_it(repo: Repository, store: MemoryStore) -> None:
    with pytest.raises(HoldfastError, match=r"'shrinking' returned 3 bytes instead of 1000"):
        save(repo, Request("a", [Shrinking()]))
    assert keys(store, "snapshots/") == keys(store, "packs/") == keys(store, "leases/") == []


class Typed:
    """A source that gives views of numbers, not of bytes."""

    def __init__(self, numbers: array[int]) -> None:
        self._view = memoryview(numbers)

    name = "typed"
    spec: Json = None
    note: Json = None
    alias = 0
    cuts: Sequence[int] = ()
    item_bytes = 1

    @property
    def size_bytes(self) -> int:
        return self._view.nbytes

    def read(self, start: int, stop: int) -> memoryview:
        return self._view[start // self._view.itemsize : stop // self._view.itemsize]


def test_a_source_may_give_views_of_any_type(repo: Repository) -> None:
    numbers = array("I", range(1_000_000))
    save(repo, Request("a", [Typed(numbers)]))
    assert load_bytes(repo, "a") == {"typed": numbers.tobytes()}


def test_small_pieces_are_hashed_where_they_are_taken_and_large_ones_on_threads() -> None:
    readers: dict[str, threading.Thread] = {}

    class Watched(BytesSource):
        def read(self, start: int, stop: int) -> memoryview:
            readers[self.name] = threading.current_thread()
            return super().read(start, stop)

    small, large = Watched("small", noise(600)), Watched("large", noise(MIB, 1))
    with Engine("test", budget_bytes=16 * MIB, waits=False) as engine:
        hasher = Hasher(engine, Stages(), batch_bytes=MIB)
        pieces = cut_sources([small, large, small])
        hashed = [item for batch in hasher.iter_batches(pieces) for item in batch.items]
    assert [item.chunk for item in hashed] == pieces
    assert readers["small"] is threading.current_thread()
    assert readers["large"] is not threading.current_thread()


def test_a_hashed_piece_holds_plain_bytes() -> None:
    source = Typed(array("I", [1, 2]))
    with Engine("test", budget_bytes=MIB, waits=False) as engine:
        (batch,) = Hasher(engine, Stages(), batch_bytes=MIB).iter_batches([SourceChunk(source, 0, 0, 8)])
    (item,) = batch.items
    assert (len(item.data), item.data.format) == (8, "B")
