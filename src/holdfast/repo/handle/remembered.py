"""What a handle remembers from one save to the next: recent snapshots, verified copies of chunks, change hints."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from holdfast.digest import Digest, Seeded, hash_bytes
from holdfast.lru import LruCache
from holdfast.repo.format.chunk import Location
from holdfast.repo.format.layout import split_prefix
from holdfast.repo.names.snapshots import CommittedSnapshot

TRUST_S: Final = 24 * 3600.0
"""How long a verification is valid: a run that saves for weeks reads everything again once a day."""
SAMPLE_SHARE: Final = 64
"""Each save reads one in 64 of the remembered copies, different ones each time, so all of them within 64 saves."""
_LIMIT: Final = 1 << 20
"""How many chunks each memory has room for. Beyond that all are forgotten: one save has to read or hash them again."""
HINTED_BYTES: Final = 16 << 10
"""Below this size a hint costs as much as the hash."""
_RECENT_PREFIXES: Final = 64


class RecentSnapshots:
    """The snapshot last saved under each prefix by this handle: a save finds the previous step without a listing.

    Safe in any thread.
    """

    def __init__(self) -> None:
        self._snapshots: LruCache[str, CommittedSnapshot] = LruCache(_RECENT_PREFIXES)
        self._lock = threading.Lock()

    def find(self, name: str) -> CommittedSnapshot | None:
        """Return the snapshot last saved under the prefix of `name`; it may have been deleted since."""
        with self._lock:
            return self._snapshots.get(split_prefix(name))

    def remember(self, snapshot: CommittedSnapshot) -> None:
        """Remember `snapshot`; forgets the least recently used prefix if there are too many."""
        with self._lock:
            self._snapshots.put(split_prefix(snapshot.name), snapshot)


class CommitWatch:
    """Calls functions for every snapshot that this handle commits; with several ranks, on the one that commits."""

    def __init__(self) -> None:
        self._watchers: list[Callable[[CommittedSnapshot], None]] = []

    def watch(self, watcher: Callable[[CommittedSnapshot], None]) -> None:
        """Call `watcher` from now on; it must be fast and must not raise, because the commit has succeeded."""
        self._watchers.append(watcher)

    def note(self, snapshot: CommittedSnapshot) -> None:
        """Call all watchers."""
        for watcher in self._watchers:
            watcher(snapshot)


@dataclass(slots=True)
class _Proof:
    """What was verified in one pack; valid while its version stays the same."""

    version: str
    written_s: float = -math.inf
    read_s: dict[int, float] = field(default_factory=dict)
    """When the copy at each offset was read and found intact."""


class VerifiedChunks:
    """Copies that the handle wrote or verified itself, and may reuse without reading them. Safe in any thread.

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
        self.add_all(location.pack_id, [location.offset], version=version)

    def add_all(self, pack_id: str, offsets: Sequence[int], *, version: str) -> None:
        """Do the same for the copies at these offsets in a pack."""
        if self._count >= _LIMIT:
            self._proofs.clear()
            self._count = 0
        proof = self._proofs.get(pack_id)
        if proof is None or proof.version != version:
            proof = self._proofs[pack_id] = _Proof(version)
        before = len(proof.read_s)
        proof.read_s.update(dict.fromkeys(offsets, self._clock()))
        self._count += len(proof.read_s) - before

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


class ChangeHints:
    """Keyed hashes of memory at its last save: unchanged memory is not hashed with BLAKE3 again. Safe in any thread.

    A hint is XXH3-128 with a secret random seed: different memory has the same hint with a chance of 1 in 2**128,
    unless an attacker can read this process. A hint never leaves the process and is never used as an address.
    """

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
