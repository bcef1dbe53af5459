"""Finds other copies of a chunk, in the index first, then in the footers of all packs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

from holdfast.digest import Digest
from holdfast.errors import Corrupt, NewerFormat, NotFound, StoreError
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.chunk import ChunkRef, Location
from holdfast.repo.format.layout import PACKS
from holdfast.repo.format.pack import Footer, PackedChunk, iter_pack_footers, parse_pack_key
from holdfast.repo.handle.repository import Repository

ROW_COST_BYTES: Final = 400
"""Approximate memory of one row of a footer."""


class Copies:
    """Finds other copies of chunks; keeps what it has read, as a lost pack takes many chunks. Safe in any thread."""

    def __init__(self, repo: Repository) -> None:
        """Search `repo`; nothing is read before the first search."""
        self._store = repo.store
        self._limit_bytes = repo.budget_bytes // 4
        self._lock = threading.Lock()
        self._index = repo.index
        self._is_refreshed = False
        self._in_footers: dict[Digest, list[PackedChunk]] | None = None

    def iter_copies(self, ref: ChunkRef) -> Iterator[Location]:
        """Yield every other location where a copy of the chunk may be stored, the cheapest to find first."""
        seen = {ref.location}
        for find in (self._find_in_index, self._find_in_footers):
            for location in find(ref):
                if location not in seen:
                    seen.add(location)
                    yield location

    def _find_in_index(self, ref: ChunkRef) -> list[Location]:
        with self._lock:
            if not self._is_refreshed:
                self._index.refresh()
                self._is_refreshed = True
            return self._index.find(ref.digest, ref.size_bytes)

    def _find_in_footers(self, ref: ChunkRef) -> list[Location]:
        with self._lock:
            if self._in_footers is None:
                self._in_footers = self._read_footers()
            found = self._in_footers.get(ref.digest, ())
        if not found and len(self._in_footers) * ROW_COST_BYTES >= self._limit_bytes:
            # Not all footers fit in memory: read them again, for this chunk only.
            found = [
                row for _, footer in iter_footers(self._store) for row in footer.chunks if row.digest == ref.digest
            ]
        return [row.location for row in found if row.size_bytes == ref.size_bytes]

    def _read_footers(self) -> dict[Digest, list[PackedChunk]]:
        rows: dict[Digest, list[PackedChunk]] = {}
        for _, footer in iter_footers(self._store):
            for row in footer.chunks:
                if len(rows) * ROW_COST_BYTES < self._limit_bytes:
                    rows.setdefault(row.digest, []).append(row)
        return rows


def iter_footers(store: ObjectStore) -> Iterator[tuple[str, Footer]]:
    """Yield the id and footer of every pack whose footer can be read."""
    listed = ((parse_pack_key(info.key), info.size_bytes) for info in store.iter_objects(PACKS))
    packs = [(pack_id, size_bytes) for pack_id, size_bytes in listed if pack_id]
    for (pack_id, _), footer in zip(packs, iter_pack_footers(store, packs), strict=True):
        if isinstance(footer, Footer):
            yield pack_id, footer
        elif not isinstance(footer, NotFound | Corrupt | NewerFormat | StoreError):
            raise footer
