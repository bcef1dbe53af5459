"""Drilling: records the result of every operation inside chosen modules, while these run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.compiler import is_compiling
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.capture.record.forms import iter_paths
from holdfast.capture.record.observer import CallSite, Observer, find_graph_task, find_source
from holdfast.capture.record.points import Point
from holdfast.capture.stored.events import Level

_UNWRITTEN: Final = ("aten.empty", "aten.new_empty")
"""Operations that return uninitialized memory; its content is arbitrary."""


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
        self._drill.see(self._point, func, result)
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

    def see(self, point: Point, operation: Any, result: object) -> None:
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
                observer.see(tensor, where, level, path)
        except Exception as error:  # noqa: BLE001  # a bug in the recorder must not stop the training
            observer.fail(error)
