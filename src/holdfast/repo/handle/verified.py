"""What a handle knows to be intact: copies that it has written or compared itself, in packs that have not changed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from holdfast.repo.format.chunk import Location

TRUST_S: Final = 24 * 3600.0
"""How long a look counts: a run that saves for weeks reads everything again once a day."""
SAMPLE_SHARE: Final = 64
"""Each save reads one in so many of the copies that it need not read, other ones each time, so all in so many saves."""
_LIMIT: Final = 1 << 20
"""How many chunks are remembered one by one; beyond, all are forgotten, which costs one save the reading."""


@dataclass(slots=True)
class _Proof:
    """What is known of one pack, as long as its version stays the same."""

    version: str
    written_s: float = -math.inf
    read_s: dict[int, float] = field(default_factory=dict)
    """When the copy at each offset was read and found intact."""


class Proven:
    """What a save may rely on without reading it. Safe in any thread.

    Versions are those of `ObjectInfo`: they tell that somebody has changed a pack. They do not tell that its disk has
    damaged it; for that there are the sample, and the limit in time.
    """

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        """Know nothing; `clock` is in seconds and never goes back."""
        self._clock = clock
        self._proofs: dict[str, _Proof] = {}
        self._count = 0
        self._turns = itertools.count()

    def begin_turn(self) -> int:
        """Return the number of a save: it decides which copies belong to the save's sample."""
        return next(self._turns)

    def add_pack(self, pack_id: str, *, version: str) -> None:
        """Remember a pack that was written whole and made durable just now."""
        self._proofs[pack_id] = _Proof(version, written_s=self._clock())

    def add(self, location: Location, *, version: str) -> None:
        """Remember a copy that was found intact just now; `version` is that of its pack before it was read."""
        if self._count >= _LIMIT:
            self._proofs.clear()
            self._count = 0
        proof = self._proofs.get(location.pack_id)
        if proof is None or proof.version != version:
            proof = self._proofs[location.pack_id] = _Proof(version)
        self._count += location.offset not in proof.read_s
        proof.read_s[location.offset] = self._clock()

    def forget(self, pack_id: str) -> None:
        """Trust nothing of a pack any more: something in it proved to be damaged."""
        self._proofs.pop(pack_id, None)

    def covers(self, location: Location, *, version: str, turn: int) -> bool:
        """Return whether the save `turn` need not read a copy, whose pack has `version` now."""
        proof = self._proofs.get(location.pack_id)
        if proof is None or proof.version != version:
            return False
        looked_s = max(proof.written_s, proof.read_s.get(location.offset, -math.inf))
        is_sampled = hash((location.pack_id, location.offset)) % SAMPLE_SHARE == turn % SAMPLE_SHARE
        return self._clock() - looked_s < TRUST_S and not is_sampled
