"""Whether and how a handle encodes new chunks: as the user says, or as measured speeds of store and cores suggest."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, get_args

from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.codec import CodecLevel

Compression = Literal["default", "auto", "fast", "small"] | None
"""How new chunks are stored: None: raw; "fast": LZ4; "small": zstd; "auto": what is soonest done, chunk by chunk.

"default" in `open` is "auto" for an object store and None for a directory; in a save, it is the choice of `open`.
"""
DeltaChoice = Literal["auto", "off"] | int
"""Whether new chunks are stored as deltas on an earlier snapshot: a number N: yes, but one save in N is whole.

"auto" is 10 if chunks are compressed by "fast" or "small", otherwise "off".
"""
LEVELS: Final[tuple[CodecLevel, ...]] = get_args(CodecLevel)
_CHOICES: Final = (None, *get_args(Literal["default", "auto", "fast", "small"]))

_AUTO_DELTAS: Final = 10
LEAST_PACK_BYTES: Final = 4 << 20
"""A smaller pack does not show how fast the store is: its request or its fsync takes longer than its bytes."""
_NEWEST: Final = 0.3
"""The weight of the newest measurement."""
_LEAST_GAIN: Final = 0.9
"""A codec is used if a byte then takes at most this share of the time."""
_PROBE: Final = 32
"""Of so many chunks that are stored raw, one is encoded all the same, to learn whether such chunks shrink."""


class Speed(NamedTuple):
    """What one thread does with one level."""

    bytes_per_s: float
    """Raw bytes."""
    share: float
    """Stored bytes for each raw byte."""


PRIORS: Final[Mapping[CodecLevel, Speed]] = {"fast": Speed(2.0e9, 0.8), "small": Speed(0.4e9, 0.75)}
"""What is assumed before anything was measured: weights, on a core of a server."""
_HOPES: Final[Mapping[CodecLevel, Speed]] = {level: prior._replace(share=0.5) for level, prior in PRIORS.items()}
"""What a probe may hope for."""


def verify_compression(choice: Compression) -> None:
    """Raise ValueError unless `choice` is one."""
    if choice not in _CHOICES:
        raise ValueError(f"compression must be None, 'auto', 'fast', 'small' or 'default', not {choice!r}")


def verify_delta(choice: DeltaChoice) -> None:
    """Raise ValueError unless `choice` is one."""
    is_number = isinstance(choice, int) and not isinstance(choice, bool) and choice >= 1
    if choice not in ("auto", "off") and not is_number:
        raise ValueError(
            f"delta must be 'auto', 'off' or a number N from 1 on (one save in N is whole), not {choice!r}"
        )


def find_delta_run(choice: DeltaChoice, compression: Compression) -> int:
    """Return how many saves in a row may store deltas before one has to be whole; 0 for none."""
    if choice == "auto":
        return _AUTO_DELTAS - 1 if compression in LEVELS else 0
    return 0 if choice == "off" else choice - 1


def choose_compression(store: ObjectStore, choice: Compression) -> Compression:
    """Return the choice of a handle: "default" is "auto" if encoding is faster than sending, otherwise None."""
    verify_compression(choice)
    if choice != "default":
        return choice
    return "auto" if store.traits.compresses else None


def plan_level(
    store_bytes_per_s: float, hash_bytes_per_s: float, cores: int, speeds: Mapping[CodecLevel, Speed]
) -> CodecLevel | None:
    """Return the level with which a byte is soonest hashed, encoded and stored; None to store it raw.

    Threads hash and encode while others send: the slower of the two decides.
    """

    def count_s(level: CodecLevel) -> float:
        bytes_per_s, share = speeds[level]
        return max((1 / hash_bytes_per_s + 1 / bytes_per_s) / cores, share / store_bytes_per_s)

    best = min(speeds, key=count_s)
    raw_s = max(1 / hash_bytes_per_s / cores, 1 / store_bytes_per_s)
    return best if count_s(best) <= _LEAST_GAIN * raw_s else None


class Speeds:
    """What a handle has measured of its store and of each level; new measurements count most. Safe in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store_bytes_per_s: float | None = None
        self._levels: dict[tuple[CodecLevel, int], Speed] = {}
        self._raw: Counter[int] = Counter()

    def note_stored(self, size_bytes: int, seconds: float) -> None:
        """Note that the store can take so many bytes in this time; small packs do not count."""
        if size_bytes < LEAST_PACK_BYTES or seconds <= 0:
            return
        with self._lock:
            self._store_bytes_per_s = _average_rate(self._store_bytes_per_s, size_bytes / seconds)

    def note_encoded(self, level: CodecLevel, item_bytes: int, sizes: tuple[int, int], seconds: float) -> None:
        """Note that one thread encoded a chunk in this time; `sizes` are its raw and its stored bytes."""
        if seconds <= 0:
            return
        with self._lock:
            before = self._levels.get((level, item_bytes), PRIORS[level])
            raw_bytes, stored_bytes = sizes
            speed = _average_rate(before.bytes_per_s, raw_bytes / seconds)
            self._levels[level, item_bytes] = Speed(speed, _average(before.share, stored_bytes / raw_bytes))

    def find_level(self, item_bytes: int, hash_bytes_per_s: float, cores: int) -> CodecLevel | None:
        """Return the level for the next chunk; None to store it raw, as before anything was measured of the store."""
        with self._lock:
            store = self._store_bytes_per_s
            if store is None:
                return None
            speeds = {level: self._levels.get((level, item_bytes), PRIORS[level]) for level in LEVELS}
            level = plan_level(store, hash_bytes_per_s, cores, speeds)
            if level is not None:
                return level
            self._raw[item_bytes] += 1
            is_probe = self._raw[item_bytes] % _PROBE == 0
            return plan_level(store, hash_bytes_per_s, cores, _HOPES) if is_probe else None


def _average(before: float, newest: float) -> float:
    return (1 - _NEWEST) * before + _NEWEST * newest


def _average_rate(before: float | None, newest: float) -> float:
    """Average the time of a byte: one moment in which the store took bytes at once does not hide that it is slow."""
    return newest if before is None else 1 / _average(1 / before, 1 / newest)
