"""Direct reads: bytes that are not in the page cache are read without it, so that nothing else is evicted."""

from __future__ import annotations

import os
from typing import Final

from holdfast.objects.blocks import PAGE_BYTES, BlockPool, copy_bytes, is_aligned
from holdfast.objects.local.files import Files

DIRECT_BYTES: Final = 256 << 10
"""Below this size a read through the page cache, with its read-ahead, is as fast."""
_BLOCK_BYTES: Final = 4 << 20
"""Large enough for a disk to be fast, and small enough to be copied while it is in the processor's cache."""
_KEPT_BLOCKS: Final = 8


class DirectReads:
    """Direct reads of one store's files; owns the buffers for them. Thread-safe."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._blocks = BlockPool(_BLOCK_BYTES + PAGE_BYTES, kept=_KEPT_BLOCKS, huge=True)

    def read(self, handle: int, start: int, target: memoryview) -> int:
        """Fill the beginning of `target` from byte `start` on, and return how many bytes were filled.

        Returns 0 if the bytes are in the page cache, which is faster, or if the filesystem has no direct reads.
        """
        # One random page is checked for all. Not always the same one: the check itself may bring it into the cache.
        if self._files.is_cached(handle, start + int.from_bytes(os.urandom(4)) % target.nbytes):
            return 0
        if not self._files.set_direct(handle, direct=True):
            return 0
        try:
            return self._read_aligned(handle, start, target)
        finally:
            self._files.set_direct(handle, direct=False)

    def _read_aligned(self, handle: int, start: int, target: memoryview) -> int:
        done = 0
        try:
            if is_aligned(target, start):
                whole = target.nbytes // PAGE_BYTES * PAGE_BYTES
                done = self._files.read_into(handle, start, target[:whole])
                if done < whole:
                    return done
            with self._blocks.lend() as block:
                while done < target.nbytes:
                    count = self._read_block(handle, start + done, block, target[done : done + _BLOCK_BYTES])
                    if not count:
                        break
                    done += count
        except OSError:
            # The disk needs another alignment, or cannot read: the read through the cache will show which.
            pass
        return done

    def _read_block(self, handle: int, start: int, block: memoryview, target: memoryview) -> int:
        skipped = start % PAGE_BYTES
        wanted = skipped + target.nbytes
        wanted += -wanted % PAGE_BYTES
        found = self._files.read_into(handle, start - skipped, block[:wanted])
        count = max(0, min(found - skipped, target.nbytes))
        copy_bytes(target[:count], block[skipped : skipped + count])
        return count
