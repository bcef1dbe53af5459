"""Saving in the background: copy what has to be written into memory that the saver owns, then write from a thread."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import ge
from typing import Final, Literal, Protocol

import numpy as np
import torch

from holdfast.errors import SourceChanged, StoreError
from holdfast.json_text import Json
from holdfast.objects.at_exit import before_exit
from holdfast.objects.blocks import copy_bytes
from holdfast.objects.thread_pool import BackgroundThread
from holdfast.progress import Progress, Silent
from holdfast.repo.engine import Engine, count_cores
from holdfast.repo.format.chunk import UNIT_BYTES
from holdfast.repo.format.source import Source, SourceChunk, SourceChunks, group_chunks
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import read_name
from holdfast.repo.write.writer import Request, SaveResult, save
from holdfast.snapshot.save import add_digests, drop_digests
from holdfast.tensors.build import CPU
from holdfast.tensors.memory import new_memory, view_bytes
from holdfast.texts import format_bytes

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


Staging = Literal["full", "budget"]
_NEW_SHARE: Final = 0.5
"""A save of which a larger share was new is mostly new."""
_NEW_SAVES: Final = 2
"""After so many saves in a row that were mostly new, tensors of devices are copied without being looked up first."""


@dataclass(slots=True)
class _Meter:
    """The progress of a save, for other threads to read, and a callback for when no more bytes will be read."""

    on_end: Callable[[], None] | None = None
    done_bytes: int = 0
    total_bytes: int = 0
    other: Progress = field(default_factory=Silent)
    """Receives the same calls."""

    def begin(self, what: str, total_bytes: int | None) -> None:
        self.total_bytes = total_bytes or 0
        self.other.begin(what, self.total_bytes)

    def advance(self, size_bytes: int) -> None:
        self.done_bytes += size_bytes
        self.other.advance(size_bytes)

    def end(self) -> None:
        self.other.end()
        # A failing save calls this before it joins its own threads, which may be waiting for pieces.
        if self.on_end is not None:
            self.on_end()


class Write(Protocol):
    """Saves a staged request: in one process, or together with other ranks."""

    def __call__(self, repo: Repository, request: Request, *, progress: Progress) -> SaveResult:
        """Save it."""


@dataclass(slots=True)
class SaveHandle:
    """A save in the background."""

    name: str
    waited_s: float = 0.0
    """How long the caller was blocked."""
    _thread: BackgroundThread | None = None
    _result: SaveResult | None = None
    _error: BaseException | None = None
    _is_error_raised: bool = False
    _meter: _Meter = field(default_factory=_Meter)
    _write: Write | None = None
    """Saves the request; None for a save by this process alone."""
    _forget: Callable[[], object] = field(default=lambda: None)
    """Called when the interpreter need not wait for this save any more."""

    def __repr__(self) -> str:
        """Show the name, and how far the save is or how it ended."""
        return f"<SaveHandle {self.name!r}: {self._describe()}>"

    def _describe(self) -> str:
        if not self.done() and not self._meter.total_bytes:
            return "saving"
        if not self.done():
            return f"saving, {format_bytes(self._meter.done_bytes)} of {format_bytes(self._meter.total_bytes)} done"
        if self._result is not None:
            return f"saved, {format_bytes(self._result.new_bytes)} new, in {self._result.seconds:.2f} s"
        return f"failed with {type(self._error).__name__}" if self._error else "ended without a result"

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def _is_under_way(self) -> bool:
        """Return whether the save has not ended."""
        return not self.done()

    def progress(self) -> tuple[int, int]:
        """Return how many bytes are done, and the total."""
        return self._meter.done_bytes, self._meter.total_bytes

    def wait(self, timeout_s: float | None = None) -> SaveResult:
        """Wait for the save and return its result; raises its error, or TimeoutError."""
        self._join(timeout_s)
        error = self._error or (self._thread.error if self._thread and self._result is None else None)
        if error is not None:
            self._note_raised()
            raise error
        if self._result is None:
            raise StoreError(f"saving {self.name!r} was started by another process; wait for it there")
        return self._result

    def result(self, timeout_s: float | None = None) -> SaveResult:
        """Return what `wait` returns: the name that the futures of Python's standard library have for it."""
        return self.wait(timeout_s)

    def _finish(self) -> None:
        """Wait for the save; raises its error if the caller has not seen it yet."""
        self._join()
        if not self._is_error_raised:
            self.wait()

    def _join(self, timeout_s: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"saving {self.name!r} is still under way after {timeout_s} s")

    @contextmanager
    def _raising(self) -> Iterator[None]:
        """Note that an error in the `with` is raised to the caller, so that the thread's own need not be reported."""
        try:
            yield
        except BaseException:
            self._note_raised()
            raise

    def _note_raised(self) -> None:
        """Note that the caller has seen the error."""
        self._is_error_raised = True
        self._forget()

    def _run(self, repo: Repository, request: Request) -> None:
        try:
            self._result = (self._write or save)(repo, request, progress=self._meter)
        except BaseException as error:  # noqa: BLE001  # of any kind: `wait` raises it
            self._error = error
        finally:
            self._meter.end()
        if self._error is None:
            self._forget()


