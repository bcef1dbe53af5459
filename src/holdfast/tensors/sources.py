"""Plans how tensors and numpy arrays are saved as bytes: which span of a storage, what is shared, where chunks end."""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, overload

import numpy as np
import torch

from holdfast.errors import Corrupt, SourceChanged, TooLarge, Unsupported
from holdfast.json_text import Json
from holdfast.repo.format.grid import Extent, cut_extent, cut_extents
from holdfast.repo.format.source import BytesSource
from holdfast.tensors.composite import verify_readable, verify_unwrapped
from holdfast.tensors.device_copy import copy_to_host
from holdfast.tensors.memory import (
    ALIGNMENT,
    copy_bytes,
    copy_items,
    gather_items,
    view_bytes,
    view_memory,
    view_raw,
    view_storage,
)
from holdfast.tensors.spec import (
    MAX_DIMS,
    SpecEncoder,
    TensorSpec,
    contiguous_stride,
    count_bytes,
    describe,
    find_role,
    item_bytes,
    items_per_byte,
    number_bytes,
)

_COPIED_BYTES: Final = 16 << 10
_MAX_CUTS: Final = 50_000
"""A group of overlapping views that needs more cuts than this is stored as one shared span."""


@dataclass(frozen=True, slots=True)
class SourceForm:
    """What many sources have in common: spec, size, and the ends of their chunks."""

    tensor_spec: TensorSpec
    size_bytes: int
    cuts: Sequence[int] = ()
    spec: Json = None
    """`tensor_spec`, encoded as JSON."""


