"""How a recording reaches the tensors of a model: hooks on modules and parameters, kept out of copies of the model."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch.compiler import is_compiling
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from holdfast.capture.record.observer import CallSite, Observer, find_graph_task, find_source
from holdfast.capture.record.points import Point, Points, describe_form, list_arguments, list_paths
from holdfast.capture.stored.events import EventKind, Level

_HOOKS: Final = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


class CopiedHook:
    """Takes the place of a module's hooks in a copy of the module. It does nothing, and is removed from the copy."""

    _hooks: Final = None

    def __init__(self, module: torch.nn.Module, memo: dict[Any, Any]) -> None:
        """Be removed from the copy of `module` when `memo`, that of `copy.deepcopy`, is deleted after the copying."""
        copied = memo.get(id(module))
        if copied is not None:
            memo.setdefault(_CopiedModules, _CopiedModules()).modules.append(copied)


class _CopiedModules:
    """The modules of a copy from which hooks are to be removed."""

    def __init__(self) -> None:
        self.modules: list[torch.nn.Module] = []

    def __del__(self) -> None:
        """Remove the hooks; any that are left do nothing."""
        for module in self.modules:
            hooks = [vars(module).get(name, {}) for name in _HOOKS]
            copied = [key for each in hooks for key, hook in each.items() if _is_copied(hook)]
            for key in copied:
                for each in hooks:
                    each.pop(key, None)


def _is_copied(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), CopiedHook)


_UNWRITTEN: Final = ("aten.empty", "aten.new_empty")
"""Operations that return uninitialized memory; its content is arbitrary."""
Tap = Callable[[torch.Tensor, int, int, int], torch.Tensor]


class Removable(Protocol):
    """A hook that is installed."""

    @property
    def name(self) -> str:
        """The module, parameter or optimizer that has the hook."""

    @property
    def is_present(self) -> bool:
        """Whether the hook is still there; other code may have removed it."""

    def remove(self) -> None:
        """Remove the hook, unless other code has removed or replaced it."""


class InstalledHook(NamedTuple):
    """A hook, and where torch keeps it; other code may remove it."""

    name: str
    """The module, parameter or optimizer that has the hook."""
    owner: object
    table: str
    """The attribute of `owner` that has its hooks by number."""
    handle: RemovableHandle

    @property
    def is_present(self) -> bool:
        """Whether the hook is still there."""
        return self.handle.id in (getattr(self.owner, self.table) or ())

    def remove(self) -> None:
        """Remove the hook."""
        self.handle.remove()


class _Sites(NamedTuple):
    """Where the tensors of one call of a module are observed."""

    input: CallSite
    output: CallSite
    grad: CallSite


class _Call(NamedTuple):
    """A module call that has not returned: it is running, or an exception ended it."""

    hook: _ModuleHook
    sites: _Sites
    inputs: list[tuple[str, torch.Tensor, int]]
    """Path, tensor and version of each recorded input; a version changes with every operation in place."""


