"""The key parts `graph` and `constants`; refuses graphs that the key cannot describe completely."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar

import torch
import torch._dynamo.compiled_autograd as compiled_autograd
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._guards import TracingContext
from torch._subclasses import fake_tensor
from torch.fx import GraphModule, Node

from holdfast.compile_cache.code.digest import digest_code
from holdfast.compile_cache.code.targets import name_target
from holdfast.compile_cache.key.inputs import Symbols, find_shared, list_fakes
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


_NO_VERSIONS: Final[Mapping[str, str]] = MappingProxyType({})
_KINDS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_DEVICES: Final = frozenset({"cpu", "cuda"})

# Metadata of a node that controls the compiler; dynamo itself sets none of it.
_ANNOTATIONS: Final = frozenset(
    {
        "ac_graph_id",
        "chunking",
        "is_wrapped",
        "memory_budget",
        "partitioner_tag",
        "recompute",
        "saved_for_offloading",
        "steal_arg",
    }
)

_REGION_OPTIONS: Final = "nested_region_config"
"""Metadata key of a subgraph of `nested_compile_region`, if it was called with options."""

# Settings with which ranks communicate while they compile: a rank that loads a graph would let the others wait.
_SYNCHRONISING: Final = ("_sync_decision_cross_ranks", "_sync_cache_decision_cross_ranks")

# Functions that change their arguments without changing the version counters of the fake tensors.
_UNTRACKED: Final = ("batch_norm", "instance_norm")
_IN_PLACE: Final = frozenset(
    {operator.setitem, operator.delitem}
    | {getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")}
    | {getattr(operator, f"i{name}") for name in ("and", "or", "xor", "lshift", "rshift")}
)


def verify_cacheable(
    graph: GraphModule, inputs: Sequence[object], *, versions: Mapping[str, str] = _NO_VERSIONS
) -> None:
    """Raise Uncacheable if the artifact of a graph could be wrong for another graph with the same key.

    Args:
        graph: the graph that dynamo passes to a backend.
        inputs: the inputs that dynamo passes with it.
        versions: versions of user operators and functions whose code the cache does not read.
    """
    _verify_surroundings(graph)
    for number, value in enumerate(inputs):
        _verify_input(value, number)
    for module in _list_graphs(graph):
        _verify_attributes(module)
        seen: set[object] = set()
        for node in module.graph.nodes:
            _verify_node(node, versions, seen)
    _verify_sharing(graph, inputs)


def _verify_surroundings(graph: GraphModule) -> None:
    if compiled_autograd.in_compiled_autograd_region or compiled_autograd.compiled_autograd_enabled:
        raise Uncacheable("compiled autograd is on, and the hooks in its graphs are not in the key")
    context = TracingContext.try_get()
    if context is not None and context.fakify_first_call:
        raise Uncacheable("the first call uses fake tensors, which do not show shared memory or alignment")
    if inductor_config.freezing:
        raise Uncacheable("freezing is on, which makes the weights part of the compiled code")
    if synchronising := [name for name in _SYNCHRONISING if getattr(functorch_config, name, False)]:
        raise Uncacheable(f"{synchronising[0]} is on, so every rank has to compile each graph")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise Uncacheable("saved-tensor hooks are set, and their code is not in the graph")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise Uncacheable("the graph is compiled inside a torch.func transform")
    if torch._C._len_torch_dispatch_stack():
        raise Uncacheable("a torch dispatch mode is active, which may change the operators of the graph")


def _verify_input(value: object, number: int) -> None:
    if not isinstance(value, torch.Tensor):
        return
    if _is_fake(value):
        raise Uncacheable(f"input {number} is a fake tensor, which does not show shared memory or alignment")
    if type(value) not in _KINDS:
        raise Uncacheable(
            f"input {number} is a tensor subclass ({type(value).__qualname__}), whose code is not in the key"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise Uncacheable(f"input {number} is wrapped by a torch.func transform")
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        raise Uncacheable(f"input {number} is a {_describe_layout(value)} tensor, which the key cannot describe")
    if value.device.type not in _DEVICES:
        raise Uncacheable(f"input {number} is on the device {value.device}; the cache supports only CPU and CUDA")


def _is_fake(value: torch.Tensor) -> bool:
    # Newer versions also have fake tensors whose class is torch.Tensor.
    find: Callable[[object], bool] | None = getattr(fake_tensor, "is_fake_tensor", None)
    return isinstance(value, fake_tensor.FakeTensor) if find is None else find(value)


def _describe_layout(value: torch.Tensor) -> str:
    if value.is_quantized:
        return "quantized"
    return "nested" if value.is_nested else str(value.layout).removeprefix("torch.")


def _list_graphs(graph: GraphModule) -> list[GraphModule]:
    """Return a graph and all its subgraphs."""
    found = []
    for name, module in graph.named_modules():
        if isinstance(module, GraphModule):
            found.append(module)
        else:
            raise Uncacheable(
                f"the graph contains the module {name} ({type(module).__qualname__}), which dynamo did not trace into"
            )
    return found


def _verify_attributes(graph: GraphModule) -> None:
    if _REGION_OPTIONS in graph.meta:
        raise Uncacheable("a nested_compile_region has options, which are functions that the key does not describe")
    own = [name for name, _ in (*graph.named_parameters(), *graph.named_buffers())]
    if own:
        # Torch makes them the first inputs of the compiled graph, and passes them from a wrapper that cannot be saved.
        raise Uncacheable(f"the graph contains its own parameters or buffers ({', '.join(own[:3])})")
    used = {str(node.target).partition(".")[0] for node in graph.graph.nodes if node.op == "get_attr"}
    if unused := sorted({name for name, _ in graph.named_children()} - used):
        raise Uncacheable(
            f"the graph contains subgraphs that it does not call ({', '.join(unused)}), such as saved-tensor hooks"
        )


def _verify_node(node: Node, versions: Mapping[str, str], seen: set[object]) -> None:
    if not _ANNOTATIONS.isdisjoint(node.meta):
        found = ", ".join(sorted(_ANNOTATIONS & node.meta.keys()))
        raise Uncacheable(f"a node of the graph has annotations for the compiler ({found})")
    if node.op == "call_function":
        if node.target not in seen:
            seen.add(node.target)
            name_target(node.target, versions)
    elif node.op == "call_method":
        _verify_method(node)
    elif node.op not in ("placeholder", "get_attr", "output"):
        raise Uncacheable(f"the graph has a {node.op} node, which dynamo did not trace into")


def _verify_method(node: Node) -> None:
    """Refuse methods of objects other than tensors and sizes: only the method's name is in the key."""
    owner = node.args[0] if node.args else None
    value = owner.meta.get("example_value") if isinstance(owner, Node) else None
    if not isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | torch.Size):
        raise Uncacheable(
            f"the graph calls the method {node.target} of a {type(value).__qualname__}, which is not a tensor"
        )


