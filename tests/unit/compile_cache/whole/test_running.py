"""A loaded program returns what the callable returned, and passes gradients in the layout that its backward expects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.compile_cache.whole.program import Autograd, GeneratedCode, Program, Tangent
from holdfast.compile_cache.whole.running import LoadedProgram, build_result, find_extern, fit_tangent

_FORWARD = GeneratedCode(
    "def call(args):\n    x, = args\n    args.clear()\n    return (extern_kernels.mul(x, x), x)\n", {}, ("mul",), ()
)
_BACKWARD = GeneratedCode(
    "def call(args):\n    x, grad = args\n    args.clear()\n    return (2 * x * grad,)\n", {}, (), ()
)


def _square(*, is_training: bool) -> LoadedProgram:
    autograd = Autograd(1, (), (), (), (Tangent(0, (2, 3), (3, 1)),), deterministic=False, donated=False)
    return LoadedProgram(
        Program(
            inputs=(0,),
            num_outputs=1,
            result={"dict": [["y", {"output": 0}]]},
            mutated=(),
            changes_inputs=False,
            disable_autocast=False,
            forward=_FORWARD,
            backward=_BACKWARD if is_training else None,
            autograd=autograd if is_training else None,
        ),
        {},
    )


def test_a_program_for_training_has_gradients() -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()

    y = _square(is_training=True)([x])["y"]
    y.sum().backward()

    assert torch.equal(y, x * x)
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x)


def test_a_program_for_inference_has_none() -> None:
    x = torch.ones(2, 3, requires_grad=True)

    assert not _square(is_training=False)([x])["y"].requires_grad


def test_the_gradient_of_a_gradient_is_refused() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(_square(is_training=True)([x])["y"].sum(), x, create_graph=True)

    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()  # type: ignore[no-untyped-call]  # torch's


def test_deterministic_algorithms_after_the_forward_are_refused() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    y = _square(is_training=True)([x])["y"].sum()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="after the forward"):
            y.backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_gradient_gets_the_expected_strides() -> None:
    gradient = torch.arange(6.0).reshape(3, 2).T

    fitted = fit_tangent(gradient, Tangent(0, (2, 3), (3, 1)))

    assert fitted.stride() == (3, 1)
    assert torch.equal(fitted, gradient)
    assert fit_tangent(None, Tangent(0, (2, 3), (3, 1))) is None


def test_a_result_is_built_of_outputs_and_plain_values() -> None:
    outputs: list[Any] = ["a", "b"]

    assert build_result({"tuple": [{"output": 1}, {"list": [None, 3]}]}, outputs) == ("b", [None, 3])


def test_an_unknown_operator_or_function_cannot_be_loaded() -> None:
    code = GeneratedCode("call = None", {}, (), ("torch.ops.aten.no_such_operator",))
    with pytest.raises(AttributeError):
        LoadedProgram(Program((), 0, None, (), False, False, code, None, None), {})
    with pytest.raises(Uncacheable):
        find_extern("no_such_function")
