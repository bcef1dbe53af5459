"""What a leaf of a rank's tree is: a tensor of its own, a replica, or boxes of a global tensor; and finding a box."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from holdfast.errors import ShardNotFound, Unsupported
from holdfast.repo.format.boxes import Box, Coordinates, contains, slices, volume, whole
from holdfast.tensors.composite import has_own_bytes
from holdfast.tensors.dtypes import items_per_byte
from holdfast.tensors.sharding.meshes import Layouts, verify_placements

# By name: to import what defines them takes longer than to save a small model, and most trees hold none of them.
_DTENSOR: Final = "torch.distributed.tensor.DTensor"
_SHARDED_TENSOR: Final = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_UNFINISHED: Final = "torch.distributed._functional_collectives.AsyncCollectiveTensor"
_MAX_NAMED: Final = 8

Kind = Literal["plain", "replica", "shards", "per rank"]


class LookupIndex(Protocol):
    """What finds a tensor, or a part of it, in a state dict: torch's MetadataIndex is one."""

    @property
    def fqn(self) -> str:
        """The name."""

    @property
    def offset(self) -> Sequence[int] | None:
        """Where the part starts in the global tensor; None means the only one."""

    @property
    def index(self) -> int | None:
        """Which of the local parts it probably is."""


@runtime_checkable
class Checkpointable(Protocol):
    """What says by itself which boxes of a tensor it has: torch's protocol for checkpoints."""

    def __create_chunk_list__(self) -> list[Any]:
        """Return the boxes, each as something with `offsets` and `sizes`."""

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Return the box at the offset of a LookupIndex."""


class Piece(NamedTuple):
    """A box of a global tensor, and the memory that has its items."""

    box: Box
    tensor: torch.Tensor
    """Of the shape of the box; a view of what the rank holds, so what is written to it is written there."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds of one leaf."""

    kind: Kind
    global_shape: Coordinates = ()
    dtype: torch.dtype | None = None
    """None for what is not strided items: values, and tensors that are made of others."""
    pieces: tuple[Piece, ...] = ()
    """None of them is empty, unless the global tensor is."""
    ranks: tuple[int, ...] = ()
    """The global ranks that are declared to hold the very same, this one among them; empty if nothing is declared."""
    mesh_ranks: tuple[int, ...] = ()
    """The global ranks that together hold all of a DTensor. Others with the same name have copies of their own."""


@dataclass(frozen=True, slots=True, eq=False)
class PerRank:
    """A value that every rank has one of, and gets its own back."""

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
    """Declare that every rank has a value of its own here, so that none of them is taken for a replica."""
    return value if isinstance(value, PerRank) else PerRank(value)


def shard(tensor: torch.Tensor, *, global_shape: Sequence[int], offsets: Sequence[int]) -> Shard:
    """Declare that a tensor is the part of a global one that starts at `offsets`."""
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
        raise ValueError(f"a shard of shape {box.sizes} at offsets {starts} does not lie inside of shape {shape}")
    return Shard(tensor, shape, starts)


def describe(value: object, *, layouts: Layouts | None = None) -> Held:
    """Tell what a rank holds of a leaf; raises Unsupported for a tensor whose parts are not its ranks' own.

    Who describes many leaves gives one `Layouts` for all of them.
    """
    if isinstance(value, PerRank):
        return _describe_per_rank(value.value)
    if isinstance(value, Shard):
        box = Box(value.offsets, tuple(value.tensor.shape))
        return _hold_shards(value.global_shape, value.tensor.dtype, [Piece(box, value.tensor)])
    if isinstance(value, torch.Tensor) and has_own_bytes(value):
        shape = tuple(value.shape)
        return Held("plain", shape, value.dtype, (Piece(whole(shape), value),))
    names = _find_names(value)
    if _DTENSOR in names:
        return _describe_dtensor(value, Layouts() if layouts is None else layouts)
    if _SHARDED_TENSOR in names:
        return _describe_sharded(value)
    if isinstance(value, Checkpointable):
        return _describe_checkpointable(value)
    return Held("plain")


