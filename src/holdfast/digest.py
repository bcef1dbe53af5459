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
    """Return the BLAKE3-256 of the concatenated parts, without concatenating them."""
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
    """Return a hasher for the content digest of a kind; call its `update` with one part after the other."""
    return _begin_kind(kind).copy()


def authenticate(data: Buffer, *, secret: bytes) -> Digest:
    """Return the keyed BLAKE3 of `data`: the 32 bytes of `secret` are needed to make it or to check it."""
    return Digest(blake3(data, key=secret).digest())


@cache
def _begin_kind(kind: str) -> blake3:
    """Return a hasher to copy. Cached, because deriving the key takes as long as hashing a small entry."""
    return blake3(derive_key_context=f"holdfast v1 {kind}")


def fingerprint(data: Buffer) -> bytes:
    """Return the XXH3-128 of stored bytes: detects accidents at memory speed; never used as a name."""
    return xxh3_128_digest(data)


class Seeded:
    """XXH3-128 with a 64-bit seed: detects, within this process, whether bytes have changed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, data: Buffer) -> bytes:
        """Return the seeded hash of `data`."""
        return xxh3_128_digest(data, self._seed)


def parse_digest(text: object, *, where: str) -> Digest:
    """Return the digest that 64 lower-case hex digits encode, or raise Corrupt that names `where`."""
    # bytes.fromhex alone is not enough: it skips spaces.
    if isinstance(text, str) and _HEX.match(text):
        return Digest(bytes.fromhex(text))
    raise Corrupt(f"{where}: {str(text)[:80]!r} is not a digest", key=where)


def short_hex(digest: bytes) -> str:
    """Return the first 12 hex digits, for messages."""
    return digest[:6].hex()
