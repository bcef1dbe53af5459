"""Reads within the memory budget: batches of items, of small tensors, and of memory on other devices."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import torch

from holdfast.repo.format.entry import Entry
from holdfast.repo.read.reader import SnapshotReader, WriteObserver
from holdfast.tensors.build import CPU
from holdfast.tensors.memory import new_memory, view_bytes, view_storage
from holdfast.tensors.spec import TensorSpec

Item = TypeVar("Item")
_READ_AT_ONCE: Final = 1024
"""How many small tensors are read at a time; each has an entry, a chunk and a buffer in memory."""
_SMALL_BYTES: Final = 8 << 10
"""A small tensor has about so many bytes, where more of them are read at a time because each batch waits once."""

EntriesOfSpec = tuple[TensorSpec, list[int]]
"""A spec, and the numbers of entries that have it."""


def view_tensor_memory(tensor: torch.Tensor, size_bytes: int) -> torch.Tensor:
    """Return the memory of a tensor on any device, from its first item on, as a tensor of bytes."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return view_storage(tensor.untyped_storage(), start, start + size_bytes)


def read_to_devices(reader: SnapshotReader, wanted: Sequence[tuple[Entry, torch.Tensor]], watch: WriteObserver) -> None:
    """Fill memory on other devices, given as tensors of bytes; uses at most half of the budget on the host."""
    limit = reader.budget_bytes // 2
    for entry, _ in wanted:
        watch.expect(entry.name, 1)
    for batch in iter_batches(wanted, lambda each: each[0].size_bytes, limit):
        if batch[0][0].size_bytes > limit:
            entry, memory = batch[0]
            for start in range(0, entry.size_bytes, limit):
                piece = new_memory(min(limit, entry.size_bytes - start), CPU)
                reader.read_into(entry, start, view_bytes(piece))
                watch.begin(entry.name)
                memory[start : start + piece.numel()].copy_(piece)
            watch.end(entry.name)
            continue
        pieces = [new_memory(entry.size_bytes, CPU) for entry, _ in batch]
        reader.read_all([(entry, view_bytes(piece)) for (entry, _), piece in zip(batch, pieces, strict=True)])
        for (entry, memory), piece in zip(batch, pieces, strict=True):
            watch.begin(entry.name)
            memory.copy_(piece)
            watch.end(entry.name)


def read_to_memory(reader: SnapshotReader, entry: Entry, start: int, memory: torch.Tensor) -> None:
    """Fill a tensor of bytes, on any device, with the bytes of an entry from `start` on."""
    staged = memory if memory.device == CPU else new_memory(memory.numel(), CPU)
    buffer = view_bytes(staged)
    reader.read_small(entry, start, buffer)
    if staged is not memory:
        memory.copy_(staged)


def iter_batches(items: Iterable[Item], measure: Callable[[Item], int], limit_bytes: int) -> Iterator[list[Item]]:
    """Yield the items in batches that fit into a limit; an item that exceeds it is a batch by itself."""
    batch: list[Item] = []
    batch_bytes = 0
    for item in items:
        size = measure(item)
        if batch and batch_bytes + size > limit_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += size
    if batch:
        yield batch


def find_batch_count(reader: SnapshotReader) -> int:
    """Return how many small tensors to read at a time."""
    return max(_READ_AT_ONCE, reader.ahead_bytes // _SMALL_BYTES)


class SmallTensors:
    """The numbers and specs of entries that contain small tensors, in the order in which they were added."""

    def __init__(self) -> None:
        self._kinds: dict[int, int] = {}
        self._specs: list[TensorSpec] = []
        # There may be millions: ten bytes each here, where a tuple and a set would take over a hundred.
        self._numbers = array("Q")
        self._kind_of = array("I")
        self._is_added = bytearray()
        # Indexed from the lowest number on: a list takes eight bytes each, where a dict would take fifty.
        self._tensors: list[torch.Tensor | None] = []
        self._lowest = 0

    def has_kind(self, spec: TensorSpec) -> bool:
        """Return whether an entry with this spec object was added."""
        return id(spec) in self._kinds

    def add(self, number: int, spec: TensorSpec) -> None:
        """Add an entry, unless it was added before; equal specs should be one object."""
        if number >= len(self._is_added):
            self._is_added.extend(bytes(number + 1 + number // 8 - len(self._is_added)))
        if self._is_added[number]:
            return
        self._is_added[number] = 1
        kind = self._kinds.setdefault(id(spec), len(self._specs))
        if kind == len(self._specs):
            self._specs.append(spec)
        self._numbers.append(number)
        self._kind_of.append(kind)

    def put(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Store the tensors of these entries."""
        if not self._tensors:
            self._lowest = min(self._numbers)
            self._tensors = [None] * (max(self._numbers) + 1 - self._lowest)
        for number, tensor in zip(numbers, tensors, strict=True):
            self._tensors[number - self._lowest] = tensor

    def find(self, number: int) -> torch.Tensor | None:
        """Return the tensor of an entry, or None if it is not one of these or not read yet."""
        index = number - self._lowest
        return self._tensors[index] if 0 <= index < len(self._tensors) else None

    def iter_batches(self, limit_bytes: int, limit_count: int) -> Iterator[list[EntriesOfSpec]]:
        """Yield all entries in order, in batches of at most so many bytes and entries, grouped by spec; for one use."""
        batch: dict[int, EntriesOfSpec] = {}
        count = batch_bytes = 0
        sizes = [spec.span_bytes for spec in self._specs]
        for number, kind in zip(self._numbers, self._kind_of, strict=True):
            size_bytes = sizes[kind]
            if count == limit_count or (batch and batch_bytes + size_bytes > limit_bytes):
                yield list(batch.values())
                batch, count, batch_bytes = {}, 0, 0
            batch.setdefault(kind, (self._specs[kind], []))[1].append(number)
            count, batch_bytes = count + 1, batch_bytes + size_bytes
        if batch:
            yield list(batch.values())
        self._numbers, self._kind_of = array("Q"), array("I")
