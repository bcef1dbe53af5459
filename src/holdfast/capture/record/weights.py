"""Observes the state of a step: parameters, buffers, RNG state, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from holdfast.capture.record.forms import iter_paths
from holdfast.capture.record.observer import CallSite, Observer
from holdfast.capture.record.points import Points
from holdfast.capture.stored.events import EventKind, Level, Phase


class Weights:
    """Passes the state of a model and its optimizers to an observer, before and after the optimizers step."""

    def __init__(self, observer: Observer, points: Points, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._observer = observer
        self._points = points
        self._optimizers = optimizers
        self._names = {id(parameter): name for name, parameter in points.parameters.items()}

    def see_state(self) -> None:
        """Observe the state at the start of a step: RNG state, parameters and buffers."""
        if "rng" in self._observer.options.kinds:
            self._see("forward", "rng", "cpu", torch.get_rng_state())
        for name, parameter in self._points.parameters.items():
            self._see("forward", "parameter", name, parameter)
        for name, buffer in self._points.iter_buffers():
            self._see("forward", "buffer", name, buffer)

    def see_all_grads(self) -> None:
        """Observe the gradients of all parameters."""
        self._see_grads(self._points.parameters.items())

    def see_grads(self, optimizer: torch.optim.Optimizer) -> None:
        """Observe what an optimizer is about to use: gradients and the settings of its parameter groups."""
        self._see_grads(self._iter_parameters(optimizer))
        if "optimizer" in self._observer.options.kinds:
            self._see_groups(optimizer)

    def see_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Observe what an optimizer has updated: parameters and optimizer state."""
        for name, parameter in self._iter_parameters(optimizer):
            self._see("optimizer", "parameter", name, parameter)
        for name, parameter in self._iter_parameters(optimizer):
            for path, tensor in iter_paths(optimizer.state.get(parameter)):
                self._see("optimizer", "optimizer", name, tensor, path)

    def _see(self, phase: Phase, kind: EventKind, name: str, tensor: torch.Tensor, path: str = "") -> None:
        level = self._observer.find_level(kind, name)
        if level is not Level.OFF:
            self._observer.see(tensor, CallSite(phase, kind, name), level, path)

    def _see_grads(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, parameter in parameters:
            if parameter.grad is not None:
                self._see("backward", "param_grad", name, parameter.grad)

    def _iter_parameters(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                yield self._names.get(id(parameter), f"param_groups.{number}.{index}"), parameter

    def _see_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Observe the settings of parameter groups: a wrong learning rate explains every later difference."""
        prefix = f"{self._optimizers.index(optimizer)}." if len(self._optimizers) > 1 else ""
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                tensor = None if key == "params" else _find_numbers(value)
                if tensor is not None:
                    self._see("optimizer", "optimizer", f"param_groups.{prefix}{number}", tensor, f"[{key!r}]")


def _find_numbers(value: object) -> torch.Tensor | None:
    """Return a setting of a parameter group as a tensor; None if it is no number."""
    numbers = value if isinstance(value, tuple | list) else (value,)
    if all(type(each) in (int, float) for each in numbers):
        return torch.tensor(numbers, dtype=torch.float64)
    return value if isinstance(value, torch.Tensor) else None
