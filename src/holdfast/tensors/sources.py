"""Tensors as sources of bytes: which bytes of which storage each one needs, who shares memory, where chunks end."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, overload

import numpy as np
import torch

from holdfast.errors import SourceChanged, TooLarge, Unsupported
from holdfast.repo.format.boxes import cut_rows, volume, whole
from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.repo.format.record import Json
from holdfast.tensors.composite import verify_readable, verify_unwrapped
from holdfast.tensors.dtypes import item_bytes, items_per_byte
from holdfast.tensors.memory import ALIGNMENT, copy_bytes, copy_items, view_bytes, view_memory, view_raw, view_storage
from holdfast.tensors.roles import find_role
from holdfast.tensors.spec import TensorSpec, contiguous_stride, count_bytes, describe, encode_spec

_COPIED_BYTES: Final = 16 << 10
_MAX_CUTS: Final = 50_000
"""Views that overlap in more ways than this are stored with the whole of what they share."""


@dataclass(frozen=True, slots=True)
class Form:
    """What many sources have in common: what their bytes mean, how many there are, and where chunks end."""

    meaning: TensorSpec
    size_bytes: int
    cuts: Sequence[int] = ()
    spec: Json = None
    """The meaning, encoded."""


# A tuple, not a dataclass: there may be very many, and it is made in a fraction of the time.
class TensorSource(NamedTuple):
    """The bytes of one tensor, read from its storage in place, or gathered if they lie apart."""

    name: str
    tensor: torch.Tensor
    form: Form
    start: int = 0
    """Where in its storage the bytes begin."""
    alias: int = 0

    @property
    def meaning(self) -> TensorSpec:
        """What the tensor is."""
        return self.form.meaning

    @property
    def size_bytes(self) -> int:
        """How many bytes there are."""
        return self.form.size_bytes

    @property
    def cuts(self) -> Sequence[int]:
        """Where the chunks end."""
        return self.form.cuts

    @property
    def spec(self) -> Json:
        """What the bytes mean."""
        return self.form.spec

    @property
    def note(self) -> Json:
        """Where the tensor was."""
        if self.tensor.is_cpu or self.tensor.is_meta:
            return None
        return {"device": str(self.tensor.device)}

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`: the tensor's own memory where that can be, or a copy of a few."""
        name, tensor, form, at, _ = self
        if form.meaning.packed:
            size = tensor.element_size()
            first, last = start // size, -(-stop // size)
            items = copy_items(_drop_repeated(tensor), first, last)
            data = view_bytes(view_storage(items.untyped_storage(), 0, (last - first) * size))
            return data[start - first * size : stop - first * size]
        storage = tensor.untyped_storage()
        if at + stop > storage.nbytes():
            raise SourceChanged(f"{name!r}: its memory was freed while it was being saved; nothing was committed")
        if not tensor.is_cpu:
            return view_bytes(view_storage(storage, at + start, at + stop).cpu())
        # A view costs more than a copy of that little.
        if stop - start <= _COPIED_BYTES:
            return memoryview(copy_bytes(storage, at + start, at + stop))
        return view_memory(storage, at + start, at + stop)


