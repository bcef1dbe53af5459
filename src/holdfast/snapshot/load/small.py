"""Small tensors that are to be read: kept in a few bytes each, and read in batches."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from holdfast.tensors.spec import TensorSpec

_BATCH: Final = 1024
"""How many are read at once: of so many there are entries, chunks and buffers in memory."""

Alike = tuple[TensorSpec, list[int]]
"""A spec, and the numbers of entries that have it."""


class SmallTensors:
    """The numbers of entries that hold small tensors, in the order in which they were added, and their specs."""

    def __init__(self) -> None:
        """Begin with none."""
        self._kinds: dict[int, int] = {}
        self._specs: list[TensorSpec] = []
        # There may be millions: ten bytes each, where a tuple and a set would take more than a hundred.
        self._numbers = array("Q")
        self._kind_of = array("I")
        self._is_added = bytearray()
        # By number, from the lowest on: a list, which takes eight bytes each, where a dict would take fifty.
        self._tensors: list[torch.Tensor | None] = []
        self._lowest = 0

    def has_kind(self, spec: TensorSpec) -> bool:
        """Tell whether there is one with this very spec."""
        return id(spec) in self._kinds

    def add(self, number: int, spec: TensorSpec) -> None:
        """Add one, unless it is there already; equal specs should be one object."""
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
        """Keep the tensors of these entries."""
        if not self._tensors:
            self._lowest = min(self._numbers)
            self._tensors = [None] * (max(self._numbers) + 1 - self._lowest)
        for number, tensor in zip(numbers, tensors, strict=True):
            self._tensors[number - self._lowest] = tensor

    def find(self, number: int) -> torch.Tensor | None:
        """Return the tensor of an entry, if it is one of these and was read."""
        index = number - self._lowest
        return self._tensors[index] if 0 <= index < len(self._tensors) else None

    def iter_batches(self, limit_bytes: int) -> Iterator[list[Alike]]:
        """Yield all in order, some at a time and at most `limit_bytes` of them, those of one spec together; once."""
        batch: dict[int, Alike] = {}
        count = held = 0
        sizes = [spec.span_bytes for spec in self._specs]
        for number, kind in zip(self._numbers, self._kind_of, strict=True):
            size_bytes = sizes[kind]
            if count == _BATCH or (batch and held + size_bytes > limit_bytes):
                yield list(batch.values())
                batch, count, held = {}, 0, 0
            batch.setdefault(kind, (self._specs[kind], []))[1].append(number)
            count, held = count + 1, held + size_bytes
        if batch:
            yield list(batch.values())
        self._numbers, self._kind_of = array("Q"), array("I")
