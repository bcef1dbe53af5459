"""Deltas: a chunk stored as the XOR with another chunk of the same length, its base, encoded by Blosc2."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from holdfast.digest import DIGEST_BYTES, Digest, fingerprint
from holdfast.errors import Corrupt
from holdfast.repo.format.chunk import Location
from holdfast.repo.format.codecs.codec import CodecLevel, decode_into, encode
from holdfast.repo.format.layout import pack_key

_ITEM_BYTES_AT: Final = 3
"""Offset of the item size in the header of a Blosc2 chunk."""


def encode_delta(
    data: memoryview, base: memoryview, base_digest: Digest, level: CodecLevel, item_bytes: int
) -> bytes | None:
    """Return a chunk as a delta on `base`, which has the same length; None if that is not smaller than the chunk."""
    encoded = encode(memoryview(_xor(data, base)), level, item_bytes)
    return None if encoded is None else base_digest + encoded


def find_base_digest(stored: memoryview) -> Digest:
    """Return the digest of the base, with which the stored bytes of a delta begin."""
    return Digest(bytes(stored[:DIGEST_BYTES]))


def find_item_bytes(stored: memoryview) -> int:
    """Return the size of an item by which the bytes of a delta were grouped."""
    return stored[DIGEST_BYTES + _ITEM_BYTES_AT]


def apply_delta(stored: memoryview, target: memoryview, scratch: memoryview) -> None:
    """Turn the base in `target` into the chunk that a delta states; raises Corrupt. The caller verifies the digest.

    `scratch` is overwritten; it has at least the size of the chunk.
    """
    difference = scratch[: len(target)]
    decode_into(stored[DIGEST_BYTES:], difference)
    _xor(target, difference, target)


def open_delta(location: Location, stored: memoryview, base: memoryview) -> memoryview:
    """Return the raw bytes of a chunk in new memory; raises Corrupt. The caller verifies the digest."""
    if fingerprint(stored) != location.fingerprint:
        raise Corrupt(f"a delta in pack {location.pack_id} is damaged", key=pack_key(location.pack_id))
    target = memoryview(bytearray(base))
    apply_delta(stored, target, memoryview(bytearray(len(base))))
    return target


def _xor(first: memoryview, second: memoryview, out: memoryview | None = None) -> Any:
    """Return the XOR of bytes, in new memory or in `out`; frees the GIL."""
    numpy = _load()
    views = [numpy.frombuffer(view, numpy.uint8) for view in (first, second)]
    result = numpy.empty(len(first), numpy.uint8) if out is None else numpy.frombuffer(out, numpy.uint8)
    return numpy.bitwise_xor(*views, out=result)


@cache
def _load() -> Any:
    """Import numpy at the first use; Blosc2 has imported it already."""
    import numpy

    return numpy