def _find_names(value: object) -> set[str]:
    return {f"{base.__module__}.{base.__qualname__}" for base in type(value).__mro__}


def _name_kind(value: object) -> str:
    if not isinstance(value, torch.Tensor) or type(value) is not torch.Tensor:
        return type(value).__qualname__
    return f"{value.layout} tensor of {value.dtype}"


def _describe_per_rank(value: object) -> Held:
    if not isinstance(value, torch.Tensor | Shard | PerRank | Checkpointable):
        return Held("per rank")
    held = describe(value)
    if held.kind != "plain":
        raise Unsupported(f"a {_name_kind(value)} is one rank's part of a tensor: it cannot be declared per rank, too")
    return replace(held, kind="per rank")


def _describe_dtensor(value: Any, layouts: Layouts) -> Held:
    layout = layouts.find(value)
    shape, local = tuple(value.shape), _find_local(value)
    kind: Kind = "shards" if layout.is_cut else "replica"
    if 0 in shape:
        # Nothing is the same everywhere, however it is cut.
        piece = Piece(whole(shape), local.new_empty(shape))
        return Held("replica", shape, value.dtype, (piece,), layout.mesh_ranks, layout.mesh_ranks)
    if not layout.ranks:
        return Held(kind, shape, value.dtype, mesh_ranks=layout.mesh_ranks)
    if not has_own_bytes(local) and isinstance(local, Checkpointable):
        held = _hold_shards(shape, value.dtype, _iter_chunks(local))
        return replace(held, ranks=layout.ranks, mesh_ranks=layout.mesh_ranks)
    if tuple(local.shape) != layout.local_shape:
        raise Unsupported(
            f"a DTensor of shape {shape}, placed as {tuple(value.placements)}, has a local part of shape"
            f" {tuple(local.shape)} where {layout.local_shape} belongs: give from_local its shape= and stride="
        )
    memory = local.detach()
    if len(layout.placed) == 1:
        pieces = [Piece(layout.placed[0].box, memory)]
    else:
        pieces = [Piece(box, memory[slices(part)]) for box, part in layout.placed]
    return Held(kind, shape, value.dtype, _verify_pieces(shape, value.dtype, pieces), layout.ranks, layout.mesh_ranks)


def _find_local(value: Any) -> torch.Tensor:
    """Return the local part of a DTensor, when it has arrived."""
    # Not to_local(): that makes a new tensor with a history, or a parameter.
    local: Any = value._local_tensor
    arrived: torch.Tensor = local.wait() if _UNFINISHED in _find_names(local) else local
    return arrived


def _describe_sharded(value: Any) -> Held:
    pieces = (Piece(_find_box(each.metadata), each.tensor) for each in value.local_shards())
    metadata = value.metadata()
    # Not value.dtype: to look at a ShardedTensor as at a tensor is to be warned that it is deprecated.
    return _hold_shards(tuple(metadata.size), metadata.tensor_properties.dtype, pieces)


def _describe_checkpointable(value: Any) -> Held:
    pieces = list(_iter_chunks(value))
    if isinstance(value, torch.Tensor):
        return _hold_shards(tuple(value.size()), value.dtype, pieces)
    items = value.__create_write_items__("", value)
    if not items:
        return Held("shards")
    data = items[0].tensor_data
    return _hold_shards(tuple(data.size), data.properties.dtype, pieces)


def _iter_chunks(value: Any) -> Iterator[Piece]:
    for number, chunk in enumerate(value.__create_chunk_list__()):
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        # What holds nothing may say so by an empty box that it then cannot find.
        if volume(box):
            yield Piece(box, value.__get_tensor_shard__(_Index("", torch.Size(box.starts), number)))


def _find_box(metadata: Any) -> Box:
    return Box(tuple(metadata.shard_offsets), tuple(metadata.shard_sizes))


def _hold_shards(global_shape: Coordinates, dtype: torch.dtype, pieces: Iterable[Piece]) -> Held:
    if 0 in global_shape:
        # Whose it is cannot be told, and does not matter: all who have it have the same.
        return Held("plain", global_shape, dtype, (Piece(whole(global_shape), torch.empty(global_shape, dtype=dtype)),))
    held = [Piece(box, tensor.detach()) for box, tensor in pieces if volume(box)]
    return Held("shards", global_shape, dtype, _verify_pieces(global_shape, dtype, held))


