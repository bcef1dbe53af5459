"""Setters and copies of state restore what they found, also if one of several fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from holdfast.snapshot.into.undo import (
    FieldSetter,
    ItemSetter,
    PerRankSetter,
    keep_grad,
    keep_module,
    keep_object,
    keep_optimizer,
    keep_tensors,
)
from holdfast.tensors.sharding import PerRank
from holdfast.tensors.storage import alloc_storage, free_storage, is_allocated


@dataclass
class Point:
    x: object


def test_setters_assign_a_value_and_restore_the_old_one() -> None:
    point, items = Point(1), [1, 2]
    for setter in (FieldSetter(point, "x"), ItemSetter(items, 1)):
        undo = setter.keep()
        setter("new")
        assert "new" in (point.x, items[1])
        undo()

    assert (point.x, items) == (1, [1, 2])


def test_a_value_that_is_declared_per_rank_stays_declared() -> None:
    items: list[Any] = [None]
    PerRankSetter(ItemSetter(items, 0))(5)

    assert isinstance(items[0], PerRank)
    assert items[0].value == 5


def test_tensors_get_their_bits_back_and_freed_ones_are_freed_again() -> None:
    tensor, freed = torch.tensor([1.0, float("nan")]), torch.ones(3)
    bits = tensor.clone().view(torch.int32)
    free_storage(freed)
    undo = keep_tensors([tensor, freed])
    tensor.zero_()
    alloc_storage(freed, freed.shape)
    undo()

    assert torch.equal(tensor.view(torch.int32), bits)
    assert not is_allocated(freed)


def test_a_gradient_is_restored_as_the_same_object() -> None:
    tensor = torch.nn.Parameter(torch.ones(2))
    tensor.grad = grad = torch.ones(2)
    undo = keep_grad(tensor)
    tensor.grad = None
    undo()

    assert tensor.grad is grad


def test_a_module_gets_values_attributes_and_replaced_parameters_back() -> None:
    module: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    weight = module[0].weight
    undo = keep_module(module)
    module[0].weight = torch.nn.Parameter(torch.zeros(2, 2))
    module[1].running_mean.fill_(7)
    module.loaded = True
    undo()

    assert module[0].weight is weight
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not hasattr(module, "loaded")


def test_an_optimizer_gets_its_state_and_groups_back() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=0.5)
    parameter.grad = torch.ones(2)
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    undo = keep_optimizer(optimizer)
    other = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.load_state_dict(other.state_dict())
    undo()

    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(torch.equal(value, before[key]) for key, value in optimizer.state[parameter].items())


class Refusing:
    """Refuses every state; its attribute can be restored without its method."""

    def __init__(self) -> None:
        self.value = 1

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("not this one")


def test_attributes_are_restored_although_the_object_refuses_its_old_state() -> None:
    target = Refusing()
    undo = keep_object(target)
    target.value = 2

    with pytest.raises(ValueError, match="not this one"):
        undo()
    assert target.value == 1
