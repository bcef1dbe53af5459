"""An upload to a bucket: owns its bytes until one put sends them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from holdfast.digest import Buffer
from holdfast.errors import StoreError
from holdfast.objects.blocks import GrowingBlock, LentBlock
from holdfast.objects.protocol import Upload

PACK_BYTES: Final = 64 << 20
_PACK_END_BYTES: Final = 12 << 20
"""Room for the last batch of a pack and its footer."""


class CloudUpload(Upload):
    """An object in parts: blocks as they are, and copies of everything else. One put sends all parts, in order."""

    def __init__(self, key: str, *, commit: Callable[[str, Sequence[memoryview]], None]) -> None:
        self._key = key
        self._commit = commit
        self._has_ended = False
        self._parts: list[memoryview] = []
        self._blocks: list[LentBlock] = []
        self._copies: GrowingBlock | None = None
        """The part that is open at the end."""

    def append(self, *buffers: Buffer) -> None:
        """Append copies of `buffers`."""
        self._verify_open()
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if view:
                self._copies = self._copies or GrowingBlock(PACK_BYTES + _PACK_END_BYTES)
                self._copies.append(view)

    def append_block(self, block: LentBlock) -> None:
        """Append a block without a copy, wherever it starts."""
        self._verify_open()
        self._close_part()
        self._blocks.append(block)
        self._parts.append(block.memory)

    def commit(self) -> None:
        """Send all bytes and make the object visible.

        If that fails, the blocks are not released. A request that has not ended might still read them, and an object
        with other bytes could be taken for this one.
        """
        self._verify_open()
        self._close_part()
        self._has_ended = True
        parts, blocks = self._parts, self._blocks
        self._parts, self._blocks = [], []
        self._commit(self._key, parts or [memoryview(b"")])
        for block in blocks:
            block.release()

    def abort(self) -> None:
        """Drop what was appended."""
        self._has_ended = True
        blocks, self._parts, self._blocks, self._copies = self._blocks, [], [], None
        for block in blocks:
            block.release()

    def _close_part(self) -> None:
        if self._copies is not None:
            self._parts.append(self._copies.find())
            self._copies = None

    def _verify_open(self) -> None:
        if self._has_ended:
            raise StoreError(f"the upload of {self._key} has ended; begin a new one", key=self._key)
