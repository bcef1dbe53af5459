"""Encodes the new chunks of one save, and measures what that takes and gains."""

from __future__ import annotations

from time import perf_counter
from typing import Final, Literal, NamedTuple

from holdfast.repo.engine import count_cores
from holdfast.repo.format.chunk import RAW, Base
from holdfast.repo.format.codecs.codec import LEAST_BYTES, CodecLevel, encode
from holdfast.repo.format.source import SourceChunk
from holdfast.repo.handle.compression import LEVELS, Compression, Speeds
from holdfast.repo.stages import Stages
from holdfast.repo.write.deltas import DELTA_SHARE, DeltaEncoder

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
