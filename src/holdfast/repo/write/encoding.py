"""Encodes the new chunks of one save, and measures what that takes and gains."""

from __future__ import annotations

from time import perf_counter
from typing import Final

from holdfast.repo.engine import count_cores
from holdfast.repo.format.codec import LEAST_BYTES, CodecLevel, encode
from holdfast.repo.handle.compression import LEVELS, Compression, Speeds
from holdfast.repo.stages import Stages

_HASH_BYTES_PER_S: Final = 2e9
"""Of one thread, before it was measured."""


class ChunkEncoder:
    """Encodes chunks as one save has chosen. Safe in any thread."""

    def __init__(self, choice: Compression, speeds: Speeds, stages: Stages) -> None:
        """Encode as `choice` says, which is not "default"; "auto" decides by `speeds`, and adds to them."""
        self._choice = choice
        self._speeds = speeds
        self._stages = stages
        self._cores = count_cores()

    @property
    def is_off(self) -> bool:
        """Every chunk is stored raw."""
        return self._choice is None

    def choose(self, size_bytes: int, item_bytes: int) -> CodecLevel | None:
        """Return how to encode a chunk; None if it is stored raw."""
        if size_bytes < LEAST_BYTES or self._choice is None:
            return None
        if self._choice in LEVELS:
            return self._choice
        hashed = self._stages.read().get("hash")
        rate = hashed.size_bytes / hashed.seconds if hashed and hashed.seconds else _HASH_BYTES_PER_S
        return self._speeds.find_level(item_bytes, rate, self._cores)

    def encode(self, data: memoryview, level: CodecLevel, item_bytes: int) -> bytes | None:
        """Return the encoded bytes of a chunk; None if it does not shrink."""
        started = perf_counter()
        encoded = encode(data, level, item_bytes)
        seconds = perf_counter() - started
        self._stages.add("encode", seconds, len(data))
        stored_bytes = len(data) if encoded is None else len(encoded)
        self._speeds.note_encoded(level, item_bytes, (len(data), stored_bytes), seconds)
        return encoded
