"""Allocates and frees storages in place, gives access to their bytes, and finds those that are still in use."""

from __future__ import annotations

import logging
import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from holdfast.errors import Mismatch, Unsupported
from holdfast.tensors.memory import view_memory
from holdfast.tensors.spec import items_per_byte

_log = logging.getLogger(__name__)


def alloc_storage(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Allocate uninitialised memory for `shape` in the storage of `tensor`; return False if it is there already."""
    storage = _find_storage(tensor)
    size_bytes = _count_bytes(shape, tensor.dtype)
    if storage.nbytes() == size_bytes:
        return False
    if storage.nbytes():
        raise Mismatch(
            f"the storage of a {_describe(tensor)} has {storage.nbytes()} bytes, not 0 or the {size_bytes} "
            f"of shape {tuple(shape)}; free it first"
        )
    if _span_bytes(tensor) > size_bytes:
        raise Mismatch(
            f"a {_describe(tensor)} needs {_span_bytes(tensor)} bytes of storage, more than the {size_bytes} "
            f"of shape {tuple(shape)}; pass the shape of the tensor that owns the storage"
        )
    _resize(storage, size_bytes, tensor)
    return True


def free_storage(tensor: torch.Tensor) -> bool:
    """Free the storage of `tensor`, which must cover all of it; return False if it was free already."""
    storage = _find_storage(tensor)
    if tensor.storage_offset() != 0:
        raise Unsupported(
            f"a {_describe(tensor)} starts {tensor.storage_offset()} elements into a storage that others may use; "
            "free the tensor that it is a view of"
        )
    if storage.nbytes() == 0:
        return False
    own_bytes = _count_bytes(tensor.shape, tensor.dtype)
    if not storage.nbytes() == own_bytes == _span_bytes(tensor):
        raise Unsupported(
            f"a {_describe(tensor)} is {own_bytes} bytes of a storage of {storage.nbytes()}, which others may use; "
            "free the tensor that it is a view of"
        )
    _resize(storage, 0, tensor)
    return True


def assert_logged(condition: object, text: str, *, raises: bool = True) -> None:
    """Log `text` at error level, with the stack, and raise AssertionError, unless `condition` is true.

    For hooks and backward passes, whose callers may lose an exception; the log has it anyway. raises=False only logs.
    """
    if not condition:
        _log.error(text, stack_info=True, stacklevel=2)
        if raises:
            raise AssertionError(text)


def is_allocated(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has memory: False if it was freed, is empty or is on the meta device."""
    return _has_memory(_find_storage(tensor))


def tensor_bytes(tensor: torch.Tensor, size_bytes: int) -> memoryview:
    """Return `size_bytes` of a CPU tensor's memory from its first item on: no copy, valid while the tensor lives."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    # By address: torch has no view of bytes that works for every dtype, and none as fast.
    return view_memory(tensor.untyped_storage(), start, start + size_bytes)


def _has_memory(storage: torch.UntypedStorage) -> bool:
    # Fake tensors have storages on the meta device, which raise when asked for a pointer.
    if storage.device.type == "meta" or storage.nbytes() == 0:
        return False
    try:
        return storage.data_ptr() != 0
    except RuntimeError:
        # The storage of a tensor subclass that wraps other tensors has no pointer.
        return False


def _find_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise Unsupported(f"an {type(tensor).__name__} has no storage yet; run its module once")
    is_made_of_others = getattr(tensor, "__tensor_flatten__", None) is not None
    if tensor.layout != torch.strided or tensor.is_nested or is_made_of_others:
        raise Unsupported(f"a {_describe(tensor)} has no storage of its own; use the tensors that it is made of")
    return tensor.untyped_storage()


def _resize(storage: torch.UntypedStorage, size_bytes: int, tensor: torch.Tensor) -> None:
    if not storage.resizable():
        raise Unsupported(
            f"the memory of a {_describe(tensor)} belongs to numpy, a file or another library, not to torch; clone it"
        )
    storage.resize_(size_bytes)


def _count_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes that a contiguous tensor takes."""
    if items_per_byte(dtype) == 1 or not shape:
        return math.prod(shape) * dtype.itemsize
    *rows, columns = shape
    return math.prod(rows) * -(-columns // items_per_byte(dtype))


def _span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the start of the storage to the end of the tensor's last item."""
    if tensor.numel() == 0:
        return 0
    if items_per_byte(tensor.dtype) > 1:
        return _count_bytes(tensor.shape, tensor.dtype)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.dtype.itemsize


def _describe(tensor: torch.Tensor) -> str:
    """Describe a tensor by attributes that every tensor has."""
    layout = "" if tensor.layout == torch.strided else f" of layout {tensor.layout}"
    return f"{type(tensor).__name__}{layout} of {tensor.dtype}"


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """The bytes from `start` up to, not including, `stop`."""

    start: int
    stop: int
    is_joined: bool = False
    """Whether it was joined from different spans."""


def join_span(spans: list[ByteSpan], new: ByteSpan) -> None:
    """Insert a span into a sorted list of spans that do not overlap; join it with the spans that it overlaps."""
    low = bisect_right(spans, new.start, key=_find_start)
    if low and spans[low - 1].stop > new.start:
        low -= 1
    high = max(low, bisect_left(spans, new.stop, key=_find_start))
    touched = spans[low:high]
    if touched:
        is_joined = any(span.is_joined or (span.start, span.stop) != (new.start, new.stop) for span in touched)
        new = ByteSpan(min(new.start, touched[0].start), max(new.stop, touched[-1].stop), is_joined)
    spans[low:high] = [new]


def find_span_at(spans: Sequence[ByteSpan], at: int) -> ByteSpan | None:
    """Return the span that contains `at`, or None."""
    number = bisect_right(spans, at, key=_find_start) - 1
    return spans[number] if number >= 0 and at < spans[number].stop else None


def iter_gaps(spans: Sequence[ByteSpan], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of [start, stop) that no span contains."""
    at = start
    for span in spans[max(0, bisect_right(spans, start, key=_find_start) - 1) :]:
        if span.start >= stop:
            break
        if span.start > at:
            yield at, span.start
        at = max(at, span.stop)
    if at < stop:
        yield at, stop


def _find_start(span: ByteSpan) -> int:
    return span.start


@dataclass(slots=True)
class FilledBytes:
    """Which bytes of a storage have been read."""

    spans: list[ByteSpan] = field(default_factory=list)
    """Sorted, and without overlaps."""
    packed: set[tuple[object, ...]] = field(default_factory=set)
    """Geometries of packed tensors that have been read; these fill only their items, not whole spans."""


class CachedStorage(NamedTuple):
    """A storage that is still in use."""

    storage: torch.UntypedStorage
    filled: FilledBytes | None
    """What was passed to `keep`."""


class StorageCache:
    """Finds storages that are still in use, without keeping them alive. Thread-safe."""

    def __init__(self) -> None:
        self._refs: dict[tuple[Hashable, str], tuple[StorageWeakRef, FilledBytes | None]] = {}
        self._lock = threading.Lock()

    def find(self, key: Hashable, device: torch.device) -> CachedStorage | None:
        """Return the storage that was added under `key` for `device`, or None if it is not in use any more."""
        with self._lock:
            ref, filled = self._refs.get((key, str(device)), (None, None))
            if ref is None:
                return None
            storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._refs[key, str(device)]
                return None
            return CachedStorage(storage, filled)

    def keep(self, key: Hashable, storage: torch.UntypedStorage, filled: FilledBytes | None = None) -> None:
        """Add a storage under `key`, for as long as it is in use elsewhere; `filled` is kept with it.

        A storage that is read as a whole needs no `filled`, which takes a few hundred bytes.
        """
        with self._lock:
            self._refs[key, str(storage.device)] = (StorageWeakRef(storage), filled)  # type: ignore[no-untyped-call]  # torch does not say
            if len(self._refs) % 256 == 0:
                live = {known: found for known, found in self._refs.items() if not found[0].expired()}  # type: ignore[no-untyped-call]  # as above
                self._refs = live
