"""Restoring the state of objects through their own methods, without changing dtypes on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from holdfast.errors import Mismatch
from holdfast.snapshot.into.in_place import cut_like
from holdfast.snapshot.optimizers import find_loading_layer, is_optimizer, is_optimizer_state, list_layers, unwrap
from holdfast.snapshot.stateful import find_wrapping, has_hooks
from holdfast.trees.outline import TreePath, join_name
from holdfast.trees.rename import replace_by_prefix

_Module = torch.nn.Module


def is_plain_module(module: torch.nn.Module) -> bool:
    """Return whether `module`'s state dict is its own memory, and loading one only copies tensors."""
    is_own = _is_method(module.state_dict, _Module.state_dict)
    return is_own and not does_translate(module) and all(_is_plain(each) for each in module.modules())


def does_translate(module: torch.nn.Module) -> bool:
    """Return whether `module` may convert a state dict before it loads it."""
    if not _is_method(module.load_state_dict, _Module.load_state_dict):
        return True
    return any(
        has_hooks(each._load_state_dict_pre_hooks)
        or not _is_known(type(each), "_load_from_state_dict", _Module._load_from_state_dict)
        for each in module.modules()
    )


def _is_plain(module: torch.nn.Module) -> bool:
    kind = type(module)
    hooks = (module._load_state_dict_post_hooks, module._state_dict_hooks, module._state_dict_pre_hooks)
    has_own = kind.set_extra_state is not _Module.set_extra_state
    return not has_hooks(*hooks) and not has_own and _is_known(kind, "_save_to_state_dict", _Module._save_to_state_dict)


def _is_known(kind: type[torch.nn.Module], name: str, original: object) -> bool:
    # Torch's own modules override these to read what older versions saved. The method is checked, not the class:
    # `fully_shard` gives each module a new class that inherits it.
    method = getattr(kind, name)
    return method is original or method.__module__.startswith("torch.nn.modules.")


def _is_method(method: Any, original: object) -> bool:
    return getattr(method, "__func__", None) is original


def restore(target: Any, state: Any, *, path: TreePath) -> None:
    """Load `state` into an object that is not a module, through its own method."""
    with refusals_as_mismatch(target, path):
        if is_optimizer(target) and is_optimizer_state(state):
            restore_optimizer(target, state)
        else:
            target.load_state_dict(state)


def restore_optimizer(target: Any, state: dict[str, Any]) -> None:
    """Load a state, by the numbers of parameters, into an optimizer: cut like these, and with the saved dtypes.

    A wrapper is loaded by its own method, if it has one.
    """
    _cut_like_parameters(unwrap(target), state)
    find_loading_layer(target).load_state_dict(state)
    for layer in list_layers(target):
        if hasattr(layer, "state"):  # a wrapper need not forward it
            keep_dtypes(layer, state)


def is_itemwise(field: object, shape: Sequence[int], parameter: torch.Tensor) -> bool:
    """Return whether a part of an optimizer's state has a value for each item of the parameter."""
    return field != "step" and tuple(shape) == tuple(parameter.shape)


def _cut_like_parameters(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Of whole per-item state, keep this rank's part of each parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        values = state["state"].get(number)
        for field, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor) and is_itemwise(field, value.shape, parameter):
                values[field] = cut_like(parameter, value)


def restore_module(target: torch.nn.Module, state: Any, *, path: TreePath, assign: bool, strict: bool) -> None:
    """Load `state` into a module through its own method."""
    # A user's own method may not accept these options.
    options = {name: True for name, value in (("assign", assign),) if value}
    if not strict:
        options["strict"] = False
    prefix = find_wrapping(target)
    with refusals_as_mismatch(target, path):
        if prefix:
            replace_by_prefix(state, "", prefix)
        target.load_state_dict(state, **options)


@contextmanager
def refusals_as_mismatch(target: Any, path: TreePath) -> Iterator[None]:
    """Turn errors of an object's own load method into Mismatch, with its name."""
    try:
        yield
    except (KeyError, ValueError, RuntimeError) as error:
        raise Mismatch(
            f"{join_name(path) or 'the tree'}: {type(target).__name__} refused its state: {str(error).rstrip(' .')}",
            problems=(str(error),),
        ) from error


def keep_dtypes(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore the saved dtypes of an optimizer's tensors: its own method converts them to the parameters' dtype."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(numbers) != len(parameters):
        return  # a hook of the optimizer has changed its groups
    for number, parameter in zip(numbers, parameters, strict=True):
        current = optimizer.state.get(parameter)
        if current:
            optimizer.state[parameter] = _keep_dtype(state["state"].get(number), current)


def _keep_dtype(saved: Any, current: Any) -> Any:
    """Return an optimizer's state, with tensors of a changed dtype replaced by the saved ones."""
    if isinstance(saved, torch.Tensor) and isinstance(current, torch.Tensor):
        return saved.to(current.device) if saved.dtype != current.dtype else current
    if isinstance(saved, dict) and isinstance(current, dict):
        for key in saved.keys() & current.keys():
            current[key] = _keep_dtype(saved[key], current[key])
    elif isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        current[:] = [_keep_dtype(one, other) for one, other in zip(saved, current, strict=True)]
    return current
