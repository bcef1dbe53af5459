"""Change hints: what memory looked like when it was last saved, so that what still looks so need not be hashed again.

A hint is XXH3-128 with a seed that nobody knows: memory that differs looks the same with a chance of 1 in 2**128,
but for somebody who can read this process. It never leaves the process and never names anything.
"""

from __future__ import annotations

import os
from typing import Final

from holdfast.digest import Digest, Seeded, hash_bytes

HINTED_BYTES: Final = 16 << 10
"""Below this size a hint costs as much as the hash."""
_LIMIT: Final = 1 << 20
"""How many chunks are remembered; beyond, all are forgotten, which costs one save its hints."""


class Hints:
    """What one handle remembers. Safe in any thread."""

    def __init__(self) -> None:
        """Choose a seed."""
        self._look = Seeded(int.from_bytes(os.urandom(8), "little"))
        self._seen: dict[tuple[str, int, int], tuple[bytes, Digest]] = {}

    def hash(self, name: str, start: int, data: memoryview) -> Digest:
        """Return the BLAKE3 of a chunk of the entry `name`: remembered, if it looks as it did."""
        if data.nbytes < HINTED_BYTES:
            return hash_bytes(data)
        key = (name, start, data.nbytes)
        look = self._look(data)
        seen = self._seen.get(key)
        if seen and seen[0] == look:
            return seen[1]
        digest = hash_bytes(data)
        # Memory that changes just now must not be remembered by the one look and the other digest.
        if self._look(data) == look:
            if len(self._seen) >= _LIMIT:
                self._seen.clear()
            self._seen[key] = (look, digest)
        return digest
