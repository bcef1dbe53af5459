"""Operators of torch are known by their namespace."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.compile_cache.code.operators import is_builtin, name_operator

_ADD: Any = torch.ops.aten.add


def test_operators_of_torch_are_known_by_their_namespace() -> None:
    assert name_operator(_ADD) == "aten::add"
    assert is_builtin("aten::add")
    assert not is_builtin("mine::add")
