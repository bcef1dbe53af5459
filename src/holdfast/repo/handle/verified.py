"""Remembers which stored copies a handle has written or verified itself, in packs that have not changed since."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from holdfast.repo.format.chunk import Location

TRUST_S: Final = 24 * 3600.0
"""How long a verification is valid: a run that saves for weeks reads everything again once a day."""
SAMPLE_SHARE: Final = 64
"""Each save reads one in 64 of the remembered copies, different ones each time, so all of them within 64 saves."""
_LIMIT: Final = 1 << 20
"""How many chunks are remembered; beyond that, all are forgotten, and one save has to read them again."""


@dataclass(slots=True)
class _Proof:
    """What was verified in one pack; valid while its version stays the same."""

    version: str
    written_s: float = -math.inf
    read_s: dict[int, float] = field(default_factory=dict)
    """When the copy at each offset was read and found intact."""


class VerifiedChunks:
    """Copies of chunks that a save may reuse without reading them. Safe in any thread.

    Versions are those of `ObjectInfo`: they change when a pack is written to. They do not change when its disk damages
    it; the sample and the time limit are there to find that.
    """

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        """Start empty; `clock` is in seconds and never goes back."""
        self._clock = clock
        self._proofs: dict[str, _Proof] = {}
        self._count = 0
        self._turns = itertools.count()

    def begin_turn(self) -> int:
        """Return a number for a new save; it selects the sample of copies that this save reads."""
        return next(self._turns)

    def add_pack(self, pack_id: str, *, version: str) -> None:
        """Remember a pack that was just written and made durable."""
        self._proofs[pack_id] = _Proof(version, written_s=self._clock())

    def add(self, location: Location, *, version: str) -> None:
        """Remember a copy that was just read and found intact; `version` is that of its pack before the read."""
        if self._count >= _LIMIT:
            self._proofs.clear()
            self._count = 0
        proof = self._proofs.get(location.pack_id)
        if proof is None or proof.version != version:
            proof = self._proofs[location.pack_id] = _Proof(version)
        self._count += location.offset not in proof.read_s
        proof.read_s[location.offset] = self._clock()

    def forget(self, pack_id: str) -> None:
        """Forget all copies in a pack, because something in it was found to be damaged."""
        self._proofs.pop(pack_id, None)

    def covers(self, location: Location, *, version: str, turn: int) -> bool:
        """Return whether the save `turn` may reuse a copy unread; `version` is the current one of its pack."""
        proof = self._proofs.get(location.pack_id)
        if proof is None or proof.version != version:
            return False
        verified_s = max(proof.written_s, proof.read_s.get(location.offset, -math.inf))
        is_sampled = hash((location.pack_id, location.offset)) % SAMPLE_SHARE == turn % SAMPLE_SHARE
        return self._clock() - verified_s < TRUST_S and not is_sampled
