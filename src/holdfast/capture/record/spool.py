"""The spool: collects observed events, and commits them as segments on a background thread, within a byte budget."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
import torch

from holdfast.capture.stored.events import EventFields, Measured, ObservedEvent, ObservedEvents
from holdfast.capture.stored.observed import Array, build_copy
from holdfast.capture.stored.segments import (
    Segment,
    advance_roots,
    format_leaf,
    parse_leaf,
    read_replacement,
    write_segment,
)
from holdfast.capture.stored.statistics import Unmeasured, measure_all
from holdfast.errors import NameInUse
from holdfast.json_text import Json
from holdfast.repo.handle.repository import Repository
from holdfast.repo.write.writer import SaveResult
from holdfast.snapshot.gc_pause import pause_gc
from holdfast.tensors.device_digest.deferred import CollectedDigests, DeferredDigests

_MAX_FAILURES: Final = 3
"""After this many segments in a row that could not be written, recording stops."""
_MAX_TRIES: Final = 4
"""How often a segment is written if each time another recording was first."""
_MAX_EVENTS: Final = 20_000
"""Limit for the events of a segment, however small they are."""
_MAX_SMALL_BYTES: Final = 4 << 20
"""Limit for the small tensors that wait to be measured together."""


class Copy(NamedTuple):
    """A copy of a tensor's bytes."""

    memory: Array
    dtype: torch.dtype
    shape: tuple[int, ...]
    measured: Measured
    """Gets the statistics when the copy is written."""


