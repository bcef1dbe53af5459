"""The key of a graph: equal work has equal keys in any process, and what can change a result changes the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule

from holdfast.compile_cache.key.cacheability import verify_cacheable
from holdfast.compile_cache.key.config import describe_config, describe_options
from holdfast.compile_cache.key.flags import describe_flags
from holdfast.compile_cache.key.graph import GraphText
from holdfast.compile_cache.key.inputs import describe_aliasing, describe_inputs
from holdfast.compile_cache.key.ops import describe_operators
from holdfast.compile_cache.key.symbols import Symbols
from holdfast.compile_cache.key.system import describe_system
from holdfast.compile_cache.key_parts import PARTS, GraphKey, Uncacheable, UnknownCode, hash_parts

__all__ = ["PARTS", "GraphKey", "Uncacheable", "UnknownCode", "make_key"]


def make_key(
    graph: GraphModule, inputs: Sequence[object], *, options: Mapping[str, object], versions: Mapping[str, str]
) -> GraphKey:
    """Return the key of a graph as dynamo gives it to a backend; raises Uncacheable if it has none.

    Args:
        graph: what to compile.
        inputs: what it is called with first; their values do not count.
        options: settings of the compiler for this call.
        versions: operators (`namespace::name`) and functions (`module.name`) whose code the user vouches for.
    """
    verify_cacheable(graph, inputs, versions=versions)
    symbols = Symbols()
    described = describe_inputs(graph, inputs, symbols)
    text = GraphText(graph, symbols=symbols, versions=versions)
    # Those that only the graph has, as sizes read from data, come after those of the inputs.
    described["symbols"] = symbols.list_ranges()
    device_types = _find_device_types(inputs, text.lines)
    return hash_parts(
        {
            "graph": text.lines,
            "constants": text.constants,
            "inputs": described,
            "aliasing": describe_aliasing(inputs),
            "custom_ops": describe_operators(graph, versions),
            "flags": describe_flags(device_types),
            "config": describe_config(),
            "options": describe_options(options),
            "system": describe_system(device_types),
        }
    )


def _find_device_types(inputs: Sequence[object], lines: Sequence[str]) -> set[str]:
    found = {value.device.type for value in inputs if isinstance(value, torch.Tensor)}
    return found | ({"cuda"} if any("cuda" in line for line in lines) else set())
