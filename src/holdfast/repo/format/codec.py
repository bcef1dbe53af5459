"""Chunks that are not stored raw: encoded with Blosc2, or as the XOR with another chunk, the base."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, Final, Literal, NamedTuple

from holdfast.digest import DIGEST_BYTES, Digest, fingerprint
from holdfast.errors import Corrupt
from holdfast.repo.format.chunk import CHUNK_BYTES, RAW, Location
from holdfast.repo.format.layout import pack_key

CodecLevel = Literal["fast", "small"]
"""How a chunk is encoded: "fast" is LZ4 after a bit shuffle, "small" is zstd after a byte shuffle."""

LEAST_BYTES: Final = 4096
"""Shorter chunks are stored raw: the call would take longer than writing them."""
WORTH_SHARE: Final = 0.97
"""An encoded chunk that is larger than this share of its raw bytes is not stored: decoding costs more than it saves."""
ITEM_SIZES: Final = (1, 2, 4, 8, 16)
"""The sizes of an item that the shuffle filters may group bytes by."""

HEADER: Final = struct.Struct("<BBBBIII6sBB6sBB")
_START: Final = struct.Struct("<I")
_VERSION: Final = 5
_STREAM_VERSION: Final = 1
_EXTENDED: Final = 0b0000_0101
"""Both flags of the old header's shuffles: the header has 32 bytes."""
_UNSPLIT: Final = 0b0001_0000
_ZEROS: Final = 0x10
"""In the last byte of the header: all bytes of the chunk are zero, and nothing follows."""
_NO_FILTERS: Final = bytes(6)
_FILTERS: Final = (b"", b"\x01", b"\x02")
"""None, byte shuffle, bit shuffle."""
_COMPRESSORS: Final = {1: 1, 4: 5}
"""The number of LZ4 and of zstd, as stated in the flags and, by another count, in the byte after the filters."""


class _Header(NamedTuple):
    version: int
    stream_version: int
    flags: int
    item_bytes: int
    raw_bytes: int
    block_bytes: int
    stored_bytes: int
    filters: bytes
    compressor: int
    compressor_meta: int
    filter_meta: bytes
    more_flags: int
    special: int

    def find_fault(self, stored_bytes: int, raw_bytes: int) -> str:
        """Return what the format does not allow, an empty text if nothing."""
        if (self.version, self.stream_version) != (_VERSION, _STREAM_VERSION):
            return f"version {self.version}.{self.stream_version}"
        if (self.raw_bytes, self.stored_bytes) != (raw_bytes, stored_bytes):
            return f"a header of {self.stored_bytes} stored and {self.raw_bytes} raw bytes"
        if self.flags & ~(_UNSPLIT | 0b1110_0000) != _EXTENDED or self.more_flags or self.special not in (0, _ZEROS):
            return f"flags {self.flags:02x} {self.more_flags:02x} {self.special:02x}"
        if _COMPRESSORS.get(self.flags >> 5) != self.compressor or self.compressor_meta:
            return f"compressor {self.flags >> 5}/{self.compressor}"
        if self.filters.replace(b"\0", b"") not in _FILTERS or self.filter_meta != _NO_FILTERS:
            return f"filters {self.filters.hex()}"
        if self.item_bytes not in ITEM_SIZES:
            return f"items of {self.item_bytes} bytes"
        return self._find_size_fault()

    def _find_size_fault(self) -> str:
        if not 0 < self.block_bytes <= self.raw_bytes:
            return f"blocks of {self.block_bytes} bytes"
        blocks = -(-self.raw_bytes // self.block_bytes)
        if self.special:
            return "" if self.stored_bytes == HEADER.size else "bytes after a header that stands for zeros"
        return "" if self.stored_bytes >= HEADER.size + _START.size * (blocks + 1) else f"{blocks} blocks"


def encode(data: memoryview, level: CodecLevel, item_bytes: int) -> bytes | None:
    """Return the encoded bytes of a chunk; None if it is short or does not shrink. Other threads may run meanwhile."""
    if len(data) < LEAST_BYTES:
        return None
    encoded: bytes = _load_blosc2().compress2(
        data, typesize=item_bytes if item_bytes in ITEM_SIZES else 1, **_find_setting(level)
    )
    # The same check as when it is read: a later Blosc2 might write what this version of the format does not allow.
    is_readable = len(encoded) <= WORTH_SHARE * len(data) and not _find_fault(encoded, len(data))
    return encoded if is_readable else None


def decode_into(stored: memoryview, target: memoryview) -> None:
    """Decode a chunk into memory of exactly its raw size; raises Corrupt. The caller verifies the digest."""
    fault = _find_fault(stored, len(target))
    if fault:
        raise Corrupt(f"an encoded chunk has {fault}, which the format does not allow")
    try:
        _load_blosc2().decompress2(stored, dst=target, nthreads=1)
    except (ValueError, RuntimeError) as error:
        raise Corrupt(f"an encoded chunk cannot be decoded: {error}") from error


def decode(stored: memoryview, raw_bytes: int) -> memoryview:
    """Return the raw bytes of a chunk in new memory; raises Corrupt. The caller verifies the digest."""
    if not 0 < raw_bytes <= CHUNK_BYTES:
        raise Corrupt(f"an encoded chunk of {raw_bytes} bytes, which the format does not allow")
    target = memoryview(bytearray(raw_bytes))
    decode_into(stored, target)
    return target


def open_stored(location: Location, stored: memoryview, raw_bytes: int) -> memoryview:
    """Return the raw bytes of a chunk: `stored` itself, or decoded in new memory. The caller verifies the digest.

    Raises Corrupt if encoded bytes do not have the fingerprint of the location: by accident, the library never gets
    bytes that it did not write.
    """
    if location.codec == RAW:
        return stored
    if fingerprint(stored) != location.fingerprint:
        raise Corrupt(f"an encoded chunk in pack {location.pack_id} is damaged", key=pack_key(location.pack_id))
    return decode(stored, raw_bytes)


def _find_fault(stored: bytes | memoryview, raw_bytes: int) -> str:
    if not HEADER.size <= len(stored) < raw_bytes:
        return f"{len(stored)} stored bytes for {raw_bytes} raw ones"
    return _Header(*HEADER.unpack_from(stored)).find_fault(len(stored), raw_bytes)


@cache
def _load_blosc2() -> Any:
    """Import Blosc2 at the first use: it takes as long as numpy. Its calls then let other threads run."""
    import blosc2

    blosc2.set_releasegil(True)
    return blosc2


@cache
def _find_setting(level: CodecLevel) -> dict[str, Any]:
    blosc2 = _load_blosc2()
    codec, effort, last = blosc2.Codec.LZ4, 5, blosc2.Filter.BITSHUFFLE
    if level == "small":
        codec, effort, last = blosc2.Codec.ZSTD, 1, blosc2.Filter.SHUFFLE
    filters = [blosc2.Filter.NOFILTER] * 5 + [last]
    return {"codec": codec, "clevel": effort, "filters": filters, "filters_meta": [0] * 6, "nthreads": 1}


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
    numpy = _load_numpy()
    views = [numpy.frombuffer(view, numpy.uint8) for view in (first, second)]
    result = numpy.empty(len(first), numpy.uint8) if out is None else numpy.frombuffer(out, numpy.uint8)
    return numpy.bitwise_xor(*views, out=result)


@cache
def _load_numpy() -> Any:
    """Import numpy at the first use; Blosc2 has imported it already."""
    import numpy

    return numpy
