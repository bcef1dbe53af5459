"""Assigns values and restores state through objects' own methods, and keeps old state so that a load can be undone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from holdfast.errors import Mismatch, Unsupported
from holdfast.snapshot.into.in_place import cut_like, list_memory, mark_written
from holdfast.snapshot.stateful import (
    find_loading_layer,
    find_wrapping,
    has_hooks,
    is_optimizer,
    is_optimizer_state,
    is_plain_optimizer,
    list_layers,
    unwrap,
)
from holdfast.tensors.memory import view_raw
from holdfast.tensors.sharding import PerRank
from holdfast.tensors.spec import items_per_byte
from holdfast.tensors.storage import free_storage, is_allocated
from holdfast.trees.apply import iter_tensors
from holdfast.trees.outline import TreePath, join_name
from holdfast.trees.pick import replace_by_prefix

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


Undo = Callable[[], None]
"""Restores the value or state that existed when the function was created."""


class ValueSetter(Protocol):
    """A position in a tree that can be assigned."""

    def __call__(self, value: Any, /) -> None:
        """Assign a value."""

    def keep(self) -> Undo:
        """Return a function that restores the current value."""


@dataclass(frozen=True, slots=True)
class ItemSetter:
    """Assigns an item of a dict or list."""

    container: Any
    key: Any

    def __call__(self, value: Any, /) -> None:
        """Assign a value."""
        self.container[self.key] = value

    def keep(self) -> Undo:
        """Return a function that restores the current value."""
        old = self.container[self.key]
        return lambda: self(old)


@dataclass(frozen=True, slots=True)
class FieldSetter:
    """Assigns a field of a dataclass."""

    owner: Any
    name: str

    def __call__(self, value: Any, /) -> None:
        """Assign a value."""
        setattr(self.owner, self.name, value)

    def keep(self) -> Undo:
        """Return a function that restores the current value."""
        old = getattr(self.owner, self.name)
        return lambda: self(old)


@dataclass(frozen=True, slots=True)
class PerRankSetter:
    """Assigns a value that is declared per rank, and declares the new one."""

    inner: ValueSetter

    def __call__(self, value: Any, /) -> None:
        """Assign a value."""
        self.inner(PerRank(value))

    def keep(self) -> Undo:
        """Return a function that restores the current value."""
        return self.inner.keep()


def keep_tensors(tensors: Iterable[torch.Tensor]) -> Undo:
    """Copy tensors; the returned function copies them back, and frees those that had no memory."""
    undos = [_keep_tensor(each) for tensor in tensors for each in list_memory(tensor)]
    return lambda: _run_all(undos)


def _keep_tensor(tensor: torch.Tensor) -> Undo:
    if tensor.numel() and not is_allocated(tensor):
        return partial(_free_again, tensor)
    if tensor.is_quantized or items_per_byte(tensor.dtype) > 1:
        copied = tensor.detach().clone()
        return lambda: _copy_back(lambda: tensor.copy_(copied), tensor)
    raw = view_raw(tensor).clone()
    return lambda: _copy_back(lambda: view_raw(tensor).copy_(raw), tensor)


def _free_again(tensor: torch.Tensor) -> None:
    free_storage(tensor)


def _copy_back(act: Callable[[], object], tensor: torch.Tensor) -> None:
    with torch.no_grad():
        act()
    mark_written([tensor])


def keep_grad(tensor: torch.Tensor) -> Undo:
    """Keep the gradient of a tensor."""
    old = tensor.grad
    return lambda: setattr(tensor, "grad", old)


def keep_module(module: torch.nn.Module) -> Undo:
    """Keep the parameters, buffers, attributes and extra states of a module and of all its submodules."""
    modules = list(module.modules())
    tensors = {id(each): each for part in modules for each in _list_tensors(part)}
    undos = [_keep_attributes(part) for part in modules]
    undos.append(keep_tensors(tensors.values()))
    undos += [
        _keep_extra(part) for part in modules if type(part).get_extra_state is not torch.nn.Module.get_extra_state
    ]
    if does_translate(module):
        # Its own code may change more than tensors, so it runs first; the copies are restored after it.
        undos.insert(0, _keep_state(module))
    return lambda: _run_all(undos)


def _list_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [each for table in (module._parameters, module._buffers) for each in table.values() if each is not None]


def _keep_extra(module: torch.nn.Module) -> Undo:
    state = _copy_state(module.get_extra_state(), module)
    return lambda: module.set_extra_state(state)


def keep_optimizer(target: Any) -> Undo:
    """Keep the state and the groups of an optimizer, which may be in a wrapper; torch's own method replaces these."""
    layers = list_layers(target)
    states = [layer.state for layer in layers if hasattr(layer, "state")]  # a wrapper need not forward it
    tables = [values for state in states for values in state.values() if isinstance(values, dict)]
    tables += layers[-1].param_groups
    undos = [_keep_attributes(layer) for layer in layers if hasattr(layer, "__dict__")]
    undos += [_keep_table(table) for table in (*states, *tables)]
    if not is_plain_optimizer(target):
        undos.append(keep_tensors([tensor for _, tensor in iter_tensors(tables)]))
        undos.insert(0, _keep_state(find_loading_layer(target)))
    return lambda: _run_all(undos)


def keep_object(target: Any) -> Undo:
    """Keep a copy of an object's state, which its own method restores, and its attributes."""
    undos = [_keep_state(target)]
    if hasattr(target, "__dict__"):
        undos.append(_keep_attributes(target))
    return lambda: _run_all(undos)


def _keep_state(target: Any) -> Undo:
    state = _copy_state(target.state_dict(), target)
    return lambda: target.load_state_dict(state) and None


def _copy_state(state: Any, owner: object) -> Any:
    """Return a copy that shares no mutable object."""
    known: dict[int, Any] = {id(tensor): tensor.detach().clone() for _, tensor in iter_tensors(state)}
    try:
        return copy.deepcopy(state, known)
    except Exception as error:
        raise Unsupported(
            f"atomic=True needs a copy of the state of a {type(owner).__name__}, which cannot be copied: {error}."
            " Nothing was changed; load without atomic=True"
        ) from error


def _keep_attributes(target: Any) -> Undo:
    """Keep references to an object's attributes, and the contents of a module's tables."""
    attributes = vars(target)
    tables = (
        [table for table in attributes.values() if type(table) is dict] if isinstance(target, torch.nn.Module) else []
    )
    undos = [_keep_table(attributes), *map(_keep_table, tables)]
    return lambda: _run_all(undos)


def _keep_table(table: dict[Any, Any]) -> Undo:
    old = dict(table)

    def undo() -> None:
        if table.keys() != old.keys():
            table.clear()
        table.update(old)

    return undo


def _run_all(undos: Iterable[Undo]) -> None:
    """Run all in order, even if one fails; then raise the first error."""
    failed: Exception | None = None
    for undo in undos:
        try:
            undo()
        except Exception as error:  # noqa: BLE001 - code of the user; raised below
            failed = failed or error
    if failed is not None:
        raise failed
