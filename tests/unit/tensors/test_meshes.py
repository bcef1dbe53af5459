"""The boxes of DTensors equal those that torch cuts, for each rank in turn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from holdfast.errors import Unsupported
from holdfast.repo.format.boxes import Box, slices
from holdfast.tensors.sharding import Cut, Layouts, LocalLeaf, describe, plan_runs
from tests.kit.capabilities import needs_ability
from tests.kit.mesh_worlds import be_rank, distribute, make_mesh
from tests.kit.tilings import shapes


@needs_ability("locate a part that _StridedShard cuts without Shard")
@given(st.integers(0, 60), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=3), st.data())
def test_runs_are_what_torch_leaves_of_a_dim(length: int, axes: list[tuple[int, int]], data: st.DataObject) -> None:
    rows = torch.arange(length)
    cuts = []
    for parts, stripes in axes:
        cut = Cut(0, parts, data.draw(st.integers(0, parts - 1)), stripes)
        placement: Any = Shard(0) if stripes == 1 else _StridedShard(0, split_factor=stripes)
        rows = placement._split_tensor(rows, parts, with_padding=False)[0][cut.position]
        cuts.append(cut)

    runs = plan_runs(length, cuts)

    assert [row for run in runs for row in range(run.start, run.start + run.size)] == rows.tolist()
    for run in runs:
        assert rows[run.local_start : run.local_start + run.size].tolist()[:1] == [run.start][: run.size]


Case = tuple[tuple[int, ...], tuple[int, ...], list[Any]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a global shape, the shape of a mesh and a placement for each of its axes."""
    shape = draw(shapes(min_side=0, max_side=11))
    mesh_shape = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda sides: math.prod(sides) <= 8).map(tuple)
    )
    dims = st.integers(0, len(shape) - 1)
    strided = st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(2, 4))
    kinds: st.SearchStrategy[Placement] = st.one_of(dims.map(Shard), st.builds(Replicate), strided)
    return shape, mesh_shape, [draw(kinds) for _ in mesh_shape]


def hold_everywhere(full: torch.Tensor, mesh_shape: tuple[int, ...], placements: list[Any]) -> list[LocalLeaf]:
    """Return what each rank holds."""
    held = []
    world_size = math.prod(mesh_shape)
    for rank in range(world_size):
        with be_rank(rank, world_size):
            held.append(describe(distribute(full, make_mesh(mesh_shape), placements)))
    return held


@needs_ability("locate a part that _StridedShard cuts without Shard")
@given(cases())
@example(((16, 3), (2, 4), [_StridedShard(0, split_factor=4), Shard(0)]))  # FSDP2 over tensor parallelism
@example(((26, 3), (2, 4), [_StridedShard(0, split_factor=4), Shard(0)]))
@example(((16, 6), (2, 2, 2), [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]))
@example(((3, 5), (8,), [Shard(0)]))
@example(((16, 6), (2, 2), [_StridedShard(0, split_factor=4), Replicate()]))
def test_the_parts_of_all_ranks_are_the_tensor_once_for_each_replica(case: Case) -> None:
    shape, mesh_shape, placements = case
    full = torch.arange(math.prod(shape)).reshape(shape)

    held = hold_everywhere(full, mesh_shape, placements)

    counts = np.zeros(shape, int)
    for each in held:
        assert (each.global_shape, each.dtype) == (shape, torch.int64)
        for box, tensor in each.pieces:
            assert torch.equal(tensor, full[slices(box)])
            counts[slices(box)] += 1
    copies = math.prod(size for size, placement in zip(mesh_shape, placements, strict=True) if placement.is_replicate())
    assert (counts == copies).all()


@needs_ability("locate a part that _StridedShard cuts without Shard")
@given(cases())
def test_the_ranks_that_hold_the_same_are_known_to_each_other(case: Case) -> None:
    shape, mesh_shape, placements = case
    full = torch.arange(math.prod(shape)).reshape(shape)

    held = hold_everywhere(full, mesh_shape, placements)

    for rank, each in enumerate(held):
        boxes = [piece.box for piece in each.pieces]
        same = [other for other in range(len(held)) if [piece.box for piece in held[other].pieces] == boxes]
        assert rank in each.ranks
        assert set(each.ranks) <= set(same)
        assert not boxes or list(each.ranks) == same
        assert each.mesh_ranks == tuple(range(len(held)))


@needs_ability("cut a tensor unevenly with _StridedShard")
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support:UserWarning")
def test_the_parameters_of_a_model_that_is_cut_twice_are_boxes() -> None:
    # One rank only: torch keeps the meshes of operations that it has seen, whatever rank it was then.
    with be_rank(4, 6):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("fsdp", "tp"))
        model = torch.nn.Sequential(torch.nn.Linear(7, 26), torch.nn.Linear(26, 5))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["fsdp"])

        held = {name: describe(parameter) for name, parameter in model.named_parameters()}

    # Of 26 rows the second of three has 9:18, and of those the second of two has the last four.
    assert {name: [piece.box for piece in each.pieces] for name, each in held.items()} == {
        "0.weight": [Box((14, 0), (4, 7))],
        "0.bias": [Box((14,), (4,))],
        "1.weight": [Box((3, 9), (2, 9))],
        "1.bias": [Box((3,), (2,))],
    }
    assert [each.ranks for each in held.values()] == [(4,), (4,), (4,), (3, 4, 5)]