# A tuple, not a dataclass: there may be very many, and a tuple is created in a fraction of the time.
class TensorSource(NamedTuple):
    """The bytes of one tensor: read in place from its storage, or gathered if there are gaps between its items."""

    name: str
    tensor: torch.Tensor
    form: SourceForm
    start: int = 0
    """The offset of the first byte in its storage."""
    alias: int = 0

    @property
    def tensor_spec(self) -> TensorSpec:
        """The spec of the tensor."""
        return self.form.tensor_spec

    @property
    def size_bytes(self) -> int:
        """The number of bytes."""
        return self.form.size_bytes

    @property
    def cuts(self) -> Sequence[int]:
        """The offsets at which chunks end."""
        return self.form.cuts

    @property
    def item_bytes(self) -> int:
        """The size of one number of the tensor."""
        return number_bytes(self.form.tensor_spec.dtype)

    @property
    def spec(self) -> Json:
        """The spec of the tensor, as JSON."""
        return self.form.spec

    @property
    def note(self) -> Json:
        """The device of the tensor, as JSON; None for the CPU and the meta device."""
        if self.tensor.is_cpu or self.tensor.is_meta:
            return None
        return {"device": str(self.tensor.device)}

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`: a view of the tensor's memory if possible, otherwise a copy."""
        name, tensor, form, base, _ = self
        if form.tensor_spec.packed:
            size = tensor.element_size()
            first, last = start // size, -(-stop // size)
            items = self.view_packed_items()
            if not tensor.is_cpu:
                gathered = gather_items(items, first, last).view(torch.uint8)
                return copy_to_host(gathered[start - first * size : stop - first * size])
            items = copy_items(items, first, last)
            data = view_bytes(view_storage(items.untyped_storage(), 0, (last - first) * size))
            return data[start - first * size : stop - first * size]
        storage = tensor.untyped_storage()
        if base + stop > storage.nbytes():
            raise SourceChanged(f"{name!r}: its memory was freed while it was being saved; nothing was committed")
        if not tensor.is_cpu:
            return copy_to_host(view_storage(storage, base + start, base + stop))
        # To create a view takes longer than to copy so few bytes.
        if stop - start <= _COPIED_BYTES:
            return memoryview(copy_bytes(storage, base + start, base + stop))
        return view_memory(storage, base + start, base + stop)

    def view_packed_items(self) -> torch.Tensor:
        """Return the raw items without the dimensions of stride 0, in which every item is the same one."""
        raw = view_raw(self.tensor)
        for dim in reversed(range(raw.dim())):
            if raw.stride(dim) == 0 and raw.size(dim) > 1:
                raw = raw.select(dim, 0)
        return raw


class TensorSources(Sequence[TensorSource]):
    """Sources of many tensors, stored as columns: 36 bytes each instead of 88. A source is created when accessed."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._forms: list[SourceForm] = []
        self._starts = array("Q")
        self._aliases = array("I")

    def add(self, name: str, tensor: torch.Tensor, form: SourceForm, start: int) -> None:
        """Add the source of a tensor that shares memory with no other."""
        self._names.append(name)
        self._tensors.append(tensor)
        self._forms.append(form)
        self._starts.append(start)
        self._aliases.append(0)

    def change(self, number: int, form: SourceForm, start: int, alias: int) -> None:
        """Replace the form, the start and the alias of the source at index `number`."""
        self._forms[number], self._starts[number], self._aliases[number] = form, start, alias

    def __len__(self) -> int:
        """Return the number of sources."""
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> TensorSource: ...
    @overload
    def __getitem__(self, index: slice) -> list[TensorSource]: ...
    def __getitem__(self, index: int | slice) -> TensorSource | list[TensorSource]:
        """Return one source, or a list of sources for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        numbers = (self._starts[index], self._aliases[index])
        return TensorSource(self._names[index], self._tensors[index], self._forms[index], *numbers)

    def __iter__(self) -> Iterator[TensorSource]:
        """Yield all sources, in the order in which they were added."""
        return map(TensorSource, self._names, self._tensors, self._forms, self._starts, self._aliases)


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """The bytes of a storage from a tensor's first item to its last."""

    number: int
    """The index of the tensor."""
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Unshared:
    """The spec of tensors of one geometry, and their form if they share memory with no other tensor."""

    spec: TensorSpec
    span_bytes: int
    form: SourceForm
    offset_bytes: int = 0
    """The bytes of one item of a storage offset; 0 for dtypes that pack items into bytes: these have no offset."""


class _SourceForms:
    """Creates the forms of sources. Equal tensors share a form, and equal specs are one object that is written once."""

    def __init__(self) -> None:
        self._wholes: dict[tuple[object, ...], _Unshared] = {}
        self._specs = SpecEncoder()

    def find(self, tensor: torch.Tensor) -> _Unshared:
        """Return the spec and form of a tensor; tensors that differ only in their values share them."""
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

    def make(self, tensor_spec: TensorSpec, size_bytes: int, cuts: Sequence[int]) -> SourceForm:
        """Return a form with its spec encoded."""
        return SourceForm(tensor_spec, size_bytes, cuts, self._specs.encode(tensor_spec))

    def pack(self, spec: TensorSpec) -> SourceForm:
        """Return the form of a tensor that is stored without the gaps between its items."""
        spec = replace(spec, packed=True)
        size = count_bytes(spec.dtype, math.prod(spec.packed_shape))
        return self.make(spec, size, cut_extent(Extent(0, size, item_bytes(spec.dtype), spec.packed_shape)))

    def _plan_alone(self, spec: TensorSpec) -> _Unshared:
        size = 0 if spec.meta else spec.span_bytes
        if size == 0:
            return _Unshared(spec, 0, self.make(spec, 0, ()))
        if items_per_byte(spec.dtype) > 1:
            if spec.has_gaps:
                raise Unsupported(f"a slice of a {spec.dtype} tensor cannot be saved; save the whole tensor, or a copy")
            return _Unshared(spec, size, self.make(spec, size, cut_extent(Extent(0, size, 1, _find_rows(spec)))))
        item = item_bytes(spec.dtype)
        if spec.has_gaps:
            return _Unshared(spec, size, self.pack(spec), item)
        return _Unshared(spec, size, self.make(spec, size, cut_extent(Extent(0, size, item, _find_rows(spec)))), item)


class SourcePlan:
    """Plans sources for ordinary tensors. They must stay alive and unchanged while the sources are in use.

    Tensors that share a storage share an alias number and, where they overlap, chunks. Bytes of a storage that no
    tensor covers are not saved.
    """

    def __init__(self) -> None:
        self._forms = _SourceForms()
        self._sources = TensorSources()
        # The address of each tensor's storage, 0 for a tensor without bytes: 8 bytes each; a dict would take 90.
        self._storages = array("Q")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add an ordinary tensor; raises Unsupported if its memory was freed or cannot be read."""
        verify_unwrapped(tensor)
        whole = self._forms.find(tensor)
        start = address = 0
        if whole.span_bytes:
            start = int(tensor.storage_offset()) * whole.offset_bytes
            storage = tensor.untyped_storage()
            if storage.nbytes() < start + whole.span_bytes or not storage.data_ptr():
                verify_readable(tensor)  # raises with the reason
            address = storage._cdata
        self._storages.append(address)
        self._sources.add(name, tensor, whole.form, start)

    def make(self) -> TensorSources:
        """Return a source for each tensor, in order; call it once."""
        sources = self._sources
        # Numbered in the order of each group's first tensor, because alias numbers are part of the content.
        for alias, numbers in enumerate(group_equal(self._storages), start=1):
            wholes = {number: self._forms.find(sources[number].tensor) for number in numbers}
            members = {number: (sources[number], whole.spec) for number, whole in wholes.items()}
            starts = [(number, sources[number].start) for number in members]
            spans = [TensorSpan(number, start, start + wholes[number].span_bytes) for number, start in starts]
            for number, form, start in _plan_group(spans, members, self._forms):
                sources.change(number, form, start, alias)
        return sources


def group_equal(addresses: array[int]) -> list[list[int]]:
    """Return the positions of each nonzero address that occurs more than once, ordered by first position."""
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
_Planned = tuple[int, SourceForm, int]
"""The index of a tensor, its form, and the offset of its bytes in the storage."""


def _plan_group(spans: Sequence[TensorSpan], members: _Members, forms: _SourceForms) -> Iterator[_Planned]:
    """Yield the plan of each tensor in a group that shares one storage."""
    specs = [members[span.number][1] for span in spans]
    geometries = {(span.start, spec.dtype, spec.shape, spec.stride) for span, spec in zip(spans, specs, strict=True)}
    if len(geometries) > 1 or not specs[0].has_gaps:
        yield from _plan_shared(spans, members, forms)
    else:
        yield from ((span.number, forms.pack(spec), span.start) for span, spec in zip(spans, specs, strict=True))


def _plan_shared(spans: Sequence[TensorSpan], members: _Members, forms: _SourceForms) -> Iterator[_Planned]:
    """Cut shared memory wherever a tensor begins or ends, so that each has whole chunks and none is stored twice."""
    base = 0
    for segment in iter_overlapping(spans):
        low, high = min(span.start for span in segment), max(span.stop for span in segment)
        ends = _cut_segment(segment, members)
        count = sum(bisect_left(ends, span.stop) - bisect_left(ends, span.start) for span in segment)
        is_tangled = count > _MAX_CUTS + 2 * len(ends)
        if is_tangled:
            # Every tensor of the segment starts its entry here, so the offset must suit every item size.
            low -= low % ALIGNMENT
            ends = cut_extent(Extent(low, high))
            if len(ends) * len(segment) > 100 * _MAX_CUTS:
                raise TooLarge(
                    f"{members[segment[0].number][0].name}: {len(segment)} views overlap in too many ways;"
                    " save clones of them, or the tensor that they are views of"
                )
        base += (low - base) % ALIGNMENT
        for span in segment:
            source, spec = members[span.number]
            start, stop = (low, high) if is_tangled else (span.start, span.stop)
            offset = (span.start - start) // source.tensor.element_size()
            spec = replace(spec, offset=offset, at=base + start - low)
            yield span.number, forms.make(spec, stop - start, _find_cuts_within(ends, start, stop)), start
        base += high - low


def _find_cuts_within(ends: Sequence[int], start: int, stop: int) -> list[int]:
    """Return the cuts of one span, relative to its start."""
    return [end - start for end in ends[bisect_left(ends, start + 1) : bisect_left(ends, stop) + 1]]


def iter_overlapping(spans: Iterable[TensorSpan]) -> Iterator[list[TensorSpan]]:
    """Yield groups of spans that overlap, directly or through others, in the order of memory."""
    group: list[TensorSpan] = []
    reach = 0
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        if group and span.start >= reach:
            yield group
            group = []
        group.append(span)
        reach = max(reach, span.stop) if len(group) > 1 else span.stop
    yield group


def _cut_segment(segment: Sequence[TensorSpan], members: _Members) -> list[int]:
    """Return where the chunks of a segment end, so that each of its tensors has whole chunks."""
    return cut_extents(_find_extent(span, *members[span.number]) for span in segment)


def _find_extent(span: TensorSpan, source: TensorSource, spec: TensorSpec) -> Extent:
    return Extent(span.start, span.stop, source.tensor.element_size(), _find_rows(spec))


def _find_rows(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape whose rows cells are cut along; () if the memory is not in C order, or rows share bytes."""
    is_in_order = spec.stride == contiguous_stride(spec.shape) and items_per_byte(spec.dtype) == 1
    return spec.shape if is_in_order else ()


ARRAY: Final = "array"
# Numbers, booleans, times, and text of a fixed width; no objects, records or padding.
_DTYPE: Final = re.compile(
    r"[<>|](?:b1|[iu][1248]|f[248]|c(?:8|16)|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?|[SU][1-9][0-9]{0,8})"
)


def make_source(name: str, array: np.ndarray[Any, Any]) -> BytesSource:
    """Return an array as a source: its own memory if it is contiguous in C or Fortran order, or a copy in C order."""
    if type(array) is not np.ndarray:
        raise Unsupported(f"a {type(array).__qualname__} is a subclass of ndarray; convert it with numpy.asarray")
    dtype = array.dtype.str
    if array.dtype.fields is not None or not _DTYPE.fullmatch(dtype):
        raise Unsupported(f"an array of dtype {array.dtype} cannot be saved; convert it to another dtype")
    spec: dict[str, Json] = {"type": ARRAY, "dtype": dtype, "shape": list(array.shape)}
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        spec["order"] = "F"
        array = array.T
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
    return BytesSource(name, data, spec)


def build_array(value: Json, data: bytearray, *, what: str) -> np.ndarray[Any, Any]:
    """Return an array over `data` as the spec `value` describes it; raises Corrupt if they do not match."""
    if not isinstance(value, dict) or value.get("type") != ARRAY or value.get("order", "C") not in ("C", "F"):
        raise Corrupt(f"{what} is not described as an array", key=what)
    dtype, shape = value.get("dtype"), value.get("shape")
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype) or not isinstance(shape, list):
        raise Corrupt(f"{what} has an invalid dtype or shape", key=what)
    if len(shape) > MAX_DIMS or not all(type(size) is int and 0 <= size < 1 << 60 for size in shape):
        raise Corrupt(f"{what} has an invalid shape", key=what)
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise Corrupt(f"{what} has an invalid dtype: {error}", key=what) from error
    if math.prod(shape) * found.itemsize != len(data):
        raise Corrupt(f"{what} has {len(data)} bytes, which do not match its shape and dtype", key=what)
    order = value.get("order", "C")
    try:
        return np.frombuffer(data, dtype=found).reshape(shape, order=order) if data else np.zeros(shape, found, order)
    except ValueError as error:
        # An array without items may still have dimensions whose product is too large.
        raise Corrupt(f"{what} has an invalid shape: {error}", key=what) from error
