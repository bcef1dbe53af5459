"""Graphs that a key cannot describe completely are not cached, and the reason is a sentence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd as compiled_autograd
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.invoke_subgraph import NestedCompileRegionOptions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from holdfast.compile_cache.key.key import make_key
from holdfast.compile_cache.key_parts import GraphKey, Uncacheable
from tests.kit.graph_keys import key_of, reason_of, record_keys

# Any: much of torch has no types.
_CONFIG: Any = inductor_config
_FUNCTORCH: Any = functorch_config
_allow_in_graph: Any = torch.compiler.allow_in_graph
_DYNAMO: Any = dynamo_config
_TwoTensor: Any = TwoTensor
_nested_region: Any = torch.compiler.nested_compile_region


@_allow_in_graph  # type: ignore[untyped-decorator]  # it is Any
def user_function(x: Tensor) -> Tensor:
    return x * 2


def call_user_function(x: Tensor) -> Any:
    return user_function(x)


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def change(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return x + y


def normalize(x: Tensor, y: Tensor) -> Tensor:
    return F.batch_norm(torch.ones(2, 4), x, y, training=True)


def assign(x: Tensor, y: Tensor) -> Tensor:
    x.data = y * 2
    return x + y


def views() -> tuple[Tensor, Tensor]:
    memory = torch.ones(8)
    return memory[:4], memory[4:]


def graph_of(build: Callable[[Graph, Any], Any], *, attributes: dict[str, Any] | None = None) -> GraphModule:
    """Return a graph with one input of four floats, built without dynamo."""
    graph = Graph()
    x = graph.placeholder("x")
    with FakeTensorMode() as mode:
        x.meta["example_value"] = mode.from_tensor(torch.ones(4))
    graph.output((build(graph, x),))
    root = nn.Module()
    for name, value in (attributes or {}).items():
        setattr(root, name, value)
    return GraphModule(root, graph)


def find_reason(graph: GraphModule, x: object = None) -> str:
    with pytest.raises(Uncacheable) as caught:
        make_key(graph, [torch.ones(4) if x is None else x], options={}, versions={})
    return caught.value.reason


def test_a_user_function_is_not_cached_and_the_reason_names_the_next_step() -> None:
    reason = reason_of(call_user_function, torch.ones(3))

    name = f"{__name__}.user_function"
    assert reason.startswith(f"the graph calls {name}, which is not part of torch, so its code may change; to cache")
    assert f'versions={{"{name}": "1"}}' in reason


def test_a_user_function_with_a_version_is_cached() -> None:
    name = f"{__name__}.user_function"

    one, same, other = (
        key_of(call_user_function, torch.ones(3), versions={name: version}) for version in ("1", "1", "2")
    )

    assert one.digest == same.digest != other.digest


def test_a_function_of_torch_that_was_replaced_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    def silu(x: Tensor) -> Tensor:
        return x * 2

    silu.__module__ = "torch.nn.functional"
    monkeypatch.setattr(F, "silu", silu)

    reason = find_reason(graph_of(lambda graph, x: graph.call_function(silu, (x,))))

    assert reason == f"torch.nn.functional.silu was replaced by code from {__file__}"


def test_a_function_that_its_name_does_not_lead_to_is_not_cached() -> None:
    def relu(x: Tensor) -> Tensor:
        return x

    relu.__module__ = "torch.nn.functional"

    reason = find_reason(graph_of(lambda graph, x: graph.call_function(relu, (x,))))

    assert reason.endswith("which is not the function that torch.nn.functional.relu refers to")


def test_an_unknown_higher_order_operator_is_not_cached() -> None:
    operator = torch.ops.higher_order.strict_mode

    reason = find_reason(graph_of(lambda graph, x: graph.call_function(operator, (x,))))

    assert reason == "the graph calls the higher-order operator strict_mode, which the cache does not support"


def test_an_object_that_is_called_is_not_cached() -> None:
    partial: Any = functools.partial(torch.add, other=1)
    partial.__name__ = "partial"

    reason = find_reason(graph_of(lambda graph, x: graph.call_function(partial, (x,))))

    assert reason.startswith("the graph calls functools.partial(")
    assert reason.endswith("which is neither a function nor an operator")


def test_a_module_that_was_not_traced_is_not_cached() -> None:
    reason = find_reason(graph_of(lambda graph, x: graph.call_module("relu", (x,)), attributes={"relu": nn.ReLU()}))

    assert reason == "the graph contains the module relu (ReLU), which dynamo did not trace into"


def test_collectives_are_not_cached() -> None:
    operator = torch.ops._c10d_functional.all_reduce.default

    reason = find_reason(graph_of(lambda graph, x: graph.call_function(operator, (x, "sum", "0"))))

    assert reason == (
        "the graph communicates with other processes (_c10d_functional::all_reduce), which the key does not describe"
    )


def test_an_argument_that_has_no_text_is_not_cached() -> None:
    graph = graph_of(lambda graph, x: graph.call_function(torch.bernoulli, (x,)))
    called = next(node for node in graph.graph.nodes if node.op == "call_function")
    called.kwargs = {"generator": torch.Generator()}

    reason = find_reason(graph)

    assert reason == "a node of the graph has an argument of type torch._C.Generator, which the key cannot describe"


def test_checkpoints_without_a_policy_are_cached() -> None:
    key = key_of(lambda x: checkpoint(torch.sin, x, use_reentrant=False), torch.ones(3, requires_grad=True))

    assert "graph 1:" in key.parts["graph"]


def test_a_node_with_annotations_for_the_compiler_is_not_cached() -> None:
    graph = graph_of(lambda graph, x: graph.call_function(torch.sin, (x,)))
    next(node for node in graph.graph.nodes if node.op == "call_function").meta["recompute"] = True

    assert find_reason(graph) == "a node of the graph has annotations for the compiler (recompute)"


def test_a_nested_region_is_cached_and_one_with_options_is_not() -> None:
    options = NestedCompileRegionOptions(partitioner="default_partition")
    plain = _nested_region(lambda x: x.sin())
    with _DYNAMO.patch(enable_invoke_subgraph_regional_compile=True):
        reason = reason_of(_nested_region(lambda x: x.sin(), options=options), torch.ones(3))

    assert "graph 1:" in key_of(lambda x: plain(plain(x)), torch.ones(3)).parts["graph"]
    assert reason == "a nested_compile_region has options, which are functions that the key does not describe"


def test_methods_of_other_objects_than_tensors_are_not_cached() -> None:
    reason = find_reason(graph_of(lambda graph, x: graph.call_method("sin", (graph.call_function(len, (x,)),))))

    assert reason == "the graph calls the method sin of a NoneType, which is not a tensor"


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.ones(4).to_sparse(), "input 0 is a sparse_coo tensor, which the key cannot describe"),
        (
            _TwoTensor(torch.ones(4), torch.ones(4)),
            "input 0 is a tensor subclass (TwoTensor), whose code is not in the key",
        ),
        (torch.ones(4, device="meta"), "input 0 is on the device meta; the cache supports only CPU and CUDA"),
        ("text", "input 0 is a str, neither a tensor nor a number"),
    ],
    ids=["sparse", "subclass", "meta", "text"],
)
def test_inputs_that_a_key_cannot_describe_are_not_cached(x: object, reason: str) -> None:
    assert find_reason(graph_of(lambda graph, x: graph.call_function(torch.sin, (x,))), x) == reason


def test_fake_inputs_are_not_cached() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(4))

    reason = find_reason(graph_of(lambda graph, x: graph.call_function(torch.sin, (x,))), x)

    assert reason == "input 0 is a fake tensor, which does not show shared memory or alignment"


def test_inputs_that_dynamo_did_not_trace_are_not_cached() -> None:
    graph = graph_of(lambda graph, x: graph.call_function(torch.sin, (x,)))
    next(iter(graph.graph.nodes)).meta.clear()

    assert find_reason(graph) == "input 0 was not traced by dynamo, so it is not known which of its sizes may change"


def test_a_graph_that_changes_shared_memory_is_not_cached() -> None:
    assert reason_of(change, *views()) == "inputs 0 and 1 share memory, and the graph changes one of them"


def test_a_graph_that_changes_shared_buffers_without_a_new_version_is_not_cached() -> None:
    reason = reason_of(normalize, *views())

    assert reason.startswith("inputs 0 and 1 share memory, and the graph may change one of them (<function batch_norm")


def test_a_graph_that_gives_a_shared_input_other_memory_is_not_cached() -> None:
    reason = reason_of(assign, *views())

    # Not every version of torch traces the assignment.
    assert reason.startswith(("inputs 0 and 1 share memory, and the graph may change one of them", "the graph calls"))


def test_a_graph_that_changes_shared_memory_by_an_operator_without_overload_is_not_cached() -> None:
    graph = Graph()
    inputs = [graph.placeholder(name) for name in "xy"]
    with FakeTensorMode() as mode:
        for each in inputs:
            each.meta["example_value"] = mode.from_tensor(torch.ones(4))
    graph.output((graph.call_function(torch.ops.aten.relu_, (inputs[0],)),))

    with pytest.raises(Uncacheable) as caught:
        make_key(GraphModule({}, graph), views(), options={}, versions={})

    assert caught.value.reason == "inputs 0 and 1 share memory, and the graph may change one of them (aten.relu_)"


def test_sharing_without_a_change_and_changes_without_sharing_are_cached() -> None:
    assert isinstance(record_keys(add, *views())[0], GraphKey)
    assert isinstance(record_keys(change, torch.ones(4), torch.ones(4))[0], GraphKey)


@pytest.fixture
def _saved_tensor_hooks() -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


@pytest.mark.usefixtures("_saved_tensor_hooks")
def test_hooks_on_saved_tensors_are_not_cached() -> None:
    reason = find_reason(graph_of(lambda graph, x: graph.call_function(torch.sin, (x,))))

    assert reason == "saved-tensor hooks are set, and their code is not in the graph"


def test_freezing_is_not_cached() -> None:
    with _CONFIG.patch(freezing=True):
        reason = find_reason(graph_of(lambda graph, x: graph.call_function(torch.sin, (x,))))

    assert reason == "freezing is on, which makes the weights part of the compiled code"


@pytest.mark.parametrize("name", ["_sync_decision_cross_ranks", "_sync_cache_decision_cross_ranks"])
def test_a_graph_that_ranks_compile_together_is_not_cached(name: str) -> None:
    if name not in _FUNCTORCH.get_config_copy():
        pytest.skip(f"this torch has no setting {name}")

    with _FUNCTORCH.patch({name: True}):
        reason = find_reason(graph_of(lambda graph, x: graph.call_function(torch.sin, (x,))))

    assert reason == f"{name} is on, so every rank has to compile each graph"


def test_compiled_autograd_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_autograd, "compiled_autograd_enabled", True)

    reason = find_reason(graph_of(lambda graph, x: graph.call_function(torch.sin, (x,))))

    assert reason == "compiled autograd is on, and the hooks in its graphs are not in the key"


def test_a_first_call_with_fake_tensors_is_not_cached() -> None:
    context = TracingContext(None)
    context.fakify_first_call = True

    with tracing(context):
        reason = find_reason(graph_of(lambda graph, x: graph.call_function(torch.sin, (x,))))

    assert reason == "the first call uses fake tensors, which do not show shared memory or alignment"


def graph_with(tensor: Tensor) -> GraphModule:
    return graph_of(
        lambda graph, x: graph.call_function(torch.add, (x, graph.get_attr("held"))), attributes={"held": tensor}
    )


@pytest.mark.parametrize("kind", [nn.Buffer, nn.Parameter])
def test_a_graph_with_its_own_parameters_or_buffers_is_not_cached(kind: Callable[[Tensor], Tensor]) -> None:
    assert find_reason(graph_with(kind(torch.ones(4)))) == "the graph contains its own parameters or buffers (held)"


def test_transforms_around_a_graph_are_not_cached() -> None:
    graph, reasons = graph_of(lambda graph, x: graph.call_function(torch.sin, (x,))), []

    def transformed(x: Tensor) -> Tensor:
        reasons.append(find_reason(graph, x))
        return x

    torch.vmap(transformed)(torch.ones(2, 4))

    assert reasons == ["the graph is compiled inside a torch.func transform"]


def test_dispatch_modes_around_a_graph_are_not_cached() -> None:
    graph = graph_of(lambda graph, x: graph.call_function(torch.sin, (x,)))

    with FlopCounterMode(display=False):
        reason = find_reason(graph)

    assert reason == "a torch dispatch mode is active, which may change the operators of the graph"


def test_constants_are_identified_by_their_content() -> None:
    def key(constant: Tensor) -> GraphKey:
        graph = graph_with(constant)
        # As an attribute it becomes a part of the code; as a buffer it would be another input.
        graph.__dict__["held"] = graph._buffers.pop("held")
        return make_key(graph, [torch.ones(4)], options={}, versions={})

    one, same, other = key(torch.ones(4)), key(torch.ones(4)), key(torch.zeros(4))

    assert one.digest == same.digest
    assert one.digests["graph"] == other.digests["graph"]
    assert one.digests["constants"] != other.digests["constants"]
    assert key(torch.ones(2, 2).flatten()).digest == one.digest
    assert key(torch.ones(1)).digests["constants"] != one.digests["constants"]
