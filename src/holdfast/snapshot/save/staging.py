"""Saving behind the caller's back: a copy in memory that the saver owns, then a thread that writes it."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import ge
from typing import Final, Literal, Protocol

import numpy as np
import torch

from holdfast.errors import SourceChanged, StoreError
from holdfast.objects.blocks import copy_bytes
from holdfast.objects.thread_pool import BackgroundThread
from holdfast.progress import Progress
from holdfast.repo.engine import Engine, count_cores
from holdfast.repo.format.chunk import UNIT_BYTES
from holdfast.repo.format.record import Json
from holdfast.repo.format.source import Piece, Source, cut_sources, group_pieces
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import read_name
from holdfast.repo.write.writer import Request, SaveResult, save
from holdfast.tensors.build import CPU
from holdfast.tensors.memory import new_memory, view_bytes

Staging = Literal["full", "budget"]
_ALIGNMENT: Final = 64
_SLAB_BYTES: Final = 8 << 20
_LOOK_S: Final = 1.0
"""How often whoever waits looks again, in case a signal was lost."""
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
    fetch: Callable[[int, int], memoryview]

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes as they were when they were staged."""
        return self.fetch(start, stop)


def _stage(source: Source, fetch: Callable[[int, int], memoryview]) -> StagedSource:
    return StagedSource(source.name, source.size_bytes, source.spec, source.note, source.alias, source.cuts, fetch)