def test_a_tensor_that_is_not_cut_is_a_replica() -> None:
    held = hold_everywhere(torch.arange(6).reshape(2, 3), (2, 2), [Replicate(), Replicate()])

    assert Counter(each.kind for each in held) == {"replica": 4}
    assert held[3].ranks == (0, 1, 2, 3)


def test_a_tensor_that_is_cut_along_one_axis_has_replicas_along_the_other() -> None:
    held = hold_everywhere(torch.arange(8), (2, 2), [Replicate(), Shard(0)])

    assert [each.kind for each in held] == ["shards"] * 4
    assert [each.ranks for each in held] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_a_scalar_is_a_replica_with_one_item() -> None:
    (held,) = hold_everywhere(torch.tensor(4.0), (1,), [Replicate()])

    assert held.kind == "replica"
    assert [(piece.box, float(piece.tensor)) for piece in held.pieces] == [(((), ()), 4.0)]


def test_a_rank_that_gets_no_rows_holds_nothing() -> None:
    held = hold_everywhere(torch.arange(3), (8,), [Shard(0)])

    assert [len(each.pieces) for each in held] == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_nothing_is_the_same_on_every_rank_however_it_is_cut(shape: tuple[int, ...]) -> None:
    held = hold_everywhere(torch.zeros(shape), (2, 2), [Shard(0), Replicate()])

    for each in held:
        assert (each.kind, each.ranks) == ("replica", (0, 1, 2, 3))
        assert [(piece.box.sizes, tuple(piece.tensor.shape)) for piece in each.pieces] == [(shape, shape)]


def test_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    with be_rank(0, 4):
        mesh = make_mesh((2,), first_rank=2)
        local = torch.empty(0)
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((8,)), stride=(1,))

        held = describe(tensor)

    assert (held.kind, held.global_shape, held.pieces, held.ranks) == ("shards", (8,), (), ())
    assert held.mesh_ranks == (2, 3)


@pytest.mark.parametrize(("names", "axis"), [(("dp", "tp"), "'tp'"), (None, "1")])
def test_a_partial_is_refused_by_its_axis(names: tuple[str, ...] | None, axis: str) -> None:
    with be_rank(0, 4):
        mesh = make_mesh((2, 2), names=names)
        tensor = DTensor.from_local(torch.ones(4), mesh, [Shard(0), Partial("avg")], run_check=False)

        with pytest.raises(Unsupported, match=rf"Partial\(avg\) over mesh axis {axis} .*: redistribute it to Rep"):
            describe(tensor)


def test_a_placement_of_another_kind_is_refused() -> None:
    class Odd(Placement):
        def __repr__(self) -> str:
            return "Odd()"

    with be_rank(0, 2):
        tensor = distribute(torch.ones(4), make_mesh((2,)), [Shard(0)])
        tensor._spec.placements = (Odd(),)

        with pytest.raises(Unsupported, match=r"Odd\(\) over mesh axis 0 has a placement that is not supported"):
            describe(tensor)


def test_a_local_part_of_another_shape_is_refused() -> None:
    with be_rank(0, 2):
        mesh = make_mesh((2,))
        tensor = DTensor.from_local(
            torch.ones(3), mesh, [Shard(0)], run_check=False, shape=torch.Size((8,)), stride=(1,)
        )

        with pytest.raises(Unsupported, match=r"shape \(3,\) instead of \(4,\): pass shape="):
            describe(tensor)


def test_a_torch_that_cuts_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with be_rank(1, 2):
        tensor = distribute(torch.ones(4), make_mesh((2,)), [Shard(0)])
        chunk = ChunkStorageMetadata(offsets=torch.Size((0,)), sizes=torch.Size((2,)))
        monkeypatch.setattr(DTensor, "__create_chunk_list__", lambda _: [chunk])

        with pytest.raises(Unsupported, match="in a way that is not supported: update holdfast"):
            describe(tensor)


def test_layouts_are_worked_out_once_for_tensors_that_are_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original: Callable[[DTensor], object] = DTensor.__create_chunk_list__

    def ask(tensor: DTensor) -> object:
        asked.append(tensor)
        return original(tensor)

    monkeypatch.setattr(DTensor, "__create_chunk_list__", ask)
    layouts = Layouts()

    with be_rank(1, 4):
        mesh = make_mesh((2, 2))
        for fill in range(3):
            tensor = distribute(torch.full((4,), fill), mesh, [Shard(0), Replicate()])
            assert describe(tensor, layouts=layouts).pieces[0].tensor.tolist() == [fill, fill]
        assert len(asked) == 1
        describe(distribute(torch.ones(6), mesh, [Shard(0), Replicate()]), layouts=layouts)

    assert len(asked) == 2
