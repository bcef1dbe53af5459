"""The leaves of a rank's tree: how each kind is described, what is refused, and parts found by name and offset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint import utils as torch_checkpoint
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.errors import NotFound, ShardNotFound, Unsupported
from holdfast.repo.format.boxes import Box, whole
from holdfast.tensors.sharding import (
    LocalLeaf,
    PerRank,
    describe,
    find_state_dict_object,
    find_tensor_shard,
    per_rank,
    shard,
)
from tests.kit.capabilities import needs_ability
from tests.kit.mesh_worlds import be_rank, distribute, make_mesh


@pytest.fixture
def two_ranks() -> Iterator[None]:
    with be_rank(1, 2):
        yield


def show(held: LocalLeaf) -> list[tuple[Any, ...]]:
    return [(*piece.box, piece.tensor.tolist()) for piece in held.pieces]


# Kinds of leaves


def test_a_tensor_is_all_there() -> None:
    tensor = torch.nn.Parameter(torch.ones(2, 3))

    held = describe(tensor)

    assert (held.kind, held.global_shape, held.dtype, held.ranks) == ("plain", (2, 3), torch.float32, ())
    assert held.pieces[0].box == whole((2, 3))
    assert held.pieces[0].tensor is tensor


@pytest.mark.parametrize("value", [3, "text", None, {"a": 1}, torch.ones(2).to_sparse()])
def test_what_is_no_strided_tensor_is_plain_and_has_no_pieces(value: object) -> None:
    assert describe(value) == LocalLeaf("plain")


def test_a_value_of_each_rank_is_not_a_replica() -> None:
    tensor = torch.arange(3)

    assert describe(per_rank(tensor)).kind == "per rank"
    assert show(describe(per_rank(tensor))) == [((0,), (3,), [0, 1, 2])]
    assert describe(per_rank({"seed": 1})) == LocalLeaf("per rank")


def test_what_is_declared_twice_is_declared_once() -> None:
    value = per_rank(3)

    assert per_rank(value) is value


def test_a_declared_shard_is_a_box_of_the_global_tensor() -> None:
    part = torch.arange(6.0, requires_grad=True).reshape(2, 3)

    held = describe(shard(part, global_shape=[8, 3], offsets=[4, 0]))

    assert (held.kind, held.global_shape, held.dtype) == ("shards", (8, 3), torch.float32)
    assert show(held) == [((4, 0), (2, 3), part.tolist())]
    assert not held.pieces[0].tensor.requires_grad
    assert held.pieces[0].tensor.data_ptr() == part.data_ptr()


def test_an_empty_shard_has_no_pieces() -> None:
    assert describe(shard(torch.ones(0, 3), global_shape=(8, 3), offsets=(8, 0))).pieces == ()


def test_a_shard_of_nothing_is_the_same_for_all() -> None:
    held = describe(shard(torch.ones(0, 3), global_shape=(0, 3), offsets=(0, 0)))

    assert (held.kind, show(held)) == ("plain", [((0, 0), (0, 3), [])])


@pytest.mark.parametrize(
    ("tensor", "global_shape", "offsets"),
    [
        (torch.ones(2, 3), (8, 3), (7, 0)),
        (torch.ones(2, 3), (8, 3), (-1, 0)),
        (torch.ones(2, 3), (8, 2), (0, 0)),
        (torch.ones(0, 3), (8, 3), (9, 0)),
        (torch.ones(0), (-1,), (0,)),
    ],
)
def test_a_shard_outside_of_the_global_tensor_is_refused(
    tensor: torch.Tensor, global_shape: Sequence[int], offsets: Sequence[int]
) -> None:
    with pytest.raises(ValueError, match="is not inside of shape"):
        shard(tensor, global_shape=global_shape, offsets=offsets)


def test_a_shard_of_another_number_of_dims_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 dims needs as many in global_shape and offsets, not \(8,\) and \(0, 0\)"):
        shard(torch.ones(2, 3), global_shape=(8,), offsets=(0, 0))


@pytest.mark.parametrize(
    "value", [torch.ones(2).to_sparse(), 3, torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)]
)
def test_only_an_ordinary_tensor_can_be_declared_a_shard(value: Any) -> None:
    with pytest.raises(Unsupported, match="cannot be declared a shard: pass an ordinary strided tensor"):
        shard(value, global_shape=(4,), offsets=(0,))


@pytest.mark.usefixtures("two_ranks")
def test_a_part_of_a_tensor_cannot_be_declared_per_rank() -> None:
    tensor = distribute(torch.ones(4), make_mesh((2,)), [Shard(0)])

    for value in (tensor, shard(torch.ones(2), global_shape=(4,), offsets=(0,))):
        with pytest.raises(Unsupported, match="so it cannot be declared per rank"):
            describe(PerRank(value))


@needs_ability("locate a part that _StridedShard cuts without Shard")
@pytest.mark.usefixtures("two_ranks")
def test_the_pieces_of_a_parameter_are_its_memory() -> None:
    tensor = distribute(torch.arange(6.0), make_mesh((2,)), [_StridedShard(0, split_factor=2)])

    held = describe(torch.nn.Parameter(tensor))
    held.pieces[0].tensor.fill_(9)

    assert show(held) == [((2,), (1,), [9.0]), ((5,), (1,), [5.0])]
    assert tensor.to_local().tolist() == [9.0, 5.0]


@pytest.mark.usefixtures("two_ranks")
def test_a_local_part_that_is_still_on_its_way_is_waited_for() -> None:
    tensor = distribute(torch.arange(4), make_mesh((2,)), [Shard(0)])
    tensor._local_tensor = AsyncCollectiveTensor(tensor._local_tensor)

    assert show(describe(tensor)) == [((2,), (2,), [2, 3])]


@pytest.mark.usefixtures("two_ranks")
def test_a_local_part_that_is_no_ordinary_tensor_is_refused() -> None:
    tensor = distribute(torch.arange(4), make_mesh((2,)), [Shard(0)])
    tensor._local_tensor = torch.ones(2, dtype=torch.int64).to_sparse()

    with pytest.raises(Unsupported, match=r"its local part is a torch.sparse_coo tensor of torch.int64"):
        describe(tensor)


def make_sharded(parts: Sequence[tuple[Sequence[int], torch.Tensor]], size: Sequence[int]) -> ShardedTensor:
    """Return a ShardedTensor of two ranks, of which this one, the second, has some parts, and the first the rest."""
    local = [LocalShard(part, ShardMetadata(list(offsets), list(part.shape), "rank:1/cpu")) for offsets, part in parts]
    missing = size[0] - sum(len(part) for _, part in parts)
    other = ShardMetadata([0] * len(size), [missing, *size[1:]], "rank:0/cpu")
    metadata = ShardedTensorMetadata(
        [other, *(each.metadata for each in local)],
        torch.Size(size),
        TensorProperties(dtype=torch.float32),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


@pytest.mark.usefixtures("two_ranks")
def test_a_sharded_tensor_is_its_local_shards() -> None:
    tensor = make_sharded([((2, 0), torch.ones(1, 2)), ((3, 0), torch.zeros(2, 2))], (5, 2))

    held = describe(tensor)

    assert (held.kind, held.global_shape, held.dtype) == ("shards", (5, 2), torch.float32)
    assert show(held) == [((2, 0), (1, 2), [[1.0, 1.0]]), ((3, 0), (2, 2), [[0.0, 0.0], [0.0, 0.0]])]


@needs_ability("view the local shards of a DTensor")
@pytest.mark.usefixtures("two_ranks")
def test_a_dtensor_of_several_local_shards_asks_them() -> None:
    parts = [torch.zeros(4, 1), torch.ones(4, 2)]
    local = LocalShardsWrapper(parts, [(0, 3), (0, 4)])
    tensor = DTensor.from_local(
        local, make_mesh((2,)), [Shard(1)], run_check=False, shape=torch.Size((4, 6)), stride=(6, 1)
    )

    held = describe(tensor)

    assert [piece.box for piece in held.pieces] == [Box((0, 3), (4, 1)), Box((0, 4), (4, 2))]
    assert [piece.tensor.data_ptr() for piece in held.pieces] == [part.data_ptr() for part in parts]
    assert (held.global_shape, held.ranks, held.mesh_ranks) == ((4, 6), (1,), (0, 1))


@needs_ability("view the local shards of a DTensor")
@pytest.mark.usefixtures("two_ranks")
def test_a_dtensor_of_no_local_shards_holds_nothing() -> None:
    local = LocalShardsWrapper([], [])
    tensor = DTensor.from_local(
        local, make_mesh((2,)), [Shard(0)], run_check=False, shape=torch.Size((4, 6)), stride=(6, 1)
    )

    assert describe(tensor).pieces == ()


@dataclass
class Table:
    """What follows torch's protocol and is no tensor: rows of a table of 6 by 2."""

    rows: torch.Tensor
    first: int
    claimed: int | None = None

    def __create_write_items__(self, fqn: str, value: object) -> list[Any]:
        data = SimpleNamespace(size=torch.Size((6, 2)), properties=SimpleNamespace(dtype=self.rows.dtype))
        return [SimpleNamespace(tensor_data=data)] if len(self.rows) else []

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        size = torch.Size((self.claimed or len(self.rows), 2))
        return [ChunkStorageMetadata(offsets=torch.Size((self.first, 0)), sizes=size)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if index.offset != torch.Size((self.first, 0)):
            raise ValueError("no such rows")
        return self.rows


def test_what_follows_the_protocol_is_asked_for_its_boxes() -> None:
    held = describe(Table(torch.ones(2, 2), 4))

    assert (held.kind, held.global_shape, held.dtype) == ("shards", (6, 2), torch.float32)
    assert show(held) == [((4, 0), (2, 2), [[1.0, 1.0], [1.0, 1.0]])]
    assert describe(Table(torch.ones(0, 2), 0)) == LocalLeaf("shards")


@pytest.mark.parametrize("table", [Table(torch.ones(2, 2), 5), Table(torch.ones(2, 2), 0, claimed=3)])
def test_a_box_that_is_not_as_it_says_is_refused(table: Table) -> None:
    with pytest.raises(Unsupported, match=r"its local part of shape \(2, 2\) .* rebuild it from parts that match"):
        describe(table)


# Finding parts


def at(*offset: int, hint: int | None = None) -> MetadataIndex:
    return MetadataIndex("model.w", offset, hint)


@pytest.mark.parametrize("offset", [None, (0, 0)])
def test_a_tensor_is_found_at_its_origin(offset: tuple[int, ...] | None) -> None:
    tensor = torch.ones(2, 2)

    assert find_tensor_shard(tensor, MetadataIndex("model.w", offset)) is tensor


def test_what_is_not_found_is_the_error_of_a_mapping_and_that_of_torch() -> None:
    for error in (KeyError, ValueError, NotFound):
        with pytest.raises(error):
            find_tensor_shard(torch.ones(2, 2), at(1, 0))
        with pytest.raises(error):
            find_state_dict_object({}, at(0))


def test_a_tensor_is_found_nowhere_else() -> None:
    with pytest.raises(
        ShardNotFound, match=r"model.w: no part was found at offset \(1, 0\); it is not a shard: all of it is"
    ):
        find_tensor_shard(torch.ones(2, 2), at(1, 0))


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("hint", [None, 0, 1, 7, -1])
def test_a_shard_is_found_whatever_the_hint(hint: int | None) -> None:
    tensor = make_sharded([((2, 0), torch.ones(1, 2)), ((3, 0), torch.zeros(2, 2))], (5, 2))

    assert find_tensor_shard(tensor, at(3, 0, hint=hint)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.usefixtures("two_ranks")
def test_a_shard_that_is_elsewhere_is_not_found() -> None:
    tensor = make_sharded([((2, 0), torch.ones(1, 2)), ((3, 0), torch.zeros(2, 2))], (5, 2))

    with pytest.raises(
        ShardNotFound, match=r"model.w: no part .* at offset \(0, 0\); this rank has parts at \(2, 0\) and"
    ):
        find_tensor_shard(tensor, at(0, 0))
    with pytest.raises(ShardNotFound, match=r"model.w: no part was found without an offset; this rank has parts at"):
        find_tensor_shard(tensor, MetadataIndex("model.w"))


@needs_ability("locate a part that _StridedShard cuts without Shard")
@pytest.mark.usefixtures("two_ranks")
def test_the_part_of_a_dtensor_is_found_by_its_offset() -> None:
    tensor = distribute(torch.arange(6), make_mesh((2,)), [_StridedShard(0, split_factor=2)])

    assert find_tensor_shard(tensor, MetadataIndex("model.w")).tolist() == [2, 5]
    assert find_tensor_shard(tensor, at(5)).tolist() == [5]
    with pytest.raises(ShardNotFound, match=r"at offset \(0,\); this rank has parts at \(2,\) and \(5,\)"):
        find_tensor_shard(tensor, at(0))


@pytest.mark.usefixtures("two_ranks")
def test_a_dtensor_without_a_part_here_says_so() -> None:
    tensor = distribute(torch.arange(1), make_mesh((2,)), [Shard(0)])

    with pytest.raises(ShardNotFound, match=r"offset \(0,\); this rank has no part of it"):
        find_tensor_shard(tensor, at(0))


@pytest.mark.usefixtures("two_ranks")
def test_no_part_of_a_partial_is_given_out() -> None:
    tensor = DTensor.from_local(torch.ones(4), make_mesh((2,)), [Partial()], run_check=False)

    with pytest.raises(Unsupported, match="redistribute"):
        find_tensor_shard(tensor, MetadataIndex("model.w"))


@needs_ability("view the local shards of a DTensor")
@pytest.mark.usefixtures("two_ranks")
def test_a_local_shard_of_a_dtensor_is_asked_for() -> None:
    local = LocalShardsWrapper([torch.zeros(4, 1), torch.ones(4, 2)], [(0, 3), (0, 4)])
    tensor = DTensor.from_local(
        local, make_mesh((2,)), [Shard(1)], run_check=False, shape=torch.Size((4, 6)), stride=(6, 1)
    )

    assert find_tensor_shard(tensor, at(0, 4)).shape == (4, 2)
    with pytest.raises(
        ShardNotFound, match=r"model.w: no part was found at offset \(0, 0\); a LocalShardsWrapper does not"
    ):
        find_tensor_shard(tensor, at(0, 0))


def test_a_declared_shard_is_found() -> None:
    part = shard(torch.ones(2), global_shape=(4,), offsets=(2,))

    assert find_tensor_shard(part, at(2)).tolist() == [1.0, 1.0]
    assert find_tensor_shard(part, MetadataIndex("model.w")) is part.tensor
    with pytest.raises(ShardNotFound, match=r"this rank has parts at \(2,\)"):
        find_tensor_shard(part, at(0))


class OnlyShards:
    """Has one method of torch's protocol for checkpoints, and not the other."""

    def __init__(self) -> None:
        self.part = torch.ones(1, 2)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if index.offset not in (None, torch.Size((4, 0))):
            raise ValueError("no such rows")
        return self.part


class BothMethods(OnlyShards):
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size((4, 0)), sizes=torch.Size((1, 2)))]


