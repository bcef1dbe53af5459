"""Optimizers inside wrappers of training frameworks: finding torch's optimizer, and whether hooks run when it loads.

A wrapper is saved and loaded by its own `state_dict` and `load_state_dict`. Its parameters are those of the optimizer
that it keeps as `.optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final, Protocol, cast

import torch

from holdfast.errors import Unsupported
from holdfast.snapshot.stateful import is_stateful

_LOAD_HOOKS: Final = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


class WrappedOptimizer(Protocol):
    """An object that steps another optimizer, such as Accelerate's AcceleratedOptimizer."""

    @property
    def optimizer(self) -> Any:
        """The optimizer inside, which may itself be a wrapper."""


AnyOptimizer = torch.optim.Optimizer | WrappedOptimizer
Optimizers = AnyOptimizer | Sequence[AnyOptimizer] | None


def list_optimizers(optimizers: Optimizers) -> list[AnyOptimizer]:
    """Return one optimizer, several or none as a list; raise Unsupported for anything else."""
    if optimizers is None:
        return []
    is_one = is_optimizer(optimizers) or not isinstance(optimizers, Iterable)
    found: list[Any] = [optimizers] if is_one else list(cast("Sequence[AnyOptimizer]", optimizers))
    for each in found:
        if not is_optimizer(each):
            raise Unsupported(
                f"a {type(each).__name__} is not an optimizer, nor a wrapper with state_dict, load_state_dict and"
                " param_groups that has one as its .optimizer; pass the optimizer inside it"
            )
    return found


def is_optimizer(value: object) -> bool:
    """Return whether `value` is an optimizer, or a wrapper around one that is saved and loaded as the optimizer is."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    # A schedule has an `.optimizer` too, but no parameters.
    return is_stateful(value) and _has_groups(value) and isinstance(unwrap(value), torch.optim.Optimizer)


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer inside all wrappers; `optimizer` itself if it is none."""
    return list_layers(optimizer)[-1]


def list_layers(optimizer: Any) -> list[Any]:
    """Return an optimizer and those inside it, the innermost last; not all need have a `.state`."""
    layers = [optimizer]
    while True:
        inner = getattr(layers[-1], "optimizer", None)
        is_known = any(inner is layer for layer in layers)
        if inner is None or is_known or not (isinstance(inner, torch.optim.Optimizer) or _has_groups(inner)):
            return layers
        layers.append(inner)


def find_loading_layer(optimizer: Any) -> Any:
    """Return the layer to load: the outermost that has its own `load_state_dict`, or forwards it.

    Lightning's wrapper inherits from the class of the optimizer inside. The inherited method would load the wrapper,
    and leave the optimizer that steps as it is.
    """
    layers = list_layers(optimizer)
    for layer, inner in pairwise(layers):
        method = getattr(type(layer), "load_state_dict", None)
        if method is None or method is not getattr(type(inner), "load_state_dict", None):
            return layer
    return layers[-1]


def has_load_hooks(optimizer: Any, *, before_only: bool = False) -> bool:
    """Return whether hooks run when a state is loaded into an optimizer or one inside it.

    Wrappers need not have torch's tables of hooks.
    """
    names = _LOAD_HOOKS[:1] if before_only else _LOAD_HOOKS
    return any(getattr(layer, name, None) for layer in list_layers(optimizer) for name in names)


def is_plain_optimizer(optimizer: Any) -> bool:
    """Return whether an optimizer is loaded by torch's own method alone."""
    return (
        isinstance(optimizer, torch.optim.Optimizer)
        and unwrap(optimizer) is optimizer
        and type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        and not has_load_hooks(optimizer)
    )


def is_optimizer_state(state: object) -> bool:
    """Return whether a state has the form that torch's optimizers return; that of a wrapper may be different."""
    return (
        isinstance(state, dict) and isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list)
    )


def _has_groups(value: object) -> bool:
    return isinstance(getattr(value, "param_groups", None), list)
