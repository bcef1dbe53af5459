"""Observes tensors and settings: a digest, statistics or a copy of each, without errors in the training."""

from __future__ import annotations

import math
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import torch

from holdfast.capture.record.options import RecordOptions
from holdfast.capture.record.points import Points, list_paths
from holdfast.capture.record.spool import Copy, Spool
from holdfast.capture.stored.events import (
    EventFacts,
    EventKind,
    Level,
    Measured,
    OptimizerSettings,
    ParameterSettings,
    Phase,
    encode_model,
    encode_optimizer,
)
from holdfast.capture.stored.observed import (
    WHOLE,
    KnownMemory,
    ObservedTensor,
    ShardPlacement,
    TensorInspector,
    find_part,
    observe_remote,
    verify_kind,
)
from holdfast.capture.stored.statistics import SMALL_BYTES, Unmeasured, measure_bytes
from holdfast.digest import fingerprint, hash_bytes
from holdfast.errors import HoldfastError, StoreFull, Unsupported
from holdfast.json_text import Json
from holdfast.tensors.composite import ORDINARY_CLASSES
from holdfast.tensors.device_digest.deferred import can_defer
from holdfast.tensors.sharding import Layouts

_PLAIN: Final = (bool, int, float, str, type(None))
_MAX_ITEMS: Final = 16
_MAX_TEXT: Final = 200
_MAX_CHANGES: Final = 8
_MODE: Final = "training"
_IMPLEMENTATION: Final = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Keys of parameter groups that choose how an optimizer computes, not what."""


class SettingsReader:
    """Reads settings as text; the text of a model is encoded again only when a value has changed."""

    def __init__(self, points: Points, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Choose the attributes to read: those that are plain now."""
        self._points = points
        self._optimizers = optimizers
        self._attributes = [
            (fqn, module, tuple(name for name, value in vars(module).items() if _is_setting(name, value)))
            for fqn, module in points.described
        ]
        self._last: tuple[list[list[Json]], object] = ([], None)
        self._changes: Counter[tuple[str, str]] = Counter()
        """By module and attribute, how often its value has changed."""
        self._text = ""

    def read_model(self) -> str:
        """Return the settings of all modules and parameters."""
        groups = {id(parameter): name for name, parameter in self._iter_grouped()}
        parameters = [(each.requires_grad, groups.get(id(each), "")) for each in self._points.parameters.values()]
        values = self._read_values()
        if (values, parameters) != self._last:
            if self._leave_out_counters(values):
                values = self._read_values()
            self._last = (values, parameters)
            self._text = self._encode(values, [ParameterSettings(*flags) for flags in parameters])
        return self._text

    def _read_values(self) -> list[list[Json]]:
        return [
            [type(module).__name__, *(_freeze(vars(module).get(name)) for name in names)]
            for _, module, names in self._attributes
        ]

    def _leave_out_counters(self, values: Sequence[Sequence[Json]]) -> bool:
        """Leave out attributes that change again and again: not settings, and their text would be stored each time."""
        for (fqn, _, names), before, now in zip(self._attributes, self._last[0], values, strict=False):
            pairs = zip(names, before[1:], now[1:], strict=True)
            self._changes.update((fqn, name) for name, first, second in pairs if first != second and name != _MODE)
        counters = {key for key, count in self._changes.items() if count > _MAX_CHANGES}
        for key in counters:
            del self._changes[key]
        self._attributes = [
            (fqn, module, tuple(name for name in names if (fqn, name) not in counters))
            for fqn, module, names in self._attributes
        ]
        return bool(counters)

    def read_optimizer(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the class and the settings of an optimizer."""
        groups = tuple(dict(_iter_group(group)) for group in optimizer.param_groups)
        return encode_optimizer(OptimizerSettings(type(optimizer).__name__, groups))

    def find_number(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the number of an optimizer as text; "" if there is only one."""
        return str(self._optimizers.index(optimizer)) if len(self._optimizers) > 1 else ""

    def _iter_grouped(self) -> Iterator[tuple[str, torch.Tensor]]:
        for optimizer in self._optimizers:
            number = self.find_number(optimizer)
            for index, group in enumerate(optimizer.param_groups):
                name = f"{number}.{index}" if number else str(index)
                yield from ((name, parameter) for parameter in group["params"])

    def _encode(self, values: Sequence[Sequence[Json]], parameters: Sequence[ParameterSettings]) -> str:
        modules: dict[str, Mapping[str, Json]] = {}
        for (fqn, _, names), found in zip(self._attributes, values, strict=True):
            modules[fqn] = dict(zip(("class", *names), found, strict=True))
        return encode_model(
            modules, dict(zip(self._points.parameters, parameters, strict=True)), dict(self._points.tied)
        )


def _is_setting(name: str, value: object) -> bool:
    """Return whether an attribute of a module is a setting: public, and a number, a short text or a few of these."""
    if name.startswith("_"):
        return False
    items = value if isinstance(value, tuple | list) else (value,)
    return len(items) <= _MAX_ITEMS and all(
        type(item) in _PLAIN and (not isinstance(item, str) or len(item) <= _MAX_TEXT) for item in items
    )


def _freeze(value: object) -> Json:
    """Return a value as JSON that does not change later; other values than settings as the name of their class."""
    if type(value) in _PLAIN:
        return value if not isinstance(value, float) or math.isfinite(value) else str(value)
    if isinstance(value, tuple | list):
        return [_freeze(item) for item in value]
    return type(value).__name__


def _iter_group(group: Mapping[str, Any]) -> Iterator[tuple[str, Json]]:
    for key, value in group.items():
        if key in _IMPLEMENTATION:
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            yield key, _freeze(value.item())
        elif _is_setting(key, value):
            yield key, _freeze(value)


_TORCH: Final = str(Path(torch.__file__).parent)
_OURS: Final = str(Path(__file__).parents[1])
_MAX_NOTES: Final = 50
_LASTING: Final = frozenset({"parameter", "buffer", "optimizer"})
"""Kinds of tensors that mostly are in the same memory in each step."""
find_graph_task: Final[Callable[[], int]] = torch._C._current_graph_task_id
"""Returns -1 outside a backward pass. Modules called inside one recompute activations."""


class RecordingWarning(UserWarning):
    """Something could not be recorded; training is not affected."""


@dataclass(slots=True, eq=False)
class CallSite:
    """Where a tensor was observed, except for its path in the arguments or results; made once for all steps."""

    phase: Phase
    kind: EventKind
    fqn: str
    call: int = 0
    module: str = ""
    parent: str = ""
    source: str = ""
    recompute: bool = False
    last: dict[str, LastSeen] = field(default_factory=dict)
    """By path, what was observed here last."""

    def make_facts(self, path: str, tensor: ObservedTensor, place: ShardPlacement) -> EventFacts:
        """Return the facts of an event here."""
        return EventFacts(
            *(self.phase, self.kind, self.fqn, self.call, path, tensor.dtype_name, tensor.shape),
            *(self.module, self.parent, self.recompute, self.source),
            *(place.placement, place.global_shape, place.offsets),
        )


class LastSeen(NamedTuple):
    """The last tensor that was observed at a site: what it has in common with the next one is not computed again."""

    facts: EventFacts
    dtype: torch.dtype
    place: ShardPlacement
    known: KnownMemory | None = None
    """The memory of a tensor that lasts from step to step."""


class _Aliases:
    """Numbers the memory of tensors within a step, in the order in which it is observed."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def find(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage."""
        key: int = storage._cdata
        number = self._numbers.get(key)
        if number is None:
            # The weak reference keeps the storage's address from being reused in this step, but not its memory.
            storage._weak_ref()
            number = self._numbers[key] = len(self._numbers)
        return number

    def clear(self) -> None:
        """Forget all storages."""
        for key in self._numbers:
            torch.UntypedStorage._free_weak_ref(key)  # type: ignore[no-untyped-call]  # torch's
        self._numbers.clear()


class Observer:
    """Observes tensors, passes them to the spool, and counts steps. One per recording."""

    def __init__(self, spool: Spool, options: RecordOptions) -> None:
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
        self._inspector = TensorInspector()
        self._aliases = _Aliases()
        self._known: dict[tuple[bytes, torch.dtype, tuple[int, ...]], tuple[str, Measured]] = {}
        self._known_before = self._known
        self._measured: dict[tuple[bytes, torch.dtype], Measured] = {}
        self._measured_before = self._measured
        self._layouts = Layouts()
        self._is_full_off = False
        self._failures = 0
        # Backward passes on accelerators run on threads of their own.
        self._lock = threading.RLock()

    # Steps

    def begin_step(self) -> bool:
        """Begin the step numbered `step`; returns whether it is recorded."""
        self.is_open = not self._stopped and self.options.steps(self.step)
        return self.is_open

    def end_step(self) -> None:
        """End the step, seal the segment if it is full, and report failures of the writer thread."""
        was_open, self.is_open = self.is_open, False
        self.step += 1
        self._aliases.clear()
        # A tensor that equals one of the previous step, such as a parameter after its update, is not copied again.
        self._known_before, self._known = self._known, {}
        self._measured_before, self._measured = self._measured, {}
        if was_open:
            self.spool.pending.steps += 1
            if self.spool.is_full(segment_steps=self.options.segment_steps, segment_s=self.options.segment_s):
                self.spool.seal(tuple(self.notes))
        self.report_failures()

    def find_level(self, kind: EventKind, name: str) -> Level:
        """Return the level at which a tensor is recorded."""
        level = self._levels.get((kind, name))
        if level is None:
            level = self._levels[kind, name] = self.options.find_level(kind, name)
        return level

    # Failures

    def note(self, text: str) -> None:
        """Add a note to the run, and warn the user once."""
        if text in self.notes or len(self.notes) >= _MAX_NOTES:
            return
        self.notes.append(text)
        warnings.warn(f"holdfast: {text}", RecordingWarning, stacklevel=2)

    @property
    def is_stopped(self) -> bool:
        """Whether recording has stopped for good."""
        return self._stopped

    def stop(self) -> None:
        """Stop recording for good."""
        self._stopped = True
        self.is_open = False

    def report_failures(self) -> None:
        """Warn about errors of devices and of the writer thread; raises the latter if `when_full` is "raise"."""
        if self.spool.device_note:
            self.note(self.spool.device_note)
        if self.spool.replaced and not self._stopped:
            self.stop()
            self.note(
                f"recording stopped before step {self.step}: {self.spool.replaced}, so it belongs to that one; training"
                " continues. Record under another name to keep both"
            )
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
                "a segment of this recording could not be written and its tensors are lost; training continues, and"
                f" only digests and statistics are kept from step {self.step} on: {type(error).__name__}: {error}"
            )
        self._failures += 1
        if self.spool.has_given_up and not self._stopped:
            self.stop()
            self.note(f"recording stopped before step {self.step}: the store failed several times in a row")

    def fail(self, error: Exception) -> None:
        """Stop recording and warn, so that the training continues; raises errors that the user asked for."""
        is_asked_for = self.options.when_full == "raise" and isinstance(error, HoldfastError)
        if is_asked_for or isinstance(error, RecordingWarning):
            raise error
        self.stop()
        self.note(f"recording stopped at step {self.step}: {type(error).__name__}: {error}")

    # Observing

    def observe(self, tensor: torch.Tensor, where: CallSite, level: Level, path: str = "", form: str = "") -> None:
        """Record a tensor at its level: digest, statistics or copy."""
        with self._lock:
            try:
                self._observe(tensor, where, level, path, form)
            except Unsupported as error:
                self.note(f"{where.kind} of {where.fqn or 'the model'} is not recorded: {error}")

    def _observe(self, tensor: torch.Tensor, where: CallSite, level: Level, path: str, form: str) -> None:
        last, place, known = where.last.get(path), WHOLE, None
        if type(tensor) not in ORDINARY_CLASSES:
            tensor, place = find_part(tensor, self._layouts)
        is_remote = not tensor.is_cpu and self._is_hashed_on_device(tensor)
        digest, leaf, measured = b"", "", None
        blake3: bytes | int = b""
        if is_remote and level is Level.DIGEST and self.options.hashes == "auto":
            observed = observe_remote(tensor)
        else:
            if where.kind in _LASTING:
                observed, known = self._inspector.observe_lasting(tensor, last.known if last else None)
            else:
                observed = self._inspector.observe(tensor)
            digest = fingerprint(observed.data)
            if self.options.hashes == "both" and not is_remote:
                blake3 = hash_bytes(observed.data)
        dtype, shape, _, storage = observed
        if level is Level.FULL:
            leaf, measured = self._keep(observed, digest)
        if level is Level.STATS or (level is Level.FULL and not leaf):
            measured = self._measure(observed, digest)
        if (
            last is None
            or last.dtype is not dtype
            or last.facts.shape != shape
            or (last.place is not place and last.place != place)
        ):
            last = where.last[path] = LastSeen(where.make_facts(path, observed, place), dtype, place, known)
        elif last.known is not known:
            where.last[path] = last._replace(known=known)
        if is_remote:
            # After `_keep`, which may seal the segment: the index counts from the start of the pending one.
            digest, blake3 = self._queue_digest(tensor, digest)
            storage = tensor.untyped_storage()
        alias = -1 if storage is None else self._aliases.find(storage)
        # The fields of an `ObservedEvent`.
        fields = (self._seq, self.step, last.facts, digest, alias, measured, leaf, form, blake3)
        self.spool.pending.events.flat += fields
        self._seq += 1

    def _queue_digest(self, tensor: torch.Tensor, digest: bytes) -> tuple[bytes, bytes | int]:
        """Queue the BLAKE3 of a tensor on its device; returns both digests, of which the XXH3 may be b"".

        If there is no memory for that on the device, the BLAKE3 is b"", and the XXH3 is computed on the host.
        """
        try:
            return digest, self.spool.queue_digest(tensor)
        except torch.OutOfMemoryError:
            self.note(f"{tensor.device} had no memory left to compute digests: some tensors were hashed on the host")
            return digest or self._inspector.observe(tensor).digest(), b""

    def _is_hashed_on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether the digest of a tensor that is not on the CPU is computed where it is."""
        verify_kind(tensor)
        return can_defer(tensor.device)

    def _measure(self, observed: ObservedTensor, digest: bytes) -> Measured:
        """Return the statistics of a tensor; those of equal bytes in this step or the one before are used again."""
        key = (digest, observed.dtype)
        measured = self._measured.get(key) or self._measured_before.get(key)
        if measured is None:
            measured = Measured()
            if observed.data.nbytes > SMALL_BYTES:
                measured.stats = measure_bytes(observed.data, observed.dtype, self.options.bins)
            else:
                self.spool.add_small(Unmeasured(measured, bytes(observed.data), observed.dtype))
        self._measured[key] = measured
        return measured

    def _keep(self, observed: ObservedTensor, digest: bytes) -> tuple[str, Measured | None]:
        """Copy a tensor, unless the same bytes were copied already; returns its leaf, or "" if there is no room."""
        key = (digest, observed.dtype, observed.shape)
        found = self._known.get(key) or self._known_before.get(key)
        if found is None:
            size_bytes = observed.data.nbytes
            if not self._has_room(size_bytes):
                return "", None
            self._copied_bytes += size_bytes
            memory = self.spool.take_memory(size_bytes)
            observed.copy(memory)
            measured = Measured()
            found = (self.spool.add_copy(Copy(memory, observed.dtype, observed.shape, measured)), measured)
        self._known[key] = found
        return found

    def _has_room(self, size_bytes: int) -> bool:
        options = self.options
        if self._is_full_off:
            return False
        if options.max_bytes is not None and self._copied_bytes + size_bytes > options.max_bytes:
            self._is_full_off = True
            self.note(
                f"degraded to stats at step {self.step}: max_bytes={options.max_bytes} is used up;"
                " digests and statistics are still kept"
            )
            return False
        if options.when_full == "block":
            self.spool.make_room(size_bytes, tuple(self.notes))
            self.report_failures()
            return not self._is_full_off
        if self.spool.has_room(size_bytes):
            return True
        if options.when_full == "raise":
            raise StoreFull(
                f"step {self.step}: copies that wait to be written have reached queue_bytes={options.queue_bytes};"
                " raise queue_bytes, record less, or pass when_full='block' or 'degrade'",
                needed_bytes=size_bytes,
            )
        self.note(f"degraded to stats since step {self.step} whenever queue_bytes={options.queue_bytes} was used up")
        return False


def find_source() -> str:
    """Return the innermost line of the user's code on the call stack, such as "model.py:212"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = _find_own_name(frame.f_code.co_filename)
        if name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@cache
