"""What a handle knows to be intact: copies that it has written itself, or has read and compared, not long ago."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic
from typing import Final

from holdfast.repo.chunk import Location

TRUST_S: Final = 24 * 3600.0
"""How long a look counts: disks rot slowly, and a run that saves for weeks looks again once a day."""
_LIMIT: Final = 1 << 20
"""How many chunks are remembered one by one; beyond, all are forgotten, which costs one save the reading."""


class Proven:
    """What a save may rely on without another look. Safe in any thread."""

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        """Know nothing yet."""
        self._clock = clock
        self._packs: dict[str, float] = {}
        self._places: dict[tuple[str, int], float] = {}

    def add_pack(self, pack_id: str) -> None:
        """Remember a pack that was written whole and made durable just now."""
        self._packs[pack_id] = self._clock()

    def add(self, location: Location) -> None:
        """Remember a copy that was read and found intact just now."""
        if len(self._places) >= _LIMIT:
            self._places.clear()
        self._places[location.pack_id, location.offset] = self._clock()

    def forget(self, pack_id: str) -> None:
        """Trust nothing of a pack any more: something in it proved to be damaged."""
        self._packs.pop(pack_id, None)
        for place in [place for place in list(self._places) if place[0] == pack_id]:
            self._places.pop(place, None)

    def covers(self, location: Location) -> bool:
        """Tell whether a copy was written or looked at by this handle, and not long ago."""
        written = self._packs.get(location.pack_id, -math.inf)
        read = self._places.get((location.pack_id, location.offset), -math.inf)
        return self._clock() - max(written, read) < TRUST_S