class TensorSources(Sequence[TensorSource]):
    """Sources of many tensors as columns: each is made when it is asked for, and takes 36 bytes until then, not 88."""

    def __init__(self) -> None:
        """Begin with none."""
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._forms: list[Form] = []
        self._starts = array("Q")
        self._aliases = array("I")

    def add(self, name: str, tensor: torch.Tensor, form: Form, start: int) -> None:
        """Add the source of a tensor that shares memory with no other."""
        self._names.append(name)
        self._tensors.append(tensor)
        self._forms.append(form)
        self._starts.append(start)
        self._aliases.append(0)

    def change(self, number: int, form: Form, start: int, alias: int) -> None:
        """Change what is read of a tensor."""
        self._forms[number], self._starts[number], self._aliases[number] = form, start, alias

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> TensorSource: ...
    @overload
    def __getitem__(self, index: slice) -> list[TensorSource]: ...
    def __getitem__(self, index: int | slice) -> TensorSource | list[TensorSource]:
        """Return one source, or some."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        place = (self._starts[index], self._aliases[index])
        return TensorSource(self._names[index], self._tensors[index], self._forms[index], *place)

    def __iter__(self) -> Iterator[TensorSource]:
        """Yield all."""
        return map(TensorSource, self._names, self._tensors, self._forms, self._starts, self._aliases)


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


@dataclass(frozen=True, slots=True)
class _Whole:
    """What tensors of one geometry are, and the form that those have which share memory with no other."""

    spec: TensorSpec
    span_bytes: int
    form: Form
    offset_bytes: int = 0
    """What one item of a storage offset stands for; such tensors as share bytes between items have no offset."""


class _Forms:
    """Finds the forms of sources: equal tensors share one, and equal specs are one object, which is written once."""

    def __init__(self) -> None:
        self._wholes: dict[tuple[object, ...], _Whole] = {}
        self._encoded: dict[str, Json] = {}

    def find(self, tensor: torch.Tensor) -> _Whole:
        """Describe a tensor; those that differ in nothing but their values are described once."""
        if tensor.is_quantized:
            verify_readable(tensor)
            return self._plan_alone(describe(tensor))
        traits = (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_meta,
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
            find_role(tensor),
        )
        found = self._wholes.get(traits)
        if found is None:
            found = self._wholes[traits] = self._plan_alone(describe(tensor))
        return found

    def make(self, meaning: TensorSpec, size_bytes: int, cuts: Sequence[int]) -> Form:
        """Return a form with its meaning encoded."""
        spec = encode_spec(meaning)
        return Form(meaning, size_bytes, cuts, self._encoded.setdefault(repr(spec), spec))

    def pack(self, spec: TensorSpec) -> Form:
        """Return the form of a tensor that is stored without what lies between its items."""
        spec = replace(spec, packed=True)
        size = count_bytes(spec.dtype, math.prod(spec.packed_shape))
        return self.make(spec, size, _cut_cells(0, size, item_bytes(spec.dtype), spec.packed_shape))

    def _plan_alone(self, spec: TensorSpec) -> _Whole:
        size = 0 if spec.meta else spec.span_bytes
        if size == 0:
            return _Whole(spec, 0, self.make(spec, 0, ()))
        if items_per_byte(spec.dtype) > 1:
            if _is_gappy(spec):
                raise Unsupported(f"a part of a {spec.dtype} tensor cannot be saved; save the whole, or a copy")
            return _Whole(spec, size, self.make(spec, size, _cut_cells(0, size, 1, _find_rows(spec))))
        item = item_bytes(spec.dtype)
        if _is_gappy(spec):
            return _Whole(spec, size, self.pack(spec), item)
        return _Whole(spec, size, self.make(spec, size, _cut_cells(0, size, item, _find_rows(spec))), item)


class SourcePlan:
    """Plans sources for ordinary tensors, which must stay alive and unchanged while the sources are in use.

    Tensors that share a storage share an alias number and, where they overlap, chunks. What no tensor reaches
    of a storage is not saved.
    """

    def __init__(self) -> None:
        """Begin with no tensors."""
        self._forms = _Forms()
        self._sources = TensorSources()
        # The address of each tensor's storage, 0 for a tensor without bytes: 8 bytes each, where a dict would take 90.
        self._storages = array("Q")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take up a tensor that has bytes of its own; raises Unsupported for one whose bytes are not there."""
        verify_unwrapped(tensor)
        whole = self._forms.find(tensor)
        start = address = 0
        if whole.span_bytes:
            start = int(tensor.storage_offset()) * whole.offset_bytes
            storage = tensor.untyped_storage()
            if storage.nbytes() < start + whole.span_bytes or not storage.data_ptr():
                verify_readable(tensor)  # which says what is missing
            address = storage._cdata
        self._storages.append(address)
        self._sources.add(name, tensor, whole.form, start)

    def make(self) -> TensorSources:
        """Return a source for each tensor, in order; to be called once."""
        sources = self._sources
        # In the order of the first tensors: the numbers are part of the content.
        for alias, numbers in enumerate(group_equal(self._storages), start=1):
            wholes = {number: self._forms.find(sources[number].tensor) for number in numbers}
            members = {number: (sources[number], whole.spec) for number, whole in wholes.items()}
            starts = [(number, sources[number].start) for number in members]
            spans = [_Span(number, start, start + wholes[number].span_bytes) for number, start in starts]
            for number, form, start in _plan_group(spans, members, self._forms):
                sources.change(number, form, start, alias)
        return sources


