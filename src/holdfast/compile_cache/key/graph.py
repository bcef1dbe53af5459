"""A graph as text that names nothing of the user's, and its constants by content: two parts of a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import torch
from torch.fx import GraphModule, Node

from holdfast.compile_cache.code.digest import digest_code
from holdfast.compile_cache.code.targets import name_target
from holdfast.compile_cache.key.symbols import Symbols
from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.digest import hash_bytes
from holdfast.repo.format.record import Json

Held = TypeVar("Held")

_PLAIN: Final = frozenset({bool, int, float, complex, str, type(None), type(...)})
_TORCH_PLAIN: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_FUNCTIONS: Final = (type(len), type(hash_bytes), torch._ops.OpOverload, torch._ops.OpOverloadPacket)

# Their last argument is a message that names variables, and nobody sees it unless the assertion fails.
_WITH_MESSAGE: Final = frozenset({"aten::_assert_scalar"})

# What dynamo notes about a graph for others to read, and what no compiler looks at.
_NOTES: Final = frozenset({"backend_id", "dynamo_compile_id", "dynamo_flat_name_to_original_fqn"})
_POLICY: Final = "_checkpoint_context_fn"
"""The note that holds what a selective checkpoint keeps, a function."""


class GraphText:
    """The text of a graph and of those below it, and the constants that it refers to, in order of appearance.

    Nodes are numbered, so is what they refer to; what a node calls is written by a name that finds it again.
    """

    def __init__(self, graph: GraphModule, *, symbols: Symbols, versions: Mapping[str, str]) -> None:
        """Write the text of `graph`; raises Uncacheable if something in it cannot be written."""
        self.lines: list[str] = []
        self.constants: list[Json] = []
        self._symbols = symbols
        self._versions = versions
        self._graphs: list[GraphModule] = [graph]
        self._seen_constants: list[torch.Tensor] = []
        self._targets: dict[object, str] = {}
        self._written = 0
        while self._written < len(self._graphs):
            self._write_graph(self._graphs[self._written])
            self._written += 1

    def _write_graph(self, graph: GraphModule) -> None:
        _verify_notes(graph)
        if self._written:
            self.lines.append(f"graph {self._written}:")
        if (policy := graph.meta.get(_POLICY)) is not None:
            self.lines.append(f"policy {_describe_policy(policy)}")
        numbers: dict[Node, str] = {}
        num_inputs = 0
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                numbers[node] = f"in{num_inputs}"
                num_inputs += 1
                self.lines.append(numbers[node])
                continue
            text = self._describe_node(node, graph, numbers)
            if node.meta and (note := node.meta.get("custom")):
                text += f"  # {self._describe(note, numbers)}"
            numbers[node] = f"%{len(numbers) - num_inputs}"
            self.lines.append(f"{numbers[node]} = {text}" if node.op != "output" else text)

    def _describe_node(self, node: Node, graph: GraphModule, numbers: Mapping[Node, str]) -> str:
        if node.op == "get_attr":
            return self._describe_attribute(graph, str(node.target))
        if node.op == "output":
            return f"return {self._describe(node.args[0], numbers)}"
        if node.op == "call_method":
            return f".{node.target}({self._describe_call(node, numbers)})"
        if node.op != "call_function":
            raise Uncacheable(f"the graph has a node of the kind {node.op}, which dynamo leaves whole")
        if (name := self._targets.get(node.target)) is None:
            name = self._targets[node.target] = name_target(node.target, self._versions)
        if name in _WITH_MESSAGE:
            return f"{name}({self._describe(node.args[0], numbers)})"
        return f"{name}({self._describe_call(node, numbers)})"

    def _describe_call(self, node: Node, numbers: Mapping[Node, str]) -> str:
        texts = [self._describe(each, numbers) for each in node.args]
        texts += [f"{name}={self._describe(node.kwargs[name], numbers)}" for name in sorted(node.kwargs)]
        return ", ".join(texts)

    def _describe_attribute(self, graph: GraphModule, path: str) -> str:
        value: object = graph
        for name in path.split("."):
            value = getattr(value, name)
        if isinstance(value, GraphModule):
            return f"graph {_place(value, self._graphs)}"
        if isinstance(value, torch.Tensor):
            number = _place(value, self._seen_constants)
            if number == len(self.constants):
                self.constants.append(_describe_constant(value))
            return f"constant {number}"
        raise Uncacheable(f"the graph refers to {path}, a {type(value).__qualname__}, which has no digest")

    def _describe(self, value: object, numbers: Mapping[Node, str]) -> str:
        if type(value) is Node:
            return numbers[value]
        if type(value) in _PLAIN:
            return repr(value)
        if isinstance(value, tuple | list):
            inside = ", ".join([self._describe(each, numbers) for each in value])
            if hasattr(value, "_fields"):
                return f"{type(value).__module__}.{type(value).__qualname__}({inside})"
            return f"({inside},)" if isinstance(value, tuple) else f"[{inside}]"
        if isinstance(value, dict):
            items = [f"{self._describe(key, numbers)}: {self._describe(value[key], numbers)}" for key in value]
            return f"{{{', '.join(items)}}}"
        if isinstance(value, slice):
            return f"slice{self._describe((value.start, value.stop, value.step), numbers)}"
        if isinstance(value, _TORCH_PLAIN):
            return str(value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return str(self._symbols.describe(value))
        if isinstance(value, _FUNCTIONS):
            return name_target(value, self._versions)
        raise Uncacheable(f"the graph is given a {type(value).__module__}.{type(value).__qualname__} as an argument")


def _place(value: Held, held: list[Held]) -> int:
    """Return where `value` itself stands in a list, at its end if it is new."""
    for number, each in enumerate(held):
        if each is value:
            return number
    held.append(value)
    return len(held) - 1


def _verify_notes(graph: GraphModule) -> None:
    if strange := sorted(graph.meta.keys() - _NOTES - {_POLICY}):
        raise Uncacheable(f"the graph carries notes that may direct the compiler ({', '.join(map(str, strange))})")


def _describe_policy(policy: object) -> str:
    """Return what stands for the policy of a selective checkpoint: what its owner says, as torch asks, or its code."""
    own = getattr(policy, "cache_hash", None)
    return repr(own) if own is not None else digest_code(policy, where="the policy of a checkpoint").digest


def _describe_constant(tensor: torch.Tensor) -> Json:
    """Return what a constant is, and the digest of its items."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        raise Uncacheable(f"the graph holds a constant of the kind {type(tensor).__qualname__}, {tensor.layout}")
    items = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {
        "dtype": str(tensor.dtype),
        "device": str(tensor.device),
        "size": list(tensor.shape),
        "stride": list(tensor.stride()),
        "requires_grad": tensor.requires_grad,
        "digest": hash_bytes(items.numpy().tobytes()).hex(),
    }
