"""Making much at once: the collector of cycles would walk over all of it meanwhile, again and again, for nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

_SMALL_ENTRY_BYTES: Final = 32 << 10


@contextmanager
def pause_gc() -> Iterator[None]:
    """Hold automatic collections back, in all threads: for work that makes many objects, and is soon over.

    With torch there are so many objects that a few for each of ten thousand tensors make the collector walk over all
    of them several times, which takes about as long as the work itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Of several at once the first has found it enabled, and is the one to enable it again.
        if was_enabled:
            gc.enable()


def pause_gc_if_small(size_bytes: int, num_entries: int) -> AbstractContextManager[None]:
    """Hold collections back while so many entries are saved or loaded, unless that takes long because of the bytes."""
    return pause_gc() if is_small(size_bytes, num_entries) else nullcontext()


def is_small(size_bytes: int, num_entries: int) -> bool:
    """Tell whether so many entries are saved or loaded soon, because they have few bytes."""
    return size_bytes <= _SMALL_ENTRY_BYTES * num_entries
