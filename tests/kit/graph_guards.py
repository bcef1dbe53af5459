"""Guards as the installed torch writes them, without compiling anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from holdfast.compile_cache.inductor import TorchCompiler

# Any: torch does not type them.
_maximum: Any = torch.sym_max
_minimum: Any = torch.sym_min


def write_guards(compiler: TorchCompiler) -> tuple[str, bool]:
    """Return guards that contain a maximum and a minimum, and whether they hold where they were written."""
    found: list[tuple[str, bool]] = []

    def backend(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        size: Any = next(value for value in inputs if isinstance(value, torch.SymInt))
        # A comparison of a symbolic number adds a guard.
        assert _maximum(size, 5) * size % 7 == 1
        assert _minimum(size, 50) * size % 7 == 1
        guards = str(size.node.shape_env.produce_guards_expression([size]))
        found.append((guards, compiler.evaluate_guards(guards, [size], install=False)))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(torch.sin, backend=backend, dynamic=True)(torch.ones(8))
    return found[0]
