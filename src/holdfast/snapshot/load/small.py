"""Small tensors that are to be read: a few bytes each until then, and read in batches."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from holdfast.tensors.spec import TensorSpec

_BATCH: Final = 1024
"""How many are read at a time; each has an entry, a chunk and a buffer in memory."""

Alike = tuple[TensorSpec, list[int]]
"""A spec, and the numbers of entries that have it."""


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
        """Tell whether an entry with this spec object was added."""
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

    def iter_batches(self, limit_bytes: int) -> Iterator[list[Alike]]:
        """Yield all entries in order, in batches of at most `limit_bytes`, grouped by spec; can be used once."""
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