class _Calls(threading.local):
    """The running calls of one thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Call] = []


class ModuleHooks:
    """Hooks on all recorded modules; each calls `begin` first, which begins a step unless one is in progress."""

    def __init__(
        self, observer: Observer, begin: Callable[[], None], begin_backward: Callable[[], None] = lambda: None
    ) -> None:
        """Observe for `observer`; `begin_backward` is called before each gradient of an output is observed."""
        self._observer = observer
        self._begin = begin
        self._begin_backward = begin_backward
        self._handles: list[Removable] = []
        self._on_outputs: list[tuple[weakref.ref[torch.Tensor], int, str, RemovableHandle]] = []
        """The hooks on outputs of this step. Most outputs are freed during the backward pass."""
        self._calls = _Calls()
        self._installed: list[_ModuleHook] = []
        self._arrived: defaultdict[tuple[Hashable, str], int] = defaultdict(int)
        """By call and path, how many gradients or tapped tensors have arrived in this step."""
        self._tapped: list[Point] = []
        self._receiver_number = 0
        self.is_on = True
        self.called: set[str] = set()
        """The modules that were called at least once."""

    def install(self, point: Point) -> None:
        """Hook a module. The model itself is always hooked, because its call begins a step."""
        find_level = self._observer.find_level
        levels = (find_level("input", point.fqn), find_level("output", point.fqn), find_level("grad", point.fqn))
        if point.fqn and all(level is Level.OFF for level in levels):
            return
        hook = _ModuleHook(self, point, levels)
        self._installed.append(hook)
        enter, leave = hook.enter, _ignore_output if point.is_outside else hook.leave
        if point.is_compiled:
            self._handles.append(_CompiledCall(point, enter, leave))
            return
        module, name = point.module, point.fqn or "the model"
        before = module.register_forward_pre_hook(enter, with_kwargs=True)
        self._handles.append(InstalledHook(name, module, "_forward_pre_hooks", before))
        self._handles.append(InstalledHook(name, module, "_forward_hooks", module.register_forward_hook(leave)))
        if self._observer.options.compiled == "tap" and not point.is_outside:
            self._tap(point)

    def _tap(self, point: Point) -> None:
        taps = find_taps()
        if not self._tapped:
            self._receiver_number = taps.register(self)
        hook = make_hook(taps.tap, self._receiver_number, len(self._tapped))
        self._tapped.append(point)
        handle = point.module.register_forward_hook(hook)
        self._handles.append(InstalledHook(point.fqn or "the model", point.module, "_forward_hooks", handle))

    def receive_tapped(self, module_index: int, position: int, tensor: torch.Tensor, *, is_grad: bool) -> None:
        """Observe a tensor that a tap received: an output of a module, or its gradient.

        `module_index` is the number of the module in the order in which they were tapped. `position` is the index of
        the tensor among the module's outputs; -1 if it is the only one.
        """
        observer, point = self._observer, self._tapped[module_index]
        if not self.is_on:
            return
        try:
            self._begin()
            kind: EventKind = "grad" if is_grad else "output"
            level = observer.find_level(kind, point.fqn)
            if not observer.is_open or level is Level.OFF:
                return
            self.called.add(point.fqn)
            path = f"[{position}]" if position >= 0 else ""
            key = ((f"tapped {kind}", module_index), path)
            call = self._arrived[key]
            self._arrived[key] += 1
            where = CallSite("backward" if is_grad else "forward", kind, point.fqn, call, point.class_name)
            observer.observe(tensor, where, level, path)
        except Exception as error:  # noqa: BLE001  # a bug in the recorder must not stop the training
            observer.fail(error)

    def remove(self) -> None:
        """Remove all hooks."""
        self.is_on = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def iter_missing(self) -> Iterator[str]:
        """Yield the modules whose hooks other code has removed, in this step or before."""
        yield from (each.name for each in self._handles if not each.is_present)
        if self._observer.options.compiled == "boundary":
            # A module that was compiled since then calls its hooks in compiled code, where only taps observe.
            yield from (each.fqn or "the model" for each in self._installed if each.is_compiled_again)
        for find_output, version, name, handle in self._on_outputs:
            output = find_output()
            # An operation in place moves the hooks to what the output was computed by.
            is_same = output is not None and _find_version(output) == version
            if output is not None and is_same and handle.id not in (output._backward_hooks or ()):
                yield name

    def begin_step(self) -> None:
        """Reset the call counts."""
        self._on_outputs.clear()
        for hook in self._installed:
            hook.counts = [0, 0]
        self._arrived.clear()
        self._calls.stack.clear()

    def find_innermost(self) -> str | None:
        """Return the module whose call is running in this thread, the innermost one."""
        return self._calls.stack[-1].hook.fqn if self._calls.stack else None

    def enter(self, hook: _ModuleHook, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Observe the inputs of a call that begins."""
        observer = self._observer
        self._begin()
        if not observer.is_open:
            return
        self.called.add(hook.fqn)
        sites, level = hook.begin_call(), hook.input_level
        inputs: list[tuple[str, torch.Tensor, int]] = []
        self._calls.stack.append(_Call(hook, sites, inputs))
        if level is Level.OFF:
            return
        form = describe_form(args, kwargs) if level is Level.FULL else ""
        for path, tensor in list_arguments(args, kwargs):
            inputs.append((path, tensor, _find_version(tensor)))
            observer.observe(tensor, sites.input, level, path, form)
            form = ""

    def leave(self, hook: _ModuleHook, output: object) -> None:
        """Observe the outputs of a call that ends, and later their gradients."""
        observer = self._observer
        call = self._find_call(hook)
        if call is None or not observer.is_open:
            return
        level, observes_grads = hook.output_level, hook.grad_level is not Level.OFF
        for path, tensor in list_paths(output):
            if level is not Level.OFF:
                observer.observe(tensor, call.sites.output, level, path)
            if observes_grads and tensor.requires_grad:
                self._await_grad(tensor, hook, call.sites.grad, path)
        if level is not Level.OFF:
            for path, tensor in _iter_changed(call, output):
                observer.observe(tensor, call.sites.output, level, f"#input{path}")

    def fail(self, error: Exception) -> None:
        """Stop recording, because a hook has failed; a bug in the recorder must not stop the training."""
        self._observer.fail(error)

    def _find_call(self, hook: _ModuleHook) -> _Call | None:
        """Pop the call that ends; exceptions ended those above it on the stack."""
        stack = self._calls.stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index].hook is hook:
                call = stack[index]
                del stack[index:]
                return call
        return None

    def _await_grad(self, tensor: torch.Tensor, hook: _ModuleHook, where: CallSite, path: str) -> None:
        # On the tensor, not on the module: backward hooks of modules do not allow in-place operations.
        handle = tensor.register_hook(partial(self._observe_grad, hook.grad_level, where, path))  # type: ignore[no-untyped-call]  # torch's
        if tensor.is_leaf:
            # A leaf outlives the step; other tensors take their hooks with them when they are freed.
            self._handles.append(InstalledHook(hook.fqn or "the model", tensor, "_backward_hooks", handle))
        else:
            known = (weakref.ref(tensor), _find_version(tensor), hook.fqn or "the model", handle)
            self._on_outputs.append(known)

    def _observe_grad(self, level: Level, where: CallSite, path: str, grad: torch.Tensor) -> None:
        observer = self._observer
        if not self.is_on or not observer.is_open:
            return
        try:
            self._begin_backward()
            key = ((where.fqn, where.call), path)
            count = self._arrived[key] = self._arrived[key] + 1
            observer.observe(grad, where, level, f"{path}#{count}" if count > 1 else path)
        except Exception as error:  # noqa: BLE001  # as above
            observer.fail(error)


