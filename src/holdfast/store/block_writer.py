"""Writes one file in large blocks behind its caller: around the page cache where that works, through it elsewhere."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from holdfast.store.blocks import PAGE_BYTES, copy_bytes, new_block
from holdfast.store.files import Files

BLOCK_BYTES: Final = 4 << 20
_BLOCKS: Final = 4
"""One is being filled while the others are written: this is all the memory that a file under way takes."""


class _Writing:
    """A block that is being written by a thread of its own: next to what the disk takes, that costs nothing."""

    def __init__(self, block: memoryview, write: Callable[[], None]) -> None:
        self.block = block
        self._write = write
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-write")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            self._error = error

    def wait(self) -> None:
        """Wait until it is written, or raise what kept it from being so."""
        self.wait_quietly()
        if self._error is not None:
            raise self._error

    def wait_quietly(self) -> None:
        """Wait until nothing is written any more, whether it was or not."""
        self._thread.join()


class BlockWriter:
    """The bytes of one file, from its start to its end; a small file is written by one call, when it is finished."""

    def __init__(self, files: Files, handle: int, *, may_be_direct: bool) -> None:
        """Write to an empty file; neither thread nor memory is taken before they are needed."""
        self._files = files
        self._handle = handle
        self._may_be_direct = may_be_direct
        self._is_direct = False
        self._has_begun = False
        self._under_way: deque[_Writing] = deque()
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
                self._hand_over(self._block)

    def finish(self) -> None:
        """Write what is left and wait for all of it; it is not durable yet."""
        while self._under_way:
            self._under_way.popleft().wait()
        if self._block is not None and self._filled:
            # The end of a file is hardly ever a whole page.
            whole = self._filled // PAGE_BYTES * PAGE_BYTES if self._is_direct else 0
            self._write(self._block[:whole], self._start)
            self._go_through_cache()
            self._write(self._block[whole : self._filled], self._start + whole)
        self.stop()

    def stop(self) -> None:
        """Write no more; once this returns, nobody uses the file."""
        while self._under_way:
            self._under_way.popleft().wait_quietly()
        self._block = None

    def _take_block(self) -> memoryview:
        if len(self._under_way) < _BLOCKS - 1:
            return new_block(BLOCK_BYTES)
        written = self._under_way.popleft()
        written.wait()
        return written.block

    def _hand_over(self, block: memoryview) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._is_direct = self._may_be_direct and self._files.set_direct(self._handle, direct=True)
        self._under_way.append(_Writing(block, partial(self._write, block, self._start)))
        self._start += BLOCK_BYTES
        self._block, self._filled = None, 0

    def _write(self, data: memoryview, start: int) -> None:
        """Write every byte, however few each call takes."""
        while data.nbytes:
            try:
                count = self._files.write_at(self._handle, start, data)
            except OSError as error:
                # It wants a coarser alignment than any disk that we know, or has taken a part that is not whole pages.
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._go_through_cache()
                continue
            data, start = data[count:], start + count

    def _go_through_cache(self) -> None:
        if self._is_direct:
            self._is_direct = self._files.set_direct(self._handle, direct=False)
