"""Copies of the bytes to be saved: all of them in slabs of memory, or piece by piece through a queue."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import ge
from typing import Final

import numpy as np
import torch

from holdfast.errors import SourceChanged
from holdfast.json_text import Json
from holdfast.objects.blocks import copy_bytes
from holdfast.repo.engine import Engine, count_cores
from holdfast.repo.format.chunk import UNIT_BYTES
from holdfast.repo.format.source import Source, SourceChunk, group_chunks
from holdfast.tensors.build import CPU
from holdfast.tensors.memory import new_memory, view_bytes

_ALIGNMENT: Final = 64
_SLAB_BYTES: Final = 8 << 20
_RECHECK_S: Final = 1.0
"""How often a waiting thread checks again, in case a notification was lost."""
_Memory = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class StagedSource:
    """A source whose bytes were copied, so that the original may change."""

    name: str
    size_bytes: int
    spec: Json
    note: Json
    alias: int
    cuts: Sequence[int]
    item_bytes: int
    fetch: Callable[[int, int], memoryview]

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes as they were when they were staged."""
        return self.fetch(start, stop)


def _stage(source: Source, fetch: Callable[[int, int], memoryview]) -> StagedSource:
    traits = (source.spec, source.note, source.alias, source.cuts, source.item_bytes)
    return StagedSource(source.name, source.size_bytes, *traits, fetch)


