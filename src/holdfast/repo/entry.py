"""Entries: the leaves of a snapshot as names, bytes and meaning, and the digests that say what they are."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from holdfast.digest import Digest, begin_kind, hash_kind
from holdfast.repo.chunk import ChunkRef
from holdfast.repo.record import Json, canonical_json

NO_RANK: Final = 0xFFFFFFFF
"""In place of a rank: the entry is the same for all ranks."""

_HASHED_BYTES: Final = 32 << 10
_ENTRY_HEAD: Final = struct.Struct("<QQIIIQQ")
_CHUNK: Final = struct.Struct("<Q32s")


class Entry(NamedTuple):
    """One leaf of a snapshot: `size_bytes` bytes with a meaning (`spec`) that the layers above give it."""

    name: str
    size_bytes: int
    chunks: tuple[ChunkRef, ...]
    spec: Json = None
    """Part of the content: two entries that differ in it are different."""
    note: Json = None
    """Not part of the content: where it came from, when, and the like."""
    dims: int = 0
    """0: a plain span of bytes, its chunks in order. 1: each chunk has its place in that span, its start and size in
    bytes. More: each chunk is a box of the tensor's shape, with so many starts and sizes."""
    alias: int = 0
    """Entries with the same number, if not 0, share memory."""
    rank: int = NO_RANK


def digest_entry(entry: Entry) -> Digest:
    """Return the content digest of an entry: what it is, not where it lies."""
    return _digest_entry(entry, canonical_json(entry.spec))


def _digest_entry(entry: Entry, spec: bytes) -> Digest:
    text, size_bytes, held, _, _, dims, alias, rank = entry
    name = text.encode()
    parts = [_ENTRY_HEAD.pack(len(name), len(spec), dims, alias, rank, size_bytes, len(held)), name, spec]
    if dims:
        boxes = [value for chunk in held for value in chunk.box]
        parts.append(struct.pack(f"<{len(boxes)}q", *boxes))
    # A loop, not a comprehension, which takes longer for the one chunk that most of many entries have.
    for chunk in held:
        parts.append(_CHUNK.pack(chunk.size_bytes, chunk.digest))
    return hash_kind("entry", parts)


def digest_snapshot(spec: Json, entries: Sequence[Entry]) -> Digest:
    """Return the content digest of a snapshot: its spec and its entries in order."""
    digester = SnapshotDigester(spec, len(entries))
    for _ in digester.pass_on(entries):
        pass
    return digester.digest()


class SnapshotDigester:
    """Takes the content digest of a snapshot while somebody else goes over its entries."""

    def __init__(self, spec: Json, num_entries: int) -> None:
        """Begin with the spec, and how many entries there will be."""
        encoded = canonical_json(spec)
        self._hasher = begin_kind("snapshot")
        self._hasher.update(struct.pack("<QQ", len(encoded), num_entries))
        self._hasher.update(encoded)
        # Those that the hasher has not got yet: it is faster with many at once.
        self._digests = bytearray()

    def pass_on(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Yield the entries, having taken the digest of each."""
        # The same object, as the specs of many entries are, is encoded once. By identity, not equality: 1, 1.0 and True
        # are equal, and differ in JSON. Each is kept beside its encoding, so that no other has its identity.
        specs: dict[int, tuple[Json, bytes]] = {}
        for entry in entries:
            spec = entry.spec
            known = specs.get(id(spec))
            if known is None:
                known = specs[id(spec)] = (spec, canonical_json(spec))
            self._digests += _digest_entry(entry, known[1])
            if len(self._digests) >= _HASHED_BYTES:
                self._pass_to_hasher()
            yield entry

    def _pass_to_hasher(self) -> None:
        self._hasher.update(self._digests)
        self._digests.clear()

    def digest(self) -> Digest:
        """Return the digest, when all entries were passed on."""
        self._pass_to_hasher()
        return Digest(self._hasher.digest())


def digest_parts(spec: Json, entries: Sequence[Entry], parts: Sequence[Digest]) -> Digest:
    """Return the content digest of a snapshot of many parts: what its root says, and the content of each part."""
    return hash_kind("parts", [digest_snapshot(spec, entries), *parts])
