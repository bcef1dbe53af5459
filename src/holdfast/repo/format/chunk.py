"""Chunks: how bytes are cut into them, what identifies a chunk, and where a copy of it is stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from holdfast.digest import DIGEST_BYTES, Digest, hash_bytes, short_hex
from holdfast.errors import Corrupt, DigestMismatch, NewerFormat

CHUNK_BYTES: Final = 1 << 20
"""The grid: a chunk never crosses a multiple of this."""
UNIT_BYTES: Final = 8 << 20
"""How much of adjacent chunks is read or written at once."""
INLINE_BYTES: Final = 512
"""Chunks up to this size are stored in the manifest itself."""
RAW: Final = 0
"""The codec of chunks whose bytes are stored unchanged."""
BLOSC2: Final = 1
"""The codec of chunks that are stored as a chunk of Blosc2; see `codec`."""
DELTA: Final = 2
"""The codec of chunks that are stored as their difference from another chunk, the base; see `codec`."""
WHOLE: Final = (RAW, BLOSC2)
"""The codecs of chunks that can be read without another chunk. A base has one of these."""


# Tuples, not dataclasses: there may be millions of each, and creating a frozen dataclass takes four times as long.
class Location(NamedTuple):
    """Where one copy of a chunk should be stored; a hint that is verified when the copy is read."""

    pack_id: str
    offset: int
    stored_bytes: int
    codec: int
    fingerprint: bytes
    """XXH3-128 of the stored bytes."""
    base: Base | None = None
    """What a delta is the difference from. None for other codecs, and in footers and the index, which do not state it:
    the stored bytes begin with the digest of the base."""


class Base(NamedTuple):
    """The chunk that a delta is the difference from: its digest, and where a copy of it should be stored."""

    digest: Digest
    location: Location


class ChunkRef(NamedTuple):
    """One chunk of an entry: its identity (digest and length), and where to find it."""

    digest: Digest
    size_bytes: int
    location: Location | None
    """None if the bytes are inline."""
    inline: bytes = b""
    box: tuple[int, ...] = ()
    """Starts, then sizes, in the entry's global shape; empty if the entry is a plain span of bytes."""


def iter_places(location: Location) -> Iterator[Location]:
    """Yield where the bytes are that a reader needs: the location itself and, for a delta, that of its base."""
    yield location
    if location.base:
        yield location.base.location


def cut(size_bytes: int) -> list[tuple[int, int]]:
    """Return the (start, stop) of each chunk of a span of bytes."""
    return [(start, min(start + CHUNK_BYTES, size_bytes)) for start in range(0, size_bytes, CHUNK_BYTES)]


def has_possible_size(codec: int, stored_bytes: int, size_bytes: int) -> bool:
    """Return whether a chunk of `size_bytes` may be stored in so many bytes by a codec; False for an unknown codec."""
    if codec == RAW:
        return stored_bytes == size_bytes
    least = {BLOSC2: 0, DELTA: DIGEST_BYTES}.get(codec)
    return least is not None and least < stored_bytes < size_bytes


def verify_location(location: Location, size_bytes: int, *, what: str, key: str) -> None:
    """Raise unless a chunk can be read there: NewerFormat for an unknown codec, Corrupt for an impossible size."""
    if location.codec not in (*WHOLE, DELTA):
        raise NewerFormat(f"{what} is stored with codec {location.codec}, which this Holdfast does not know: upgrade")
    if not has_possible_size(location.codec, location.stored_bytes, size_bytes):
        raise Corrupt(f"{what}: {location.stored_bytes} bytes are stored instead of {size_bytes}", key=key)


def verify_chunk(data: memoryview, digest: Digest, *, what: str) -> None:
    """Raise DigestMismatch unless `data` has this digest."""
    found = hash_bytes(data)
    if found != digest:
        raise DigestMismatch(f"{what}: the stored bytes have digest {short_hex(found)}, not {short_hex(digest)}")
