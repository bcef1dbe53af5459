"""Refuses graphs that must not be cached because the key cannot describe everything that affects their compilation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import torch._dynamo.compiled_autograd as compiled_autograd
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._guards import TracingContext
from torch._subclasses import fake_tensor
from torch.fx import GraphModule, Node

from holdfast.compile_cache.code.targets import name_target
from holdfast.compile_cache.key.inputs import find_shared, list_fakes
from holdfast.compile_cache.key_parts import Uncacheable

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
