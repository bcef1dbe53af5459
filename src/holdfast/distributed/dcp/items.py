"""Turns the items of a rank's save plan into sources to write, one group at a time."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Final

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from holdfast.distributed.dcp.metadata import find_box
from holdfast.errors import Mismatch, Unsupported
from holdfast.json_text import Json
from holdfast.repo.format.boxes import Box, Coordinates, volume, whole
from holdfast.repo.format.chunk import cut
from holdfast.repo.format.source import BytesSource
from holdfast.repo.write.part_writer import MakeSources, PlacedSource
from holdfast.repo.write.writer import Placement
from holdfast.snapshot.pickled import find_refusal
from holdfast.tensors.composite import has_own_bytes, verify_readable
from holdfast.tensors.dtypes import dtype_name, item_bytes, items_per_byte
from holdfast.tensors.sharding.shard_source import make_shard_source
from holdfast.tensors.sharding.sharded import LocalBox, LocalLeaf
from holdfast.tensors.spec import TensorSpec, contiguous_stride, encode_spec

PAYLOAD_SPEC: Final[Json] = {"type": "torch_save"}
_ASSUMED_BYTES: Final = 4096
"""Assumed size of a bytes item that the planner has not serialised yet."""


@dataclass(slots=True)
class Written:
    """Facts that are known only after the planner has resolved its data."""

    notes_refused: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes of bytes items, by name."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Dtypes of the tensors that the planner returned with another dtype than planned, by name."""
    refused: dict[str, str] = field(default_factory=dict)
    """What a weights-only load would refuse in bytes items, by name; noted only if `notes_refused` is set."""


def encode_tensor(shape: Coordinates, dtype: torch.dtype, *, requires_grad: bool) -> Json:
    """Return the spec of a tensor's entry."""
    # Torch's metadata may say requires_grad for any dtype, but only floating-point and complex tensors can require it.
    can_require = dtype.is_floating_point or dtype.is_complex
    return encode_spec(TensorSpec(dtype, shape, contiguous_stride(shape), requires_grad=requires_grad and can_require))


def name_piece(fqn: str, starts: Sequence[int]) -> str:
    """Return the entry name of one box of a tensor that was saved only in part."""
    return f"{fqn}@{','.join(map(str, starts))}"


def is_whole_here(items: Sequence[WriteItem]) -> bool:
    """Return whether the items of one tensor cover all of it, judged by their sizes."""
    data = [item.tensor_data for item in items if item.tensor_data is not None]
    if not data:
        return True
    boxes = {find_box(each.chunk) for each in data}
    return sum(map(volume, boxes)) >= volume(whole(tuple(data[0].size)))


def plan_groups(
    plan: SavePlan, planner: SavePlanner, written: Written, *, limit_bytes: int, is_only_rank: bool
) -> list[MakeSources]:
    """Divide a plan into groups of at most `limit_bytes`, or one tensor each, to be resolved one after the other.

    Other ranks complete the tensors of which this rank has a part. If it is the only rank, none does: then each box of
    an incomplete tensor is stored as an entry of its own.
    """
    by_name: dict[str, list[WriteItem]] = {}
    for item in plan.items:
        by_name.setdefault(item.index.fqn, []).append(item)
    makers = [
        (
            partial(_make_sources, items, planner, written, in_pieces=is_only_rank and not is_whole_here(items)),
            _measure(items),
        )
        for items in by_name.values()
    ]
    return [partial(_make_all, group) for group in _group(makers, limit_bytes)]


_Maker = Callable[[], Iterator[PlacedSource]]


def _group(makers: Sequence[tuple[_Maker, int]], limit_bytes: int) -> Iterator[list[_Maker]]:
    group: list[_Maker] = []
    group_bytes = 0
    for maker, size_bytes in makers:
        if group and group_bytes + size_bytes > limit_bytes:
            yield group
            group, group_bytes = [], 0
        group.append(maker)
        group_bytes += size_bytes
    if group:
        yield group


def _make_all(group: Sequence[_Maker]) -> list[PlacedSource]:
    return [placed for make in group for placed in make()]