def _verify_pieces(global_shape: Coordinates, dtype: torch.dtype, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return the pieces; raise Unsupported unless each is ordinary memory of the right shape and dtype."""
    verified = tuple(pieces)
    for box, tensor in verified:
        if not has_own_bytes(tensor) or tensor.is_quantized:
            raise Unsupported(f"its local part is a {_name_kind(tensor)}, which is not cut into boxes: save it whole")
        if tuple(tensor.shape) != box.sizes or tensor.dtype != dtype or not contains(whole(global_shape), box):
            raise Unsupported(
                f"its local part of shape {tuple(tensor.shape)} and {tensor.dtype} is declared as {box.sizes} at"
                f" {box.starts} of shape {global_shape} and {dtype}: build it anew from parts that fit"
            )
    return verified


def find_state_dict_object(state_dict: Mapping[str, Any], index: LookupIndex) -> Any:
    """Return the value of that name, or its part at that offset; raises ShardNotFound, naming both."""
    if index.fqn not in state_dict:
        raise ShardNotFound(f"{index.fqn}: no such name among the {len(state_dict)} of this state dict", name=index.fqn)
    value = state_dict[index.fqn]
    if isinstance(value, PerRank):
        value = value.value
    if isinstance(value, torch.Tensor | Shard | Checkpointable):
        return find_tensor_shard(value, index)
    if index.offset is not None:
        raise _no_part(index, f"it is a {type(value).__qualname__}, which has no parts: ask for it without an offset")
    return value


def find_tensor_shard(tensor: Any, index: LookupIndex) -> torch.Tensor:
    """Return the part of a tensor that starts at the offset of the index; raises ShardNotFound, naming both.

    Without an offset it is the local part of a DTensor, or the tensor itself; what has parts of its own must be asked
    for one of them.
    """
    if isinstance(tensor, Shard):
        return tensor.tensor if index.offset is None else _find_piece(describe(tensor).pieces, index)
    names = _find_names(tensor)
    if _DTENSOR in names:
        verify_placements(tensor.device_mesh, tensor.placements)
        local = _find_local(tensor)
        if not has_own_bytes(local) and isinstance(local, Checkpointable):
            return _ask(local, index)
        return local if index.offset is None else _find_piece(describe(tensor).pieces, index)
    if _SHARDED_TENSOR in names:
        return _find_piece([Piece(_find_box(each.metadata), each.tensor) for each in tensor.local_shards()], index)
    if isinstance(tensor, Checkpointable):
        return _ask(tensor, index)
    if index.offset is not None and tuple(index.offset) != (0,) * tensor.dim():
        raise _no_part(index, "it is no shard: all of it is here, at the origin")
    found: torch.Tensor = tensor
    return found


def _ask(value: Any, index: LookupIndex) -> torch.Tensor:
    """Ask what has parts of its own for one of them."""
    try:
        found: torch.Tensor = value.__get_tensor_shard__(index)
    except (LookupError, ValueError) as error:
        raise _no_part(index, f"a {type(value).__qualname__} does not find it ({error})") from error
    return found


def _find_piece(pieces: Sequence[Piece], index: LookupIndex) -> torch.Tensor:
    """Return the piece that starts at the offset; the one at the index, if there is any, is looked at first."""
    hint = () if index.index is None else pieces[index.index : index.index + 1]
    for box, tensor in (*hint, *pieces):
        if index.offset is not None and tuple(index.offset) == box.starts:
            return tensor
    here = " and ".join(str(box.starts) for box, _ in pieces[:_MAX_NAMED])
    raise _no_part(index, f"this rank holds parts at {here}" if pieces else "this rank holds no part of it")


def _no_part(index: LookupIndex, reason: str) -> ShardNotFound:
    where = "without an offset" if index.offset is None else f"at offset {tuple(index.offset)}"
    return ShardNotFound(f"{index.fqn}: nothing is found {where}; {reason}", name=index.fqn)