class _ModuleHook:
    """The hooks of one module, and everything about it that is the same for each call."""

    __slots__ = (
        "_class_name",
        "_compiled",
        "_hooks",
        "_is_wrapped",
        "_module",
        "_sites",
        "counts",
        "fqn",
        "grad_level",
        "input_level",
        "output_level",
    )

    def __init__(self, hooks: ModuleHooks, point: Point, levels: tuple[Level, Level, Level]) -> None:
        """Pass calls to `hooks`; the levels are those of inputs, outputs and gradients."""
        self.fqn = point.fqn
        self.input_level, self.output_level, self.grad_level = levels
        self.counts = [0, 0]
        """The number of calls in this step: those of the forward pass, and those that recompute activations."""
        self._hooks: ModuleHooks | None = hooks
        """None in a copy of the module."""
        self._module = point.module
        self._is_wrapped = point.is_compiled
        self._compiled = point.module._compiled_call_impl
        self._class_name = point.class_name
        self._sites: dict[tuple[int, bool, str], _Sites] = {}

    @property
    def is_compiled_again(self) -> bool:
        """Whether the module was compiled after its hooks were installed; a wrapped call is checked by itself."""
        return not self._is_wrapped and self._module._compiled_call_impl is not self._compiled

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Observe a call that begins."""
        # While torch traces, there are no values; returning early keeps this hook out of the compiled code.
        if is_compiling() or self._hooks is None:
            return
        try:
            self._hooks.enter(self, args, kwargs)
        except Exception as error:  # noqa: BLE001  # a bug in the recorder must not stop the training
            self._hooks.fail(error)

    def leave(self, module: torch.nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Observe a call that ends."""
        if is_compiling() or self._hooks is None:
            return
        try:
            self._hooks.leave(self, output)
        except Exception as error:  # noqa: BLE001  # as above
            self._hooks.fail(error)

    def __deepcopy__(self, memo: dict[Any, Any]) -> CopiedHook:
        """Leave the hooks out of a copy of the module: a copy is not recorded."""
        return CopiedHook(self._module, memo)

    def begin_call(self) -> _Sites:
        """Count a call, and return where its tensors are observed."""
        recompute = find_graph_task() != -1
        number = self.counts[recompute]
        self.counts[recompute] = number + 1
        key = (number, recompute, find_source())
        found = self._sites.get(key)
        if found is None:
            found = self._sites[key] = self._make_sites(*key)
        return found

    def _make_sites(self, number: int, recompute: bool, source: str) -> _Sites:
        facts = (self.fqn, number, self._class_name, "", source)
        return _Sites(
            CallSite("forward", "input", *facts, recompute),
            CallSite("forward", "output", *facts, recompute),
            CallSite("backward", "grad", *facts),
        )


def _find_version(tensor: torch.Tensor) -> int:
    """Return the number of operations in place so far; -1 for inference tensors, which do not count them."""
    return -1 if tensor.is_inference() else tensor._version