def _find_own_name(filename: str) -> str:
    """Return the name of a file of the user without its folder; "" for a file of torch or Holdfast."""
    return "" if filename.startswith((_TORCH, _OURS, "<")) else filename.rpartition("/")[2]


class StateObserver:
    """Passes the state of a model and its optimizers to an observer, before and after the optimizers step."""

    def __init__(self, observer: Observer, points: Points, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._observer = observer
        self._points = points
        self._optimizers = optimizers
        self._names = {id(parameter): name for name, parameter in points.parameters.items()}
        self._settings = SettingsReader(points, optimizers)
        self._sites: dict[tuple[Phase, EventKind, str], tuple[CallSite, Level]] = {}

    def observe_state(self) -> None:
        """Observe the state at the start of a step: settings, RNG state, parameters and buffers."""
        self._observe_setting("forward", self._settings.read_model)
        if "rng" in self._observer.options.kinds:
            self._observe("forward", "rng", "cpu", torch.get_rng_state())
        for name, parameter in self._points.parameters.items():
            self._observe("forward", "parameter", name, parameter)
        for name, buffer in self._points.iter_buffers():
            self._observe("forward", "buffer", name, buffer)

    def observe_all_grads(self) -> None:
        """Observe the gradients of all parameters."""
        self._observe_grads(self._points.parameters.items())

    def observe_grads(self, optimizer: torch.optim.Optimizer) -> None:
        """Observe what an optimizer is about to use: gradients and the settings of its parameter groups."""
        self._observe_grads(self._iter_parameters(optimizer))
        if "optimizer" in self._observer.options.kinds:
            self._observe_groups(optimizer)
        number = self._settings.find_number(optimizer)
        self._observe_setting("optimizer", partial(self._settings.read_optimizer, optimizer), number)

    def observe_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Observe what an optimizer has updated: parameters and optimizer state."""
        for name, parameter in self._iter_parameters(optimizer):
            self._observe("optimizer", "parameter", name, parameter)
        for name, parameter in self._iter_parameters(optimizer):
            for path, tensor in list_paths(optimizer.state.get(parameter)):
                self._observe("optimizer", "optimizer", name, tensor, path)

    def _observe(self, phase: Phase, kind: EventKind, name: str, tensor: torch.Tensor, path: str = "") -> None:
        key = (phase, kind, name)
        found = self._sites.get(key)
        if found is None:
            found = self._sites[key] = (CallSite(phase, kind, name), self._observer.find_level(kind, name))
        if found[1] is not Level.OFF:
            self._observer.observe(tensor, *found, path)

    def _observe_setting(self, phase: Phase, read: Callable[[], str], path: str = "") -> None:
        if "setting" not in self._observer.options.kinds:
            return
        text = read()
        content = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)
        self._observer.observe(content, CallSite(phase, "setting", ""), Level.DIGEST, path, text)

    def _observe_grads(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, parameter in parameters:
            if parameter.grad is not None:
                self._observe("backward", "param_grad", name, parameter.grad)

    def _iter_parameters(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                yield self._names.get(id(parameter), f"param_groups.{number}.{index}"), parameter

    def _observe_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Observe the settings of parameter groups: a wrong learning rate explains every later difference."""
        prefix = f"{self._optimizers.index(optimizer)}." if len(self._optimizers) > 1 else ""
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                tensor = None if key == "params" else _find_numbers(value)
                if tensor is not None:
                    self._observe("optimizer", "optimizer", f"param_groups.{prefix}{number}", tensor, f"[{key!r}]")


def _find_numbers(value: object) -> torch.Tensor | None:
    """Return a setting of a parameter group as a tensor; None if it is no number."""
    numbers = value if isinstance(value, tuple | list) else (value,)
    if all(type(each) in (int, float) for each in numbers):
        return torch.tensor(numbers, dtype=torch.float64)
    return value if isinstance(value, torch.Tensor) else None