@dataclass(slots=True)
class PendingSegment:
    """Events and copies that will become one segment."""

    number: int
    started_s: float = 0.0
    max_steps: int = 1
    """It is sealed after this many steps, if not before."""
    events: ObservedEvents = field(default_factory=ObservedEvents)
    copies: dict[int, Copy] = field(default_factory=dict)
    small: list[Unmeasured] = field(default_factory=list)
    """Small tensors that wait to be measured together."""
    small_bytes: int = 0
    size_bytes: int = 0
    steps: int = 0
    notes: tuple[str, ...] = ()
    is_last: bool = False
    digests: CollectedDigests | Exception | None = None
    """Digests that devices compute; an error if they could not be collected."""

    def wait_digests(self) -> None:
        """Wait for the digests of devices; after an error, the events have only the digests that are known."""
        try:
            if isinstance(self.digests, Exception):
                raise self.digests
            if self.digests is not None and self.digests.count:
                self.events.set_blake3(self.digests.wait())
        except Exception:
            self.events.drop_blake3()
            raise


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The run and rank of a recording, and its environment."""

    run: str
    rank: int
    world: int
    started_s: float
    environment: Mapping[str, Json]
    recording: str = ""
    job: str = ""
    """The same on all ranks of a job."""
    overwrite: bool = False
    """Whether older recordings under the name may be replaced."""


class Spool:
    """Takes copies and events from the training thread, and commits them on a background thread."""

    def __init__(self, repo: Repository, identity: RunIdentity, *, queue_bytes: int, bins: int = 0) -> None:
        """Write to `repo`; `queue_bytes` limits the copies in memory, `bins` is for the histograms of copies."""
        self._bins = bins
        self._repo = repo
        self._identity = identity
        self._queue_bytes = queue_bytes
        self._copy_bytes = self._free_bytes = 0
        self._free: dict[int, list[Array]] = {}
        self._changed = threading.Condition()
        self._batches: deque[PendingSegment] = deque()
        self._is_writing = False
        self._thread: threading.Thread | None = None
        self._roots: dict[int, bytes] = {}
        self._lost: set[int] = set()
        self._unwritten = ObservedEvents()
        self._in_a_row = 0
        self._error: Exception | None = None
        self._device_note = ""
        self._replaced = ""
        self._first: int | None = None
        """Number of the first segment that was committed."""
        self.lost_step: int | None = None
        """See `Segment.lost_step`."""
        self._new_bytes = 0
        self._deferred = DeferredDigests()
        self._next_number = 0
        self._sealed_steps = 0
        self.pending = self._open_batch()

    def _open_batch(self) -> PendingSegment:
        self._next_number += 1
        # Segments grow, so that a run which ends early, or has slow steps, loses at most about half of its steps.
        return PendingSegment(self._next_number - 1, time.monotonic(), self._sealed_steps + 1)

    def begin(self, started_s: float) -> None:
        """Set when the recording has begun: after it has deleted what it replaces, so that it counts as the newer."""
        self._identity = replace(self._identity, started_s=started_s)

    @property
    def new_bytes(self) -> int:
        """Bytes that were added to the store, after deduplication."""
        return self._new_bytes

    @property
    def has_given_up(self) -> bool:
        """Whether too many segments in a row could not be written; then recording should stop."""
        return self._in_a_row >= _MAX_FAILURES

    def take_error(self) -> Exception | None:
        """Return the last error since the previous call, or None."""
        error, self._error = self._error, None
        return error

    @property
    def replaced(self) -> str:
        """Why nothing is written any more: another recording has the name of this run; "" if none has."""
        return self._replaced

    @property
    def device_note(self) -> str:
        """What was lost because a device computed no digests; "" if nothing was."""
        return self._device_note

    def queue_digest(self, tensor: torch.Tensor) -> int:
        """Queue the BLAKE3 of a tensor on its device; returns its index among those of the pending segment."""
        return self._deferred.queue(tensor)

    def has_room(self, size_bytes: int) -> bool:
        """Return whether a copy fits into the budget; a single copy always does."""
        with self._changed:
            return self._fits(size_bytes)

    def _fits(self, size_bytes: int) -> bool:
        return self._copy_bytes + size_bytes <= self._queue_bytes or self._copy_bytes == 0

    def make_room(self, size_bytes: int, notes: tuple[str, ...]) -> None:
        """Seal the pending segment if a copy would make it larger than half the budget, and wait until the copy fits.

        Where a segment ends depends on the bytes alone, not on how far the writer is.
        """
        if self.pending.size_bytes and self.pending.size_bytes + size_bytes > self._queue_bytes // 2:
            self.seal(notes)
        with self._changed:
            self._changed.wait_for(lambda: self._fits(size_bytes))

    def add_small(self, small: Unmeasured) -> None:
        """Add a small tensor to those that are measured together, at the latest when the segment is written."""
        pending = self.pending
        pending.small.append(small)
        pending.small_bytes += len(small.memory)
        if pending.small_bytes > _MAX_SMALL_BYTES:
            measure_all(pending.small, self._bins)
            pending.small.clear()
            pending.small_bytes = 0

    def add_copy(self, copy: Copy) -> str:
        """Add a copy to the pending segment, and return the name of its leaf."""
        number = len(self.pending.copies)
        self.pending.copies[number] = copy
        self.pending.size_bytes += copy.memory.nbytes
        with self._changed:
            self._copy_bytes += copy.memory.nbytes
        return format_leaf(self.pending.number, number)

    def take_memory(self, size_bytes: int) -> Array:
        """Return memory for a copy, reusing that of a written copy: touching new pages takes longer than copying."""
        with self._changed:
            if self._free.get(size_bytes):
                self._free_bytes -= size_bytes
                return self._free[size_bytes].pop()
        return np.empty(size_bytes, dtype=np.uint8)

    def _recycle(self, batch: PendingSegment) -> None:
        """Keep the memory of written copies for later copies of the same size, within the budget."""
        for copy in batch.copies.values():
            size_bytes = copy.memory.nbytes
            if self._copy_bytes + self._free_bytes + size_bytes <= self._queue_bytes:
                self._free.setdefault(size_bytes, []).append(copy.memory)
                self._free_bytes += size_bytes

    def is_full(self, *, segment_steps: int, segment_s: float | None) -> bool:
        """Return whether the pending segment should be sealed, now that a step has ended.

        Unless `segment_s` is given, equal runs have equal segments: these are stored once, however fast a run is.
        """
        batch = self.pending
        return (
            batch.size_bytes >= self._queue_bytes // 4
            or batch.steps >= min(segment_steps, batch.max_steps)
            or len(batch.events) >= _MAX_EVENTS
            or (segment_s is not None and time.monotonic() - batch.started_s >= segment_s)
        )

    def seal(self, notes: tuple[str, ...], *, is_last: bool = False) -> None:
        """Hand the pending segment to the writer thread, and start that thread if needed."""
        self._sealed_steps += self.pending.steps
        batch, self.pending = self.pending, self._open_batch()
        batch.notes, batch.is_last = notes, is_last
        try:
            batch.digests = self._deferred.collect()
        except Exception as error:  # noqa: BLE001  # a device that fails must not stop the training here
            batch.digests = error
        with self._changed:
            self._batches.append(batch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="holdfast-record")
                self._thread.start()
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until every sealed segment is written or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._batches and not self._is_writing)

    def _work(self) -> None:
        """Write all queued segments, then end; `seal` starts a new thread for the next one."""
        while True:
            with self._changed:
                if not self._batches:
                    self._thread = None
                    return
                batch = self._batches.popleft()
                self._is_writing = True
            try:
                self._write(batch)
            finally:
                with self._changed:
                    self._is_writing = False
                    self._copy_bytes -= batch.size_bytes
                    self._recycle(batch)
                    self._changed.notify_all()

    def _write(self, batch: PendingSegment) -> None:
        if self._replaced:
            return
        try:
            batch.wait_digests()
        except Exception as error:  # noqa: BLE001  # no error may stop the training; the observer reports it
            self._device_note = self._device_note or (
                "a device computed no digests for a segment of this recording: tensors of which nothing else was kept"
                f" are not in it; training and recording continue: {type(error).__name__}: {error}"
            )
        # The notes of a run are those of its last segment, which may have been sealed before this one was written.
        if self._device_note and self._device_note not in batch.notes:
            batch.notes += (self._device_note,)
        observed = batch.events
        if self._unwritten:
            self._unwritten.flat += observed.flat
            observed = self._unwritten
        try:
            with pause_gc():  # a commit creates some objects for each tensor, and frees nearly all of them at its end
                self._commit(batch, observed, batch.copies)
        except Exception as error:  # noqa: BLE001  # no error may stop the training; the observer reports it
            self._fail(batch, observed, error)
            if batch.is_last:
                self._try_last(batch)

    def _fail(self, batch: PendingSegment, observed: ObservedEvents, error: Exception) -> None:
        self._in_a_row += 1
        self._lost.add(batch.number)
        self._error = error
        observed.keep_last(0 if self.has_given_up else 4 * _MAX_EVENTS)
        self._unwritten = observed

    def _try_last(self, batch: PendingSegment) -> None:
        """Commit the end of a recording without its tensors: the events alone may still fit on a full disk."""
        last = PendingSegment(self._next_number, notes=batch.notes, is_last=True)
        try:
            self._commit(last, self._unwritten, {})
        except Exception as error:  # noqa: BLE001  # as above
            self._error = error

    def _commit(self, batch: PendingSegment, observed: ObservedEvents, copies: Mapping[int, Copy]) -> None:
        waiting = [Unmeasured(copy.measured, copy.memory.data, copy.dtype) for copy in copies.values()]
        measure_all([*batch.small, *waiting], self._bins)
        events = ObservedEvents(map(self._drop_lost, observed)) if self._lost else observed
        roots = dict(self._roots)
        steps = advance_roots(roots, events)
        segment = Segment(
            *(self._identity.run, self._identity.rank, batch.number, self._identity.world, self._identity.started_s),
            *(self._identity.environment, batch.notes, {step: roots[step] for step in sorted(steps)}, batch.is_last),
            recording=self._identity.recording,
            job=self._identity.job,
            lost_step=self.lost_step,
        )
        tensors = {number: build_copy(copy.memory, copy.dtype, copy.shape) for number, copy in copies.items()}
        result = self._write_owned(segment, events, tensors)
        if result is None:
            return
        self._first = segment.number if self._first is None else self._first
        self._roots, self._unwritten = roots, ObservedEvents()
        self._in_a_row = 0
        self._new_bytes += result.new_bytes

    def _write_owned(
        self, segment: Segment, events: ObservedEvents, tensors: Mapping[int, torch.Tensor]
    ) -> SaveResult | None:
        """Commit a segment; returns None if the name of the run belongs to another recording by now."""
        overwrite = self._identity.overwrite
        for tries in range(_MAX_TRIES):
            self._replaced = read_replacement(
                self._repo, segment, first=self._first, overwrite=overwrite, is_taken=tries > 0
            )
            if self._replaced:
                break
            try:
                return write_segment(self._repo, segment, events, tensors)
            except NameInUse:
                # Another recording has written a segment with this number; which of the two stays is decided above.
                if tries == _MAX_TRIES - 1:
                    raise
        self._unwritten = ObservedEvents()
        return None

    def _drop_lost(self, fields: EventFields) -> ObservedEvent:
        """Return an event without its leaf if the copy could not be written."""
        event = ObservedEvent(*fields)
        is_lost = event.leaf and parse_leaf(event.leaf)[0] in self._lost
        return event._replace(leaf="") if is_lost else event
