"""Change hints: keyed hashes of memory at its last save, so that unchanged memory is not hashed with BLAKE3 again.

A hint is XXH3-128 with a secret random seed: different memory has the same hint with a chance of 1 in 2**128, unless an
attacker can read this process. A hint never leaves the process and is never used as an address.
"""

from __future__ import annotations

import os
from typing import Final

from holdfast.digest import Digest, Seeded, hash_bytes

HINTED_BYTES: Final = 16 << 10
"""Below this size a hint costs as much as the hash."""
_LIMIT: Final = 1 << 20
"""How many chunks are remembered; beyond, all are forgotten, which costs one save its hints."""


class ChangeHints:
    """The hints and digests that one handle remembers. Safe in any thread."""

    def __init__(self) -> None:
        self._hint_of = Seeded(int.from_bytes(os.urandom(8), "little"))
        self._seen: dict[tuple[str, int, int], tuple[bytes, Digest]] = {}

    def hash(self, name: str, start: int, data: memoryview) -> Digest:
        """Return the BLAKE3 of a chunk of the entry `name`; the remembered one, if its hint has not changed."""
        if data.nbytes < HINTED_BYTES:
            return hash_bytes(data)
        key = (name, start, data.nbytes)
        hint = self._hint_of(data)
        seen = self._seen.get(key)
        if seen and seen[0] == hint:
            return seen[1]
        digest = hash_bytes(data)
        # Memory that changed between the two hashes must not be remembered: hint and digest would not match.
        if self._hint_of(data) == hint:
            if len(self._seen) >= _LIMIT:
                self._seen.clear()
            self._seen[key] = (hint, digest)
        return digest
