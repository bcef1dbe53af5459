"""Which inputs share memory, and how symbolic sizes are named."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from holdfast.compile_cache.key.inputs import Symbols, may_share


def test_inputs_may_share_memory_if_they_do_or_if_it_cannot_be_seen() -> None:
    base = torch.zeros(8)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(base)

    assert may_share([base[:6], base[2:]])
    assert not may_share([base, base.clone(), 3])
    assert may_share([fake, fake])


@given(order=st.permutations(["s9", "s1", "s55"]))
def test_symbols_are_named_as_they_appear(order: list[str]) -> None:
    symbols, shapes = Symbols(), torch.fx.experimental.symbolic_shapes.ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        made = [make_size(shapes, name, hint) for name, hint in zip(order, (5, 7, 11), strict=True)]

    texts = [symbols.describe(value) for value in (*made, made[2] + made[0] * made[1], 4)]

    assert texts == ["s0", "s1", "s2", "s0*s1 + s2", 4]
    assert list(symbols.list_ranges()) == ["s0", "s1", "s2"]


def make_size(shapes: Any, name: str, hint: int) -> torch.SymInt:
    """Return a symbolic size, as dynamo names them after variables."""
    source = torch._dynamo.source.ConstantSource(name)
    symbol = shapes.create_symbol(hint, source, dynamic_dim=torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC)
    made: torch.SymInt = shapes.create_symintnode(symbol, hint=hint, source=source)
    return made
