"""Taps: operations that stand in compiled code where a hook was, and show what passes through them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch.compiler import is_compiling
from torch.utils._pytree import tree_flatten, tree_unflatten

Tap = Callable[[torch.Tensor, int, int, int], torch.Tensor]


class Watcher(Protocol):
    """Who is shown what passes."""

    def see_tapped(self, place: int, position: int, tensor: torch.Tensor, *, is_grad: bool) -> None:
        """Look at an output, or its gradient, of the module at a place: the n-th of its results, or the only one."""


class Taps:
    """Who is shown what, by number: compiled code outlives the recording that it was compiled in.

    There is one for the process, for so it is with torch's operations; it holds nobody alive.
    """

    def __init__(self) -> None:
        """Make the operations known to torch."""
        self._watchers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._count = 0
        self.tap = _define(self._show)

    def register(self, watcher: Watcher) -> int:
        """Return a number by which taps find a watcher as long as it lives."""
        self._count += 1
        self._watchers[self._count] = watcher
        return self._count

    def _show(self, tensor: torch.Tensor, whom: tuple[int, int, int], is_grad: bool) -> torch.Tensor:
        number, place, position = whom
        watcher = self._watchers.get(number)
        if watcher is not None:
            watcher.see_tapped(place, position, tensor, is_grad=is_grad)
        # An operation must not return its argument.
        return tensor.clone()


@cache
def find_taps() -> Taps:
    """Return the taps of this process, made when they are first needed."""
    return Taps()


def _define(show: Callable[[torch.Tensor, tuple[int, int, int], bool], torch.Tensor]) -> Tap:
    @torch.library.custom_op("holdfast::tap", mutates_args=())
    def tap(tensor: torch.Tensor, number: int, place: int, position: int) -> torch.Tensor:
        return show(tensor, (number, place, position), False)

    @torch.library.custom_op("holdfast::tap_grad", mutates_args=())
    def tap_grad(tensor: torch.Tensor, number: int, place: int, position: int) -> torch.Tensor:
        return show(tensor, (number, place, position), True)

    def remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.whom = inputs[1:]

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return tap_grad(grad, *ctx.whom), None, None, None

    tap.register_fake(lambda tensor, number, place, position: torch.empty_like(tensor))
    tap_grad.register_fake(lambda tensor, number, place, position: torch.empty_like(tensor))
    tap.register_autograd(backward, setup_context=remember)
    return tap


def make_hook(tap: Tap, number: int, place: int) -> Callable[..., object]:
    """Return a hook for the results of a module that does something only while it is compiled."""

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: object) -> object:
        if not is_compiling():
            return None
        if isinstance(output, torch.Tensor):
            return tap(output, number, place, -1)
        leaves, form = tree_flatten(output)
        tapped = [
            tap(leaf, number, place, position) if isinstance(leaf, torch.Tensor) else leaf
            for position, leaf in enumerate(leaves)
        ]
        return tree_unflatten(tapped, form)

    return hook
