"""Observes the gradients of parameters during the backward pass: what is left from before, and each sum.

A comparison then tells apart a wrong backward pass, gradients that were not cleared, and a change after the pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import torch
from torch.compiler import is_compiling

from holdfast.capture.record.hooks import InstalledHook
from holdfast.capture.record.observer import CallSite, Observer
from holdfast.capture.record.points import Points
from holdfast.capture.stored.events import Level


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
