"""The items of a save plan as sources: grouped by size, by whole tensor or by box, and refused by name."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from holdfast.distributed.dcp.writer import Written, is_whole_here, name_piece, plan_groups
from holdfast.errors import Mismatch, Unsupported
from holdfast.repo.write.part_writer import PlacedSource


class Planner:
    """Resolves items to given values, by name and offset."""

    def __init__(self, values: dict[tuple[str, int], Any]) -> None:
        self._values = values

    def resolve_data(self, item: WriteItem) -> Any:
        offset = item.index.offset
        return self._values[item.index.fqn, offset[0] if offset else 0]


def shard(fqn: str, start: int, size: int, length: int) -> WriteItem:
    """Return the item of a part of a float32 vector."""
    chunk = ChunkStorageMetadata(torch.Size([start]), torch.Size([size]))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size([length]))
    return WriteItem(MetadataIndex(fqn, torch.Size([start])), WriteItemType.SHARD, tensor_data=data)


def payload(fqn: str) -> WriteItem:
    return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)


def make_groups(
    items: list[WriteItem],
    values: dict[tuple[str, int], Any],
    written: Written | None = None,
    *,
    limit_bytes: int = 1 << 20,
    is_only_rank: bool = False,
) -> list[list[PlacedSource]]:
    planner: SavePlanner = Planner(values)  # type: ignore[assignment]  # only this method is called
    plan = SavePlan(items)
    makers = plan_groups(plan, planner, written or Written(), limit_bytes=limit_bytes, is_only_rank=is_only_rank)
    return [list(make()) for make in makers]


def test_tensors_are_grouped_up_to_the_limit_and_a_larger_one_is_a_group() -> None:
    sizes = {"a": 10, "b": 10, "c": 100, "d": 10}
    items = [shard(name, 0, size, size) for name, size in sizes.items()]

    groups = make_groups(items, {(name, 0): torch.zeros(size) for name, size in sizes.items()}, limit_bytes=80)

    assert [[placed.source.name for placed in group] for group in groups] == [["a", "b"], ["c"], ["d"]]


def test_a_part_of_a_tensor_is_placed_in_the_whole_entry() -> None:
    ((placed,),) = make_groups([shard("w", 4, 2, 8)], {("w", 4): torch.ones(2)})

    assert (placed.source.name, placed.place.size_bytes, list(placed.place.boxes)) == ("w", 32, [(16, 8)])


def test_an_incomplete_tensor_of_the_only_rank_is_stored_by_box() -> None:
    items = [shard("w", 0, 2, 8), shard("w", 4, 2, 8)]
    values = {("w", 0): torch.ones(2), ("w", 4): torch.ones(2)}

    (group,) = make_groups(items, values, is_only_rank=True)

    assert [placed.source.name for placed in group] == ["w@0", "w@4"] == [name_piece("w", (at,)) for at in (0, 4)]
    assert not is_whole_here(items)
    assert is_whole_here([shard("w", 0, 4, 8), shard("w", 4, 4, 8)])


def test_facts_that_only_the_data_shows_are_noted() -> None:
    written = Written(notes_refused=True)
    values = {("w", 0): torch.ones(2, dtype=torch.bfloat16), ("n", 0): io.BytesIO(b"not a checkpoint")}

    make_groups([shard("w", 0, 2, 2), payload("n")], values, written)

    assert (written.dtypes, written.sizes) == ({"w": "bfloat16"}, {"n": 16})
    assert set(written.refused) == {"n"}


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (torch.ones(3), Mismatch, r"w: the planner returned shape \(3,\)"),
        (io.BytesIO(), Unsupported, "w: DCP saves only ordinary strided tensors"),
        (torch.ones(2).to_sparse(), Unsupported, "w: DCP saves only ordinary strided tensors"),
    ],
    ids=["shape", "stream", "sparse"],
)
def test_what_cannot_be_stored_is_refused_by_name(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make_groups([shard("w", 0, 2, 2)], {("w", 0): value})


def test_a_tensor_that_was_planned_as_bytes_is_refused() -> None:
    with pytest.raises(Unsupported, match="n: the planner returned a Tensor for an item that it planned as bytes"):
        make_groups([payload("n")], {("n", 0): torch.ones(1)})
