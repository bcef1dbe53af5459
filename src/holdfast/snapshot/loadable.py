"""Objects with `state_dict` whose state could be saved but not loaded again: these are refused when they are saved."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from holdfast.errors import Unsupported
from holdfast.trees.outline import TreePath, join_name

_Module = torch.nn.Module


def verify_loadable(value: Any, *, path: TreePath = ()) -> None:
    """Raise Unsupported, with the name of the leaf, if an object's methods cannot be called as a load calls them."""
    problem = _find_problem(value)
    if problem:
        raise Unsupported(f"{join_name(path) or 'the tree'}: {problem}")


def _find_problem(value: Any) -> str:
    could = f"a {type(value).__name__} could not be loaded again:"
    if not _accepts(value.state_dict):
        return f"{could} its state_dict cannot be called without arguments; save what it returns"
    if not _accepts(value.load_state_dict, {}):
        return f"{could} its load_state_dict cannot be called with the state alone; save what its state_dict returns"
    if _is_of_class(value, "load_state_dict") and not _is_of_class(value, "state_dict"):
        return f"{could} its load_state_dict is a class method; make it one that changes the object"
    if isinstance(value, _Module):
        return _find_module_problem(value)
    return ""


def _accepts(method: Callable[..., object], *args: object) -> bool:
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # written in C, or a callable of another kind
        return True
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def _is_of_class(value: Any, name: str) -> bool:
    return isinstance(inspect.getattr_static(type(value), name, None), classmethod | staticmethod)


def _find_module_problem(module: torch.nn.Module) -> str:
    """Describe a submodule with an extra state that nothing takes back; "" if there is none."""
    if type(module).load_state_dict is not _Module.load_state_dict:
        return ""
    parts = list(module.modules())
    if any(part._load_state_dict_pre_hooks for part in parts):  # a hook may take it
        return ""
    for kind in {type(part) for part in parts}:
        is_saved = kind.get_extra_state is not _Module.get_extra_state
        is_taken = kind.set_extra_state is not _Module.set_extra_state
        if is_saved and not is_taken and kind._load_from_state_dict is _Module._load_from_state_dict:
            return f"a {kind.__name__} could not be loaded again: it has get_extra_state, but no set_extra_state"
    return ""