class Slabs:
    """The memory for full copies, kept from one save to the next. Used by one save at a time."""

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []

    def free(self) -> None:
        """Release the memory."""
        self._memory.clear()

    def copy(self, sources: Sequence[Source]) -> list[StagedSource]:
        """Copy all sources."""
        targets = self._lay_out([source.size_bytes for source in sources])
        units = _cut_units(sources)
        _copy_at_once(units, [targets[unit.position][unit.start : unit.stop] for unit in units])
        return [_stage(source, partial(_view, target)) for source, target in zip(sources, targets, strict=True)]

    def copy_chunks(self, chunks: Sequence[SourceChunk]) -> list[memoryview]:
        """Return a copy of each chunk."""
        targets = self._lay_out([chunk.stop - chunk.start for chunk in chunks])
        _copy_at_once(chunks, targets)
        return targets

    def _lay_out(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return memory for each size, reusing the slabs of the last save if they are large enough.

        A large source has a slab of its own, and small ones share one: allocations of such sizes are often served from
        memory that tensors have freed. A single slab for everything would be new pages each time.
        """
        starts, ends = [], [0]
        for size in sizes:
            if ends[-1] >= _SLAB_BYTES:
                ends.append(0)
            starts.append((len(ends) - 1, ends[-1]))
            ends[-1] += -(-size // _ALIGNMENT) * _ALIGNMENT
        is_enough = len(self._memory) >= len(ends) and all(map(ge, (slab.numel() for slab in self._memory), ends))
        if not is_enough:
            self._memory.clear()  # before the new ones: both at once may be too much
            self._memory = [new_memory(end, CPU) for end in ends]
        views = [view_bytes(slab) for slab in self._memory]
        return [views[slab][at : at + size] for (slab, at), size in zip(starts, sizes, strict=True)]


def _copy_at_once(pieces: Sequence[SourceChunk], targets: Sequence[memoryview]) -> None:
    """Copy each piece to its target, on all cores."""
    numbered = [piece._replace(position=number) for number, piece in enumerate(pieces)]

    def copy_batch(batch: Sequence[SourceChunk]) -> None:
        for piece in batch:
            copy_bytes(targets[piece.position], piece.source.read(piece.start, piece.stop).cast("B"))

    # Copies in progress need no memory besides the targets.
    with Engine("holdfast-copy", budget_bytes=count_cores() * UNIT_BYTES, waits=False) as engine:
        engine.run(copy_batch, ((batch, 0) for batch in group_chunks(numbered, limit_bytes=UNIT_BYTES)))


def read_at_once(chunks: Sequence[SourceChunk]) -> list[memoryview]:
    """Return the bytes of each chunk, read on all cores."""

    def read_batch(batch: Sequence[SourceChunk]) -> list[memoryview]:
        return [chunk.source.read(chunk.start, chunk.stop).cast("B") for chunk in batch]

    with Engine("holdfast-copy", budget_bytes=count_cores() * UNIT_BYTES, waits=False) as engine:
        batches = ((batch, 0) for batch in group_chunks(chunks, limit_bytes=UNIT_BYTES))
        return [data for batch in engine.iter_results(read_batch, batches) for data in batch]


def _cut_units(sources: Sequence[Source]) -> list[SourceChunk]:
    """Cut sources into units that are worth a thread's work; copying need not respect the boundaries of chunks."""
    return [
        SourceChunk(source, position, start, min(start + UNIT_BYTES, source.size_bytes))
        for position, source in enumerate(sources)
        for start in range(0, source.size_bytes, UNIT_BYTES)
    ]


def _view(target: memoryview, start: int, stop: int) -> memoryview:
    return target[start:stop]


class Queue:
    """Passes pieces from the caller to the writing thread, at most a budget of them at a time.

    With chunks whose digests are known, the writing thread says first which of these it needs. Without a budget, pieces
    are kept until the save ends, and may be taken more than once.

    If memory runs out, a notification between the two may be lost, so both check again every second.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        """Keep at most `budget_bytes`, or one piece; None: keep all."""
        self._budget = budget_bytes
        self._buffers: list[tuple[weakref.ref[_Memory], int]] = []
        """Weak references to the filled memory, with its size; some of it has been freed."""
        self._pieces: dict[tuple[int, int], memoryview] = {}
        self._taken: set[tuple[int, int]] = set()
        # A Condition's default lock is acquired in Python code, which may fail to release it when memory runs out.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._room = threading.Lock()
        """Released when memory was freed since the caller last checked."""
        self._error: BaseException | None = None
        self._is_over = False
        self._is_filled = False
        """No further piece will be added."""
        self._missing: Sequence[SourceChunk] | None = None

    def stage(self, sources: Sequence[Source]) -> list[StagedSource]:
        """Return replacements for the sources; reading one waits until its piece has been copied."""
        return [_stage(source, partial(self._take, source.name, position)) for position, source in enumerate(sources)]

    def note_missing(self, missing: Sequence[SourceChunk]) -> None:
        """Tell the caller which chunks of those with a digest are needed; called by the writing thread.

        Without a budget, this returns when they are copied: both the copies and the hashing that follows need the
        threads of the engine, and hashing that waited for copies would block them.
        """
        with self._lock:
            self._missing = missing
            self._changed.notify_all()
            while self._budget is None and not self._is_ended:
                self._changed.wait(_RECHECK_S)

    def wait_for_missing(self, is_wanted: Callable[[], bool]) -> Sequence[SourceChunk]:
        """Wait for `note_missing`, and return its chunks.

        Returns none if the save ends first (`is_wanted` is False), or waits for another piece first.
        """
        with self._lock:
            while self._missing is None and not self._is_over and is_wanted():
                self._changed.wait(_RECHECK_S)
            return self._missing or ()

    def add(self, chunks: Sequence[SourceChunk], copies: Sequence[memoryview]) -> None:
        """Pass on pieces that were copied already."""
        with self._lock:
            for chunk, copy in zip(chunks, copies, strict=True):
                self._pieces[chunk.position, chunk.start] = copy
            self._changed.notify_all()

    def add_last(self, chunks: Sequence[SourceChunk]) -> None:
        """Read the last pieces on all cores, and pass on what their sources return: it must be copies, not views."""
        self.add(chunks, read_at_once(chunks))
        self._end_filling()

    def fill(self, pieces: Iterable[SourceChunk], *, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Copy all pieces in order, waiting while the budget is used up; returns when the last one is copied.

        Returns early if the save has ended: `is_wanted` is called every second.
        """
        for piece in pieces:
            while not self._is_over and not self._has_room(piece.stop - piece.start):
                if not self._room.acquire(timeout=_RECHECK_S) and not is_wanted():
                    return
            if self._is_over:
                return
            self._put(piece)
        self._end_filling()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Tell the writing thread of an error in the `with`: it will get no more pieces."""
        try:
            yield
        except BaseException as error:
            self._error = error  # first: to wake the others up may fail
            with self._lock:
                self._changed.notify_all()
            raise

    def _end_filling(self) -> None:
        with self._lock:
            self._is_filled = True
            self._changed.notify_all()

    def _put(self, piece: SourceChunk) -> None:
        # An array, because every view keeps it alive: when it is freed, the piece has been written or was already
        # present.
        memory = np.empty(piece.stop - piece.start, dtype=np.uint8)
        self._buffers.append((weakref.ref(memory, self._note_room), memory.nbytes))
        copy = memory.data
        copy_bytes(copy, piece.source.read(piece.start, piece.stop).cast("B"))
        with self._lock:
            self._pieces[piece.position, piece.start] = copy
            self._changed.notify_all()

    def _has_room(self, size_bytes: int) -> bool:
        self._buffers = [(memory, size) for memory, size in self._buffers if memory() is not None]
        buffered_bytes = self.count_buffered_bytes()
        return self._budget is None or not buffered_bytes or buffered_bytes + size_bytes <= self._budget

    def count_buffered_bytes(self) -> int:
        """Return the number of bytes of pieces that are still referenced."""
        return sum([size for memory, size in self._buffers if memory() is not None])

    def _note_room(self, _: object) -> None:
        # Runs in any thread that drops the last view, and that thread may have acquired the lock.
        with suppress(RuntimeError):  # it is free already
            self._room.release()

    def _take(self, name: str, position: int, start: int, stop: int) -> memoryview:
        key = (position, start)
        with self._lock:
            while not (self._is_ended or key in self._pieces or key in self._taken):
                if self._missing is None:
                    # The save reads before it looks chunks up, because the name was taken or the store filled up just
                    # now. The caller waits for the look-up, and this thread for the caller.
                    self._missing = ()
                    self._changed.notify_all()
                self._changed.wait(_RECHECK_S)
            if key in self._taken:
                raise SourceChanged(
                    f"{name!r}: bytes {start} to {stop} are needed again, and staging='budget' has released them;"
                    " nothing was committed. Save again, or with staging='full'"
                )
            if self._error is not None or self._is_over:
                raise SourceChanged(f"{name!r}: it was not copied completely: {self._error or 'the save ended first'}")
            if key not in self._pieces:
                raise SourceChanged(
                    f"{name!r}: bytes {start} to {stop} were not copied from the device, because the store had them,"
                    " and this stored copy cannot be read any more; nothing was committed. Save again"
                )
            if self._budget is None:
                return self._pieces[key]
            self._taken.add(key)
            return self._pieces.pop(key)

    @property
    def _is_ended(self) -> bool:
        return self._error is not None or self._is_over or self._is_filled

    def end(self) -> None:
        """Stop all waiting: the writing thread has ended or failed."""
        self._is_over = True  # first: to wake the others up may fail
        self._note_room(None)
        with self._lock:
            self._pieces.clear()
            self._changed.notify_all()