class OnlyChunkList(torch.Tensor):
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return []


class ShardsOfTensor(OnlyShards, torch.Tensor):
    def __init__(self, *args: object) -> None:
        super().__init__()


class BothOfTensor(BothMethods, torch.Tensor):
    def __init__(self, *args: object) -> None:
        super().__init__()


def make_dtensor(local: torch.Tensor) -> DTensor:
    mesh = make_mesh((2,))
    return DTensor.from_local(local, mesh, [Replicate()], run_check=False, shape=local.shape, stride=local.stride())


FOUND_AS_TORCH: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.zeros(6, 2),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(6, 2)),
    "tensor with the method": lambda: ShardsOfTensor(torch.zeros(6, 2)),
    "tensor with both methods": lambda: BothOfTensor(torch.zeros(6, 2)),
    "tensor with the other method": lambda: torch.zeros(6, 2).as_subclass(OnlyChunkList),
    "object with the method": OnlyShards,
    "object with both methods": BothMethods,
    "ShardedTensor": lambda: make_sharded([((4, 0), torch.ones(1, 2)), ((5, 0), torch.zeros(1, 2))], (6, 2)),
    "DTensor of a tensor": lambda: make_dtensor(torch.zeros(6, 2)),
    "DTensor of a tensor with the method": lambda: make_dtensor(ShardsOfTensor(torch.zeros(6, 2))),
    "DTensor of a tensor with both methods": lambda: make_dtensor(BothOfTensor(torch.zeros(6, 2))),
    "number": lambda: 7,
}
INDICES = [(None, None), ((0, 0), None), ((4, 0), None), ((4, 0), 1), ((1, 1), 0)]


