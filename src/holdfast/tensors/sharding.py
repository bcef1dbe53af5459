"""What a rank has of a leaf (a tensor, a replica, or boxes of a global tensor), and the layout of DTensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from holdfast.errors import ShardNotFound, Unsupported
from holdfast.repo.format.boxes import Box, Coordinates, contains, slices, volume, whole
from holdfast.tensors.composite import has_own_bytes
from holdfast.tensors.spec import items_per_byte

_PLACEMENTS: Final = "torch.distributed.tensor.placement_types"


class Cut(NamedTuple):
    """How one axis of a mesh cuts a dim, and which part belongs to this rank."""

    dim: int
    parts: int
    position: int
    """The coordinate of this rank on the axis."""
    stripes: int = 1
    """The split factor of a strided shard: the dim is first split into so many parts, each of which is then cut."""


class RowRun(NamedTuple):
    """Neighbouring rows of a dim that a rank has: their start in the global tensor and in the local one."""

    start: int
    local_start: int
    size: int


def plan_runs(length: int, cuts: Sequence[Cut]) -> list[RowRun]:
    """Return the rows of a dim of that length that remain after all cuts, in local order; neighbours are one run."""
    spans = [(0, length)]
    for cut in cuts:
        size = sum(stop - start for start, stop in spans)
        spans = [span for low, high in _iter_parts(size, cut) for span in _iter_global_spans(spans, low, high)]
    runs: list[RowRun] = []
    for start, stop in spans:
        if runs and runs[-1].start + runs[-1].size == start:
            last = runs.pop()
            runs.append(last._replace(size=last.size + stop - start))
        else:
            runs.append(RowRun(start, runs[-1].local_start + runs[-1].size if runs else 0, stop - start))
    return runs


def _iter_parts(size: int, cut: Cut) -> Iterator[tuple[int, int]]:
    for stripe in range(cut.stripes):
        low, high = _find_part(size, cut.stripes, stripe)
        start, stop = _find_part(high - low, cut.parts, cut.position)
        yield low + start, low + stop


def _find_part(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the start and stop of a part: all are as large as the first, except the last ones."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def _iter_global_spans(spans: Sequence[tuple[int, int]], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the global spans of the local rows from `low` to `high`."""
    at = 0
    for start, stop in spans:
        first, last = max(low, at), min(high, at + stop - start)
        if first < last:
            yield start + first - at, start + last - at
        at += stop - start


class PlacedBox(NamedTuple):
    """A box of a global tensor, and the same box in the coordinates of the local tensor."""

    box: Box
    local: Box


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The boxes of a DTensor's local part in the global tensor, and the ranks that have the same part."""

    local_shape: Coordinates
    placed: tuple[PlacedBox, ...]
    """One box in most cases; several for some strided shards; none if the local part is empty."""
    ranks: tuple[int, ...]
    """The global ranks that have the same part, including this one."""
    mesh_ranks: tuple[int, ...]
    """All global ranks of the mesh."""
    is_cut: bool
    """Whether any axis of the mesh cuts the tensor; if none does, every rank of the mesh has all of it."""


class Layouts:
    """Computes the layouts of DTensors; each is computed, and compared with torch's own, once for equal tensors.

    It keeps meshes alive, so create one for each save or load.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], ShardLayout] = {}

    def find(self, tensor: Any) -> ShardLayout:
        """Return the layout of a DTensor; raises Unsupported for placements other than Replicate and Shard."""
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        verify_placements(mesh, placements)
        coordinate = mesh.get_coordinate()
        key = (mesh, tuple(coordinate or ()), placements, tuple(tensor.shape))
        layout = self._known.get(key)
        if layout is None:
            layout = self._known[key] = _plan_layout(tensor, mesh, coordinate, placements)
        return layout


def verify_placements(mesh: Any, placements: Sequence[object]) -> None:
    """Raise Unsupported unless every axis of the mesh shards the tensor or replicates it."""
    known = _find_classes()
    for axis, placement in enumerate(placements):
        if isinstance(placement, (known.Replicate, known.Shard, known._StridedShard)):
            continue
        label = repr(mesh.mesh_dim_names[axis]) if mesh.mesh_dim_names else str(axis)
        is_partial = isinstance(placement, known.Partial)
        raise Unsupported(
            f"a DTensor that is {placement!r} over mesh axis {label}"
            f" {'has values that are not reduced yet' if is_partial else 'has a placement that is not supported'}:"
            " redistribute it to Replicate() or Shard(dim) there"
        )


def _find_classes() -> Any:
    """Return torch's module of placements, which a program with a DTensor has imported."""
    return sys.modules[_PLACEMENTS]