def _iter_changed(call: _Call, output: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the inputs that were changed in place during a call, unless they are outputs, which are recorded anyway."""
    changed = [(path, tensor) for path, tensor, version in call.inputs if _find_version(tensor) != version]
    if changed:
        outputs = {id(tensor) for _, tensor in list_paths(output)}
        yield from ((path, tensor) for path, tensor in changed if id(tensor) not in outputs)


def _ignore_output(*rest: object) -> None:
    """Record nothing: taps inside the module record its results."""


class _CompiledCall:
    """Wraps the compiled call of a module, because the module's own hooks are compiled into that call."""

    def __init__(self, point: Point, enter: Callable[..., None], leave: Callable[..., None]) -> None:
        module = self._module = point.module
        self.name = point.fqn or "the model"
        self._inner: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]  # None is not hooked
        inner = self._inner

        def call(*args: Any, **kwargs: Any) -> Any:
            enter(module, args, kwargs)
            output = inner(*args, **kwargs)
            leave(module, args, output)
            return output

        module._compiled_call_impl = self._outer = call

    @property
    def is_present(self) -> bool:
        """Whether the module still calls this; it does not if it was compiled again."""
        return self._module._compiled_call_impl is self._outer

    def remove(self) -> None:
        """Restore the module's own compiled call, unless it was compiled again."""
        if self.is_present:
            self._module._compiled_call_impl = self._inner


class Taps:
    """The recordings that receive tensors, by number: compiled code outlives the recording it was compiled in.

    There is one per process, because torch's operations are global. It keeps no recording alive.
    """

    def __init__(self) -> None:
        """Register the operations with torch."""
        self._receivers: weakref.WeakValueDictionary[int, ModuleHooks] = weakref.WeakValueDictionary()
        self._count = 0
        self.tap = _define(self._deliver)

    def register(self, receiver: ModuleHooks) -> int:
        """Return a number by which taps find this receiver while it is alive."""
        self._count += 1
        self._receivers[self._count] = receiver
        return self._count

    def _deliver(self, tensor: torch.Tensor, target: tuple[int, int, int], is_grad: bool) -> torch.Tensor:
        number, module_index, position = target
        receiver = self._receivers.get(number)
        if receiver is not None:
            receiver.receive_tapped(module_index, position, tensor, is_grad=is_grad)
        # A custom operation must not return its argument.
        return tensor.clone()


@cache
def find_taps() -> Taps:
    """Return the taps of this process; the first call creates them."""
    return Taps()


def _define(deliver: Callable[[torch.Tensor, tuple[int, int, int], bool], torch.Tensor]) -> Tap:
    @torch.library.custom_op("holdfast::tap", mutates_args=())
    def tap(tensor: torch.Tensor, number: int, module_index: int, position: int) -> torch.Tensor:
        return deliver(tensor, (number, module_index, position), False)

    @torch.library.custom_op("holdfast::tap_grad", mutates_args=())
    def tap_grad(tensor: torch.Tensor, number: int, module_index: int, position: int) -> torch.Tensor:
        return deliver(tensor, (number, module_index, position), True)

    def remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.target = inputs[1:]

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return tap_grad(grad, *ctx.target), None, None, None

    tap.register_fake(lambda tensor, number, module_index, position: torch.empty_like(tensor))
    tap_grad.register_fake(lambda tensor, number, module_index, position: torch.empty_like(tensor))
    tap.register_autograd(backward, setup_context=remember)
    return tap


def make_hook(tap: Tap, number: int, module_index: int) -> Callable[..., object]:
    """Return a forward hook that adds taps to a module's outputs while it is compiled, and otherwise does nothing."""

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: object) -> object:
        if not is_compiling():
            return None
        if isinstance(output, torch.Tensor):
            return tap(output, number, module_index, -1)
        leaves, form = tree_flatten(output)
        tapped = [
            tap(leaf, number, module_index, position) if isinstance(leaf, torch.Tensor) else leaf
            for position, leaf in enumerate(leaves)
        ]
        return tree_unflatten(tapped, form)

    return hook


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """A dispatch mode that observes the results of operations."""

    def __init__(self, drill: Drill, point: Point) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as well
        self._drill = drill
        self._point = point

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._drill.observe(self._point, func, result)
        return result


class _DrilledForward:
    """Takes the place of a module's `forward`, and records the operations in it."""

    def __init__(self, drill: Drill, point: Point, forward: Callable[..., Any]) -> None:
        self._drill = drill
        self._point = point
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not self._drill.is_open:
            return self._forward(*args, **kwargs)
        with _Operations(self._drill, self._point):
            return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Callable[..., Any]:
        """Return the plain method of the copied module: a copy is not recorded."""
        return copy.deepcopy(self._forward, memo)


