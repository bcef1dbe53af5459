"""The key parts `graph` and `constants`: a graph as text without user names, and the content of its constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import torch
from torch.fx import GraphModule, Node

from holdfast.compile_cache.code.digest import digest_code
from holdfast.compile_cache.code.targets import name_target
from holdfast.compile_cache.key.inputs import Symbols
from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.digest import hash_bytes
from holdfast.json_text import Json

Item = TypeVar("Item")

_PLAIN: Final = frozenset({bool, int, float, complex, str, type(None), type(...)})
_TORCH_PLAIN: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_FUNCTIONS: Final = (type(len), type(hash_bytes), torch._ops.OpOverload, torch._ops.OpOverloadPacket)

# Their last argument is the message of an assertion. It contains variable names and does not affect the code.
_WITH_MESSAGE: Final = frozenset({"aten::_assert_scalar"})

# Metadata that dynamo sets on a graph and that no compiler reads.
_IGNORED_META: Final = frozenset({"backend_id", "dynamo_compile_id", "dynamo_flat_name_to_original_fqn"})
_HOOKED: Final = "has_backward_hook"
"""Metadata key of nodes whose gradient has a hook; the compiler saves them for the backward."""
_POLICY: Final = "_checkpoint_context_fn"
"""Metadata key of the policy of a selective checkpoint, a function."""


class GraphText:
    """The text of a graph and its subgraphs, and their constants in order of appearance.

    Nodes, subgraphs and constants are numbered. Functions are written by a name that is valid in every process.
    """

    def __init__(self, graph: GraphModule, *, symbols: Symbols, versions: Mapping[str, str]) -> None:
        """Write the text of `graph`. Raises Uncacheable if something in it has no text."""
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
        _verify_meta(graph)
        if self._written:
            self.lines.append(f"graph {self._written}:")
        if (policy := graph.meta.get(_POLICY)) is not None:
            self.lines.append(f"policy {_describe_policy(policy)}")
        numbers: dict[Node, str] = {}
        num_inputs = 0
        for node in graph.graph.nodes:
            hooked = "  # hooked" if node.meta.get(_HOOKED) else ""
            if node.op == "placeholder":
                numbers[node] = f"in{num_inputs}"
                num_inputs += 1
                self.lines.append(numbers[node] + hooked)
                continue
            text = self._describe_node(node, graph, numbers) + hooked
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
            raise Uncacheable(f"the graph has a {node.op} node, which dynamo did not trace into")
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
            return f"graph {_find_number(value, self._graphs)}"
        if isinstance(value, torch.Tensor):
            number = _find_number(value, self._seen_constants)
            if number == len(self.constants):
                self.constants.append(_describe_constant(value))
            return f"constant {number}"
        raise Uncacheable(f"the graph refers to {path}, a {type(value).__qualname__}, which the key cannot describe")

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
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise Uncacheable(f"a node of the graph has an argument of type {kind}, which the key cannot describe")


def _find_number(value: Item, numbered: list[Item]) -> int:
    """Return the index of `value` in a list, by identity; append it if it is new."""
    for number, each in enumerate(numbered):
        if each is value:
            return number
    numbered.append(value)
    return len(numbered) - 1


def _verify_meta(graph: GraphModule) -> None:
    if unknown := sorted(graph.meta.keys() - _IGNORED_META - {_POLICY}):
        raise Uncacheable(f"the graph has metadata that may affect the compiler ({', '.join(map(str, unknown))})")


def _describe_policy(policy: object) -> str:
    """Return what identifies the policy of a selective checkpoint: its `cache_hash`, as in torch, or its digest."""
    cache_hash = getattr(policy, "cache_hash", None)
    if cache_hash is not None:
        return repr(cache_hash)
    return digest_code(policy, where="the policy of a selective checkpoint").digest


def _describe_constant(tensor: torch.Tensor) -> Json:
    """Return the properties of a constant, and the digest of its items."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        raise Uncacheable(
            f"the graph contains a constant that the key cannot describe: {type(tensor).__qualname__}, {tensor.layout}"
        )
    items = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {
        "dtype": str(tensor.dtype),
        "device": str(tensor.device),
        "size": list(tensor.shape),
        "stride": list(tensor.stride()),
        "requires_grad": tensor.requires_grad,
        "digest": hash_bytes(items.numpy().tobytes()).hex(),
    }
