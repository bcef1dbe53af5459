"""Fills packs one after the other on behalf of one save, and tells the index about each."""

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
from holdfast.repo.handle.verified import Proven
from holdfast.repo.names.leases import KeptAlive

_log = logging.getLogger(__name__)


class Packer:
    """The packs of one save; used by one thread."""

    def __init__(self, store: ObjectStore, lease: KeptAlive, *, proven: Proven | None = None) -> None:
        """Begin with no pack: one is opened when the first chunk comes. What is sealed counts as `proven`."""
        self._proven = proven
        self._store = store
        self._lease = lease
        self._open: PackBuilder | None = None

    def append(self, chunks: Sequence[NewChunk], *, block: LentBlock | None = None) -> list[Location]:
        """Append chunks, in a new pack if the open one is full; return where each lies. See `append_chunks`."""
        self.keep_alive()
        if self._open is not None and self._open.is_full:
            self.seal()
        if self._open is None:
            self._open = PackBuilder(self._store, new_file_id(self._lease.lease_id))
            # A run that goes on in another pack begins there: it must lie as it would have at first.
            if chunks[0].alignment == 1:
                chunks = [chunks[0]._replace(alignment=PAGE_BYTES), *chunks[1:]]
        return self._open.append_chunks(chunks, block=block)

    def keep_alive(self) -> None:
        """Show that the save lives, if it is time to: hashing and finding all of it in the store takes long, too."""
        self._lease.keep_alive()

    def seal(self) -> None:
        """Make what was appended durable; the index learns of it only then."""
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
            _log.warning("pack %s is not in the index, its chunks may be stored twice: %s", pack.pack_id, error)

    def _note_proven(self, pack_id: str) -> None:
        if self._proven is None:
            return
        with suppress(StoreError, NotFound):  # then the next save reads it
            # After the commit, which changes a file's inode: it gets its name, and loses the temporary one.
            self._proven.add_pack(pack_id, version=self._store.stat(pack_key(pack_id)).version)

    def abort(self) -> None:
        """Drop the open pack; sealed ones are left to a collector."""
        if self._open is not None:
            self._open.abort()
            self._open = None
