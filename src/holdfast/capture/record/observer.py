"""The eye of a recording: sees tensor after tensor, takes what its level asks for, and disturbs no training."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from holdfast.capture.record.options import Options
from holdfast.capture.record.spool import Copy, ObservedEvent, Spool
from holdfast.capture.stored.events import EventKind, Level, Phase, Site
from holdfast.capture.stored.observed import ObservedTensor, find_part, observe
from holdfast.errors import HoldfastError, StoreFull, Unsupported
from holdfast.tensors.sharding.meshes import Layouts

_TORCH: Final = str(Path(torch.__file__).parent)
_OURS: Final = str(Path(__file__).parents[1])
_MAX_NOTES: Final = 50
find_graph_task: Final[Callable[[], int]] = torch._C._current_graph_task_id
"""Returns -1 outside of a backward pass; inside of one, modules are called to compute activations again."""


class RecordingWarning(UserWarning):
    """Something could not be recorded; training is not affected."""


class CallSite(NamedTuple):
    """What is known of where a tensor is seen, besides its place in the arguments or results."""

    phase: Phase
    kind: EventKind
    fqn: str
    call: int = 0
    module: str = ""
    parent: str = ""
    source: str = ""
    recompute: bool = False


class Observer:
    """Sees tensors and passes them on; knows the step. One for each recording."""

    def __init__(self, spool: Spool, options: Options) -> None:
        """See nothing before the first step."""
        self.spool = spool
        self.options = options
        self.step = options.first_step
        self.is_open = False
        """Whether this step is recorded."""
        self.notes: list[str] = []
        self._seq = 0
        self._copied_bytes = 0
        self._stopped = False
        self._levels: dict[tuple[EventKind, str], Level] = {}
        self._aliases: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known: dict[tuple[bytes, str, tuple[int, ...]], str] = {}
        self._known_before: dict[tuple[bytes, str, tuple[int, ...]], str] = {}
        self._layouts = Layouts()
        self._is_full_off = False
        self._failures = 0
        self._dtypes: dict[torch.dtype, str] = {}
        # Backward passes of accelerators have threads of their own.
        self._lock = threading.RLock()

    # Steps

    def begin_step(self) -> bool:
        """Begin the step that `step` says; returns whether it is recorded."""
        self.is_open = not self._stopped and self.options.steps(self.step)
        return self.is_open

    def end_step(self) -> None:
        """End the step, hand over what is worth a segment, and tell the user what went wrong behind his back."""
        was_open, self.is_open = self.is_open, False
        self.step += 1
        self._aliases.clear()
        # What is the same as in the step before, parameters for one, is copied once for both.
        self._known_before, self._known = self._known, {}
        if was_open:
            self.spool.pending.steps += 1
            if self.spool.is_full(segment_steps=self.options.segment_steps, segment_s=self.options.segment_s):
                self.spool.seal(tuple(self.notes))
        self.tell_failures()

    def find_level(self, kind: EventKind, name: str) -> Level:
        """Return at which level a tensor is recorded."""
        level = self._levels.get((kind, name))
        if level is None:
            level = self._levels[kind, name] = self.options.find_level(kind, name)
        return level

    # Trouble

    def note(self, text: str) -> None:
        """Keep what could not be recorded, and tell the user once."""
        if text in self.notes or len(self.notes) >= _MAX_NOTES:
            return
        self.notes.append(text)
        warnings.warn(f"holdfast: {text}", RecordingWarning, stacklevel=2)

    def stop(self) -> None:
        """Record nothing more."""
        self._stopped = True
        self.is_open = False

    def tell_failures(self) -> None:
        """Tell the user what the thread that writes has met; raises it only if that was asked for."""
        error = self.spool.take_error()
        if error is None:
            return
        self._is_full_off = True
        self._known.clear()
        self._known_before.clear()
        if self.options.when_full == "raise":
            self.stop()
            raise error
        if not self._failures:
            self.note(
                "a segment of this recording could not be written, its tensors are lost, and only digests and numbers"
                f" are kept from step {self.step} on; training goes on: {type(error).__name__}: {error}"
            )
        self._failures += 1
        if self.spool.has_given_up and not self._stopped:
            self.stop()
            self.note(f"recording has stopped before step {self.step}: the store fails again and again")

    def fail(self, error: Exception) -> None:
        """Let no mistake of ours reach the training: stop. What the user asked to be told is raised."""
        is_asked_for = self.options.when_full == "raise" and isinstance(error, HoldfastError)
        if is_asked_for or isinstance(error, RecordingWarning):
            raise error
        self.stop()
        self.note(f"recording has stopped at step {self.step}: {type(error).__name__}: {error}")

    # Seeing

    def see(self, tensor: torch.Tensor, where: CallSite, level: Level, path: str = "", form: str = "") -> None:
        """Take of a tensor what its level asks for."""
        with self._lock:
            local, place = find_part(tensor, self._layouts)
            try:
                look = observe(local)
            except Unsupported as error:
                self.note(f"{where.kind} of {where.fqn or 'the model'} is not recorded: {error}")
                return
            digest = look.digest()
            dtype = self._dtypes.get(look.dtype) or self._dtypes.setdefault(look.dtype, look.dtype_name)
            leaf, stats = "", None
            if level is Level.FULL:
                leaf = self._keep(look, digest, dtype)
            if level is Level.STATS or (level is Level.FULL and not leaf):
                stats = look.measure(self.options.bins)
            phase, kind, fqn, call, module, parent, source, recompute = where
            alias = self._find_alias(look)
            # As a plain tuple: this is the innermost of all loops.
            seen = ObservedEvent(
                *(self._seq, Site(self.step, phase, kind, fqn, call, path), dtype, look.shape, digest, module, parent),
                *(recompute, source, alias, place, stats, leaf, form),
            )
            self._seq += 1
            self.spool.pending.seen.append(seen)

    def _find_alias(self, look: ObservedTensor) -> int:
        storage = look.keep
        if not isinstance(storage, torch.UntypedStorage):
            return -1
        key: int = storage._cdata
        found = self._aliases.get(key)
        if found is None:
            # The reference keeps the number of the storage, not its memory, from being used again in this step.
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's
            found = self._aliases[key] = (reference, len(self._aliases))
        return found[1]

    def _keep(self, look: ObservedTensor, digest: bytes, dtype: str) -> str:
        """Copy a tensor, unless this run has its bytes already; returns its leaf, or nothing if there is no room."""
        key = (digest, dtype, look.shape)
        leaf = self._known.get(key) or self._known_before.get(key)
        if leaf is None:
            size_bytes = look.data.nbytes
            if not self._has_room(size_bytes):
                return ""
            self._copied_bytes += size_bytes
            memory = self.spool.take_memory(size_bytes)
            look.copy(memory)
            leaf = self.spool.keep(Copy(memory, look.dtype, look.shape))
        self._known[key] = leaf
        return leaf

    def _has_room(self, size_bytes: int) -> bool:
        options = self.options
        if self._is_full_off:
            return False
        if options.max_bytes is not None and self._copied_bytes + size_bytes > options.max_bytes:
            self._is_full_off = True
            self.note(
                f"degraded to stats at step {self.step}: max_bytes={options.max_bytes} is used up;"
                " digests and numbers are still kept"
            )
            return False
        if self.spool.has_room(size_bytes):
            return True
        if options.when_full == "raise":
            raise StoreFull(
                f"step {self.step}: the copies that wait to be written have reached queue_bytes={options.queue_bytes};"
                " give more, record less, or choose when_full='block' or 'degrade'",
                needed_bytes=size_bytes,
            )
        if options.when_full == "degrade":
            self.note(
                f"degraded to stats since step {self.step} whenever queue_bytes={options.queue_bytes} was used up"
            )
            return False
        self.spool.wait_for_room(size_bytes, tuple(self.notes))
        self.tell_failures()
        return not self._is_full_off


def find_source() -> str:
    """Return the line of the user's code that has led here: "model.py:212"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith((_TORCH, _OURS, "<")):
            return f"{filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
