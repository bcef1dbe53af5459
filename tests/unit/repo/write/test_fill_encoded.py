"""New chunks are encoded where that makes them smaller; what is stored already is found, however it is stored."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.errors import SourceChanged, StoreFull
from holdfast.objects.memory import MemoryStore, MemoryUpload
from holdfast.repo.format.chunk import BLOSC2, CHUNK_BYTES, RAW
from holdfast.repo.format.codec import CodecLevel, encode
from holdfast.repo.format.pack import LINE_BYTES
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.compression import Compression
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.read.reader import is_readable
from holdfast.repo.write.writer import Request, WriteOptions, save
from tests.kit.encoded import CONFIGS, codecs, encoded_repo, halves, save_encoded
from tests.kit.saving import (
    MIB,
    keys,
    load_bytes,
    new_repo,
    noise,
    only_pack,
    pack_of,
    read_entries,
    rot,
    save_bytes,
    snapshot_of,
)

STATE = {"weights": halves(2 * MIB + 5000), "noise": noise(MIB + 3000, 1), "small": halves(700, 2), "tiny": b"1" * 500}


@pytest.mark.parametrize("compression", ["fast", "small"])
def test_chunks_that_shrink_are_encoded_and_others_stored_raw(store: MemoryStore, compression: Compression) -> None:
    repo = new_repo(store)
    result = save_encoded(repo, "a", STATE, compression)

    assert load_bytes(repo, "a") == STATE
    assert codecs(repo, "a", "weights") == [BLOSC2] * 3
    assert codecs(repo, "a", "noise") == [RAW, RAW]
    assert codecs(repo, "a", "small") == [RAW]
    assert result.new_bytes == sum(map(len, STATE.values()))
    assert 0.6 * len(STATE["weights"]) < result.stored_bytes - (result.new_bytes - len(STATE["weights"]))
    assert result.stored_bytes < result.new_bytes - 0.15 * len(STATE["weights"])
    assert "new, stored in" in repr(result)
    assert is_readable(repo, snapshot_of(repo, "a"))


def test_the_digest_of_a_snapshot_does_not_depend_on_the_codec() -> None:
    choices: tuple[Compression, ...] = (None, "fast", "small", "auto")
    assert len({save_encoded(new_repo(), "a", STATE, choice).digest for choice in choices}) == 1


@pytest.mark.parametrize("first", [None, "fast", "small"])
@pytest.mark.parametrize("second", [None, "fast", "small"])
def test_a_second_save_stores_nothing_again(store: MemoryStore, first: Compression, second: Compression) -> None:
    save_encoded(new_repo(store), "a", STATE, first)
    before = keys(store, "packs/")

    result = save_encoded(new_repo(store), "b", STATE, second)

    assert (result.new_bytes, keys(store, "packs/")) == (len(STATE["tiny"]), before)
    assert load_bytes(new_repo(store), "b") == STATE


def test_a_store_without_encoded_chunks_declares_nothing(store: MemoryStore) -> None:
    save_encoded(new_repo(store), "a", {"noise": STATE["noise"], "small": STATE["small"]})
    assert keys(store, "config/") == CONFIGS[:2]


def test_the_codec_is_declared_before_a_pack_is_begun_and_once() -> None:
    seen: list[list[str]] = []

    class Watching(MemoryStore):
        def upload(self, key: str) -> MemoryUpload:
            seen.append(keys(self, "config/"))
            return super().upload(key)

    store = Watching()
    repo = new_repo(store)
    for number in range(3):
        save_encoded(repo, str(number), {"weights": halves(8192, number)})
    save_encoded(new_repo(store), "other", {"weights": halves(8192, 9)})
    assert seen == [CONFIGS] * 4


def test_encoded_chunks_need_no_page_of_their_own(repo: Repository) -> None:
    save_encoded(repo, "a", {"x": halves(2 * MIB), "y": halves(MIB, 1)})
    entries = read_entries(repo, "a")
    first, second = (chunk.location for chunk in entries["x"].chunks)
    assert first is not None
    assert second is not None
    assert second.offset == first.offset + first.stored_bytes
    third = pack_of(repo, "a", "y")
    assert 0 <= third.offset - (second.offset + second.stored_bytes) < LINE_BYTES


def test_a_damaged_encoded_copy_is_not_reused(store: MemoryStore) -> None:
    repo = encoded_repo(store, "a", {"weights": STATE["weights"]})
    at = pack_of(repo, "a", "weights")
    rot(store, only_pack(store), at.offset + 2000)

    result = save_encoded(new_repo(store), "b", {"weights": STATE["weights"]})

    assert result.new_bytes == CHUNK_BYTES
    assert load_bytes(new_repo(store), "b") == {"weights": STATE["weights"]}


def test_the_others_of_a_damaged_pack_are_read_before_they_are_reused(store: MemoryStore) -> None:
    repo = new_repo(store)
    save_encoded(repo, "a", {"weights": STATE["weights"]})
    for chunk in read_entries(repo, "a")["weights"].chunks[:2]:
        assert chunk.location is not None
        rot(store, only_pack(store), chunk.location.offset + 2000)

    result = save_encoded(repo, "b", {"weights": STATE["weights"]})

    assert result.new_bytes in (0, 2 * CHUNK_BYTES)
    save_encoded(new_repo(store), "c", {"weights": STATE["weights"]})
    assert load_bytes(new_repo(store), "c") == {"weights": STATE["weights"]}


class Changing:
    """Bytes that other code changes after a number of reads of its memory."""

    name, spec, note, alias = "changing", None, None, 0
    cuts: Sequence[int] = ()
    item_bytes = 2

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.size_bytes = len(data)

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(self.data)[start:stop]


@pytest.mark.parametrize("is_first", [True, False])
def test_memory_that_changes_while_it_is_encoded_is_found(monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    repo, source = new_repo(), Changing(halves(MIB))
    if not is_first:  # the chunks are then looked up before they are encoded
        save_bytes(repo, "a", {"x": noise(1000)})

    def change(data: memoryview, level: CodecLevel, item_bytes: int) -> bytes | None:
        source.data[7] ^= 1
        return encode(data, level, item_bytes)

    monkeypatch.setattr("holdfast.repo.write.encoding.encode", change)
    with pytest.raises(SourceChanged, match="'changing' changed while it was being saved"):
        save(repo, Request("b", [source], options=WriteOptions(compression="fast")))


def test_chunks_are_encoded_after_the_look_up_if_they_are_probably_known(store: MemoryStore) -> None:
    repo = new_repo(store)
    save_encoded(repo, "a", STATE)
    before = repo.counters.stages.read()["encode"].size_bytes

    save_encoded(repo, "b", {**STATE, "new": halves(MIB, 7)})

    assert repo.counters.stages.read()["encode"].size_bytes == before + MIB
    assert codecs(repo, "b", "new") == [BLOSC2]


def test_a_repository_has_a_choice_that_a_save_can_replace(store: MemoryStore) -> None:
    repo = open_repository(store, create=True, compression="small")
    for number, (choice, expected) in enumerate((("default", BLOSC2), (None, RAW), ("fast", BLOSC2))):
        source = BytesSource("x", halves(9000, number), item_bytes=2)
        save(repo, Request(str(number), [source], options=WriteOptions(compression=choice)))  # type: ignore[arg-type]  # literals, in a tuple
        assert codecs(repo, str(number), "x") == [expected]
    with pytest.raises(ValueError, match="compression must be"):
        save(repo, Request("wrong", [BytesSource("x", b"")], options=WriteOptions(compression="zip")))  # type: ignore[arg-type]  # on purpose


def test_a_small_budget_is_enough(store: MemoryStore) -> None:
    repo = open_repository(store, create=True, budget_bytes=16 << 20)
    state = {str(number): halves(MIB, number) for number in range(5)} | {"noise": noise(20 * MIB)}
    save_encoded(repo, "a", state)
    assert load_bytes(repo, "a") == state


def test_what_fits_only_if_it_is_compressed_is_saved() -> None:
    repo = new_repo(MemoryStore(capacity_bytes=2 * MIB))
    state = {str(number): halves(MIB // 2, number) for number in range(5)}
    with pytest.raises(StoreFull):
        save_encoded(repo, "a", state, None)
    save_encoded(repo, "a", state, "small")
    assert load_bytes(repo, "a") == state
    with pytest.raises(StoreFull):
        save_encoded(repo, "b", {"noise": noise(MIB)}, "small")
    assert keys(repo.store, "snapshots/") != []
