"""Sources for boxes of a global tensor: their bytes one after the other, cut into chunks on the global grid."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from holdfast.json_text import Json
from holdfast.repo.format.boxes import Box, Coordinates, cut_rows, relative, slices, volume
from holdfast.repo.format.source import Source
from holdfast.tensors.device_copy import copy_to_host
from holdfast.tensors.memory import view_bytes, view_memory, view_raw, view_storage
from holdfast.tensors.sharding import LocalBox, LocalLeaf
from holdfast.tensors.spec import TensorSpec, contiguous_stride, count_bytes, encode_spec, find_role, number_bytes


@dataclass(frozen=True, slots=True)
class ShardSource:
    """The bytes that one rank has of a tensor."""

    name: str
    pieces: Sequence[LocalBox]
    boxes: Sequence[Box]
    """The chunks, in order."""
    homes: Sequence[LocalBox]
    """For each chunk, the piece that contains it."""
    cuts: Sequence[int]
    whole_bytes: int
    """The number of bytes of the global tensor."""
    spec: Json = None
    note: Json = None
    alias: int = 0
    item_bytes: int = 1

    @property
    def size_bytes(self) -> int:
        """The number of bytes that this rank has."""
        return self.cuts[-1] if self.cuts else 0

    @property
    def is_whole(self) -> bool:
        """Whether these are all bytes of the global tensor, in their order."""
        return len(self.pieces) <= 1 and self.size_bytes == self.whole_bytes

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`: a view of a piece's memory if they are contiguous, or a copy."""
        return _read_across(self.cuts, start, stop, lambda number, low, high: self._read_chunk(number)[low:high])

    def view_chunk(self, number: int) -> torch.Tensor:
        """Return a chunk as a part of the piece that contains it, without a copy if possible."""
        box, piece = self.boxes[number], self.homes[number]
        part = piece.tensor.detach()[slices(relative(box, piece.box.starts))]
        # The memory of a conjugated or negated view does not have the values of the view.
        return part.resolve_conj().resolve_neg()

    def _read_chunk(self, number: int) -> memoryview:
        part, piece = self.view_chunk(number), self.homes[number]
        if not part.is_cpu:
            return copy_to_host(view_raw(part).contiguous().view(-1).view(torch.uint8))
        if not part.is_contiguous():
            part = view_raw(part).contiguous()
        start = int(part.storage_offset()) * part.element_size()
        stop = start + part.numel() * part.element_size()
        if part.untyped_storage().data_ptr() == piece.tensor.untyped_storage().data_ptr():
            return view_memory(part.untyped_storage(), start, stop)
        return view_bytes(view_storage(part.untyped_storage(), start, stop))


def make_shard_source(name: str, tensor: torch.Tensor | None, leaf: LocalLeaf) -> ShardSource:
    """Return a source for the pieces in `leaf`; `tensor` is the global tensor, whose role and flags are saved."""
    assert leaf.dtype is not None, "only a tensor with strided items has pieces"
    meaning = TensorSpec(
        leaf.dtype,
        leaf.global_shape,
        contiguous_stride(leaf.global_shape),
        requires_grad=tensor is not None and tensor.requires_grad,
        role="tensor" if tensor is None else find_role(tensor),
    )
    whole_bytes = count_bytes(leaf.dtype, _count(leaf.global_shape))
    item_bytes = count_bytes(leaf.dtype, 1)
    chunks = [(box, piece) for piece in leaf.pieces for box in cut_rows(piece.box, leaf.global_shape, item_bytes)]
    return ShardSource(
        name=name,
        pieces=leaf.pieces,
        boxes=[box for box, _ in chunks],
        homes=[piece for _, piece in chunks],
        cuts=list(accumulate(volume(box) * item_bytes for box, _ in chunks)),
        whole_bytes=whole_bytes,
        spec=encode_spec(meaning),
        note=_find_device(leaf.pieces),
        item_bytes=number_bytes(leaf.dtype),
    )


def _count(shape: Coordinates) -> int:
    return volume(Box((0,) * len(shape), shape))


def _find_device(pieces: Sequence[LocalBox]) -> Json:
    devices = {str(piece.tensor.device) for piece in pieces if not piece.tensor.is_cpu}
    return {"device": min(devices)} if devices else None


@dataclass(frozen=True, slots=True)
class PartialSource:
    """Some chunks of a source: the share that one of several ranks with the same data writes."""

    inner: Source
    spans: Sequence[tuple[int, int]]
    """The chunks, as ranges of the bytes of the source."""
    cuts: Sequence[int] = field(default=())

    @property
    def name(self) -> str:
        """The name of the entry."""
        return self.inner.name

    @property
    def size_bytes(self) -> int:
        """The number of bytes in these chunks."""
        return self.cuts[-1] if self.cuts else 0

    @property
    def spec(self) -> Json:
        """The spec of the whole source."""
        return self.inner.spec

    @property
    def note(self) -> Json:
        """The note of the whole source."""
        return self.inner.note

    @property
    def item_bytes(self) -> int:
        """The size of one number in the bytes."""
        return self.inner.item_bytes

    @property
    def alias(self) -> int:
        """The alias number of the whole source."""
        return self.inner.alias

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`, counted over these chunks only."""

        def read_chunk(number: int, low: int, high: int) -> memoryview:
            first = self.spans[number][0]
            return self.inner.read(first + low, first + high)

        return _read_across(self.cuts, start, stop, read_chunk)


def _read_across(
    cuts: Sequence[int], start: int, stop: int, read_chunk: Callable[[int, int, int], memoryview]
) -> memoryview:
    """Return bytes of a source whose chunks end at `cuts`; `read_chunk` gets a chunk's number and offsets in it."""
    parts = []
    number = bisect_right(cuts, start)
    begin = cuts[number - 1] if number else 0
    while begin < stop:
        parts.append(read_chunk(number, max(start - begin, 0), min(stop, cuts[number]) - begin))
        begin, number = cuts[number], number + 1
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def pick_chunks(source: Source, spans: Sequence[tuple[int, int]]) -> PartialSource:
    """Return a source of only those chunks, given as ranges of bytes."""
    return PartialSource(source, spans, list(accumulate(stop - start for start, stop in spans)))
