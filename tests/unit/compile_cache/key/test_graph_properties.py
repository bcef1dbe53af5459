"""The texts of random graphs are equal if and only if the graphs are equal; names of nodes do not matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from hypothesis import given
from hypothesis import strategies as st
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
    """Return the text of a graph with these steps and node names."""
    graph = Graph()
    nodes: list[Node] = [graph.placeholder(names[0])]
    for (function, operand, scalar), name in zip(program, names[1:], strict=False):
        arguments = (nodes[operand % len(nodes)], scalar)
        nodes.append(graph.create_node("call_function", _FUNCTIONS[function], arguments, name=name))
    graph.output((nodes[-1],))
    return GraphText(GraphModule(torch.nn.Module(), graph), symbols=Symbols(), versions={}).lines


def normalize(program: Sequence[Step]) -> list[tuple[str, int, str]]:
    """Return a program in which equal operands have equal numbers."""
    return [
        (function, operand % (number + 1), repr(scalar)) for number, (function, operand, scalar) in enumerate(program)
    ]


@given(one=_PROGRAMS, other=_PROGRAMS, names=_NAMES, other_names=_NAMES)
def test_texts_are_equal_exactly_if_programs_are(
    one: list[Step], other: list[Step], names: list[str], other_names: list[str]
) -> None:
    assert write(one, names) == write(one, other_names)
    assert (write(one, names) == write(other, other_names)) == (normalize(one) == normalize(other))
