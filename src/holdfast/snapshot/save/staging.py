"""Saving in the background: copy what has to be written into memory that the saver owns, then write from a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal, Protocol

from holdfast.errors import StoreError
from holdfast.objects.at_exit import before_exit
from holdfast.objects.thread_pool import BackgroundThread
from holdfast.progress import Progress, Silent
from holdfast.repo.format.source import SourceChunk, SourceChunks
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import read_name
from holdfast.repo.write.writer import Request, SaveResult, save
from holdfast.snapshot.save.copies import Queue, Slabs
from holdfast.snapshot.save.device_digests import add_digests, drop_digests
from holdfast.texts import format_bytes

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
