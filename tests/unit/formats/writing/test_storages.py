"""Which tensors share a storage in a torch file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.formats.writing.plan import TensorPlan, plan_tensors, select_tree
from holdfast.formats.writing.torch_file import StoragePlan, plan_storages

Plan = Callable[[Any], tuple[TensorPlan, StoragePlan]]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Return what saves a tree, and plans its storages."""
    store = holdfast.open(tmp_path / "store")

    def run(tree: Any) -> tuple[TensorPlan, StoragePlan]:
        store.save("a", tree)
        opened = store.snapshot("a").open()
        tensors = plan_tensors(opened, select_tree(opened, "", ()))
        return tensors, plan_storages(opened, list(tensors.tensors.values()))

    return run


def _find_storages(tensors: TensorPlan, found: StoragePlan) -> dict[str, int]:
    return {name: found.views[each.tensor.number].storage for name, each in tensors.tensors.items()}


def test_separate_tensors_have_separate_storages(plan: Plan) -> None:
    tensors, found = plan({"a": torch.ones(2), "b": torch.ones(2)})

    assert _find_storages(tensors, found) == {"a": 0, "b": 1}
    assert all(found.is_whole(each.tensor) for each in tensors.tensors.values())


def test_views_are_parts_of_the_tensor_that_contains_them(plan: Plan) -> None:
    base = torch.arange(30.0)

    tensors, found = plan({"part": base[4:10], "base": base, "matrix": base.view(5, 6)[1:, ::2]})

    assert len(found.storages) == 1
    views = {name: found.views[each.tensor.number] for name, each in tensors.tensors.items()}
    assert [(view.offset, view.stride) for view in views.values()] == [(4, (1,)), (0, (1,)), (6, (6, 2))]
    assert [found.is_whole(each.tensor) for each in tensors.tensors.values()] == [False, True, False]


def test_tensors_that_overlap_in_part_are_written_apart_and_reported(plan: Plan) -> None:
    base = torch.arange(30.0)

    tensors, found = plan({"a": base[:20], "b": base[10:]})

    assert _find_storages(tensors, found) == {"a": 0, "b": 1}
    assert [each.name for each in found.left_out] == ["a", "b"]


def test_parts_that_do_not_overlap_are_written_apart(plan: Plan) -> None:
    base = torch.arange(30.0)

    tensors, found = plan({"a": base[:10], "b": base[20:]})

    assert _find_storages(tensors, found) == {"a": 0, "b": 1}
    assert found.left_out == []


def test_one_memory_in_two_dtypes_is_written_apart(plan: Plan) -> None:
    base = torch.arange(4, dtype=torch.int32)

    tensors, found = plan({"a": base, "b": base.view(torch.float32)})

    assert _find_storages(tensors, found) == {"a": 0, "b": 1}


def test_gaps_between_items_are_not_written(plan: Plan) -> None:
    tensors, found = plan({"x": torch.randn(300, 300)[:, ::100]})

    (tensor,) = [each.tensor for each in tensors.tensors.values()]
    assert found.views[tensor.number].stride == (3, 1)
    assert found.storages[0].size_bytes == 300 * 3 * 4
