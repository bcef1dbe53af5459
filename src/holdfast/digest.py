"""The two hashes: BLAKE3-256, which names and proves; XXH3-128, which only notices accidents."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Final, NewType

from blake3 import blake3
from xxhash import xxh3_128_digest

from holdfast.errors import Corrupt

Digest = NewType("Digest", bytes)
"""32 bytes of BLAKE3."""

Buffer = bytes | bytearray | memoryview

DIGEST_BYTES: Final = 32
_HEX: Final = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}\Z")


def hash_bytes(data: Buffer) -> Digest:
    """Return the BLAKE3-256 of `data`; frees the GIL."""
    return Digest(blake3(data).digest())


def hash_parts(parts: Iterable[Buffer]) -> Digest:
    """Return the BLAKE3-256 of what the parts are when joined, without joining them."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return Digest(hasher.digest())


def hash_kind(kind: str, parts: Iterable[Buffer]) -> Digest:
    """Return a content digest: BLAKE3 in derive-key mode, so that no kind collides with another or with a chunk."""
    hasher = begin_kind(kind)
    hasher.update(b"".join(parts))
    return Digest(hasher.digest())


def begin_kind(kind: str) -> blake3:
    """Return a hasher that takes the content digest of a kind when it is given the parts one after the other."""
    return _begin_kind(kind).copy()


def authenticate(data: Buffer, *, secret: bytes) -> Digest:
    """Return the keyed BLAKE3 of `data`: only who has the 32 bytes of `secret` can make it or check it."""
    return Digest(blake3(data, key=secret).digest())


@cache
def _begin_kind(kind: str) -> blake3:
    """Return a hasher to copy: to derive the key takes as long as to hash a small entry."""
    return blake3(derive_key_context=f"holdfast v1 {kind}")


def fingerprint(data: Buffer) -> bytes:
    """Return the XXH3-128 of stored bytes: finds accidents at memory speed, never a name."""
    return xxh3_128_digest(data)


class Seeded:
    """XXH3-128 with a seed of its own: tells, in this process only, whether bytes are the same as before."""

    def __init__(self, seed: int) -> None:
        """Use a 64-bit seed."""
        self._seed = seed

    def __call__(self, data: Buffer) -> bytes:
        """Return what `data` looks like."""
        return xxh3_128_digest(data, self._seed)


def parse_digest(text: object, *, where: str) -> Digest:
    """Read 64 lower-case hex digits, or raise Corrupt that says where they stood."""
    # Not by bytes.fromhex alone: that passes over spaces.
    if isinstance(text, str) and _HEX.match(text):
        return Digest(bytes.fromhex(text))
    raise Corrupt(f"{where}: {str(text)[:80]!r} is not a digest", key=where)


def short_hex(digest: bytes) -> str:
    """Return the first 12 hex digits, for messages."""
    return digest[:6].hex()
