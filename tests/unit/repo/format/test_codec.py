"""Encoded chunks come back as they were; a header that the format does not allow never reaches the library."""

from __future__ import annotations

import random
import struct
import subprocess
import sys

import pytest

from holdfast.digest import fingerprint
from holdfast.errors import Corrupt, NewerFormat
from holdfast.repo.format.chunk import BLOSC2, CHUNK_BYTES, DELTA, RAW, Location, has_possible_size, verify_location
from holdfast.repo.format.codec import (
    HEADER,
    ITEM_SIZES,
    LEAST_BYTES,
    WORTH_SHARE,
    CodecLevel,
    decode,
    decode_into,
    encode,
    open_stored,
)
from tests.kit.saving import PACK_ID, flip, noise

LEVELS: tuple[CodecLevel, ...] = ("fast", "small")


def weights(size_bytes: int, item_bytes: int = 2, seed: int = 0) -> bytes:
    """Return items of which the upper half takes few values, as in weights of a model."""
    rng, low = random.Random(seed), item_bytes // 2
    high = item_bytes - low
    items = [
        rng.randbytes(low) + bytes([rng.choice((60, 61, 188, 189))]) * high for _ in range(size_bytes // item_bytes + 1)
    ]
    return b"".join(items)[:size_bytes]


def encoded(data: bytes, level: CodecLevel = "fast", item_bytes: int = 2) -> bytes:
    found = encode(memoryview(data), level, item_bytes)
    assert found is not None
    return found


DATA = weights(20_000)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("item_bytes", ITEM_SIZES)
@pytest.mark.parametrize("size_bytes", [LEAST_BYTES, 5001, 65_536, CHUNK_BYTES - 3, CHUNK_BYTES])
def test_what_was_encoded_is_decoded(level: CodecLevel, item_bytes: int, size_bytes: int) -> None:
    data = (weights(20_000, item_bytes) * 60)[:size_bytes]
    stored = encoded(data, level, item_bytes)
    assert len(stored) <= WORTH_SHARE * size_bytes
    assert bytes(decode(memoryview(stored), size_bytes)) == data


@pytest.mark.parametrize("level", LEVELS)
def test_zeros_take_a_header_only(level: CodecLevel) -> None:
    stored = encoded(bytes(CHUNK_BYTES), level)
    assert len(stored) == HEADER.size
    assert bytes(decode(memoryview(stored), CHUNK_BYTES)) == bytes(CHUNK_BYTES)
    with pytest.raises(Corrupt):
        decode(memoryview(stored[:12] + struct.pack("<I", 40) + stored[16:] + bytes(8)), CHUNK_BYTES)


@pytest.mark.parametrize("level", LEVELS)
def test_what_does_not_shrink_or_is_short_is_not_encoded(level: CodecLevel) -> None:
    assert encode(memoryview(noise(100_000)), level, 4) is None
    assert encode(memoryview(bytes(LEAST_BYTES - 1)), level, 4) is None


def test_an_odd_item_size_counts_as_bytes() -> None:
    data = b"some text" * 1000
    assert encoded(data, item_bytes=3) == encoded(data, item_bytes=1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("position", range(HEADER.size))
def test_a_changed_bit_in_the_header_is_refused_or_harmless(level: CodecLevel, position: int) -> None:
    stored = encoded(DATA, level)
    for bit in range(8):
        forged = flip(stored, position, bit)
        try:
            found = bytes(decode(memoryview(forged), len(DATA)))
        except Corrupt:
            continue
        # The digest finds it: another filter or item size, smaller blocks, or streams that are cut differently.
        assert position in (2, 3, 8, 9, 10, 11, *range(16, 22)), (position, bit)
        assert found != DATA or position == 8


FORGED = {
    "a later version": (0, 6),
    "another version of the compressor": (1, 2),
    "a plain copy": (2, 0x37),
    "a header of 16 bytes": (2, 0x31),
    "the delta filter": (2, 0x3D),
    "blosclz": (2, 0x15),
    "zlib": (2, 0x75),
    "a compressor of the user": (2, 0xD5),
    "items of 3 bytes": (3, 3),
    "items of no bytes": (3, 0),
    "items of 255 bytes": (3, 255),
    "the delta filter in the list": (16, 3),
    "truncated precision": (21, 4),
    "a filter of a plug-in": (16, 32),
    "a filter of the user": (16, 160),
    "two filters": (16, 1),
    "another compressor after the filters": (22, 4),
    "an argument of the compressor": (23, 1),
    "an argument of a filter": (29, 1),
    "blocks of different sizes": (30, 1),
    "a dictionary": (31, 1),
    "a longer header": (31, 2),
    "a lazy chunk": (31, 8),
    "nan": (31, 0x20),
    "a repeated value": (31, 0x30),
    "memory as it is": (31, 0x40),
    "instrumented": (31, 0x80),
}


@pytest.mark.parametrize(("position", "value"), FORGED.values(), ids=list(FORGED))
def test_a_header_that_the_format_does_not_allow_is_refused(position: int, value: int) -> None:
    forged = bytearray(encoded(DATA))
    forged[position] = value
    with pytest.raises(Corrupt, match="which the format does not allow"):
        decode(memoryview(bytes(forged)), len(DATA))


@pytest.mark.parametrize("at", [4, 8, 12])
@pytest.mark.parametrize("value", [0, 1, 31, 2**20 + 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_size_that_is_not_true_is_refused(at: int, value: int) -> None:
    forged = bytearray(encoded(DATA))
    struct.pack_into("<I", forged, at, value)
    with pytest.raises(Corrupt):
        decode(memoryview(bytes(forged)), len(DATA))


def test_a_chunk_is_refused_for_another_size() -> None:
    stored = memoryview(encoded(DATA))
    for size_bytes in (len(DATA) - 1, len(DATA) + 1, len(stored), 0, CHUNK_BYTES + 1):
        with pytest.raises(Corrupt):
            decode(stored, size_bytes)
    for length in (0, 1, HEADER.size - 1, HEADER.size, len(stored) - 1):
        with pytest.raises(Corrupt):
            decode(stored[:length], len(DATA))


def test_decoding_writes_to_its_target_only() -> None:
    memory = bytearray(b"\xaa" * (len(DATA) + 128))
    decode_into(memoryview(encoded(DATA)), memoryview(memory)[64:-64])
    assert bytes(memory[64:-64]) == DATA
    assert memory[:64] == memory[-64:] == b"\xaa" * 64


def test_damaged_bytes_do_not_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = encoded(DATA)
    at = Location(PACK_ID, 64, len(stored), BLOSC2, fingerprint(stored))
    assert bytes(open_stored(at, memoryview(stored), len(DATA))) == DATA
    monkeypatch.setattr("holdfast.repo.format.codec.decode", None)
    with pytest.raises(Corrupt, match="is damaged"):
        open_stored(at, memoryview(flip(stored, 100)), len(DATA))


def test_raw_bytes_are_returned_as_they_are() -> None:
    data = memoryview(DATA)
    assert open_stored(Location(PACK_ID, 64, len(DATA), RAW, b""), data, len(DATA)) is data


def test_a_location_states_a_known_codec_and_a_possible_size() -> None:
    assert has_possible_size(RAW, 10, 10)
    assert has_possible_size(BLOSC2, 9, 10)
    assert has_possible_size(DELTA, 33, 40)
    assert not any(
        has_possible_size(*each)
        for each in ((RAW, 9, 10), (BLOSC2, 10, 10), (BLOSC2, 0, 10), (DELTA, 32, 40), (3, 9, 10))
    )
    with pytest.raises(NewerFormat, match="codec 3, which this Holdfast does not know"):
        verify_location(Location(PACK_ID, 64, 9, 3, b""), 10, what="x", key="k")
    with pytest.raises(Corrupt, match="10 bytes are stored instead of 10"):
        verify_location(Location(PACK_ID, 64, 10, BLOSC2, b""), 10, what="x", key="k")


def test_blosc2_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys, holdfast; s = holdfast.open('memory://', compression='fast'); s.put('x', sys.executable)"
        " if len(sys.argv) > 1 else list(s.snapshots()); print('blosc2' in sys.modules)"
    )
    for arguments, expected in (([], "False"), (["put"], "True")):
        run = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, timeout=300
        )
        assert run.stdout.split() == [expected]
