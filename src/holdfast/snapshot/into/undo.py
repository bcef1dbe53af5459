"""Assigns values in a tree, and keeps the old state of values, tensors and objects so that a load can be undone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from holdfast.errors import Unsupported
from holdfast.snapshot.into.in_place import list_memory, mark_written
from holdfast.snapshot.into.restore import does_translate
from holdfast.snapshot.optimizers import find_loading_layer, is_plain_optimizer, list_layers
from holdfast.tensors.dtypes import items_per_byte
from holdfast.tensors.memory import view_raw
from holdfast.tensors.sharding.sharded import PerRank
from holdfast.tensors.storage import free_storage, is_allocated
from holdfast.trees.apply import iter_tensors

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
