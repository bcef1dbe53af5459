"""Keys of graphs as dynamo traces them, without compiling anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.fx import GraphModule

from holdfast.compile_cache.key.key import make_key
from holdfast.compile_cache.key_parts import GraphKey, Uncacheable

NONE: Final[Mapping[str, Any]] = MappingProxyType({})


def record_keys(
    function: Callable[..., object],
    *inputs: object,
    dynamic: bool | None = None,
    options: Mapping[str, object] = NONE,
    versions: Mapping[str, str] = NONE,
) -> list[GraphKey | str]:
    """Return the key of each graph that a call is traced to, or the reason why it has none."""
    found: list[GraphKey | str] = []

    def backend(graph: GraphModule, given: Sequence[object]) -> Callable[..., Any]:
        try:
            found.append(make_key(graph, given, options=options, versions=versions))
        except Uncacheable as error:
            found.append(error.reason)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    return found


def key_of(function: Callable[..., object], *inputs: object, **how: Any) -> GraphKey:
    """Return the key of a call that is traced to one graph."""
    (found,) = record_keys(function, *inputs, **how)
    assert isinstance(found, GraphKey), found
    return found


def reason_of(function: Callable[..., object], *inputs: object, **how: Any) -> str:
    """Return why the graph of a call has no key."""
    found = [each for each in record_keys(function, *inputs, **how) if isinstance(each, str)]
    assert found, "it has a key"
    return found[0]
