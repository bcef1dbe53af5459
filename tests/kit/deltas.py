"""Series of saves that differ in few bits, stored as deltas, for the tests of the repository layer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache

from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.chunk import DELTA, Base
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.compression import Compression, DeltaChoice
from holdfast.repo.handle.repository import Repository
from holdfast.repo.write.writer import Request, SaveResult, WriteOptions, save
from tests.kit.encoded import halves
from tests.kit.saving import MIB, new_repo, read_entries

SIZE = 2 * MIB + 5000
DELTA_CONFIGS = 4
"""How many config records a store with deltas has: created, confirmed, the codec declared, deltas declared."""


@cache
def trained(step: int, size_bytes: int = SIZE) -> bytes:
    """Return weights after some steps: each step flips the lowest bit of some items."""
    if step == 0:
        return halves(size_bytes)
    data = bytearray(trained(step - 1, size_bytes))
    chosen = random.Random(step)
    for _ in range(size_bytes // 200):
        data[2 * chosen.randrange(size_bytes // 2)] ^= 1
    return bytes(data)


def save_step(
    repo: Repository,
    name: str,
    entries: Mapping[str, bytes],
    *,
    delta: DeltaChoice | None = 10,
    compression: Compression = "small",
    overwrite: bool = False,
) -> SaveResult:
    """Save entries as items of two bytes, as deltas where that is worth it."""
    sources = [BytesSource(entry, data, item_bytes=2) for entry, data in entries.items()]
    return save(
        repo, Request(name, sources, options=WriteOptions(compression=compression, delta=delta, overwrite=overwrite))
    )


def delta_repo(store: ObjectStore | None = None, steps: int = 3) -> Repository:
    """Return a repository with snapshots run/0, which is whole, run/1, run/2 ..., whose entry `w` is deltas on it."""
    repo = new_repo(store)
    for step in range(steps):
        save_step(repo, f"run/{step}", {"w": trained(step)})
    return repo


def bases(repo: Repository, name: str, entry: str = "w") -> list[Base | None]:
    """Return the base of each chunk of an entry; None for a chunk that is no delta."""
    places = [chunk.location for chunk in read_entries(repo, name)[entry].chunks]
    assert all((at.codec == DELTA) == (at.base is not None) for at in places if at)
    return [at.base for at in places if at]
