"""Turns tensors that a graph owns into inputs of the graph.

Dynamo makes the parameters and the state of an optimizer attributes of the graph, because they stay the same objects
at every call. Torch's compiler passes them from a wrapper that cannot be stored. As inputs, they are described in the
key like all others, and only the tensors of this process are passed to the stored code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import Graph, GraphModule, Node

from holdfast.compile_cache.inductor import LiftedGraph
from holdfast.compile_cache.key_parts import Uncacheable


@dataclass(frozen=True, slots=True)
class _Lifted:
    """A graph that owns no tensors, and the tensors that it owned before: its first inputs, in this order."""

    graph: GraphModule
    tensors: list[torch.Tensor]

    def bind(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that passes the tensors and its arguments to `run`, which was compiled from the graph."""
        tensors = self.tensors
        context = TracingContext.try_get()
        if context is not None:
            # Dynamo empties this list when the optimizer is deleted, so that its tensors can be freed.
            context.params_flat = tensors

        def call(*inputs: Any) -> Any:
            return run(*tensors, *inputs)

        return call


def lift_tensors(graph: GraphModule) -> LiftedGraph | None:
    """Return a copy of a graph with its parameters and buffers as first inputs; None if it has none.

    Raises Uncacheable if dynamo did not record where one of them comes from.
    """
    own: dict[str, torch.Tensor] = dict(graph.named_parameters()) | dict(graph.named_buffers())
    if not own:
        return None
    sources = getattr(graph, "_param_name_to_source", None)
    used = {str(node.target): node for node in reversed(graph.graph.nodes) if node.op == "get_attr"}
    if sources is None or any(name not in sources or name not in used for name in own):
        raise Uncacheable(f"the graph contains its own parameters or buffers ({', '.join(list(own)[:3])})")
    copied = Graph()
    placeholders = {name: _add_input(copied, number, used[name], sources[name]) for number, name in enumerate(own)}
    values: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr" and node.target in placeholders:
            values[node] = placeholders[node.target]
            continue
        values[node] = copied.node_copy(node, values.__getitem__)
        if node.op == "placeholder":
            _set_source(values[node], getattr(node, "_dynamo_source", None))
    lifted = GraphModule(graph, copied)
    lifted.meta = copy.copy(graph.meta)
    # Torch expects it of every graph of dynamo; the graph has no parameters now.
    object.__setattr__(lifted, "_param_name_to_source", {})
    return _Lifted(lifted, list(own.values()))


def _add_input(graph: Graph, number: int, attribute: Node, source: object) -> Node:
    node = graph.placeholder(f"own_{number}")
    node.meta = copy.copy(attribute.meta)
    _set_source(node, source)
    return node


def _set_source(node: Any, source: object) -> None:  # Any: torch adds the attribute at run time
    node._dynamo_source = source
