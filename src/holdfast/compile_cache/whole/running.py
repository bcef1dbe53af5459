"""Loads a stored program and runs it: its kernels, its generated code, and the connection to autograd."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from holdfast.compile_cache.artifacts.trust import as_private_file
from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.compile_cache.whole.generated import KERNELS
from holdfast.compile_cache.whole.program import Autograd, GeneratedCode, Program, Tangent
from holdfast.digest import hash_bytes

_POINTER_VARIABLE: Final = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
"""Kernels read from it, when they are loaded, the address of torch's function that finds the data of a tensor."""
_ENTRY: Final = "kernel"

GeneratedCall = Callable[[list[Tensor]], Any]


class LoadedProgram:
    """A program that can be called."""

    def __init__(self, program: Program, libraries: Mapping[str, bytes]) -> None:
        """Load the code and kernels of a program. This runs stored code: the caller has verified it."""
        self.program = program
        kernels = _load_kernels(program, libraries)
        forward = _load_code(program.forward, kernels)
        self._run: Callable[[list[Tensor]], Sequence[Any]]
        if program.autograd is None:
            self._run = functools.partial(_infer, forward, _disable_autocast(program))
        else:
            assert program.backward is not None, "a program for training has a backward"
            step = _make_step(program, program.autograd, forward, _load_code(program.backward, kernels))
            self._run = functools.partial(_train, step, program.autograd.detached, _disable_autocast(program))

    def __call__(self, inputs: list[Tensor]) -> Any:
        """GeneratedCall the forward, and return what the callable returns."""
        if self.program.mutated:
            torch.autograd.graph.increment_version([inputs[number] for number in self.program.mutated])
        return build_result(self.program.result, self._run(inputs))


def build_result(result: Any, outputs: Sequence[Any]) -> Any:
    """Return the value of a callable, from the outputs of its graph."""
    if not isinstance(result, dict):
        return result
    (kind, content), *_ = result.items()
    match kind:
        case "output":
            return outputs[content]
        case "list":
            return [build_result(each, outputs) for each in content]
        case "tuple":
            return tuple(build_result(each, outputs) for each in content)
    return {key: build_result(each, outputs) for key, each in content}


def _disable_autocast(program: Program) -> Callable[[], AbstractContextManager[Any]]:
    return torch._C._DisableAutocast if program.disable_autocast else nullcontext


def _infer(
    run: GeneratedCall, outside: Callable[[], AbstractContextManager[Any]], inputs: list[Tensor]
) -> Sequence[Any]:
    with torch.no_grad(), outside():
        found: Sequence[Any] = run(inputs)
    return found


def _train(
    step: Any, detached: Sequence[int], outside: Callable[[], AbstractContextManager[Any]], inputs: list[Tensor]
) -> Sequence[Any]:
    for number in detached:
        inputs[number] = inputs[number].detach()
    # As torch does around compiled code: views that it returns are replayed rather than made by strides.
    replay = torch._C._is_view_replay_enabled()
    torch._C._set_view_replay_enabled(True)
    try:
        with torch.enable_grad(), outside():
            found: Sequence[Any] = step.apply(*inputs)
    finally:
        torch._C._set_view_replay_enabled(replay)
    return found