class AsyncSaver:
    """Runs one save at a time in a background thread, which the interpreter waits for at exit. Safe in any thread."""

    def __init__(self) -> None:
        self._slabs = Slabs()
        self._current: SaveHandle | None = None
        self._lock = threading.Lock()
        self._new_saves = 0
        """How many saves in a row were mostly new, the last one included."""

    def start(
        self,
        repo: Repository,
        request: Request,
        *,
        staging: Staging,
        write: Write | None = None,
        progress: Progress | None = None,
    ) -> SaveHandle:
        """Copy the state, start to write, and return; waits for the last save, and raises its error if still unseen."""
        if staging not in ("full", "budget"):
            raise ValueError(f"staging must be 'full' or 'budget', not {staging!r}")
        started = time.monotonic()
        with self._lock:
            self._wait()
            handle = SaveHandle(request.name, _write=write, _meter=_Meter(other=progress or Silent()))
            request = add_digests(request) if self._new_saves < _NEW_SAVES else drop_digests(request)
            if staging == "full" and request.digests:
                self._copy_missing(handle, repo, request)
            elif staging == "full":
                self._launch(handle, repo, replace(request, sources=self._slabs.copy(request.sources)))
            elif _needs_two_passes(repo, request):
                self._await(handle)
                handle._run(repo, request)
                if handle._error is not None and not isinstance(handle._error, Exception):
                    handle._note_raised()
                    raise handle._error
            else:
                self._stream(handle, repo, request)
        handle.waited_s = time.monotonic() - started
        return handle

    def wait(self) -> None:
        """Wait for the current save; raises its error if it was not raised yet."""
        with self._lock:
            self._wait()

    def close(self) -> None:
        """Wait for the current save, and free the memory of copies; it is allocated again when needed."""
        with self._lock:
            try:
                self._wait()
            finally:
                if self._current is None:
                    self._slabs.free()

    def _wait(self) -> None:
        handle = self._current
        if handle is None:
            return
        # It stays current until it has ended: after an interrupted wait, its memory must not be reused.
        handle._join()
        self._current = None
        handle._finish()

    def _copy_missing(self, handle: SaveHandle, repo: Repository, request: Request) -> None:
        """Copy what is not on a device, then those chunks of devices that the save, which has begun, does not find."""
        queue = Queue(None)
        queue.add(early := _list_read(request), self._slabs.copy_chunks(early))
        with queue.failing(), handle._raising():
            self._launch(handle, repo, request, queue)
            missing = queue.wait_for_missing(handle._is_under_way)
            # The sources of these chunks are the staged ones, which would wait for what is copied here.
            queue.add_last([chunk._replace(source=request.sources[chunk.position]) for chunk in missing])

    def _stream(self, handle: SaveHandle, repo: Repository, request: Request) -> None:
        """Copy piece by piece while another thread writes; returns when the last piece is copied."""
        queue = Queue(repo.budget_bytes // 2)
        with queue.failing(), handle._raising():
            self._launch(handle, repo, request, queue)
            missing = queue.wait_for_missing(handle._is_under_way) if request.digests else ()
            queue.fill(_list_read(request, missing), is_wanted=handle._is_under_way)

    def _launch(self, handle: SaveHandle, repo: Repository, request: Request, queue: Queue | None = None) -> None:
        """Start to write in a thread; with a queue, the pieces that it passes on."""
        if queue is not None:
            handle._meter.on_end = queue.end
            request = replace(request, sources=queue.stage(request.sources), note_missing=queue.note_missing)
        name = f"holdfast-save {handle.name}"
        handle._thread = BackgroundThread(partial(self._run, handle, repo, request), name)
        self._await(handle)
        try:
            handle._thread.start()
        except BaseException:
            handle._note_raised()
            raise

    def _await(self, handle: SaveHandle) -> None:
        """Let the next save and the end of the interpreter wait for this one."""
        handle._forget = before_exit(handle._finish)
        self._current = handle

    def _run(self, handle: SaveHandle, repo: Repository, request: Request) -> None:
        handle._run(repo, request)
        result = handle._result
        if result is not None and not result.existed:
            is_new = result.new_bytes > _NEW_SHARE * (result.new_bytes + result.reused_bytes)
            self._new_saves = self._new_saves + 1 if is_new else 0


def _list_read(request: Request, missing: Sequence[SourceChunk] = ()) -> list[SourceChunk]:
    """Return the chunks without a digest, which have to be read in any case, and those in `missing`, in order."""
    places = {(chunk.position, chunk.start) for chunk in missing}
    chunks = SourceChunks(request.sources, request.runs, request.repeats, request.digests)
    return [chunk for chunk in chunks if chunk.digest is None or (chunk.position, chunk.start) in places]


def _needs_two_passes(repo: Repository, request: Request) -> bool:
    """Return whether all bytes are read once before any is written; pieces of a budget can be read only once."""
    if read_name(repo.store, request.name).snapshot and not request.options.overwrite:
        return True
    free = repo.store.find_free_bytes()
    return free is not None and sum(source.size_bytes for source in request.sources) > free
