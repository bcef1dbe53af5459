"""Writes the packs of one save, one after the other, and adds each to the index."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from holdfast.errors import NotFound, StoreError
from holdfast.objects.blocks import LentBlock
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.chunk import Location
from holdfast.repo.format.layout import new_file_id, pack_key
from holdfast.repo.format.pack import PAGE_BYTES, NewChunk, PackBuilder
from holdfast.repo.handle.index import write_fragment
from holdfast.repo.handle.remembered import VerifiedChunks
from holdfast.repo.names.leases import KeptAlive

_log = logging.getLogger(__name__)


class Packer:
    """The packs of one save; used by one thread."""

    def __init__(self, store: ObjectStore, lease: KeptAlive, *, proven: VerifiedChunks | None = None) -> None:
        """Write packs under `lease`, the first one when a chunk is appended; sealed packs are added to `proven`."""
        self._proven = proven
        self._store = store
        self._lease = lease
        self._open: PackBuilder | None = None

    def append(self, chunks: Sequence[NewChunk], *, block: LentBlock | None = None) -> list[Location]:
        """Append chunks, to a new pack if the open one is full; return their locations. See `append_chunks`."""
        self.keep_alive()
        if self._open is not None and self._open.is_full:
            self.seal()
        if self._open is None:
            self._open = PackBuilder(self._store, new_file_id(self._lease.lease_id))
            # A run that continues in a new pack starts there, so it needs the alignment of a start.
            if chunks[0].alignment == 1:
                chunks = [chunks[0]._replace(alignment=PAGE_BYTES), *chunks[1:]]
        return self._open.append_chunks(chunks, block=block)

    def keep_alive(self) -> None:
        """Renew the lease if it is due. Call it even while nothing is appended: hashing and lookups take long."""
        self._lease.keep_alive()

    def seal(self) -> None:
        """Make the open pack durable, then add it to the index."""
        if self._open is None:
            return
        pack, self._open = self._open, None
        try:
            pack.seal()
        except BaseException:
            pack.abort()
            raise
        self._note_proven(pack.pack_id)
        try:
            # Before the commit: if this save dies, the next one need not write these bytes again.
            write_fragment(self._store, pack.rows)
        except StoreError as error:
            _log.warning("pack %s was not added to the index; its chunks may be stored twice: %s", pack.pack_id, error)

    def _note_proven(self, pack_id: str) -> None:
        if self._proven is None:
            return
        with suppress(StoreError, NotFound):  # the next save then reads the pack before it reuses a chunk
            # Only now: committing the upload gives the file its name, which changes its version (ctime).
            self._proven.add_pack(pack_id, version=self._store.stat(pack_key(pack_id)).version)

    def abort(self) -> None:
        """Drop the open pack; a collector deletes the sealed ones."""
        if self._open is not None:
            self._open.abort()
            self._open = None
