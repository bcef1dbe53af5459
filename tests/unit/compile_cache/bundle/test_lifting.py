"""The parameters and the state of a compiled optimizer become inputs of its graph; its settings stay in the key."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from holdfast.compile_cache.bundle.compiler import lift_tensors
from holdfast.compile_cache.key.key import make_key
from holdfast.compile_cache.key_parts import Uncacheable
from tests.kit.graph_keys import key_of
from tests.kit.thinning import thin

# Torch imports code of its own that it has deprecated, when it first traces an optimizer.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

_CHANGES: Final[dict[str, Any]] = {
    "lr": 0.2,
    "betas": (0.8, 0.999),
    "eps": 1e-6,
    "weight_decay": 0.3,
    "maximize": True,
    "amsgrad": True,
}


def _make_optimizer(kind: Callable[..., Any] = torch.optim.AdamW, **settings: Any) -> tuple[nn.Parameter, Any]:
    parameter = nn.Parameter(torch.arange(4.0))
    parameter.grad = torch.ones(4)
    return parameter, kind([parameter], **{"lr": 0.1, **settings})


def _record(optimizer: Any) -> list[str]:
    """Run a compiled step, through lifted graphs that are not compiled, and return the digests of their keys."""
    found: list[str] = []

    def backend(graph: GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        lifted = lift_tensors(graph)
        assert lifted is not None
        found.append(make_key(lifted.graph, [*lifted.tensors, *given], options={}, versions={}).digest)
        return lifted.bind(lifted.graph.forward)

    torch._dynamo.reset()
    step: Callable[[], Any] = torch.compile(optimizer.step, backend=backend)
    step()
    return found


@pytest.mark.parametrize("name", thin(_CHANGES))
def test_a_changed_setting_of_an_optimizer_changes_the_key(name: str) -> None:
    before, after = (_make_optimizer(**settings)[1] for settings in ({}, {name: _CHANGES[name]}))

    assert _record(before) != _record(after)


def test_another_optimizer_has_another_key() -> None:
    before, after = (_make_optimizer(kind, weight_decay=0.1)[1] for kind in (torch.optim.AdamW, torch.optim.Adam))

    assert _record(before) != _record(after)


def test_values_of_parameters_gradients_and_state_do_not_change_the_key() -> None:
    (_, first), (parameter, second) = _make_optimizer(), _make_optimizer()
    second.step()
    parameter.grad = torch.full((4,), 7.0)
    first.step()

    assert _record(first) == _record(second)


def test_a_lifted_graph_changes_the_tensors_of_the_optimizer() -> None:
    (plain, eager), (parameter, compiled) = _make_optimizer(), _make_optimizer()

    eager.step()
    _record(compiled)

    # Dynamo multiplies and adds in one operation, which rounds once.
    assert torch.allclose(parameter, plain)
    assert torch.allclose(compiled.state[parameter]["exp_avg"], eager.state[plain]["exp_avg"])


def test_the_tensors_of_a_deleted_optimizer_are_freed() -> None:
    parameter, optimizer = _make_optimizer()
    _record(optimizer)
    alive = weakref.ref(optimizer.state[parameter]["exp_avg"])

    del parameter, optimizer
    gc.collect()

    assert alive() is None


def test_a_graph_without_tensors_of_its_own_stays_as_it_is() -> None:
    assert lift_tensors(GraphModule({}, torch.fx.Graph())) is None


def test_tensors_of_unknown_origin_are_not_lifted() -> None:
    graph = torch.fx.Graph()
    graph.output(graph.get_attr("held"))
    module = GraphModule({"held": nn.Parameter(torch.ones(2))}, graph)

    with pytest.raises(Uncacheable) as caught:
        lift_tensors(module)
    assert caught.value.reason == "the graph contains its own parameters or buffers (held)"


def _make_function(forward_factor: float, backward_factor: float) -> Callable[[torch.Tensor], Any]:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * forward_factor

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            gradient: torch.Tensor = grads[0] * backward_factor + x
            return gradient

    function: Any = Scaled
    return lambda x: function.apply(x).sin()


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning")
def test_a_changed_forward_or_backward_of_an_autograd_function_changes_the_key() -> None:
    x = torch.ones(3, requires_grad=True)
    keys = [key_of(_make_function(*factors), x).digest for factors in ((2.0, 3.0), (2.0, 3.0), (2.0, 5.0), (4.0, 3.0))]

    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
