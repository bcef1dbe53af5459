"""How a recording reaches the tensors of a model.

Module hooks observe inputs, outputs and gradients of outputs. Taps are operations that are compiled in place of hooks.
A drill records the result of every operation inside chosen modules.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch.compiler import is_compiling
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from holdfast.capture.record.forms import describe_form, iter_arguments, iter_paths
from holdfast.capture.record.observer import CallSite, Observer, find_graph_task, find_source
from holdfast.capture.record.points import Point
from holdfast.capture.stored.events import EventKind, Level

_UNWRITTEN: Final = ("aten.empty", "aten.new_empty")
"""Operations that return uninitialized memory; its content is arbitrary."""
Tap = Callable[[torch.Tensor, int, int, int], torch.Tensor]


class Removable(Protocol):
    """A handle that torch returns for a registered hook."""

    def remove(self) -> None:
        """Remove the hook."""


class _Call(NamedTuple):
    """A module call that has not returned: it is running, or an exception ended it."""

    fqn: str
    number: int
    source: str
    recompute: bool
    inputs: tuple[tuple[str, torch.Tensor, int], ...]
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
        self._calls = _Calls()
        self._counts: defaultdict[tuple[str, bool], int] = defaultdict(int)
        self._arrived: defaultdict[tuple[str, int, str], int] = defaultdict(int)
        """By call and path, how many gradients or tapped tensors have arrived in this step."""
        self._tapped: list[Point] = []
        self._receiver_number = 0
        self.is_on = True
        self.called: set[str] = set()
        """The modules that were called at least once."""

    def install(self, point: Point) -> None:
        """Hook a module. The model itself is always hooked, because its call begins a step."""
        kinds: tuple[EventKind, ...] = ("input", "output", "grad")
        if point.fqn and all(self._observer.find_level(kind, point.fqn) is Level.OFF for kind in kinds):
            return
        enter, leave = (
            partial(self._enter, point.fqn, point.class_name),
            partial(self._leave, point.fqn, point.class_name),
        )
        if point.is_outside:
            leave = partial(_ignore_output)
        if point.is_compiled:
            self._handles.append(_CompiledCall(point.module, enter, leave))
            return
        self._handles.append(point.module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(point.module.register_forward_hook(leave))
        if self._observer.options.compiled == "tap" and not point.is_outside:
            self._tap(point)

    def _tap(self, point: Point) -> None:
        taps = find_taps()
        if not self._tapped:
            self._receiver_number = taps.register(self)
        hook = make_hook(taps.tap, self._receiver_number, len(self._tapped))
        self._tapped.append(point)
        self._handles.append(point.module.register_forward_hook(hook))

    def receive_tapped(self, module_index: int, position: int, tensor: torch.Tensor, *, is_grad: bool) -> None:
        """Observe a tensor that a tap received; see `TapReceiver.receive_tapped`."""
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
            key = (f"tapped {kind}", module_index, path)
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

    def begin_step(self) -> None:
        """Reset the call counts."""
        self._counts.clear()
        self._arrived.clear()
        self._calls.stack.clear()

    def find_innermost(self) -> str | None:
        """Return the module whose call is running in this thread, the innermost one."""
        return self._calls.stack[-1].fqn if self._calls.stack else None

    def _enter(
        self, fqn: str, class_name: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        # While torch traces, there are no values; returning early keeps this hook out of the compiled code.
        if is_compiling():
            return
        observer = self._observer
        try:
            self._begin()
            if not observer.is_open:
                return
            self.called.add(fqn)
            recompute = find_graph_task() != -1
            number = self._counts[fqn, recompute]
            self._counts[fqn, recompute] = number + 1
            level = observer.find_level("input", fqn)
            found = () if level is Level.OFF else tuple(iter_arguments(args, kwargs))
            inputs = tuple((path, tensor, _find_version(tensor)) for path, tensor in found)
            call = _Call(fqn, number, find_source(), recompute, inputs)
            self._calls.stack.append(call)
            form = describe_form(args, kwargs) if level is Level.FULL else ""
            where = CallSite("forward", "input", fqn, number, class_name, "", call.source, recompute)
            for path, tensor in found:
                observer.observe(tensor, where, level, path, form)
                form = ""
        except Exception as error:  # noqa: BLE001  # a bug in the recorder must not stop the training
            observer.fail(error)

    def _leave(self, fqn: str, class_name: str, module: torch.nn.Module, args: tuple[Any, ...], output: object) -> None:
        if is_compiling():
            return
        observer = self._observer
        try:
            call = self._find_call(fqn)
            if call is None or not observer.is_open:
                return
            where = CallSite("forward", "output", fqn, call.number, class_name, "", call.source, call.recompute)
            level, grad_level = observer.find_level("output", fqn), observer.find_level("grad", fqn)
            for path, tensor in iter_paths(output):
                if level is not Level.OFF:
                    observer.observe(tensor, where, level, path)
                if grad_level is not Level.OFF and tensor.requires_grad:
                    self._await_grad(tensor, where._replace(phase="backward", kind="grad", recompute=False), path)
            if level is not Level.OFF:
                for path, tensor in _iter_changed(call, output):
                    observer.observe(tensor, where, level, f"#input{path}")
        except Exception as error:  # noqa: BLE001  # as above
            observer.fail(error)

    def _find_call(self, fqn: str) -> _Call | None:
        """Pop the call that ends; exceptions ended those above it on the stack."""
        stack = self._calls.stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index].fqn == fqn:
                call = stack[index]
                del stack[index:]
                return call
        return None

    def _await_grad(self, tensor: torch.Tensor, where: CallSite, path: str) -> None:
        # On the tensor, not on the module: backward hooks of modules do not allow in-place operations.
        handle = tensor.register_hook(partial(self._observe_grad, where, path))  # type: ignore[no-untyped-call]  # torch's
        if tensor.is_leaf:
            # A leaf outlives the step; other tensors take their hooks with them when they are freed.
            self._handles.append(handle)

    def _observe_grad(self, where: CallSite, path: str, grad: torch.Tensor) -> None:
        observer = self._observer
        if not self.is_on or not observer.is_open:
            return
        try:
            self._begin_backward()
            key = (where.fqn, where.call, path)
            self._arrived[key] += 1
            suffix = f"#{self._arrived[key]}" if self._arrived[key] > 1 else ""
            observer.observe(grad, where, observer.find_level("grad", where.fqn), path + suffix)
        except Exception as error:  # noqa: BLE001  # as above
            observer.fail(error)


def _find_version(tensor: torch.Tensor) -> int:
    """Return the number of operations in place so far; -1 for inference tensors, which do not count them."""
    return -1 if tensor.is_inference() else tensor._version


def _iter_changed(call: _Call, output: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the inputs that were changed in place during a call, unless they are outputs, which are recorded anyway."""
    changed = [(path, tensor) for path, tensor, version in call.inputs if _find_version(tensor) != version]
    if changed:
        outputs = {id(tensor) for _, tensor in iter_paths(output)}
        yield from ((path, tensor) for path, tensor in changed if id(tensor) not in outputs)


