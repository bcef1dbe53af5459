"""Reads and writes files in large blocks, and bypasses the page cache where that is faster."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from holdfast.objects.blocks import PAGE_BYTES, BlockPool, LentBlock, copy_bytes, is_aligned, new_block
from holdfast.objects.local.files import Files
from holdfast.objects.thread_pool import Task, ThreadPool

BLOCK_BYTES: Final = 4 << 20
"""Large enough for a disk to be fast, and small enough to be copied while it is in the processor's cache."""
_WRITES: Final = 4
"""Blocks that are being written while one more is filled. A file needs no other memory."""
DIRECT_BYTES: Final = 256 << 10
"""Below this size a read through the page cache, with its read-ahead, is as fast."""
_KEPT_BLOCKS: Final = 8


class BlockWriter:
    """Writes the bytes of one file from start to end; a small file is written with one call, by `finish`."""

    def __init__(self, files: Files, handle: int, *, may_be_direct: bool) -> None:
        """Write to an empty file; threads and memory are allocated when they are needed."""
        self._files = files
        self._handle = handle
        self._may_be_direct = may_be_direct
        self._is_direct = False
        self._has_begun = False
        self._threads: ThreadPool | None = None
        self._writes_in_flight: deque[Task[None]] = deque()
        self._free: list[memoryview] = []
        self._block: memoryview | None = None
        self._filled = 0
        self._start = 0
        """Offset in the file at which the current block begins."""

    def append(self, data: memoryview) -> None:
        """Copy `data` into a block; waits while all blocks are full. Raises the error of an earlier write."""
        while data.nbytes:
            if self._block is None:
                self._block = self._take_block()
            part = data[: BLOCK_BYTES - self._filled]
            copy_bytes(self._block[self._filled : self._filled + part.nbytes], part)
            self._filled += part.nbytes
            data = data[part.nbytes :]
            if self._filled == BLOCK_BYTES:
                self._flush()

    def append_block(self, block: LentBlock) -> None:
        """Write the whole pages of a block without a copy, and copy the rest; copy all of it if it is not aligned."""
        memory = block.memory
        whole = memory.nbytes // PAGE_BYTES * PAGE_BYTES
        if not whole or not is_aligned(memory, self._start + self._filled):
            try:
                self.append(memory)
            finally:
                block.release()
            return
        rest = memoryview(bytes(memory[whole:]))
        try:
            self._flush()
            self._wait_for_room()
            self._choose_direct()
        except BaseException:
            block.release()
            raise
        self._begin(memory[:whole], block.release)
        self.append(rest)

    def finish(self) -> None:
        """Write what is left and wait for all writes; the file is not durable yet."""
        while self._writes_in_flight:
            self._writes_in_flight.popleft().result()
        if self._block is not None and self._filled:
            # A file seldom ends at a page boundary.
            whole = self._filled // PAGE_BYTES * PAGE_BYTES if self._is_direct else 0
            self._write(self._block[:whole], self._start)
            self._use_page_cache()
            self._write(self._block[whole : self._filled], self._start + whole)
        self.stop()

    def stop(self) -> None:
        """Stop writing; when this returns, no thread uses the file."""
        if self._threads:
            self._threads.shutdown()
        self._threads, self._block = None, None
        self._writes_in_flight.clear()

    def _take_block(self) -> memoryview:
        self._wait_for_room()
        # The first block may be the only one, with a few hundred bytes: no huge pages for it.
        return self._free.pop() if self._free else new_block(BLOCK_BYTES, huge=self._has_begun)

    def _wait_for_room(self) -> None:
        while len(self._writes_in_flight) >= _WRITES:
            self._writes_in_flight.popleft().result()

    def _flush(self) -> None:
        """Start writing what was copied so far, which are whole pages."""
        block, filled = self._block, self._filled
        if block is not None:
            self._choose_direct()
            self._block, self._filled = None, 0
            self._begin(block[:filled], partial(self._free.append, block))

    def _choose_direct(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._is_direct = self._may_be_direct and self._files.set_direct(self._handle, direct=True)

    def _begin(self, data: memoryview, release: Callable[[], None]) -> None:
        """Start a write on a thread, which releases the memory even if the write fails."""
        # Long-lived threads: starting one per block takes two context switches on cores that are busy hashing.
        self._threads = self._threads or ThreadPool("holdfast-write", _WRITES)
        self._writes_in_flight.append(
            self._threads.submit(partial(self._write_and_release, data, self._start, release))
        )
        self._start += data.nbytes

    def _write_and_release(self, data: memoryview, start: int, release: Callable[[], None]) -> None:
        try:
            self._write(data, start)
        finally:
            release()

    def _write(self, data: memoryview, start: int) -> None:
        """Write every byte, with as many calls as that needs."""
        while data.nbytes:
            was_direct = self._is_direct  # another thread may change it at the same time, for the same reason
            try:
                count = self._files.write_at(self._handle, start, data)
            except OSError as error:
                # The disk needs a coarser alignment than any that we know, or a write ended within a page.
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                self._use_page_cache()
                continue
            data, start = data[count:], start + count

    def _use_page_cache(self) -> None:
        if self._is_direct:
            self._is_direct = self._files.set_direct(self._handle, direct=False)


class DirectReads:
    """Reads bytes that are not in the page cache without it, so that nothing else is evicted. Thread-safe.

    One object for each store; it owns the buffers.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._blocks = BlockPool(BLOCK_BYTES + PAGE_BYTES, kept=_KEPT_BLOCKS, huge=True)

    def read(self, handle: int, start: int, target: memoryview) -> int:
        """Fill the beginning of `target` from byte `start` on, and return how many bytes were filled.

        Returns 0 if the bytes are in the page cache, which is faster, or if the filesystem has no direct reads.
        """
        # One random page is checked for all. Not always the same one: the check itself may bring it into the cache.
        if self._files.is_cached(handle, start + int.from_bytes(os.urandom(4), "little") % target.nbytes):
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
                    count = self._read_block(handle, start + done, block, target[done : done + BLOCK_BYTES])
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
