"""Blocks: page-aligned memory that reads and writes around the page cache need, lent out and taken back."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

PAGE_BYTES: Final = 4096
"""What direct reads and writes are aligned to: no less is enough for every disk."""
_LARGE_BYTES: Final = 64 << 10
"""From this size on, freeing the GIL for a copy pays."""


def new_block(size_bytes: int) -> memoryview:
    """Return page-aligned memory, given back to the system when nobody refers to it."""
    return memoryview(mmap.mmap(-1, size_bytes))


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy memory of the same size; frees the GIL if that is worth it and the source lets its address be known."""
    if source.readonly or source.nbytes < _LARGE_BYTES:
        target[:] = source
    else:
        ctypes.memmove(_address(target), _address(source), source.nbytes)


def is_aligned(memory: memoryview, start: int) -> bool:
    """Tell whether direct I/O can go straight between this memory and byte `start` of a file, page by page."""
    return not (start % PAGE_BYTES or memory.readonly or _address(memory) % PAGE_BYTES)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class BlockPool:
    """Blocks of one size that are used again; keeps a few while nobody needs them. Safe in any thread."""

    def __init__(self, size_bytes: int, *, kept: int) -> None:
        """Lend blocks of `size_bytes`, and keep at most `kept` of them."""
        self._size_bytes = size_bytes
        self._kept = kept
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self) -> Iterator[memoryview]:
        """Lend a block; what it holds is undefined."""
        with self._lock:
            block = self._free.pop() if self._free else None
        block = block or new_block(self._size_bytes)
        try:
            yield block
        finally:
            with self._lock:
                if len(self._free) < self._kept:
                    self._free.append(block)
