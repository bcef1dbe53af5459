"""Other copies of a chunk: by the index, then by the footer of every pack."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.errors import Corrupt, NewerFormat, NotFound, StoreError
from holdfast.repo.chunk import ChunkRef, Location
from holdfast.repo.index import Index
from holdfast.repo.layout import PACKS
from holdfast.repo.pack import Footer, parse_pack_key, read_footer
from holdfast.repo.repository import Repository
from holdfast.store.listing import iter_objects
from holdfast.store.protocol import ObjectStore


def iter_copies(repo: Repository, ref: ChunkRef) -> Iterator[Location]:
    """Yield every place but the hint's where a copy of the chunk may lie, the cheap look-ups first."""
    seen = {ref.location}
    for location in Index(repo.store, limit_bytes=repo.budget_bytes // 4).find(ref.digest, ref.size_bytes):
        if location not in seen:
            seen.add(location)
            yield location
    for _, footer in iter_footers(repo.store):
        for chunk in footer.chunks:
            if (chunk.digest, chunk.size_bytes) == (ref.digest, ref.size_bytes) and chunk.location not in seen:
                seen.add(chunk.location)
                yield chunk.location


def iter_footers(store: ObjectStore) -> Iterator[tuple[str, Footer]]:
    """Yield every pack whose footer can be read."""
    for info in iter_objects(store, PACKS):
        pack_id = parse_pack_key(info.key)
        if pack_id:
            try:
                yield pack_id, read_footer(store, pack_id)
            except (NotFound, Corrupt, NewerFormat, StoreError):
                continue