def _plan_layout(tensor: Any, mesh: Any, coordinate: Sequence[int] | None, placements: Sequence[Any]) -> ShardLayout:
    mesh_ranks = tuple(mesh.mesh.flatten().tolist())
    known = _find_classes()
    is_cut = not all(isinstance(placement, known.Replicate) for placement in placements)
    if coordinate is None:
        return ShardLayout((0,), (), (), mesh_ranks, is_cut)
    cuts: dict[int, list[Cut]] = {dim: [] for dim in range(tensor.dim())}
    index: list[int | slice] = list(coordinate)
    for axis, placement in enumerate(placements):
        if isinstance(placement, known.Replicate):
            index[axis] = slice(None)
        else:
            stripes = placement.split_factor if isinstance(placement, known._StridedShard) else 1
            cuts[placement.dim].append(Cut(placement.dim, mesh.shape[axis], coordinate[axis], stripes))
    runs = [plan_runs(length, cuts[dim]) for dim, length in enumerate(tensor.shape)]
    layout = ShardLayout(
        local_shape=tuple(sum(run.size for run in of_dim) for of_dim in runs),
        placed=tuple(_join(chosen) for chosen in product(*runs)),
        ranks=tuple(mesh.mesh[tuple(index)].flatten().tolist()),
        mesh_ranks=mesh_ranks,
        is_cut=is_cut,
    )
    _verify_as_torch(tensor, layout)
    return layout


def _join(runs: Sequence[RowRun]) -> PlacedBox:
    sizes = tuple(run.size for run in runs)
    return PlacedBox(Box(tuple(run.start for run in runs), sizes), Box(tuple(run.local_start for run in runs), sizes))


def _verify_as_torch(tensor: Any, layout: ShardLayout) -> None:
    """Raise Unsupported if the installed torch computes another offset or shape for the local part."""
    if not has_own_bytes(tensor._local_tensor):
        return
    (chunk,) = tensor.__create_chunk_list__()
    starts = [placed.box.starts for placed in layout.placed]
    if tuple(chunk.sizes) != layout.local_shape or (starts and tuple(chunk.offsets) != starts[0]):
        raise Unsupported(
            f"torch {torch.__version__} cuts a DTensor of shape {tuple(tensor.shape)}, placed as"
            f" {tuple(tensor.placements)}, in a way that is not supported: update holdfast, or save its full_tensor()"
        )


# By name: importing the modules that define them takes longer than saving a small model, and few trees need them.
_DTENSOR: Final = "torch.distributed.tensor.DTensor"
_SHARDED_TENSOR: Final = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_UNFINISHED: Final = "torch.distributed._functional_collectives.AsyncCollectiveTensor"
_MAX_NAMED: Final = 8

LeafKind = Literal["plain", "replica", "shards", "per rank"]


class LookupIndex(Protocol):
    """Identifies a tensor, or a part of it, in a state dict: torch's MetadataIndex is one."""

    @property
    def fqn(self) -> str:
        """The name of the tensor."""

    @property
    def offset(self) -> Sequence[int] | None:
        """The start of the part in the global tensor; None if there is only one part."""

    @property
    def index(self) -> int | None:
        """A hint: the probable index of the part among the local ones."""


@runtime_checkable
class HasShards(Protocol):
    """An object that returns parts of a tensor by their offsets; torch asks for no more to find a part."""

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Return the box at the offset of a LookupIndex."""


@runtime_checkable
class Checkpointable(HasShards, Protocol):
    """An object that also lists the boxes of a tensor that it has: torch's protocol for checkpoints."""

    def __create_chunk_list__(self) -> list[Any]:
        """Return the boxes, each an object with `offsets` and `sizes`."""


