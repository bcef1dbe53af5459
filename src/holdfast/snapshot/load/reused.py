"""Reads tensors into memory that is used again for the next ones, when these have been dropped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch

from holdfast.errors import Corrupt
from holdfast.repo.format.entry import Entry
from holdfast.snapshot.leaves import is_ordinary_node
from holdfast.snapshot.load.load import load_node
from holdfast.snapshot.load.opened import Opened
from holdfast.snapshot.load.options import LoadOptions
from holdfast.tensors.build import CPU, is_contiguous_alone, new_empty
from holdfast.tensors.dtypes import item_bytes
from holdfast.tensors.memory import new_memory, view_bytes, wrap_memory
from holdfast.tensors.spec import SpecDecoder, TensorSpec
from holdfast.trees.registered import Types

_ALIGNMENT: Final = 64
"""A cache line, which is also a multiple of the size of every item."""


class ReusedMemory:
    """A block of memory for tensors that are used for a short time; for one thread at a time.

    Memory that was used before takes no page faults, and a small block of it stays in the cache.
    """

    def __init__(self, block: memoryview) -> None:
        """Use a writable block."""
        self._bytes = wrap_memory(block)
        self._used_bytes = 0

    def clear(self) -> None:
        """Use the memory from the start again; the tensors in it change with the next read."""
        self._used_bytes = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return bytes of the block, or new memory if they do not fit."""
        start = self._used_bytes
        if size_bytes > self._bytes.numel() - start:
            return new_memory(size_bytes, CPU)
        self._used_bytes = min(-(-(start + size_bytes) // _ALIGNMENT) * _ALIGNMENT, self._bytes.numel())
        return self._bytes[start : start + size_bytes]


class TensorReader:
    """Reads tensors of one snapshot, by name, into memory that the caller gives. Safe in any thread."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._specs = SpecDecoder(opened.name)

    def read(self, names: Iterable[str], memory: ReusedMemory) -> list[torch.Tensor]:
        """Read and verify tensors, all at once; each is valid until the memory is cleared."""
        tensors: list[torch.Tensor] = []
        fills: list[tuple[Entry, memoryview]] = []
        for name in names:
            node = self._opened.find(name).leaves[0].node
            found = self._place(node[1], name, memory) if is_ordinary_node(node) else None
            if found is None:
                options = LoadOptions(device=CPU, aliases="fresh")
                tensors.append(load_node(self._opened, node, options, Types()))
                continue
            tensor, entry, raw = found
            tensors.append(tensor)
            if raw.numel():
                fills.append((entry, view_bytes(raw)))
        self._opened.reader.read_all(fills)
        return tensors

    def _place(self, number: int, name: str, memory: ReusedMemory) -> tuple[torch.Tensor, Entry, torch.Tensor] | None:
        """Return the tensor of an entry over memory that is still to be filled; None if it is not that simple."""
        saved, size_bytes, _ = self._opened.find_facts(number)
        try:
            spec = self._specs.decode(saved, size_bytes=size_bytes, name=name)
        except Corrupt:
            return None  # an ordinary read raises the error with all details
        if not is_contiguous_alone(spec, size_bytes) or spec.quantizer is not None:
            return None
        raw = memory.take(size_bytes)
        return _view(raw, spec), self._opened.entry(number), raw


def _view(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    size = item_bytes(spec.dtype)
    assert raw.numel() == size * math.prod(spec.shape), "the spec fits the entry"
    start = int(raw.storage_offset()) // size
    return new_empty(spec.dtype, CPU).set_(raw.untyped_storage(), start, spec.shape, spec.stride)
