"""Keys of random graphs: equal exactly if the graphs are, whatever the nodes are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from holdfast.compile_cache.key.graph import GraphText
from holdfast.compile_cache.key.inputs import Symbols

Step = tuple[str, int, int | float | bool]

_FUNCTIONS: Final[dict[str, Any]] = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "max": torch.maximum,
    "aten": torch.ops.aten.add.Tensor,
}
_SCALARS: Final = st.one_of(st.integers(-2, 2), st.sampled_from([0.0, -0.0, 1.0, float("inf")]), st.booleans())
_STEPS: Final = st.tuples(st.sampled_from(sorted(_FUNCTIONS)), st.integers(0, 20), _SCALARS)
_PROGRAMS: Final = st.lists(_STEPS, min_size=1, max_size=6)
_NAMES: Final = st.lists(st.sampled_from(["x", "y", "a_1", "weight", "tmp", "λ"]), min_size=8, max_size=8)


def write(program: Sequence[Step], names: Sequence[str]) -> list[str]:
    """Return the text of a graph that does these steps, its nodes called so."""
    graph = Graph()
    nodes: list[Node] = [graph.placeholder(names[0])]
    for (function, operand, scalar), name in zip(program, names[1:], strict=False):
        arguments = (nodes[operand % len(nodes)], scalar)
        nodes.append(graph.create_node("call_function", _FUNCTIONS[function], arguments, name=name))
    graph.output((nodes[-1],))
    return GraphText(GraphModule(torch.nn.Module(), graph), symbols=Symbols(), versions={}).lines


def normalize(program: Sequence[Step]) -> list[tuple[str, int, str]]:
    """Return a program without what does not count: another number for the same operand."""
    return [
        (function, operand % (number + 1), repr(scalar)) for number, (function, operand, scalar) in enumerate(program)
    ]


@given(one=_PROGRAMS, other=_PROGRAMS, names=_NAMES, other_names=_NAMES)
def test_texts_are_equal_exactly_if_programs_are(
    one: list[Step], other: list[Step], names: list[str], other_names: list[str]
) -> None:
    assert write(one, names) == write(one, other_names)
    assert (write(one, names) == write(other, other_names)) == (normalize(one) == normalize(other))


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
