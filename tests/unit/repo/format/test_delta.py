"""A delta and its base give the chunk; anything else is refused or gives other bytes, which the digest shows."""

from __future__ import annotations

import pytest

from holdfast.digest import DIGEST_BYTES, fingerprint, hash_bytes
from holdfast.errors import Corrupt
from holdfast.repo.format.chunk import DELTA, Location
from holdfast.repo.format.codec import (
    CodecLevel,
    apply_delta,
    encode_delta,
    find_base_digest,
    find_item_bytes,
    open_delta,
)
from tests.kit.deltas import trained
from tests.kit.saving import MIB, PACK_ID, flip, noise

BASE, CHUNK = trained(0, MIB), trained(1, MIB)


def make(level: CodecLevel = "small", item_bytes: int = 2) -> bytes:
    stored = encode_delta(memoryview(CHUNK), memoryview(BASE), hash_bytes(BASE), level, item_bytes)
    assert stored is not None
    return stored


def locate(stored: bytes) -> Location:
    return Location(PACK_ID, 64, len(stored), DELTA, fingerprint(stored))


@pytest.mark.parametrize("level", ["fast", "small"])
@pytest.mark.parametrize("item_bytes", [1, 2, 3, 8])
def test_a_delta_and_its_base_give_the_chunk(level: CodecLevel, item_bytes: int) -> None:
    stored = make(level, item_bytes)
    assert open_delta(locate(stored), memoryview(stored), memoryview(BASE)) == CHUNK
    assert len(stored) < 0.3 * MIB
    assert find_base_digest(memoryview(stored)) == hash_bytes(BASE)
    assert find_item_bytes(memoryview(stored)) == (1 if item_bytes == 3 else item_bytes)


def test_the_base_is_turned_into_the_chunk_in_place() -> None:
    target = memoryview(bytearray(BASE))
    apply_delta(memoryview(make()), target, memoryview(bytearray(MIB)))
    assert target == CHUNK


def test_the_same_bytes_are_a_short_delta() -> None:
    same = encode_delta(memoryview(BASE), memoryview(BASE), hash_bytes(BASE), "small", 2)
    assert same is not None
    assert len(same) == DIGEST_BYTES + 32
    assert open_delta(locate(same), memoryview(same), memoryview(BASE)) == BASE


def test_what_does_not_shrink_is_no_delta() -> None:
    other = memoryview(noise(MIB, 7))
    assert encode_delta(other, memoryview(BASE), hash_bytes(BASE), "small", 2) is None


def test_another_base_gives_another_chunk() -> None:
    stored = make()
    assert open_delta(locate(stored), memoryview(stored), memoryview(trained(2, MIB))) != CHUNK


@pytest.mark.parametrize("position", [0, DIGEST_BYTES, DIGEST_BYTES + 4, 5000])
def test_a_damaged_delta_is_refused(position: int) -> None:
    stored = make()
    with pytest.raises(Corrupt, match=r"a delta in pack .* is damaged"):
        open_delta(locate(stored), memoryview(flip(stored, position)), memoryview(BASE))


def test_a_base_of_another_length_is_refused() -> None:
    stored = make()
    with pytest.raises(Corrupt, match="which the format does not allow"):
        open_delta(locate(stored), memoryview(stored), memoryview(BASE)[:-1])
