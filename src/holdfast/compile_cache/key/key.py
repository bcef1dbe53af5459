"""Computes the key of a graph. Equal work has equal keys in every process; what can change a result changes the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule

from holdfast.compile_cache.key.flags import describe_flags
from holdfast.compile_cache.key.graph import GraphText, verify_cacheable
from holdfast.compile_cache.key.inputs import Symbols, describe_aliasing, describe_inputs
from holdfast.compile_cache.key.ops import describe_operators
from holdfast.compile_cache.key.settings import describe_config, describe_options
from holdfast.compile_cache.key.system import describe_system
from holdfast.compile_cache.key_parts import GraphKey, hash_parts


def make_key(
    graph: GraphModule, inputs: Sequence[object], *, options: Mapping[str, object], versions: Mapping[str, str]
) -> GraphKey:
    """Return the key of a graph that dynamo passes to a backend. Raises Uncacheable if it has none.

    Args:
        graph: the graph to compile.
        inputs: the inputs of the first call; their values do not affect the key.
        options: compiler settings of this call.
        versions: versions of operators (`namespace::name`) and functions (`module.name`) whose code is not read; the
            user changes the version with the code.
    """
    verify_cacheable(graph, inputs, versions=versions)
    symbols = Symbols()
    described = describe_inputs(graph, inputs, symbols)
    text = GraphText(graph, symbols=symbols, versions=versions)
    # Again, because the graph can have more symbols than the inputs, such as sizes that depend on data.
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