def _verify_sharing(graph: GraphModule, inputs: Sequence[object]) -> None:
    """Refuse graphs that change an input which shares memory: torch's guards do not check this at the next call."""
    groups = find_shared(inputs)
    if not groups:
        return
    if mutating := next(
        (node for module in _list_graphs(graph) for node in module.graph.nodes if _may_mutate(node)), None
    ):
        raise Uncacheable(
            f"inputs {_list_numbers(groups[0])} share memory, and the graph may change one of them ({mutating.target})"
        )
    fakes = list_fakes(graph)
    for group in groups:
        if any(_was_changed(fakes[number]) for number in group):
            raise Uncacheable(f"inputs {_list_numbers(group)} share memory, and the graph changes one of them")


def _may_mutate(node: Node) -> bool:
    """Return whether a node may change an argument without changing the version counters of dynamo's fake tensors."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.OpOverloadPacket) and _has_in_place_overload(node.target):
        return True
    if node.target in _IN_PLACE or node.kwargs.get("out") is not None:
        return True
    return any(name in str(getattr(node.target, "__name__", node.target)) for name in _UNTRACKED)


def _has_in_place_overload(packet: Any) -> bool:  # Any: torch does not type the overloads
    """Return whether an operator changes an argument other than `out`."""
    schemas = [getattr(packet, name)._schema for name in packet.overloads()]
    arguments = [argument for schema in schemas for argument in schema.arguments if not argument.kwarg_only]
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments)


def _was_changed(fake: object) -> bool:
    """Return whether a fake tensor may have been changed during tracing, by its version counter."""
    if not isinstance(fake, torch.Tensor):
        return False
    return fake.is_inference() or fake._version != 0


def _list_numbers(group: Sequence[int]) -> str:
    return ", ".join(map(str, group[:-1])) + f" and {group[-1]}"