def _ignore_output(*rest: object) -> None:
    """Record nothing: taps inside the module record its results."""


class _CompiledCall:
    """Wraps the compiled call of a module, because the module's own hooks are compiled into that call."""

    def __init__(self, module: torch.nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> None:
        self._module = module
        self._inner: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]  # None is not hooked
        inner = self._inner

        def call(*args: Any, **kwargs: Any) -> Any:
            enter(module, args, kwargs)
            output = inner(*args, **kwargs)
            leave(module, args, output)
            return output

        module._compiled_call_impl = call

    def remove(self) -> None:
        """Restore the module's own compiled call."""
        self._module._compiled_call_impl = self._inner


class TapReceiver(Protocol):
    """A recording that receives the tensors of taps."""

    def receive_tapped(self, module_index: int, position: int, tensor: torch.Tensor, *, is_grad: bool) -> None:
        """Receive an output of a module, or its gradient.

        `module_index` is the number of the module in the order in which the receiver tapped them.

        `position` is the index of the tensor among the module's outputs; -1 if it is the only one.
        """


class Taps:
    """The recordings that receive tensors, by number: compiled code outlives the recording it was compiled in.

    There is one per process, because torch's operations are global. It keeps no recording alive.
    """

    def __init__(self) -> None:
        """Register the operations with torch."""
        self._receivers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._count = 0
        self.tap = _define(self._deliver)

    def register(self, receiver: TapReceiver) -> int:
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


class Drill:
    """Records the operations inside modules."""

    def __init__(self, observer: Observer, find_innermost: Callable[[], str | None]) -> None:
        """Pass results to `observer`; `find_innermost` returns the module whose call is running."""
        self._observer = observer
        self._find_innermost = find_innermost
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._installed: list[tuple[torch.nn.Module, object]] = []

    def install(self, point: Point) -> None:
        """Record the operations of a module from now on."""
        module, forward = point.module, point.module.forward

        def drilled(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._observer.is_open:
                return forward(*args, **kwargs)
            with _Operations(self, point):
                return forward(*args, **kwargs)

        # On the instance, which hides the class's forward; deleting it restores the module.
        self._installed.append((module, vars(module).get("forward")))
        module.forward = drilled

    def remove(self) -> None:
        """Restore the forward methods of all modules."""
        for module, own in self._installed:
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
            for path, tensor in iter_paths(result):
                observer.observe(tensor, where, level, path)
        except Exception as error:  # noqa: BLE001  # a bug in the recorder must not stop the training
            observer.fail(error)