class Drill:
    """Records the operations inside modules."""

    def __init__(self, observer: Observer, find_innermost: Callable[[], str | None]) -> None:
        """Pass results to `observer`; `find_innermost` returns the module whose call is running."""
        self._observer = observer
        self._find_innermost = find_innermost
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._installed: list[tuple[Point, _DrilledForward, object]] = []

    def install(self, point: Point) -> None:
        """Record the operations of a module from now on."""
        module = point.module
        # On the instance, which hides the class's forward; deleting it restores the module.
        drilled = _DrilledForward(self, point, module.forward)
        self._installed.append((point, drilled, vars(module).get("forward")))
        module.forward = drilled

    def iter_missing(self) -> Iterator[str]:
        """Yield the modules whose `forward` other code has replaced."""
        yield from (
            point.fqn or "the model"
            for point, drilled, _ in self._installed
            if vars(point.module).get("forward") is not drilled
        )

    @property
    def is_open(self) -> bool:
        """Whether this step is recorded."""
        return self._observer.is_open

    def remove(self) -> None:
        """Restore the forward methods of all modules, except those that other code has replaced."""
        for point, drilled, own in self._installed:
            module = point.module
            if vars(module).get("forward") is not drilled:
                continue
            if own is None:
                del module.forward
            else:
                vars(module)["forward"] = own
        self._installed.clear()

    def begin_step(self) -> None:
        """Reset the operation counts."""
        self._counts.clear()

    def observe(self, point: Point, operation: Any, result: object) -> None:
        """Observe the result of an operation; views are left out, because they have no bytes of their own."""
        name = str(operation)
        if operation.is_view or name.startswith(_UNWRITTEN):
            return
        observer = self._observer
        try:
            parent = self._find_innermost() or point.fqn
            level = observer.find_level("op", parent)
            if level is Level.OFF:
                return
            fqn = f"{parent}/{name}"
            recompute = find_graph_task() != -1
            where = CallSite("forward", "op", fqn, self._counts[fqn], name, parent, find_source(), recompute)
            self._counts[fqn] += 1
            for path, tensor in list_paths(result):
                observer.observe(tensor, where, level, path)
        except Exception as error:  # noqa: BLE001  # a bug in the recorder must not stop the training
            observer.fail(error)


class ParameterGrads:
    """Hooks that run after a gradient was added to that of a parameter."""

    def __init__(self, observer: Observer, points: Points) -> None:
        self._observer = observer
        self._levels = {name: observer.find_level("param_grad", name) for name in points.parameters}
        self._parameters = {
            name: parameter for name, parameter in points.parameters.items() if self._levels[name] is not Level.OFF
        }
        self._sites = {name: CallSite("backward", "param_grad", name) for name in self._parameters}
        self._waiting = dict(self._parameters)
        """Parameters without a hook: they do not require gradients, and torch allows none on them."""
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._has_begun_backward = False
        self._handles: list[InstalledHook] = []

    def begin_step(self) -> None:
        """Reset the counts, and hook parameters that have begun to require gradients."""
        self._counts.clear()
        self._has_begun_backward = False
        for name, parameter in [*self._waiting.items()]:
            if parameter.requires_grad and parameter.is_leaf:
                hook = partial(self._observe_sum, name)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's
                self._handles.append(InstalledHook(name, parameter, "_post_accumulate_grad_hooks", handle))
                del self._waiting[name]

    def begin_backward(self) -> None:
        """Observe gradients that are there before the first backward pass of a step; zero_grad() clears them."""
        if self._has_begun_backward:
            return
        self._has_begun_backward = True
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._observe(name, parameter.grad, 0)

    def iter_missing(self) -> Iterator[str]:
        """Yield the parameters whose hooks other code has removed."""
        yield from (each.name for each in self._handles if not each.is_present)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _observe_sum(self, name: str, parameter: torch.Tensor) -> None:
        observer = self._observer
        # A hook of the user may have consumed the gradient already.
        if is_compiling() or not observer.is_open or parameter.grad is None:
            return
        try:
            self._counts[name] += 1
            self._observe(name, parameter.grad, self._counts[name])
        except Exception as error:  # noqa: BLE001  # a bug in the recorder must not stop the training
            observer.fail(error)

    def _observe(self, name: str, grad: torch.Tensor, count: int) -> None:
        self._observer.observe(grad, self._sites[name], self._levels[name], f"#{count}")
