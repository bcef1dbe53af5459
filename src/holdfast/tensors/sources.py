"""Tensors as sources of bytes: which bytes of which storage each one needs, who shares memory, where chunks end."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import torch

from holdfast.errors import TooLarge, Unsupported
from holdfast.repo.chunk import CHUNK_BYTES
from holdfast.repo.record import Json
from holdfast.tensors.dtypes import items_per_byte
from holdfast.tensors.memory import ALIGNMENT, copy_items, view_bytes, view_raw, view_storage
from holdfast.tensors.spec import TensorSpec, contiguous_stride, count_bytes, describe, encode_spec

_MAX_CUTS: Final = 50_000
"""Views that overlap in more ways than this are stored with the whole of what they share."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The bytes of one tensor, read from its storage in place, or gathered if they lie apart."""

    name: str
    tensor: torch.Tensor
    meaning: TensorSpec
    size_bytes: int
    start: int = 0
    """Where in its storage the bytes begin."""
    alias: int = 0
    cuts: Sequence[int] = ()
    spec: Json = None
    """What the bytes mean: `meaning`, encoded."""

    @property
    def note(self) -> Json:
        """Where the tensor was."""
        device = str(self.tensor.device)
        return None if device in ("cpu", "meta") else {"device": device}

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`: the tensor's own memory where that can be."""
        if self.meaning.packed:
            size = self.tensor.element_size()
            first, last = start // size, -(-stop // size)
            items = copy_items(_drop_repeated(self.tensor), first, last)
            data = view_bytes(view_storage(items.untyped_storage(), 0, (last - first) * size))
            return data[start - first * size : stop - first * size]
        memory = view_storage(self.tensor.untyped_storage(), self.start + start, self.start + stop)
        return view_bytes(memory.cpu())


def _drop_repeated(tensor: torch.Tensor) -> torch.Tensor:
    """Return the raw items without the dimensions in which every item is the same one."""
    raw = view_raw(tensor)
    for dim in reversed(range(raw.dim())):
        if raw.stride(dim) == 0 and raw.size(dim) > 1:
            raw = raw.select(dim, 0)
    return raw


@dataclass(frozen=True, slots=True)
class _Span:
    """The bytes of a storage that one tensor reaches over."""

    number: int
    """Of the tensor."""
    start: int
    stop: int


def plan_sources(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[TensorSource]:
    """Return a source for each named ordinary tensor.

    Tensors that share a storage share an alias number and, where they overlap, chunks. What no tensor reaches
    of a storage is not saved. The tensors must stay alive and unchanged while the sources are in use.
    """
    specs = [describe(tensor) for _, tensor in tensors]
    groups: dict[tuple[str, int], list[_Span]] = {}
    sources: dict[int, TensorSource] = {}
    for number, ((name, tensor), spec) in enumerate(zip(tensors, specs, strict=True)):
        span_bytes = 0 if spec.meta else spec.span_bytes
        if span_bytes == 0:
            sources[number] = TensorSource(name, tensor, spec, 0)
            continue
        storage = tensor.untyped_storage()
        start = _find_start(tensor, spec, name)
        key = (str(tensor.device), storage._cdata)
        groups.setdefault(key, []).append(_Span(number, start, start + span_bytes))
    alias = 0
    for spans in groups.values():
        members = {span.number: (tensors[span.number], specs[span.number]) for span in spans}
        geometries = {
            (span.start, spec.dtype, spec.shape, spec.stride) for span in spans for spec in [specs[span.number]]
        }
        if len(geometries) == 1 and _is_gappy(specs[spans[0].number]):
            planned = _plan_packed(spans, members)
        elif len(spans) == 1:
            planned = _plan_alone(spans[0], *members[spans[0].number])
        else:
            planned = _plan_shared(spans, members)
        alias += len(spans) > 1
        sources.update((number, replace(source, alias=alias if len(spans) > 1 else 0)) for number, source in planned)
    return _encode_specs([sources[number] for number in range(len(tensors))])


def _encode_specs(sources: Sequence[TensorSource]) -> list[TensorSource]:
    """Return the sources with their specs encoded; equal ones become one object, which is then written once."""
    known: dict[str, Json] = {}
    encoded = [encode_spec(source.meaning) for source in sources]
    return [
        replace(source, spec=known.setdefault(repr(spec), spec)) for source, spec in zip(sources, encoded, strict=True)
    ]


_Members = Mapping[int, tuple[tuple[str, torch.Tensor], TensorSpec]]
_Planned = list[tuple[int, TensorSource]]


def _find_start(tensor: torch.Tensor, spec: TensorSpec, name: str) -> int:
    """Return where in its storage a tensor begins, in bytes."""
    if items_per_byte(spec.dtype) == 1:
        return int(tensor.storage_offset()) * tensor.element_size()
    if tensor.storage_offset() or _is_gappy(spec):
        raise Unsupported(f"{name}: a part of a {spec.dtype} tensor cannot be saved; save the whole, or a copy")
    return 0


def _is_gappy(spec: TensorSpec) -> bool:
    """Tell whether the tensor reaches over memory that is not its own."""
    return spec.span_items > math.prod(spec.packed_shape)


def _plan_packed(spans: Sequence[_Span], members: _Members) -> _Planned:
    planned = []
    for span in spans:
        (name, tensor), spec = members[span.number]
        spec = replace(spec, packed=True)
        size = count_bytes(spec.dtype, math.prod(spec.packed_shape))
        cuts = _cut_cells(0, size, tensor.element_size(), spec.packed_shape)
        planned.append((span.number, TensorSource(name, tensor, spec, size, cuts=cuts)))
    return planned


def _plan_alone(span: _Span, named: tuple[str, torch.Tensor], spec: TensorSpec) -> _Planned:
    name, tensor = named
    size = span.stop - span.start
    cuts = _cut_cells(0, size, tensor.element_size(), _find_rows(spec))
    return [(span.number, TensorSource(name, tensor, spec, size, span.start, cuts=cuts))]


def _plan_shared(spans: Sequence[_Span], members: _Members) -> _Planned:
    """Cut what tensors share wherever one begins or ends: each has whole chunks, and none is stored twice."""
    planned = []
    base = 0
    for segment in _merge(spans):
        low, high = min(span.start for span in segment), max(span.stop for span in segment)
        ends = _cut_segment(segment, members)
        count = sum(bisect_left(ends, span.stop) - bisect_left(ends, span.start) for span in segment)
        is_tangled = count > _MAX_CUTS + 2 * len(ends)
        if is_tangled:
            # All of them begin here, whatever the size of their items.
            low -= low % ALIGNMENT
            ends = _cut_cells(low, high, 1, ())
            if len(ends) * len(segment) > 100 * _MAX_CUTS:
                raise TooLarge(
                    f"{members[segment[0].number][0][0]}: {len(segment)} views overlap in too many ways;"
                    " save clones of them, or what they are views of"
                )
        base += (low - base) % ALIGNMENT
        for span in segment:
            (name, tensor), spec = members[span.number]
            start, stop = (low, high) if is_tangled else (span.start, span.stop)
            cuts = _take(ends, start, stop)
            offset = (span.start - start) // tensor.element_size()
            spec = replace(spec, offset=offset, at=base + start - low)
            planned.append((span.number, TensorSource(name, tensor, spec, stop - start, start, cuts=cuts)))
        base += high - low
    return planned


def _take(ends: Sequence[int], start: int, stop: int) -> list[int]:
    """Return the cuts of one span, counted from its start."""
    return [end - start for end in ends[bisect_left(ends, start + 1) : bisect_left(ends, stop) + 1]]


def _merge(spans: Sequence[_Span]) -> Iterator[list[_Span]]:
    """Yield groups of spans that touch each other."""
    group: list[_Span] = []
    reach = 0
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        if group and span.start >= reach:
            yield group
            group = []
        group.append(span)
        reach = max(reach, span.stop) if len(group) > 1 else span.stop
    yield group


def _cut_segment(segment: Sequence[_Span], members: _Members) -> list[int]:
    """Return where chunks end: at every edge, and in between on the grid of the tensor that lies there, if any."""
    rows = {}
    for span in reversed(segment):
        (_, tensor), spec = members[span.number]
        rows[span.start, span.stop] = (tensor.element_size(), _find_rows(spec))
    edges = sorted({edge for span in segment for edge in (span.start, span.stop)})
    return [
        end for start, stop in pairwise(edges) for end in _cut_cells(start, stop, *rows.get((start, stop), (1, ())))
    ]


def _find_rows(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape whose rows the cells are made of: nothing unless the memory is in C order."""
    return spec.shape if spec.stride == contiguous_stride(spec.shape) else ()


def _cut_cells(start: int, stop: int, item_bytes: int, shape: tuple[int, ...]) -> list[int]:
    """Return where the cells of [start, stop) end: as many whole rows of the outermost dimension as fit in a chunk.

    The grid depends on the shape alone, so a tensor that is saved in shards of rows has the same cells.
    """
    row_bytes = math.prod(shape[1:]) * item_bytes if shape else 0
    if not 0 < row_bytes <= CHUNK_BYTES:
        return _cut_rows(start, stop, row_bytes)
    step = CHUNK_BYTES // row_bytes * row_bytes
    return [*range(start + step, stop, step), stop]


def _cut_rows(start: int, stop: int, row_bytes: int) -> list[int]:
    """Cut what has rows larger than a chunk, or none: within a row on the plain grid, and at every row."""
    if row_bytes == 0:
        return [*range(start + CHUNK_BYTES, stop, CHUNK_BYTES), stop]
    return [
        end
        for row in range(start, stop, row_bytes)
        for end in (*range(row + CHUNK_BYTES, min(row + row_bytes, stop), CHUNK_BYTES), min(row + row_bytes, stop))
    ]
