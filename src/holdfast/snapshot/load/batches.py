"""Reads within the memory budget: items in batches, and memory on other devices filled batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from holdfast.repo.format.entry import Entry
from holdfast.repo.read.reader import SnapshotReader, WriteObserver
from holdfast.tensors.build import CPU
from holdfast.tensors.memory import new_memory, view_bytes, view_storage

Item = TypeVar("Item")


def view_place(tensor: torch.Tensor, size_bytes: int) -> torch.Tensor:
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


def iter_batches(items: Iterable[Item], measure: Callable[[Item], int], limit_bytes: int) -> Iterator[list[Item]]:
    """Yield the items in batches that fit into a limit; an item that exceeds it is a batch of its own."""
    batch: list[Item] = []
    held = 0
    for item in items:
        size = measure(item)
        if batch and held + size > limit_bytes:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
    if batch:
        yield batch