def _measure(items: Sequence[WriteItem]) -> int:
    size = 0
    for item in items:
        if item.tensor_data is not None:
            size += volume(find_box(item.tensor_data.chunk)) * item_bytes(item.tensor_data.properties.dtype)
        else:
            planned = getattr(item, "bytes_io_data", None)  # some versions of torch do not plan the size
            size += planned.nbytes if planned else _ASSUMED_BYTES
    return size


def _make_sources(
    items: Sequence[WriteItem], planner: SavePlanner, written: Written, *, in_pieces: bool
) -> Iterator[PlacedSource]:
    fqn = items[0].index.fqn
    if items[0].type == WriteItemType.BYTE_IO:
        yield _make_payload(fqn, planner.resolve_data(items[0]), written)
        return
    # A box that occurs twice is stored once; several boxes of one tensor are pieces of one source.
    pieces = {piece.box: piece for piece in (_resolve(item, planner) for item in items)}
    data = _find_data(items[0])
    dtype = next(iter(pieces.values())).tensor.dtype
    if dtype != data.properties.dtype:
        written.dtypes[fqn] = dtype_name(dtype)
    if not in_pieces:
        yield _place(fqn, tuple(pieces.values()), tuple(data.size), dtype, data)
        return
    for box, piece in pieces.items():
        own = LocalBox(whole(box.sizes), piece.tensor)
        yield _place(name_piece(fqn, box.starts), (own,), box.sizes, dtype, data)


def _make_payload(fqn: str, data: torch.Tensor | io.BytesIO, written: Written) -> PlacedSource:
    if not isinstance(data, io.BytesIO):
        raise Unsupported(
            f"{fqn}: the planner returned a {type(data).__qualname__} for an item that it planned as bytes"
        )
    payload = data.getvalue()
    written.sizes[fqn] = len(payload)
    if written.notes_refused and (cause := find_refusal(payload)):
        written.refused[fqn] = cause
    boxes = [(start, stop - start) for start, stop in cut(len(payload))]
    return PlacedSource(BytesSource(fqn, payload, PAYLOAD_SPEC), Placement(len(payload), 1, boxes))


def _find_data(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise Mismatch(f"{item.index.fqn}: the planner planned a tensor without tensor_data; fix the planner")
    return item.tensor_data


def _resolve(item: WriteItem, planner: SavePlanner) -> LocalBox:
    fqn, box = item.index.fqn, find_box(_find_data(item).chunk)
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor) or not has_own_bytes(tensor) or tensor.is_quantized:
        kind = type(tensor).__qualname__
        raise Unsupported(f"{fqn}: DCP saves only ordinary strided tensors, this is a {kind}; use Store.save")
    if items_per_byte(tensor.dtype) > 1:
        raise Unsupported(f"{fqn}: a tensor of {tensor.dtype} cannot be saved through DCP; use Store.save")
    try:
        verify_readable(tensor)
    except Unsupported as error:
        raise Unsupported(f"{fqn}: {error}") from error
    if tuple(tensor.shape) != box.sizes:
        raise Mismatch(f"{fqn}: the planner returned shape {tuple(tensor.shape)} for a box of shape {box.sizes}")
    return LocalBox(box, tensor.detach())


def _place(
    name: str, pieces: tuple[LocalBox, ...], shape: Coordinates, dtype: torch.dtype, data: TensorWriteData
) -> PlacedSource:
    leaf = LocalLeaf("shards", shape, dtype, tuple(piece for piece in pieces if volume(piece.box)))
    source = replace(
        make_shard_source(name, None, leaf),
        spec=encode_tensor(shape, dtype, requires_grad=data.properties.requires_grad),
    )
    dims = max(len(shape), 1)
    sizes = [stop - start for start, stop in pairwise((0, *source.cuts))]
    boxes = [_find_position(box, size, dims) for box, size in zip(source.boxes, sizes, strict=True)]
    return PlacedSource(source, Placement(source.whole_bytes, dims if boxes else 1, boxes))


def _find_position(box: Box, size_bytes: int, dims: int) -> tuple[int, ...]:
    """Return the position of a chunk in its entry: a box or, with at most one dim, its byte offset and size."""
    if dims > 1:
        return (*box.starts, *box.sizes)
    item = size_bytes // volume(box)
    return (box.starts[0] * item if box.starts else 0, size_bytes)
