"""Encodes the new chunks of one save, also as deltas, and measures what that takes and gains."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Final, Literal, NamedTuple

from holdfast.errors import Corrupt, NotFound, StoreError
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.engine import Stages, count_cores
from holdfast.repo.format.chunk import DELTA, RAW, Base, ChunkRef, cut
from holdfast.repo.format.codec import LEAST_BYTES, CodecLevel, encode, encode_delta
from holdfast.repo.format.layout import pack_key
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.format.source import SourceChunk
from holdfast.repo.handle.compression import LEVELS, Compression, Speeds
from holdfast.repo.read.any_copy import read_stated_base
from holdfast.repo.read.read_plan import iter_begins

DELTA_SHARE: Final = 0.9
"""A delta that is larger than this share of what the chunk takes without a base is not stored: a load reads both.

Its base shows what that is: the chunks of one tensor shrink alike.
"""
_MISSES: Final = 2
"""After so many deltas of a source that were not worth it, its other chunks are stored whole."""
_Place = int | tuple[int, ...]
"""Where a chunk is in its entry: its first byte, or its box in a tensor of which several ranks have a part."""


class DeltaChunk(NamedTuple):
    """A chunk as a delta."""

    stored: bytes
    base: Base


class DeltaEncoder:
    """Encodes the new chunks of one save as deltas. Safe in any thread."""

    def __init__(
        self,
        store: ObjectStore,
        manifests: Sequence[Manifest],
        stages: Stages,
        *,
        avoid: frozenset[str],
        level: CodecLevel,
        boxes: Mapping[int, Sequence[tuple[int, ...]]],
    ) -> None:
        """Take bases from the snapshot with these `manifests`, except those in packs whose keys are in `avoid`.

        `boxes` has, by the position of a source, the box of each of its chunks, if it is part of a larger entry.
        """
        self._store = store
        self._stages = stages
        self._avoid = avoid
        self._level: CodecLevel = level
        self._boxes = boxes
        self._names: dict[str, list[tuple[Manifest, int]]] = {}
        for manifest in manifests:
            for position, name in enumerate(manifest.names):
                self._names.setdefault(name, []).append((manifest, position))
        # After a save with deltas, a chunk that is no delta was not worth it: it is not tried again.
        self._retries = not any(manifest.since_whole for manifest in manifests)
        self._lock = threading.Lock()
        self._found: dict[int, dict[_Place, ChunkRef]] = {}
        self._places: dict[int, Mapping[int, _Place]] = {}
        self._misses: Counter[int] = Counter()

    def encode(self, chunk: SourceChunk, data: memoryview) -> DeltaChunk | None:
        """Return a chunk as a delta; None if it has no base, or the delta is not much smaller than the base."""
        base = self._find_base(chunk, len(data)) if self._misses[chunk.position] < _MISSES else None
        raw = None if base is None else self._read(base, len(data))
        if base is None or raw is None:
            return None
        with self._stages.time("encode", len(data)):
            stored = encode_delta(data, raw, base.digest, self._level, chunk.source.item_bytes)
        is_worth = stored is not None and len(stored) <= DELTA_SHARE * base.location.stored_bytes
        self._misses[chunk.position] = 0 if is_worth else self._misses[chunk.position] + 1
        return None if stored is None or not is_worth else DeltaChunk(stored, base)

    def _find_base(self, chunk: SourceChunk, size_bytes: int) -> Base | None:
        """Return the base for the chunk at a place: what is stored there or, if that is a delta, what it is based on.

        So a base is never a delta.
        """
        with self._lock:
            if chunk.position not in self._found:
                self._read_places(chunk)
        place = self._places[chunk.position].get(chunk.start)
        ref = None if place is None else self._found[chunk.position].get(place)
        at = None if ref is None else ref.location
        if ref is None or at is None or ref.size_bytes != size_bytes:
            return None
        base = Base(ref.digest, at) if at.codec != DELTA else at.base
        if at.codec != DELTA and not self._retries:
            return None
        return None if base is None or pack_key(base.location.pack_id) in self._avoid else base

    def _read_places(self, chunk: SourceChunk) -> None:
        """Find the chunks of the base snapshot that belong to the entry of a source, by place."""
        source, position = chunk.source, chunk.position
        boxes = self._boxes.get(position)
        starts = [0, *source.cuts[:-1]] if source.cuts else [start for start, _ in cut(source.size_bytes)]
        self._places[position] = dict(zip(starts, starts if boxes is None else boxes, strict=True))
        found: dict[_Place, ChunkRef] = {}
        for manifest, number in self._names.get(source.name, ()):
            entry = manifest.entry(number)
            if bool(entry.dims) == (boxes is None):
                continue
            pairs = iter_begins(entry) if boxes is None else ((ref, ref.box) for ref in entry.chunks)
            found.update((place, ref) for ref, place in pairs)
        self._found[position] = found

    def _read(self, base: Base, size_bytes: int) -> memoryview | None:
        """Return the bytes of a base; None if they cannot be read or are damaged: the chunk is then stored whole."""
        try:
            with self._stages.time("read", base.location.stored_bytes):
                return read_stated_base(self._store, base, size_bytes)
        except (NotFound, Corrupt, StoreError):
            return None


_HASH_BYTES_PER_S: Final = 2e9
"""Of one thread, before it was measured."""
Way = CodecLevel | Literal["delta"]
"""How a chunk is stored if it cannot be a delta: encoded by a level; with "delta", raw."""


class Encoded(NamedTuple):
    """What is stored for a chunk."""

    stored: bytes
    """Empty if the chunk does not shrink, and is stored raw."""
    base: Base | None = None
    """The base, if it is a delta."""


class ChunkEncoder:
    """Encodes chunks as one save has chosen. Safe in any thread."""

    def __init__(self, choice: Compression, speeds: Speeds, stages: Stages) -> None:
        """Encode as `choice` says, which is not "default"; "auto" decides by `speeds`, and adds to them."""
        self.deltas: DeltaEncoder | None = None
        """Encodes chunks as deltas where that is worth it; the others are encoded as chosen."""
        self.choice = choice
        self._speeds = speeds
        self._stages = stages
        self._cores = count_cores()

    @property
    def is_off(self) -> bool:
        """Every chunk is stored raw."""
        return self.choice is None and self.deltas is None

    @property
    def copies(self) -> int:
        """How many times the bytes of a chunk are in memory while it is encoded, at most."""
        if self.is_off:
            return 1
        return 2 if self.deltas is None else 5  # also the base, as stored and raw, and the difference

    def choose(self, size_bytes: int, item_bytes: int) -> Way | None:
        """Return how to encode a chunk; None if it is stored raw."""
        if size_bytes < LEAST_BYTES or self.is_off:
            return None
        return self._choose_level(item_bytes) or (None if self.deltas is None else "delta")

    def _choose_level(self, item_bytes: int) -> CodecLevel | None:
        if self.choice is None or self.choice in LEVELS:
            return self.choice
        hashed = self._stages.read().get("hash")
        rate = hashed.size_bytes / hashed.seconds if hashed and hashed.seconds else _HASH_BYTES_PER_S
        return self._speeds.find_level(item_bytes, rate, self._cores)

    def encode(self, chunk: SourceChunk, data: memoryview, way: Way) -> Encoded:
        """Return what is stored for a chunk."""
        deltas = self.deltas
        delta = None if deltas is None else deltas.encode(chunk, data)
        if delta is not None and (way == "delta" or delta.base.location.codec != RAW):
            return Encoded(*delta)
        whole = b"" if way == "delta" else self._encode_whole(data, way, chunk.source.item_bytes)
        # The base is stored raw, so that its size does not tell what the codec alone would gain.
        is_worth = delta is not None and len(delta.stored) <= DELTA_SHARE * (len(whole) or len(data))
        return Encoded(*delta) if delta is not None and is_worth else Encoded(whole)

    def _encode_whole(self, data: memoryview, level: CodecLevel, item_bytes: int) -> bytes:
        started = perf_counter()
        encoded = encode(data, level, item_bytes)
        seconds = perf_counter() - started
        self._stages.add("encode", seconds, len(data))
        stored_bytes = len(data) if encoded is None else len(encoded)
        self._speeds.note_encoded(level, item_bytes, (len(data), stored_bytes), seconds)
        return encoded or b""