class LocalBox(NamedTuple):
    """A box of a global tensor, and the local memory with its items."""

    box: Box
    tensor: torch.Tensor
    """Has the shape of the box. It is a view, so writing to it changes the rank's tensor."""


@dataclass(frozen=True, slots=True)
class LocalLeaf:
    """What a rank has of one leaf."""

    kind: LeafKind
    global_shape: Coordinates = ()
    dtype: torch.dtype | None = None
    """None for plain values and for tensors that are made of others."""
    pieces: tuple[LocalBox, ...] = ()
    """No piece is empty, unless the global tensor is."""
    ranks: tuple[int, ...] = ()
    """The global ranks that are declared to have the same data, including this one; empty if nothing is declared."""
    mesh_ranks: tuple[int, ...] = ()
    """The global ranks that together have all of a DTensor. Other ranks with the same name have separate copies."""


@dataclass(frozen=True, slots=True, eq=False)
class PerRank:
    """A value that differs from rank to rank; a load gives each rank its own."""

    value: object


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A tensor that is a box of a global one."""

    tensor: torch.Tensor
    global_shape: Coordinates
    offsets: Coordinates


@dataclass(frozen=True, slots=True)
class _Index:
    fqn: str
    offset: torch.Size
    index: int


def per_rank(value: object) -> PerRank:
    """Declare that every rank has a value of its own here, so that it is not treated as a replica."""
    return value if isinstance(value, PerRank) else PerRank(value)


def shard(tensor: torch.Tensor, *, global_shape: Sequence[int], offsets: Sequence[int]) -> Shard:
    """Declare that a tensor is the box of a global tensor that starts at `offsets`."""
    if not has_own_bytes(tensor) or tensor.is_quantized:
        raise Unsupported(f"a {_name_kind(tensor)} cannot be declared a shard: pass an ordinary strided tensor")
    if items_per_byte(tensor.dtype) > 1:
        raise Unsupported(f"a tensor of {tensor.dtype} cannot be cut into shards: its items share bytes")
    shape, starts = tuple(map(int, global_shape)), tuple(map(int, offsets))
    if not len(shape) == len(starts) == tensor.dim():
        raise ValueError(
            f"a shard of {tensor.dim()} dims needs as many in global_shape and offsets, not {shape} and {starts}"
        )
    box = Box(starts, tuple(tensor.shape))
    if min((*shape, *starts), default=0) < 0 or any(map(int.__gt__, box.stops, shape)):
        raise ValueError(f"a shard of shape {box.sizes} at offsets {starts} is not inside of shape {shape}")
    return Shard(tensor, shape, starts)


def describe(value: object, *, layouts: Layouts | None = None) -> LocalLeaf:
    """Return what this rank has of a leaf; raises Unsupported for a tensor that cannot be split into boxes.

    To describe many leaves, pass the same `layouts` for all of them.
    """
    if isinstance(value, PerRank):
        return _describe_per_rank(value.value)
    if isinstance(value, Shard):
        box = Box(value.offsets, tuple(value.tensor.shape))
        return _make_shards_leaf(value.global_shape, value.tensor.dtype, [LocalBox(box, value.tensor)])
    if isinstance(value, torch.Tensor) and has_own_bytes(value):
        shape = tuple(value.shape)
        return LocalLeaf("plain", shape, value.dtype, (LocalBox(whole(shape), value),))
    names = _find_names(value)
    if _DTENSOR in names:
        return _describe_dtensor(value, Layouts() if layouts is None else layouts)
    if _SHARDED_TENSOR in names:
        return _describe_sharded(value)
    if isinstance(value, Checkpointable):
        return _describe_checkpointable(value)
    return LocalLeaf("plain")


def _find_names(value: object) -> set[str]:
    return {f"{base.__module__}.{base.__qualname__}" for base in type(value).__mro__}


def _name_kind(value: object) -> str:
    if not isinstance(value, torch.Tensor) or type(value) is not torch.Tensor:
        return type(value).__qualname__
    return f"{value.layout} tensor of {value.dtype}"


def _describe_per_rank(value: object) -> LocalLeaf:
    if not isinstance(value, torch.Tensor | Shard | PerRank | Checkpointable):
        return LocalLeaf("per rank")
    leaf = describe(value)
    if leaf.kind != "plain":
        raise Unsupported(
            f"a {_name_kind(value)} is one rank's part of a global tensor, so it cannot be declared per rank"
        )
    return replace(leaf, kind="per rank")


def _describe_dtensor(value: Any, layouts: Layouts) -> LocalLeaf:
    layout = layouts.find(value)
    shape, local = tuple(value.shape), _find_local(value)
    kind: LeafKind = "shards" if layout.is_cut else "replica"
    if 0 in shape:
        # An empty tensor is the same on every rank, however it is cut.
        piece = LocalBox(whole(shape), local.new_empty(shape))
        return LocalLeaf("replica", shape, value.dtype, (piece,), layout.mesh_ranks, layout.mesh_ranks)
    if not layout.ranks:
        return LocalLeaf(kind, shape, value.dtype, mesh_ranks=layout.mesh_ranks)
    if not has_own_bytes(local) and isinstance(local, Checkpointable):
        leaf = _make_shards_leaf(shape, value.dtype, _iter_chunks(local))
        return replace(leaf, ranks=layout.ranks, mesh_ranks=layout.mesh_ranks)
    if tuple(local.shape) != layout.local_shape:
        raise Unsupported(
            f"a DTensor of shape {shape}, placed as {tuple(value.placements)}, has a local part of shape"
            f" {tuple(local.shape)} instead of {layout.local_shape}: pass shape= and stride= to from_local"
        )
    memory = local.detach()
    if len(layout.placed) == 1:
        pieces = [LocalBox(layout.placed[0].box, memory)]
    else:
        pieces = [LocalBox(box, memory[slices(part)]) for box, part in layout.placed]
    return LocalLeaf(
        kind, shape, value.dtype, _verify_pieces(shape, value.dtype, pieces), layout.ranks, layout.mesh_ranks
    )


def _find_local(value: Any) -> torch.Tensor:
    """Return the local part of a DTensor, after waiting for a pending collective."""
    # Not to_local(): that returns a new tensor with an autograd history, or a parameter.
    local: Any = value._local_tensor
    arrived: torch.Tensor = local.wait() if _UNFINISHED in _find_names(local) else local
    return arrived


def _describe_sharded(value: Any) -> LocalLeaf:
    pieces = (LocalBox(_find_box(each.metadata), each.tensor) for each in value.local_shards())
    metadata = value.metadata()
    # Not value.dtype: torch warns that ShardedTensor is deprecated whenever a tensor attribute is read.
    return _make_shards_leaf(tuple(metadata.size), metadata.tensor_properties.dtype, pieces)


def _describe_checkpointable(value: Any) -> LocalLeaf:
    pieces = list(_iter_chunks(value))
    if isinstance(value, torch.Tensor):
        return _make_shards_leaf(tuple(value.size()), value.dtype, pieces)
    items = value.__create_write_items__("", value)
    if not items:
        return LocalLeaf("shards")
    data = items[0].tensor_data
    return _make_shards_leaf(tuple(data.size), data.properties.dtype, pieces)


def _iter_chunks(value: Any) -> Iterator[LocalBox]:
    for number, chunk in enumerate(value.__create_chunk_list__()):
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        # A rank without data may list an empty box, for which __get_tensor_shard__ raises.
        if volume(box):
            yield LocalBox(box, value.__get_tensor_shard__(_Index("", torch.Size(box.starts), number)))


def _find_box(metadata: Any) -> Box:
    return Box(tuple(metadata.shard_offsets), tuple(metadata.shard_sizes))


def _make_shards_leaf(global_shape: Coordinates, dtype: torch.dtype, pieces: Iterable[LocalBox]) -> LocalLeaf:
    if 0 in global_shape:
        # Which rank owns an empty tensor is unknown and does not matter: it is the same on all of them.
        return LocalLeaf(
            "plain", global_shape, dtype, (LocalBox(whole(global_shape), torch.empty(global_shape, dtype=dtype)),)
        )
    filled = [LocalBox(box, tensor.detach()) for box, tensor in pieces if volume(box)]
    return LocalLeaf("shards", global_shape, dtype, _verify_pieces(global_shape, dtype, filled))


def _verify_pieces(global_shape: Coordinates, dtype: torch.dtype, pieces: Iterable[LocalBox]) -> tuple[LocalBox, ...]:
    """Return the pieces; raise Unsupported unless each is ordinary memory of the right shape and dtype."""
    verified = tuple(pieces)
    for box, tensor in verified:
        if not has_own_bytes(tensor) or tensor.is_quantized:
            raise Unsupported(f"its local part is a {_name_kind(tensor)}, which cannot be a shard: save it whole")
        if tuple(tensor.shape) != box.sizes or tensor.dtype != dtype or not contains(whole(global_shape), box):
            raise Unsupported(
                f"its local part of shape {tuple(tensor.shape)} and {tensor.dtype} is declared as {box.sizes} at"
                f" {box.starts} of shape {global_shape} and {dtype}: rebuild it from parts that match"
            )
    return verified


def find_state_dict_object(state_dict: Mapping[str, Any], index: LookupIndex) -> Any:
    """Return the value with the name of `index`, or its part at the offset; raises ShardNotFound with both."""
    if index.fqn not in state_dict:
        raise ShardNotFound(f"{index.fqn}: no such name; this state dict has {len(state_dict)} names", name=index.fqn)
    value = state_dict[index.fqn]
    if isinstance(value, PerRank):
        value = value.value
    if isinstance(value, torch.Tensor | Shard) or (index.offset is not None and isinstance(value, HasShards)):
        return find_tensor_shard(value, index)
    if index.offset is not None:
        raise _no_part(index, f"it is a {type(value).__qualname__}, which has no parts: find it without an offset")
    return value


def find_tensor_shard(tensor: Any, index: LookupIndex) -> torch.Tensor:
    """Return the part of a tensor that starts at the offset of `index`; raises ShardNotFound with name and offset.

    Without an offset, return the local part of a DTensor, or the tensor itself. A ShardedTensor needs an offset. An
    object with `__get_tensor_shard__` finds its parts itself.
    """
    if isinstance(tensor, Shard):
        return tensor.tensor if index.offset is None else _find_piece(describe(tensor).pieces, index)
    names = _find_names(tensor)
    if _DTENSOR in names:
        verify_placements(tensor.device_mesh, tensor.placements)
        local = _find_local(tensor)
        if isinstance(local, HasShards):
            return _get_shard(local, index)
        return local if index.offset is None else _find_piece(describe(tensor).pieces, index)
    if _SHARDED_TENSOR in names:
        return _find_piece([LocalBox(_find_box(each.metadata), each.tensor) for each in tensor.local_shards()], index)
    if isinstance(tensor, HasShards):
        return _get_shard(tensor, index)
    if index.offset is not None and tuple(index.offset) != (0,) * tensor.dim():
        raise _no_part(index, "it is not a shard: all of it is at offset 0")
    found: torch.Tensor = tensor
    return found


def _get_shard(value: Any, index: LookupIndex) -> torch.Tensor:
    """Return a part of an object, by the object's own method."""
    try:
        found: torch.Tensor = value.__get_tensor_shard__(index)
    except (LookupError, ValueError) as error:
        raise _no_part(index, f"a {type(value).__qualname__} does not find it ({error})") from error
    return found


def _find_piece(pieces: Sequence[LocalBox], index: LookupIndex) -> torch.Tensor:
    """Return the piece that starts at the offset; the piece at the hinted index is tried first."""
    hint = () if index.index is None else pieces[index.index : index.index + 1]
    for box, tensor in (*hint, *pieces):
        if index.offset is not None and tuple(index.offset) == box.starts:
            return tensor
    here = " and ".join(str(box.starts) for box, _ in pieces[:_MAX_NAMED])
    raise _no_part(index, f"this rank has parts at {here}" if pieces else "this rank has no part of it")


def _no_part(index: LookupIndex, reason: str) -> ShardNotFound:
    where = "without an offset" if index.offset is None else f"at offset {tuple(index.offset)}"
    return ShardNotFound(f"{index.fqn}: no part was found {where}; {reason}", name=index.fqn)