class Slabs:
    """The memory that full copies go to; kept from one save to the next. Used by one save at a time."""

    def __init__(self) -> None:
        """Hold no memory yet."""
        self._memory: list[torch.Tensor] = []

    def free(self) -> None:
        """Give the memory back."""
        self._memory.clear()

    def copy(self, sources: Sequence[Source]) -> list[StagedSource]:
        """Copy all sources."""
        targets = self._lay_out([source.size_bytes for source in sources])

        def copy_batch(batch: Sequence[Piece]) -> None:
            for piece in batch:
                data = piece.source.read(piece.start, piece.stop)
                copy_bytes(targets[piece.position][piece.start : piece.stop], data.cast("B"))

        # What is under way takes no memory besides.
        with Engine("holdfast-copy", budget_bytes=count_cores() * UNIT_BYTES, waits=False) as engine:
            engine.run(copy_batch, ((batch, 0) for batch in group_pieces(_cut_units(sources), limit_bytes=UNIT_BYTES)))
        return [_stage(source, partial(_view, target)) for source, target in zip(sources, targets, strict=True)]

    def _lay_out(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return memory for each size, that of the save before if it is enough.

        A large source has a slab of its own and small ones share one: like that it comes from where tensors come from
        and go to, and is often there already. One for all of them would be new pages every time.
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


def _cut_units(sources: Sequence[Source]) -> list[Piece]:
    """Cut sources as large as is worth a thread's while: whoever copies does not care where chunks end."""
    return [
        Piece(source, position, start, min(start + UNIT_BYTES, source.size_bytes))
        for position, source in enumerate(sources)
        for start in range(0, source.size_bytes, UNIT_BYTES)
    ]


def _view(target: memoryview, start: int, stop: int) -> memoryview:
    return target[start:stop]


class Queue:
    """Pieces on their way from the caller to the thread that writes, never more than a budget of them.

    When memory runs out, a signal between the two may be lost. So whoever waits looks again every second.
    """

    def __init__(self, budget_bytes: int) -> None:
        """Hold at most `budget_bytes`, or one piece."""
        self._budget = budget_bytes
        self._held: list[tuple[weakref.ref[_Memory], int]] = []
        """Memory that was filled, with its size; some of it is gone."""
        self._pieces: dict[tuple[int, int], memoryview] = {}
        self._taken: set[tuple[int, int]] = set()
        # Not the lock of its own, which a Condition acquires in Python code, and may fail to release.
        self._turn = threading.Lock()
        self._changed = threading.Condition(self._turn)
        self._room = threading.Lock()
        """Free when memory has gone since the caller looked."""
        self._error: BaseException | None = None
        self._is_over = False

    def stage(self, sources: Sequence[Source]) -> list[StagedSource]:
        """Return stand-ins for the sources, which wait for the pieces that they are asked for."""
        return [_stage(source, partial(self._take, source.name, position)) for position, source in enumerate(sources)]

    def fill(self, sources: Sequence[Source], *, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Copy all pieces in order, waiting when the budget is used up; returns when the last one is copied.

        Or returns when nobody wants them any more: `is_wanted` is asked every second.
        """
        try:
            for piece in cut_sources(sources):
                while not self._is_over and not self._has_room(piece.stop - piece.start):
                    if not self._room.acquire(timeout=_LOOK_S) and not is_wanted():
                        return
                if self._is_over:
                    return
                self._put(piece)
        except BaseException as error:
            self._error = error  # first: to wake the others up may fail
            with self._turn:
                self._changed.notify_all()
            raise

    def _put(self, piece: Piece) -> None:
        # An array, because all views keep it alive: when it goes, the piece is on disk, or was there already.
        memory = np.empty(piece.stop - piece.start, dtype=np.uint8)
        self._held.append((weakref.ref(memory, self._note_room), memory.nbytes))
        copy = memory.data
        copy_bytes(copy, piece.source.read(piece.start, piece.stop).cast("B"))
        with self._turn:
            self._pieces[piece.position, piece.start] = copy
            self._changed.notify_all()

    def _has_room(self, size_bytes: int) -> bool:
        self._held = [(memory, size) for memory, size in self._held if memory() is not None]
        held = self.find_held_bytes()
        return not held or held + size_bytes <= self._budget

    def find_held_bytes(self) -> int:
        """Return how many bytes of pieces there are that somebody still refers to."""
        return sum([size for memory, size in self._held if memory() is not None])

    def _note_room(self, _: object) -> None:
        # In whatever thread drops the last view, which may hold the lock.
        with suppress(RuntimeError):  # it is free already
            self._room.release()

    def _take(self, name: str, position: int, start: int, stop: int) -> memoryview:
        key = (position, start)
        with self._turn:
            while not (self._error or self._is_over or key in self._pieces or key in self._taken):
                self._changed.wait(_LOOK_S)
            if key in self._taken:
                raise SourceChanged(
                    f"{name!r}: bytes {start} to {stop} are needed once more, and staging='budget' has let go of them;"
                    " nothing was committed. Save again, or with staging='full'"
                )
            if self._error is not None or self._is_over:
                raise SourceChanged(f"{name!r}: it was not copied to the end: {self._error or 'the save ended before'}")
            self._taken.add(key)
            return self._pieces.pop(key)

    def end(self) -> None:
        """Let nobody wait any more: the thread that writes is done, or has failed."""
        self._is_over = True  # first: to wake the others up may fail
        self._note_room(None)
        with self._turn:
            self._pieces.clear()
            self._changed.notify_all()


@dataclass(slots=True)
class _Meter:
    """How far a save is, for other threads to read; and who has to know that nothing more will be read."""

    on_end: Callable[[], None] | None = None
    done_bytes: int = 0
    total_bytes: int = 0

    def begin(self, what: str, total_bytes: int | None) -> None:
        self.total_bytes = total_bytes or 0

    def advance(self, size_bytes: int) -> None:
        self.done_bytes += size_bytes

    def end(self) -> None:
        # A save that fails calls this before it waits for its own threads, which may wait for pieces.
        if self.on_end is not None:
            self.on_end()


class Write(Protocol):
    """What saves a request in the end: by one process, or with other ranks."""

    def __call__(self, repo: Repository, request: Request, *, progress: Progress) -> SaveResult:
        """Save it."""


@dataclass(slots=True)
class SaveHandle:
    """A save under way."""

    name: str
    waited_s: float = 0.0
    """How long the caller was kept until it could go on."""
    _thread: BackgroundThread | None = None
    _result: SaveResult | None = None
    _error: BaseException | None = None
    _is_told: bool = False
    _meter: _Meter = field(default_factory=_Meter)
    _write: Write | None = None
    """What saves it in the end, if not this process alone."""

    def done(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def progress(self) -> tuple[int, int]:
        """Return how many bytes are done, and of how many."""
        return self._meter.done_bytes, self._meter.total_bytes

    def wait(self, timeout_s: float | None = None) -> SaveResult:
        """Wait for it and return what it did; raises what went wrong, or TimeoutError."""
        self._join(timeout_s)
        error = self._error or (self._thread.error if self._thread and self._result is None else None)
        if error is not None:
            self._is_told = True
            raise error
        if self._result is None:
            raise StoreError(f"saving {self.name!r} is under way in the process that began it, which this is not")
        return self._result

    def _join(self, timeout_s: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"saving {self.name!r} is still under way after {timeout_s} s")

    def _run(self, repo: Repository, request: Request) -> None:
        try:
            self._result = (self._write or save)(repo, request, progress=self._meter)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the caller hears of it
            self._error = error
        finally:
            self._meter.end()


class AsyncSaver:
    """One save at a time in a thread of its own, which the interpreter waits for when it exits. Safe in any thread."""

    def __init__(self) -> None:
        """Have nothing under way."""
        self._slabs = Slabs()
        self._current: SaveHandle | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._is_awaited = False

    def start(self, repo: Repository, request: Request, *, staging: Staging, write: Write | None = None) -> SaveHandle:
        """Copy, start to write and return; waits for the save before, and raises its error if nobody was told."""
        if staging not in ("full", "budget"):
            raise ValueError(f"staging must be 'full' or 'budget', not {staging!r}")
        started = time.monotonic()
        with self._lock:
            self._wait()
            handle = SaveHandle(request.name, _write=write)
            if staging == "full":
                self._launch(handle, repo, replace(request, sources=self._slabs.copy(request.sources)))
            elif _needs_two_passes(repo, request):
                self._current = handle
                handle._run(repo, request)
                if handle._error is not None and not isinstance(handle._error, Exception):
                    handle._is_told = True
                    raise handle._error
            else:
                self._pass_on(handle, repo, request)
        handle.waited_s = time.monotonic() - started
        return handle

    def wait(self) -> None:
        """Wait for the save under way; raises its error if nobody was told."""
        with self._lock:
            self._wait()

    def close(self) -> None:
        """Wait for the save under way, and give back the memory that copies go to; it is taken again when needed."""
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
        # It stays current until it has ended: whoever interrupts this wait must not reuse its memory.
        handle._join()
        self._current = None
        if not handle._is_told:
            handle.wait()

    def _pass_on(self, handle: SaveHandle, repo: Repository, request: Request) -> None:
        """Copy piece by piece while another thread writes; returns when the last piece is copied."""
        queue = Queue(repo.budget_bytes // 2)
        handle._meter.on_end = queue.end
        self._launch(handle, repo, replace(request, sources=queue.stage(request.sources)))
        try:
            queue.fill(request.sources, is_wanted=lambda: not handle.done())
        except BaseException:
            # The caller hears of it now; what the thread makes of it is of no more interest.
            handle._is_told = True
            raise

    def _launch(self, handle: SaveHandle, repo: Repository, request: Request) -> None:
        self._await_at_exit()
        name = f"holdfast-save {handle.name}"
        handle._thread = BackgroundThread(partial(self._run, handle, repo, request), name)
        self._current = handle
        try:
            handle._thread.start()
        except BaseException:
            handle._is_told = True
            raise

    def _run(self, handle: SaveHandle, repo: Repository, request: Request) -> None:
        # A method of ours: so the thread keeps us alive, and we are there to be asked when the interpreter exits.
        handle._run(repo, request)

    def _await_at_exit(self) -> None:
        if self._is_awaited:
            return
        # Not `atexit`: by then no thread can start another, which a save does. These are called before that, the
        # last first, and the one of thread pools is there already: so the pools still work while we wait.
        register: Callable[..., None] = threading._register_atexit  # type: ignore[attr-defined]  # there is no other
        register(_finish, weakref.ref(self))
        self._is_awaited = True

    def finish(self) -> None:
        """Wait at the end of the interpreter, and show an error that nobody was told."""
        # In a forked child the thread does not exist.
        if os.getpid() != self._pid:
            return
        try:
            self.wait()
        except BaseException as error:  # noqa: BLE001  # it is shown as every error that nobody caught
            sys.excepthook(type(error), error, error.__traceback__)


def _finish(saver: weakref.ref[AsyncSaver]) -> None:
    found = saver()
    if found is not None:
        found.finish()


def _needs_two_passes(repo: Repository, request: Request) -> bool:
    """Tell whether all bytes are looked at before any is written; what is copied piece by piece is there only once."""
    if read_name(repo.store, request.name).snapshot and not request.overwrite:
        return True
    free = repo.store.find_free_bytes()
    return free is not None and sum(source.size_bytes for source in request.sources) > free