def _make_step(program: Program, autograd: Autograd, forward_code: GeneratedCall, backward_code: GeneratedCall) -> Any:
    """Return an autograd function whose forward and backward are compiled."""
    outside = _disable_autocast(program)
    num_outputs = program.num_outputs

    class CompiledStep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Any:
            with outside():
                found = list(forward_code(list(inputs)))
            # A view is saved without its base, which would be kept alive otherwise.
            saved = [each.detach() if each._is_view() else each for each in found[num_outputs:]]
            ctx.save_for_backward(*saved)
            outputs = found[:num_outputs]
            for number in autograd.unsafe_views:
                outputs[number] = torch.ops.aten._unsafe_view(outputs[number], outputs[number].shape)
            ctx.mark_non_differentiable(*(outputs[number] for number in autograd.without_gradient))
            ctx._materialize_non_diff_grads = False
            return tuple(outputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            _verify_backward(autograd)
            tangents = [fit_tangent(gradients[each.output], each) for each in autograd.tangents]
            inputs = [*ctx.saved_tensors, *tangents]
            if torch.is_grad_enabled():
                anchor = torch.empty(0, requires_grad=True)
                return _OnceDifferentiable.apply(backward_code, outside, anchor, *inputs)  # type: ignore[no-untyped-call]  # torch's
            ctx.maybe_clear_saved_tensors()
            with outside():
                return tuple(backward_code(inputs))

    return CompiledStep


class _OnceDifferentiable(torch.autograd.Function):
    """A compiled backward whose gradients are needed, too: they cannot be computed."""

    @staticmethod
    def forward(ctx: FunctionCtx, run: GeneratedCall, outside: Any, anchor: Tensor, *inputs: Tensor) -> Any:
        with outside():
            return tuple(run(list(inputs)))

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Any) -> Any:
        raise RuntimeError("a compiled callable does not support double backward")


def _verify_backward(autograd: Autograd) -> None:
    """Raise the errors that torch's compiled backward raises."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError("a compiled backward cannot run inside a torch.func transform")
    if not autograd.deterministic and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            "torch.use_deterministic_algorithms(True) was called after the forward, which was compiled without it"
        )
    if autograd.donated and torch._C._autograd._get_current_graph_task_keep_graph():
        raise RuntimeError(
            "this compiled backward reuses the memory of saved tensors, so it needs retain_graph=False and"
            " create_graph=False; or set torch._functorch.config.donated_buffer=False"
        )


def fit_tangent(gradient: Any, tangent: Tangent) -> Any:
    """Return the gradient of an output with the layout that the backward expects."""
    if type(gradient) is not Tensor and isinstance(gradient, Tensor):
        raise RuntimeError(
            f"the gradient of a compiled callable is a {type(gradient).__qualname__}, not a plain tensor"
        )
    if not isinstance(gradient, Tensor):
        return gradient
    if tuple(gradient.shape) == tangent.size and gradient.stride() == tangent.stride:
        return gradient
    fitted = torch.empty_strided(tangent.size, tangent.stride, dtype=gradient.dtype, device=gradient.device)
    return fitted.copy_(gradient)


def _load_code(code: GeneratedCode, kernels: Mapping[str, Any]) -> GeneratedCall:
    names: dict[str, Any] = {variable: kernels[digest] for variable, digest in code.kernels.items()}
    names[KERNELS] = SimpleNamespace(**{name: find_extern(name) for name in code.externs})
    for each in code.operators:
        attrgetter(each.removeprefix("torch."))(torch)  # raises AttributeError if torch has no such operator
    exec(compile(code.source, "<holdfast>", "exec"), names)  # noqa: S102 - an artifact is code, and it is trusted
    run: GeneratedCall = names["call"]
    return run


def find_extern(name: str) -> Any:
    """Return the function of torch that generated code calls as `extern_kernels.name`."""
    found = getattr(torch, name, None)
    if found is None:
        raise Uncacheable(f"the generated code calls extern_kernels.{name}, which is not a function of torch")
    return found


def _load_kernels(program: Program, libraries: Mapping[str, bytes]) -> dict[str, Any]:
    wanted = {digest for code in (program.forward, program.backward) if code for digest in code.kernels.values()}
    os.environ[_POINTER_VARIABLE] = str(torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr)  # type: ignore[attr-defined]  # not in the stubs
    return {digest: _load_library(libraries[digest]) for digest in sorted(wanted)}


def _load_library(data: bytes) -> Any:
    # Named by its bytes: two libraries built from one source are different modules.
    digest = hash_bytes(data).hex()
    name = f"{digest}.{_ENTRY}"
    with as_private_file(data, f"{digest}.so") as path:
        spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
        assert spec is not None, "a loader is given"
        assert spec.loader is not None, "a loader is given"
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, _ENTRY)
