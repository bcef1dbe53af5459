"""Writes one file in large blocks behind its caller: around the page cache where that works, through it elsewhere."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from holdfast.objects.blocks import PAGE_BYTES, LentBlock, copy_bytes, is_aligned, new_block
from holdfast.objects.local.files import Files
from holdfast.objects.thread_pool import Task, ThreadPool

BLOCK_BYTES: Final = 4 << 20
_WRITES: Final = 4
"""Blocks that are being written while one more is filled: this is all the memory that a file under way takes."""


class BlockWriter:
    """The bytes of one file, from its start to its end; a small file is written by one call, when it is finished."""

    def __init__(self, files: Files, handle: int, *, may_be_direct: bool) -> None:
        """Write to an empty file; neither thread nor memory is taken before they are needed."""
        self._files = files
        self._handle = handle
        self._may_be_direct = may_be_direct
        self._is_direct = False
        self._has_begun = False
        self._threads: ThreadPool | None = None
        self._under_way: deque[Task[None]] = deque()
        self._free: list[memoryview] = []
        self._block: memoryview | None = None
        self._filled = 0
        self._start = 0
        """Where in the file the open block begins."""

    def append(self, data: memoryview) -> None:
        """Take a copy of `data`; waits while all blocks are full. Raises what failed in writing an earlier one."""
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
        """Write a block from where it is, but for what is no whole page; a copy of it if it does not lie on pages."""
        memory = block.memory
        whole = memory.nbytes // PAGE_BYTES * PAGE_BYTES
        if not whole or not is_aligned(memory, self._start + self._filled):
            try:
                self.append(memory)
            finally:
                block.release()
            return
        odd = memoryview(bytes(memory[whole:]))
        try:
            self._flush()
            self._wait_for_room()
            self._choose_way()
        except BaseException:
            block.release()
            raise
        self._begin(memory[:whole], block.release)
        self.append(odd)

    def finish(self) -> None:
        """Write what is left and wait for all of it; it is not durable yet."""
        while self._under_way:
            self._under_way.popleft().result()
        if self._block is not None and self._filled:
            # The end of a file is hardly ever a whole page.
            whole = self._filled // PAGE_BYTES * PAGE_BYTES if self._is_direct else 0
            self._write(self._block[:whole], self._start)
            self._go_through_cache()
            self._write(self._block[whole : self._filled], self._start + whole)
        self.stop()

    def stop(self) -> None:
        """Write no more; once this returns, nobody uses the file."""
        if self._threads:
            self._threads.shutdown()
        self._threads, self._block = None, None
        self._under_way.clear()

    def _take_block(self) -> memoryview:
        self._wait_for_room()
        # The first may be the last, and hold a few hundred bytes.
        return self._free.pop() if self._free else new_block(BLOCK_BYTES, huge=self._has_begun)

    def _wait_for_room(self) -> None:
        while len(self._under_way) >= _WRITES:
            self._under_way.popleft().result()

    def _flush(self) -> None:
        """Let what was copied so far, whole pages, be written."""
        block, filled = self._block, self._filled
        if block is not None:
            self._choose_way()
            self._block, self._filled = None, 0
            self._begin(block[:filled], partial(self._free.append, block))

    def _choose_way(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._is_direct = self._may_be_direct and self._files.set_direct(self._handle, direct=True)

    def _begin(self, data: memoryview, release: Callable[[], None]) -> None:
        """Let a thread write, which releases the memory whatever happens."""
        # Threads that stay: to begin one for each block takes two turns of cores that are busy hashing.
        self._threads = self._threads or ThreadPool("holdfast-write", _WRITES)
        self._under_way.append(self._threads.submit(partial(self._write_and_release, data, self._start, release)))
        self._start += data.nbytes

    def _write_and_release(self, data: memoryview, start: int, release: Callable[[], None]) -> None:
        try:
            self._write(data, start)
        finally:
            release()

    def _write(self, data: memoryview, start: int) -> None:
        """Write every byte, however few each call takes."""
        while data.nbytes:
            was_direct = self._is_direct  # another thread may change it meanwhile, for the same reason
            try:
                count = self._files.write_at(self._handle, start, data)
            except OSError as error:
                # It wants a coarser alignment than any disk that we know, or has taken a part that is not whole pages.
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                self._go_through_cache()
                continue
            data, start = data[count:], start + count

    def _go_through_cache(self) -> None:
        if self._is_direct:
            self._is_direct = self._files.set_direct(self._handle, direct=False)
