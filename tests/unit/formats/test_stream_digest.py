"""Pieces in any order and from any thread give the digest of the whole, within a bound on what waits."""

from __future__ import annotations

import random
import threading

from blake3 import blake3

from holdfast.digest import hash_bytes
from holdfast.formats.digests import StreamDigest, WaitingRoom

_DATA = random.Random(0).randbytes(100_000)
_STARTS = list(range(0, len(_DATA), 7_000))


def _piece(start: int) -> memoryview:
    return memoryview(_DATA)[start : start + 7_000]


def test_pieces_in_any_order_give_the_digest_of_the_whole() -> None:
    stream = StreamDigest(len(_DATA), WaitingRoom(), blake3())

    for start in random.Random(1).sample(_STARTS, len(_STARTS)):
        assert stream.finish() is None
        stream.add(start, _piece(start))

    assert stream.finish() == hash_bytes(_DATA)


def test_a_piece_that_is_read_again_is_ignored() -> None:
    stream = StreamDigest(len(_DATA), WaitingRoom(), blake3())

    for start in [*_STARTS[:5], *_STARTS, *_STARTS[3:]]:
        stream.add(start, _piece(start))

    assert stream.finish() == hash_bytes(_DATA)


def test_an_empty_stream_is_complete_at_once() -> None:
    assert StreamDigest(0, WaitingRoom(), blake3()).finish() == hash_bytes(b"")


def test_readers_ahead_wait_until_there_is_room() -> None:
    room = WaitingRoom(limit_bytes=10_000)
    stream = StreamDigest(len(_DATA), room, blake3())
    most = 0

    def run(starts: list[int]) -> None:
        nonlocal most
        for start in starts:
            stream.add(start, _piece(start))
            most = max(most, room.waiting_bytes)

    threads = [threading.Thread(target=run, args=(_STARTS[number::3],)) for number in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)

    assert stream.finish() == hash_bytes(_DATA)
    assert room.waiting_bytes == 0
    assert most <= room.limit_bytes + 3 * 7_000
