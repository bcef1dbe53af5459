"""Entries: the named bytes of a snapshot with their specs, and the digests of entries and snapshots."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final, NamedTuple

from holdfast.digest import Digest, begin_kind, hash_kind
from holdfast.errors import Corrupt
from holdfast.json_text import Json, canonical_json
from holdfast.repo.format.boxes import Box, Coordinates
from holdfast.repo.format.chunk import ChunkRef

NO_RANK: Final = 0xFFFFFFFF
"""Stands for a rank: the entry belongs to no single rank."""

_HASHED_BYTES: Final = 32 << 10
_ENTRY_HEAD: Final = struct.Struct("<QQIIIQQ")
_CHUNK: Final = struct.Struct("<Q32s")


class Entry(NamedTuple):
    """Named bytes of a snapshot; `spec` describes what they mean to the layers above."""

    name: str
    size_bytes: int
    chunks: tuple[ChunkRef, ...]
    spec: Json = None
    """Part of the content: entries with different specs have different digests."""
    note: Json = None
    """Not part of the content: origin, time and the like."""
    dims: int = 0
    """0: a plain span of bytes, chunks in order. 1: a span whose chunks each state their start and size in bytes.
    More: each chunk is a box of the tensor, with as many starts and sizes."""
    alias: int = 0
    """Entries with the same alias share memory; 0 for none."""
    rank: int = NO_RANK


def iter_boxes(entry: Entry) -> Iterator[tuple[ChunkRef, Box]]:
    """Yield each chunk of an entry that is stored in boxes, with its box."""
    for ref in entry.chunks:
        yield ref, Box(ref.box[: entry.dims], ref.box[entry.dims :])


def find_shape(entry: Entry) -> Coordinates:
    """Return the shape of the tensor that the boxes of an entry cover; raises Corrupt if they leave gaps."""
    stops = [box.stops for _, box in iter_boxes(entry)]
    shape = tuple(map(max, zip(*stops, strict=True)))
    present_bytes = sum(ref.size_bytes for ref in entry.chunks)
    if not prod(shape) or present_bytes != entry.size_bytes or present_bytes % prod(shape):
        raise Corrupt(f"{entry.name!r}: its boxes do not make up {entry.size_bytes} bytes; run `holdfast check`")
    return shape


def digest_entry(entry: Entry) -> Digest:
    """Return the content digest of an entry; it does not depend on where chunks are stored."""
    return _digest_entry(entry, canonical_json(entry.spec))


def _digest_entry(entry: Entry, spec: bytes) -> Digest:
    text, size_bytes, held, _, _, dims, alias, rank = entry
    name = text.encode()
    parts = [_ENTRY_HEAD.pack(len(name), len(spec), dims, alias, rank, size_bytes, len(held)), name, spec]
    if dims:
        boxes = [value for chunk in held for value in chunk.box]
        parts.append(struct.pack(f"<{len(boxes)}q", *boxes))
    # A loop is faster than a comprehension for a single chunk, which most entries have.
    for chunk in held:
        parts.append(_CHUNK.pack(chunk.size_bytes, chunk.digest))
    return hash_kind("entry", parts)


def digest_snapshot(spec: Json, entries: Sequence[Entry]) -> Digest:
    """Return the content digest of a snapshot: its spec and its entries in order."""
    encoded = canonical_json(spec)
    hasher = begin_kind("snapshot")
    hasher.update(struct.pack("<QQ", len(encoded), len(entries)))
    hasher.update(encoded)
    # Many entries share one spec object, which is encoded once. The key is its id, not its value: 1, 1.0 and True are
    # equal but differ in JSON. The object is kept alive, so that no other object gets the same id.
    specs: dict[int, tuple[Json, bytes]] = {}
    # Collected, because the hasher is faster with many digests at once.
    digests = bytearray()
    for entry in entries:
        own_spec = entry.spec
        known = specs.get(id(own_spec))
        if known is None:
            known = specs[id(own_spec)] = (own_spec, canonical_json(own_spec))
        digests += _digest_entry(entry, known[1])
        if len(digests) >= _HASHED_BYTES:
            hasher.update(digests)
            digests.clear()
    hasher.update(digests)
    return Digest(hasher.digest())


def digest_parts(spec: Json, entries: Sequence[Entry], parts: Sequence[Digest]) -> Digest:
    """Return the content digest of a snapshot of several parts, from its root and the digest of each part."""
    return hash_kind("parts", [digest_snapshot(spec, entries), *parts])
