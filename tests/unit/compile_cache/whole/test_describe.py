"""A description contains the code and state of a callable, or says why it has none."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.compile_cache.whole.describe import describe_call, describe_tensor

X = torch.ones(2, 4)


class _Called(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return x


class _Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(os.environ)


class _Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class _Holding(nn.Module):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (_Called(4, 4), "defines __call__"),
        (_Reading(), "os.environ|posix|_Environ"),
        (_Random(), "random"),
        (_Holding(torch.Generator()), "Generator, which has no digest"),
        (_Holding(torch.ones(2, device="meta")), "only dense ones on CPU"),
        (_Holding(torch.ones(2).to_sparse()), "only dense ones on CPU"),
        (len, "neither a module nor a function"),
    ],
    ids=str,
)
def test_what_cannot_be_described_is_refused_with_the_reason(model: Any, reason: str) -> None:
    with pytest.raises(Uncacheable, match=reason):
        describe_call(model, (X,), {})


@pytest.mark.parametrize(
    "value", [object(), {1: X}, torch.float32, nn.Linear(2, 2)], ids=["object", "dict", "dtype", "module"]
)
def test_arguments_of_other_kinds_are_refused(value: object) -> None:
    with pytest.raises(Uncacheable, match="an argument is a"):
        describe_call(nn.Linear(4, 4), (value,), {})


def test_tensors_of_the_callable_come_first() -> None:
    model = nn.Linear(4, 4)

    found = describe_call(model, (X,), {})

    assert [each is model.weight for each in found.walk.tensors] == [True, False, False]
    assert found.num_own_tensors == 2
    found.forget_arguments()
    assert len(found.walk.tensors) == 2


def test_the_values_of_a_tensor_are_not_part_of_its_description() -> None:
    assert describe_tensor(torch.ones(4)) == describe_tensor(torch.zeros(4))
    assert describe_tensor(torch.ones(4)) != describe_tensor(torch.ones(4).bool())


def test_a_model_of_many_layers_can_be_described() -> None:
    model: nn.Module = nn.Identity()
    for _ in range(60):
        model = nn.Sequential(nn.Linear(4, 4), model)

    assert describe_call(model, (X,), {}).num_own_tensors == 120