def group_equal(addresses: array[int]) -> list[list[int]]:
    """Return the positions of each address other than 0 that occurs more than once, in the order of the first ones."""
    values = np.frombuffer(addresses, dtype=np.uint64)
    order = np.argsort(values)
    ordered = values[order]
    is_repeated = (ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)
    positions = np.union1d(order[1:][is_repeated], order[:-1][is_repeated]).tolist()
    groups: dict[int, list[int]] = {}
    for position in positions:
        groups.setdefault(addresses[position], []).append(position)
    return list(groups.values())


_Members = Mapping[int, tuple[TensorSource, TensorSpec]]
_Planned = tuple[int, Form, int]
"""The number of a tensor, its form, and where in the storage its bytes begin."""


def _is_gappy(spec: TensorSpec) -> bool:
    """Tell whether the tensor reaches over memory that is not its own."""
    return spec.span_items > math.prod(spec.packed_shape)


def _plan_group(spans: Sequence[_Span], members: _Members, forms: _Forms) -> Iterator[_Planned]:
    """Yield the plan of each of several tensors in one storage."""
    specs = [members[span.number][1] for span in spans]
    geometries = {(span.start, spec.dtype, spec.shape, spec.stride) for span, spec in zip(spans, specs, strict=True)}
    if len(geometries) > 1 or not _is_gappy(specs[0]):
        yield from _plan_shared(spans, members, forms)
    else:
        yield from ((span.number, forms.pack(spec), span.start) for span, spec in zip(spans, specs, strict=True))


def _plan_shared(spans: Sequence[_Span], members: _Members, forms: _Forms) -> Iterator[_Planned]:
    """Cut what tensors share wherever one begins or ends: each has whole chunks, and none is stored twice."""
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
                    f"{members[segment[0].number][0].name}: {len(segment)} views overlap in too many ways;"
                    " save clones of them, or what they are views of"
                )
        base += (low - base) % ALIGNMENT
        for span in segment:
            source, spec = members[span.number]
            start, stop = (low, high) if is_tangled else (span.start, span.stop)
            offset = (span.start - start) // source.tensor.element_size()
            spec = replace(spec, offset=offset, at=base + start - low)
            yield span.number, forms.make(spec, stop - start, _take(ends, start, stop)), start
        base += high - low


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
        source, spec = members[span.number]
        rows[span.start, span.stop] = (source.tensor.element_size(), _find_rows(spec))
    edges = sorted({edge for span in segment for edge in (span.start, span.stop)})
    return [
        end for start, stop in pairwise(edges) for end in _cut_cells(start, stop, *rows.get((start, stop), (1, ())))
    ]


def _find_rows(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape whose rows the cells are made of: nothing unless the memory is in C order."""
    return spec.shape if spec.stride == contiguous_stride(spec.shape) else ()


def _cut_cells(start: int, stop: int, item_bytes: int, shape: tuple[int, ...]) -> list[int]:
    """Return where the cells of [start, stop) end: whole rows of a tensor of that shape, or the plain grid.

    The grid depends on the shape alone, so a tensor that is saved in shards of rows has the same cells.
    """
    if stop - start <= CHUNK_BYTES:
        return [stop]
    if not shape:
        return [*range(start + CHUNK_BYTES, stop, CHUNK_BYTES), stop]
    sizes = (volume(cell) * item_bytes for cell in cut_rows(whole(shape), shape, item_bytes))
    return list(accumulate(sizes, initial=start))[1:]
