"""A target of a graph has a name only if the name leads to the same function in every process."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from holdfast.compile_cache.code.targets import name_target
from holdfast.compile_cache.key_parts import Uncacheable

_ADD: Any = torch.ops.aten.add


def user_function(x: object) -> object:
    return x


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (_ADD.Tensor, "aten::add.Tensor"),
        (_ADD, "aten::add (any overload)"),
        (torch.ops.higher_order.cond, "higher_order.cond"),
        (F.silu, "torch.nn.functional.silu"),
        (torch.Tensor.add, "Tensor.add"),
        (operator.mul, "_operator.mul"),
        (math.sqrt, "math.sqrt"),
        (len, "builtins.len"),
    ],
)
def test_functions_of_torch_and_python_have_names(target: object, name: str) -> None:
    assert name_target(target, {}) == name


def test_a_function_of_the_user_is_named_by_its_version() -> None:
    name = f"{__name__}.user_function"

    assert name_target(user_function, {name: "7"}) == f"{name} version 7"
    with pytest.raises(Uncacheable, match=r'pass versions=\{".*user_function": "1"\}'):
        name_target(user_function, {})


def test_a_function_that_its_name_does_not_lead_to_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    silu = F.silu
    monkeypatch.setattr(F, "silu", F.relu)

    with pytest.raises(Uncacheable, match=r"is not the function that torch\.nn\.functional\.silu refers to"):
        name_target(silu, {})


def test_an_object_has_no_name() -> None:
    with pytest.raises(Uncacheable, match="which is neither a function nor an operator"):
        name_target(object(), {})
