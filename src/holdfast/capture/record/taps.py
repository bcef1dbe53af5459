"""Taps: custom operations that are compiled in place of hooks and pass each tensor on to a recording."""

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
    """A recording that receives the tensors of taps."""

    def see_tapped(self, place: int, position: int, tensor: torch.Tensor, *, is_grad: bool) -> None:
        """Receive an output, or its gradient, of the module number `place`.

        `position` is the index of the tensor among the module's outputs; -1 if it is the only one.
        """


class Taps:
    """The recordings that receive tensors, by number: compiled code outlives the recording it was compiled in.

    There is one per process, because torch's operations are global. It keeps no recording alive.
    """

    def __init__(self) -> None:
        """Register the operations with torch."""
        self._watchers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._count = 0
        self.tap = _define(self._show)

    def register(self, watcher: Watcher) -> int:
        """Return a number by which taps find this watcher while it is alive."""
        self._count += 1
        self._watchers[self._count] = watcher
        return self._count

    def _show(self, tensor: torch.Tensor, target: tuple[int, int, int], is_grad: bool) -> torch.Tensor:
        number, place, position = target
        watcher = self._watchers.get(number)
        if watcher is not None:
            watcher.see_tapped(place, position, tensor, is_grad=is_grad)
        # A custom operation must not return its argument.
        return tensor.clone()


@cache
def find_taps() -> Taps:
    """Return the taps of this process; the first call creates them."""
    return Taps()


def _define(show: Callable[[torch.Tensor, tuple[int, int, int], bool], torch.Tensor]) -> Tap:
    @torch.library.custom_op("holdfast::tap", mutates_args=())
    def tap(tensor: torch.Tensor, number: int, place: int, position: int) -> torch.Tensor:
        return show(tensor, (number, place, position), False)

    @torch.library.custom_op("holdfast::tap_grad", mutates_args=())
    def tap_grad(tensor: torch.Tensor, number: int, place: int, position: int) -> torch.Tensor:
        return show(tensor, (number, place, position), True)

    def remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.target = inputs[1:]

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return tap_grad(grad, *ctx.target), None, None, None

    tap.register_fake(lambda tensor, number, place, position: torch.empty_like(tensor))
    tap_grad.register_fake(lambda tensor, number, place, position: torch.empty_like(tensor))
    tap.register_autograd(backward, setup_context=remember)
    return tap


def make_hook(tap: Tap, number: int, place: int) -> Callable[..., object]:
    """Return a forward hook that adds taps to a module's outputs while it is compiled, and otherwise does nothing."""

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
