"""Blocks: page-aligned memory that reads and writes around the page cache need, lent out and taken back."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

PAGE_BYTES: Final = 4096
"""What direct reads and writes are aligned to: no less is enough for every disk."""
_HUGE: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it
_LARGE_BYTES: Final = 64 << 10
"""From this size on, freeing the GIL for a copy pays."""


def new_block(size_bytes: int, *, huge: bool = False) -> memoryview:
    """Return page-aligned memory, given back to the system when nobody refers to it.

    In huge pages, if the system has some, a block that is filled costs less, and lies in few pieces: a disk takes it
    in fewer requests. One of which only a little is used costs more.
    """
    # Private: shared memory, which is what this call gives by itself, takes half as long again to touch first.
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and _HUGE is not None:
        with suppress(OSError):  # a kernel without them
            memory.madvise(_HUGE)
    return memoryview(memory)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy memory of the same size; frees the GIL if that is worth it and the source lets its address be known."""
    if source.readonly or source.nbytes < _LARGE_BYTES:
        target[:] = source
        return
    try:
        ctypes.memmove(_address(target), _address(source), source.nbytes)
    except ctypes.ArgumentError as error:
        # The arguments are right, so that is how ctypes says that there was no memory to convert one of them.
        raise MemoryError(f"no memory to copy {source.nbytes} bytes: {error}") from error


def is_aligned(memory: memoryview, start: int) -> bool:
    """Tell whether direct I/O can go straight between this memory and byte `start` of a file, page by page."""
    return not (start % PAGE_BYTES or memory.readonly or _address(memory) % PAGE_BYTES)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@dataclass(frozen=True, slots=True)
class LentBlock:
    """Page-aligned memory that nobody changes until it is released."""

    memory: memoryview
    """As much of it as is filled."""
    release: Callable[[], None]
    """To be called once, from any thread."""


class BlockPool:
    """Blocks of one size that are used again; keeps a few while nobody needs them. Safe in any thread."""

    def __init__(self, size_bytes: int, *, kept: int, huge: bool = False) -> None:
        """Lend blocks of `size_bytes`, and keep at most `kept` of them."""
        self._huge = huge
        self._size_bytes = size_bytes
        self._kept = kept
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self) -> Iterator[memoryview]:
        """Lend a block; what it holds is undefined."""
        block = self.take()
        try:
            yield block
        finally:
            self.put_back(block)

    def take(self) -> memoryview:
        """Return a block that is the caller's until it is put back, or forgotten; what it holds is undefined."""
        with self._lock:
            block = self._free.pop() if self._free else None
        return block or new_block(self._size_bytes, huge=self._huge)

    def put_back(self, block: memoryview) -> None:
        """Let others have a block that was taken."""
        with self._lock:
            if len(self._free) < self._kept:
                self._free.append(block)
