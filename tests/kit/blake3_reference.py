"""BLAKE3 in plain Python, for nodes that no package returns: a leaf far from the start of its input."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

CHUNK_START: Final = 1
CHUNK_END: Final = 2
ROOT: Final = 8
_MASK: Final = 0xFFFFFFFF
_INITIAL: Final = (
    *(0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A),
    *(0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19),
)
_ORDER: Final = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_COLUMNS: Final = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
_DIAGONALS: Final = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))


def hash_leaf(data: bytes, counter: int, *, is_root: bool = False) -> bytes:
    """Return the node of one leaf of at most 1,024 bytes."""
    value: Sequence[int] = _INITIAL
    blocks = [data[at : at + 64] for at in range(0, len(data), 64)] or [b""]
    for number, block in enumerate(blocks):
        flags = CHUNK_START if number == 0 else 0
        if number == len(blocks) - 1:
            flags |= CHUNK_END | (ROOT if is_root else 0)
        message = struct.unpack("<16I", block.ljust(64, b"\0"))
        value = _compress(value, message, (counter & _MASK, counter >> 32, len(block), flags))
    return struct.pack("<8I", *value)


def _compress(value: Sequence[int], message: Sequence[int], tail: Sequence[int]) -> list[int]:
    state = [*value, *_INITIAL[:4], *tail]
    for _ in range(7):
        for number, places in enumerate((*_COLUMNS, *_DIAGONALS)):
            _mix(state, places, message[2 * number], message[2 * number + 1])
        message = [message[at] for at in _ORDER]
    return [low ^ high for low, high in zip(state[:8], state[8:], strict=True)]


def _mix(state: list[int], places: Sequence[int], x: int, y: int) -> None:
    a, b, c, d = places
    for word, first, second in ((x, 16, 12), (y, 8, 7)):
        state[a] = (state[a] + state[b] + word) & _MASK
        state[d] = _rotate(state[d] ^ state[a], first)
        state[c] = (state[c] + state[d]) & _MASK
        state[b] = _rotate(state[b] ^ state[c], second)


def _rotate(word: int, bits: int) -> int:
    return (word >> bits | word << (32 - bits)) & _MASK
