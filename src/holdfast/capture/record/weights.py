"""What a step is made with and what it makes: parameters, buffers, their gradients, and the states of optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from holdfast.capture.record.forms import iter_paths
from holdfast.capture.record.observer import CallSite, Observer
from holdfast.capture.record.points import Points
from holdfast.capture.stored.events import EventKind, Level, Phase


class Weights:
    """Shows an eye the state of a model and its optimizers, at the times at which it means something."""

    def __init__(self, eye: Observer, points: Points, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Show nothing yet."""
        self._eye = eye
        self._points = points
        self._optimizers = optimizers
        self._names = {id(parameter): name for name, parameter in points.parameters.items()}

    def see_state(self) -> None:
        """Show what a step begins with."""
        if "rng" in self._eye.options.kinds:
            self._see("forward", "rng", "cpu", torch.get_rng_state())
        for name, parameter in self._points.parameters.items():
            self._see("forward", "parameter", name, parameter)
        for name, buffer in self._points.iter_buffers():
            self._see("forward", "buffer", name, buffer)

    def see_all_grads(self) -> None:
        """Show the gradients of all parameters."""
        self._see_grads(self._points.parameters.items())

    def see_grads(self, optimizer: torch.optim.Optimizer) -> None:
        """Show what an optimizer is about to work with: gradients, and the numbers of its groups."""
        self._see_grads(self._iter_parameters(optimizer))
        if "optimizer" in self._eye.options.kinds:
            self._see_groups(optimizer)

    def see_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Show what an optimizer has made: parameters and its states of them."""
        for name, parameter in self._iter_parameters(optimizer):
            self._see("optimizer", "parameter", name, parameter)
        for name, parameter in self._iter_parameters(optimizer):
            for path, tensor in iter_paths(optimizer.state.get(parameter)):
                self._see("optimizer", "optimizer", name, tensor, path)

    def _see(self, phase: Phase, kind: EventKind, name: str, tensor: torch.Tensor, path: str = "") -> None:
        level = self._eye.find_level(kind, name)
        if level is not Level.OFF:
            self._eye.see(tensor, CallSite(phase, kind, name), level, path)

    def _see_grads(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, parameter in parameters:
            if parameter.grad is not None:
                self._see("backward", "param_grad", name, parameter.grad)

    def _iter_parameters(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                yield self._names.get(id(parameter), f"param_groups.{number}.{place}"), parameter

    def _see_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Show the numbers of parameter groups: a learning rate explains more than what follows from it."""
        prefix = f"{self._optimizers.index(optimizer)}." if len(self._optimizers) > 1 else ""
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                tensor = None if key == "params" else _find_numbers(value)
                if tensor is not None:
                    self._see("optimizer", "optimizer", f"param_groups.{prefix}{number}", tensor, f"[{key!r}]")


def _find_numbers(value: object) -> torch.Tensor | None:
    """Return what a parameter group holds as numbers, if it does."""
    numbers = value if isinstance(value, tuple | list) else (value,)
    if all(type(each) in (int, float) for each in numbers):
        return torch.tensor(numbers, dtype=torch.float64)
    return value if isinstance(value, torch.Tensor) else None
