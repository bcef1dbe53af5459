"""The encoder of a save does what was chosen, and measures it."""

from __future__ import annotations

from itertools import count

import pytest

from holdfast.objects.memory import MemoryStore
from holdfast.repo.engine import Stages
from holdfast.repo.format.chunk import BLOSC2, RAW
from holdfast.repo.format.codec import LEAST_BYTES
from holdfast.repo.format.source import BytesSource, cut_sources
from holdfast.repo.handle.compression import LEAST_PACK_BYTES, Compression, Speeds
from holdfast.repo.write.encoding import ChunkEncoder
from tests.kit.encoded import CONFIGS, codecs, halves, save_encoded
from tests.kit.saving import MIB, keys, load_bytes, new_repo, noise


def make(choice: Compression, *, seconds: float = 1.0) -> tuple[ChunkEncoder, Stages]:
    """Return an encoder for a store that takes a small pack in so many seconds."""
    speeds, stages = Speeds(), Stages()
    speeds.note_stored(LEAST_PACK_BYTES, seconds)
    return ChunkEncoder(choice, speeds, stages), stages


@pytest.mark.parametrize("choice", ["fast", "small"])
def test_a_level_that_was_chosen_is_used_for_every_chunk_that_is_not_short(choice: Compression) -> None:
    encoder, _ = make(choice, seconds=1e-6)
    assert not encoder.is_off
    assert {encoder.choose(LEAST_BYTES, item_bytes) for item_bytes in (1, 2, 16)} == {choice}
    assert encoder.choose(LEAST_BYTES - 1, 2) is None


def test_none_encodes_nothing() -> None:
    encoder, _ = make(None)
    assert encoder.is_off
    assert encoder.choose(MIB, 2) is None


def test_auto_asks_what_was_measured() -> None:
    slow, _ = make("auto", seconds=1.0)
    fast, stages = make("auto", seconds=1e-4)
    assert slow.choose(MIB, 2) == "small"
    assert fast.choose(MIB, 2) is None
    # With threads that hash slowly, the store waits anyway.
    stages.add("hash", 1.0, 1 << 20)
    assert slow.choose(LEAST_BYTES - 1, 2) is None


def test_what_an_encoding_takes_is_a_stage() -> None:
    encoder, stages = make("fast")
    (chunk,) = cut_sources([BytesSource("w", bytes(MIB), item_bytes=2)])
    assert encoder.encode(chunk, memoryview(halves(MIB)), "fast").stored
    assert not encoder.encode(chunk, memoryview(noise(MIB)), "fast").stored
    assert (stages.read()["encode"].calls, stages.read()["encode"].size_bytes) == (2, 2 * MIB)


def test_auto_compresses_as_soon_as_a_slow_disk_was_measured(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count()
    monkeypatch.setattr("holdfast.repo.write.packing.perf_counter", lambda: float(next(clock)))
    repo, template = new_repo(store), halves(MIB)
    state = {f"{number:03}": number.to_bytes(8, "little") + template[8:] for number in range(120)}

    result = save_encoded(repo, "a", state, "auto")

    first, last = codecs(repo, "a", "000"), codecs(repo, "a", "119")
    assert (first, last) == ([RAW], [BLOSC2])
    assert result.stored_bytes < result.new_bytes
    assert load_bytes(repo, "a") == state


def test_auto_stores_raw_bytes_on_a_fast_disk(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr("holdfast.repo.write.packing.perf_counter", lambda: 1e-6 * next(clock))
    repo, template = new_repo(store), halves(MIB)
    state = {f"{number:02}": number.to_bytes(8, "little") + template[8:] for number in range(40)}
    result = save_encoded(repo, "a", state, "auto")
    assert result.stored_bytes == result.new_bytes
    assert keys(store, "config/") == CONFIGS[:2]