REFUSED = object()


def find_or_refuse(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except (ValueError, AttributeError):  # the latter for what has no size
        return REFUSED


def locate(found: Any) -> object:
    """Return what identifies a result: views of the same memory are equal."""
    return (found.data_ptr(), found.shape) if isinstance(found, torch.Tensor) else id(found)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("kind", FOUND_AS_TORCH)
@pytest.mark.parametrize(("offset", "hint"), INDICES)
def test_what_torch_finds_is_found_here(kind: str, offset: tuple[int, ...] | None, hint: int | None) -> None:
    value = FOUND_AS_TORCH[kind]()
    index = MetadataIndex("w", offset, hint)

    theirs = find_or_refuse(lambda: torch_checkpoint.find_tensor_shard(value, index))
    ours = find_or_refuse(lambda: find_tensor_shard(value, index))
    in_their_state = find_or_refuse(lambda: torch_checkpoint.find_state_dict_object({"w": value}, index))
    in_our_state = find_or_refuse(lambda: find_state_dict_object({"w": value}, index))

    if kind == "DTensor of a tensor" and offset not in (None, (0, 0)):
        # Torch returns the local part, whatever the offset.
        theirs = in_their_state = REFUSED
    elif isinstance(value, OnlyShards) and not isinstance(value, torch.Tensor) and in_their_state is REFUSED:
        # Torch asks only tensors for their parts.
        in_their_state = theirs
    elif kind == "number":
        theirs = ours  # only tensors are passed to find_tensor_shard
    assert locate(ours) == locate(theirs)
    assert locate(in_our_state) == locate(in_their_state)


@pytest.mark.usefixtures("two_ranks")
def test_things_are_found_in_a_state_dict() -> None:
    table = Table(torch.ones(2, 2), 4)
    state = {
        "model.w": distribute(torch.arange(6), make_mesh((2,)), [Replicate()]),
        "table": table,
        "step": 7,
        "seed": per_rank(3),
    }

    assert find_state_dict_object(state, at(0)).tolist() == [0, 1, 2, 3, 4, 5]
    assert find_state_dict_object(state, MetadataIndex("table", (4, 0))) is table.rows
    assert find_state_dict_object(state, MetadataIndex("step")) == 7
    assert find_state_dict_object(state, MetadataIndex("seed")) == 3


def test_what_a_state_dict_does_not_hold_is_named() -> None:
    state = {"step": 7, "table": Table(torch.ones(2, 2), 4)}

    with pytest.raises(ShardNotFound, match=r"model.w: no such name; this state dict has 2 names"):
        find_state_dict_object(state, at(0))
    with pytest.raises(
        ShardNotFound, match=r"step: no part was found at offset \(0,\); it is a int, which has no parts"
    ):
        find_state_dict_object(state, MetadataIndex("step", (0,)))
    with pytest.raises(
        ShardNotFound, match=r"table: no part was found at offset \(0, 0\); a Table does not find it \(no su"
    ):
        find_state_dict_object(state, MetadataIndex("table", (0, 0)))
