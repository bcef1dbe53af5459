"""What a rank writes of a checkpoint: the items of its plan, resolved a group at a time, as sources with places."""

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
from holdfast.repo.format.boxes import Box, Coordinates, volume, whole
from holdfast.repo.format.chunk import cut
from holdfast.repo.format.record import Json
from holdfast.repo.format.source import BytesSource
from holdfast.repo.write.part_writer import MakeSources, PlacedSource
from holdfast.repo.write.writer import Placement
from holdfast.snapshot.pickled import find_refusal
from holdfast.tensors.composite import has_own_bytes, verify_readable
from holdfast.tensors.dtypes import dtype_name, item_bytes, items_per_byte
from holdfast.tensors.sharding.shard_source import make_shard_source
from holdfast.tensors.sharding.sharded import Held, Piece
from holdfast.tensors.spec import TensorSpec, contiguous_stride, encode_spec

PAYLOAD_SPEC: Final[Json] = {"type": "torch_save"}
_ASSUMED_BYTES: Final = 4096
"""The size of bytes that the planner has not made yet."""


@dataclass(slots=True)
class Written:
    """What is only known once a planner has given its data."""

    looks_for_refused: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    """Of bytes, by name."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Of tensors that the planner gave another dtype than it had planned."""
    refused: dict[str, str] = field(default_factory=dict)
    """What a weights-only load refuses of bytes, by name; only if `looks_for_refused`."""


def encode_tensor(shape: Coordinates, dtype: torch.dtype, *, requires_grad: bool) -> Json:
    """Return the spec of a tensor's entry."""
    # Torch saves what is declared to require a gradient whatever its dtype; only these can.
    can_require = dtype.is_floating_point or dtype.is_complex
    return encode_spec(TensorSpec(dtype, shape, contiguous_stride(shape), requires_grad=requires_grad and can_require))


def name_piece(fqn: str, starts: Sequence[int]) -> str:
    """Return the name of the entry that one box of a tensor has where not all of the tensor was saved."""
    return f"{fqn}@{','.join(map(str, starts))}"


def is_whole_here(items: Sequence[WriteItem]) -> bool:
    """Tell whether the items of one tensor make up all of it."""
    data = [item.tensor_data for item in items if item.tensor_data is not None]
    if not data:
        return True
    boxes = {find_box(each.chunk) for each in data}
    return sum(map(volume, boxes)) >= volume(whole(tuple(data[0].size)))


def plan_groups(
    plan: SavePlan, planner: SavePlanner, written: Written, *, limit_bytes: int, alone: bool
) -> list[MakeSources]:
    """Cut a plan into groups that are resolved one after the other, each at most `limit_bytes` large, or one tensor.

    What falls to a rank is a part of a tensor that others complete, unless this one is `alone`: then a tensor of
    which only a part is there is stored as boxes that stand for themselves.
    """
    by_name: dict[str, list[WriteItem]] = {}
    for item in plan.items:
        by_name.setdefault(item.index.fqn, []).append(item)
    makers = [
        (partial(_make_sources, items, planner, written, in_pieces=alone and not is_whole_here(items)), _measure(items))
        for items in by_name.values()
    ]
    return [partial(_make_all, group) for group in _group(makers, limit_bytes)]


_Maker = Callable[[], Iterator[PlacedSource]]


def _group(makers: Sequence[tuple[_Maker, int]], limit_bytes: int) -> Iterator[list[_Maker]]:
    group: list[_Maker] = []
    held = 0
    for maker, size in makers:
        if group and held + size > limit_bytes:
            yield group
            group, held = [], 0
        group.append(maker)
        held += size
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
            size += item.bytes_io_data.nbytes if item.bytes_io_data else _ASSUMED_BYTES
    return size


def _make_sources(
    items: Sequence[WriteItem], planner: SavePlanner, written: Written, *, in_pieces: bool
) -> Iterator[PlacedSource]:
    fqn = items[0].index.fqn
    if items[0].type == WriteItemType.BYTE_IO:
        yield _make_payload(fqn, planner.resolve_data(items[0]), written)
        return
    # The same box twice is one; several boxes of one tensor are pieces of one source.
    pieces = {piece.box: piece for piece in (_resolve(item, planner) for item in items)}
    data = _find_data(items[0])
    dtype = next(iter(pieces.values())).tensor.dtype
    if dtype != data.properties.dtype:
        written.dtypes[fqn] = dtype_name(dtype)
    if not in_pieces:
        yield _place(fqn, tuple(pieces.values()), tuple(data.size), dtype, data)
        return
    for box, piece in pieces.items():
        own = Piece(whole(box.sizes), piece.tensor)
        yield _place(name_piece(fqn, box.starts), (own,), box.sizes, dtype, data)


def _make_payload(fqn: str, data: torch.Tensor | io.BytesIO, written: Written) -> PlacedSource:
    if not isinstance(data, io.BytesIO):
        raise Unsupported(f"{fqn}: the planner gave a {type(data).__qualname__} where its plan has bytes")
    payload = data.getvalue()
    written.sizes[fqn] = len(payload)
    if written.looks_for_refused and (cause := find_refusal(payload)):
        written.refused[fqn] = cause
    boxes = [(start, stop - start) for start, stop in cut(len(payload))]
    return PlacedSource(BytesSource(fqn, payload, PAYLOAD_SPEC), Placement(len(payload), 1, boxes))


def _find_data(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise Mismatch(f"{item.index.fqn}: the planner planned a tensor here, and did not say which part of it")
    return item.tensor_data


def _resolve(item: WriteItem, planner: SavePlanner) -> Piece:
    fqn, box = item.index.fqn, find_box(_find_data(item).chunk)
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor) or not has_own_bytes(tensor) or tensor.is_quantized:
        kind = type(tensor).__qualname__
        raise Unsupported(f"{fqn}: a {kind} that is no ordinary strided tensor cannot be saved here; use Store.save")
    if items_per_byte(tensor.dtype) > 1:
        raise Unsupported(f"{fqn}: a tensor of {tensor.dtype} cannot be saved here; use Store.save")
    try:
        verify_readable(tensor)
    except Unsupported as error:
        raise Unsupported(f"{fqn}: {error}") from error
    if tuple(tensor.shape) != box.sizes:
        raise Mismatch(f"{fqn}: the planner gave a tensor of shape {tuple(tensor.shape)} for a part of {box.sizes}")
    return Piece(box, tensor.detach())


def _place(
    name: str, pieces: tuple[Piece, ...], shape: Coordinates, dtype: torch.dtype, data: TensorWriteData
) -> PlacedSource:
    held = Held("shards", shape, dtype, tuple(piece for piece in pieces if volume(piece.box)))
    source = replace(
        make_shard_source(name, None, held),
        spec=encode_tensor(shape, dtype, requires_grad=data.properties.requires_grad),
    )
    dims = max(len(shape), 1)
    sizes = [stop - start for start, stop in pairwise((0, *source.cuts))]
    boxes = [_find_place(box, size, dims) for box, size in zip(source.boxes, sizes, strict=True)]
    return PlacedSource(source, Placement(source.whole_bytes, dims if boxes else 1, boxes))


def _find_place(box: Box, size_bytes: int, dims: int) -> tuple[int, ...]:
    """Return the place of a chunk: a box or, in what has no more than one dim, its first byte and how many."""
    if dims > 1:
        return (*box.starts, *box.sizes)
    item = size_bytes // volume(box)
    return (box.starts[0] * item if box.starts else 0, size_bytes)
