"""Walks over trees of containers: yields their tensors, or rebuilds every container with converted tensors."""

from __future__ import annotations

import copy
import copyreg
import reprlib
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from inspect import getattr_static
from typing import Any, Final, TypeVar, overload

import torch
from torch.nn.utils.rnn import PackedSequence

from holdfast.errors import Unsupported
from holdfast.texts import add_note
from holdfast.trees.outline import TreePath

MAX_DEPTH: Final = 200
"""The deepest nesting of containers; state is never this deep, but a mistake may be."""
_SHOWN_KEYS: Final = 4
_UNSET: Final = object()
_ATOMS: Final = frozenset({bool, bytes, complex, float, int, str, type(None)})
"""Types that are skipped without a step: state may contain lists of a million numbers."""

Tree = TypeVar("Tree")


@overload
def apply_to_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> Tree: ...
@overload
def apply_to_tensors(function: Callable[[torch.Tensor], object], tree: object) -> object: ...
def apply_to_tensors(function: Callable[[torch.Tensor], object], tree: object) -> object:
    """Return `tree` with `function` applied to every tensor, and every container of the type it was.

    Of a PackedSequence only `data` is passed to the function. Its batch sizes and indices are kept; the indices move
    to the device of the new data. A result that is no tensor, such as the None of a function that fills its tensor in
    place, leaves the sequence as it is.

    An object that occurs twice is converted once, so that shared parts stay shared. A container in which nothing
    changed is returned as it is. An exception of `function` carries a note with the path of the tensor.
    """
    # The node is kept beside its result to stay alive: otherwise its id could be reused.
    results: dict[int, tuple[object, object]] = {}
    for step in _iter_steps(tree, results, _find_data):
        if step.parts is None:
            result = _call(function, step)
        else:
            values = [results.get(id(value), (value, value))[1] for value in step.parts.values]
            result = _rebuild(step, step.parts, values)
        results[id(step.node)] = (step.node, result)
    return results.get(id(tree), (tree, tree))[1]


def iter_tensors(tree: object) -> Iterator[tuple[TreePath, torch.Tensor]]:
    """Yield each tensor in `tree` with its path; a tensor that occurs twice is yielded twice."""
    for step in _iter_steps(tree, (), _find_parts):
        if isinstance(step.node, torch.Tensor):
            yield step.find_path(), step.node


@dataclass(frozen=True, slots=True)
class _Parts:
    """The keys and the values of a container."""

    keys: Sequence[object]
    values: Sequence[object]


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a walk: a node that is not opened yet, or, with `parts`, a container after all of its parts."""

    node: object
    depth: int = 0
    key: object = None
    parent: _Step | None = None
    parts: _Parts | None = None

    def find_path(self) -> TreePath:
        """Return the keys from the root to here."""
        keys: list[object] = []
        step = self
        while step.parent is not None:
            keys.append(step.key)
            step = step.parent
        return tuple(reversed(keys))


_Find = Callable[[object], _Parts | None]


def _iter_steps(tree: object, done: Container[int], find: _Find) -> Iterator[_Step]:
    """Yield tensors in order, and containers after their parts; skip nodes whose id is in `done` when reached."""
    ancestors: set[int] = set()
    # An explicit stack: a deep tree does not reach the interpreter's recursion limit.
    waiting = [_Step(tree)]
    while waiting:
        step = waiting.pop()
        if step.parts is not None:
            ancestors.remove(id(step.node))
            yield step
        elif id(step.node) in ancestors:
            raise Unsupported(f"{_describe(step)} is a {_class_of(step.node)} that contains itself; break the cycle")
        elif id(step.node) in done:
            continue
        elif isinstance(step.node, torch.Tensor):
            yield step
        elif (parts := find(step.node)) is not None:
            ancestors.add(id(step.node))
            waiting += _open(step, parts)


def _open(step: _Step, parts: _Parts) -> Iterator[_Step]:
    """Yield the steps to push for a container: first itself, then its parts in reverse, as the stack pops the last."""
    if step.depth == MAX_DEPTH:
        raise Unsupported(f"{_describe(step)} is nested deeper than {MAX_DEPTH} levels; flatten it")
    yield _Step(step.node, step.depth, step.key, step.parent, parts)
    for key, value in zip(reversed(parts.keys), reversed(parts.values), strict=True):
        if type(value) not in _ATOMS:
            yield _Step(value, step.depth + 1, key, step)


def _find_data(node: object) -> _Parts | None:
    """Return the parts of a container that a converting function gets; only the data of a PackedSequence."""
    return _Parts(("data",), (node.data,)) if isinstance(node, PackedSequence) else _find_parts(node)


def _find_parts(node: object) -> _Parts | None:
    """Return the parts of a container; None if `node` is not a container."""
    if isinstance(node, dict):
        return _Parts(list(node.keys()), list(node.values()))
    if isinstance(node, tuple):
        return _Parts(getattr(node, "_fields", range(len(node))), node)
    if isinstance(node, list | deque | set | frozenset):
        return _Parts(range(len(node)), list(node))
    # A module that is also a dataclass does not keep its tensors in its fields.
    if is_dataclass(node) and not isinstance(node, type | torch.nn.Module):
        items = [(field.name, getattr(node, field.name, _UNSET)) for field in fields(node)]
        items = [(name, value) for name, value in items if value is not _UNSET]
        return _Parts([name for name, _ in items], [value for _, value in items])
    return None


def _call(function: Callable[[torch.Tensor], object], step: _Step) -> object:
    assert isinstance(step.node, torch.Tensor)
    try:
        return function(step.node)
    except Exception as err:
        add_note(err, f"at {_describe(step)}")
        raise


def _rebuild(step: _Step, parts: _Parts, values: Sequence[object]) -> object:
    """Return the container with new values, or itself if all values are the same objects."""
    old = step.node
    if all(new is was for new, was in zip(values, parts.values, strict=True)):
        return old
    if isinstance(old, PackedSequence) and not isinstance(values[0], torch.Tensor):
        return old
    try:
        new = _make(old, parts.keys, values)
    except TypeError as err:
        raise Unsupported(f"{_describe(step)}: a {_class_of(old)} cannot be rebuilt: {err}; unpack it first") from err
    if new is old or type(new) is not type(old):
        raise Unsupported(f"{_describe(step)}: copying a {_class_of(old)} gives no new one; unpack it first")
    return new


def _make(old: object, keys: Sequence[object], values: Sequence[object]) -> object:
    if isinstance(old, PackedSequence):
        return _make_tuple(old, _pack(old, values[0]))
    if isinstance(old, tuple):
        return _make_tuple(old, values)
    if isinstance(old, frozenset):
        return _with_attributes(frozenset.__new__(type(old), values), old)
    if isinstance(old, dict | list | deque | set):
        return _refill(copy.copy(old), old, keys, values)
    new = _with_attributes(object.__new__(type(old)), old)
    for key, value in zip(keys, values, strict=True):
        # Not by its own methods: the class may be frozen, and its __init__ may not take every field.
        object.__setattr__(new, str(key), value)
    return new


def _make_tuple(old: tuple[object, ...], values: Sequence[object]) -> object:
    try:
        new = tuple.__new__(type(old), values)
    except TypeError:
        # Struct sequences, such as torch.return_types, need their own constructor, which takes a sequence.
        return type(old)(values)
    return _with_attributes(new, old)


def _refill(new: Any, old: object, keys: Sequence[object], values: Sequence[object]) -> object:
    """Put `values` into a copy of the container, which keeps the rest: a factory, a maximum length, attributes."""
    if new is old:
        return new
    if isinstance(new, dict):
        for key, value in zip(keys, values, strict=True):
            new[key] = value
        return new
    new.clear()
    if isinstance(new, set):
        new.update(values)
    else:
        new.extend(values)
    return new


def _with_attributes(new: object, old: object) -> object:
    """Copy the attributes in the dict and the slots of `old` to `new`, without running code of the class."""
    for name, value in _iter_attributes(old):
        # A cached property was computed from the old tensors, so it is left out and computed again.
        if not isinstance(getattr_static(type(old), name, None), cached_property):
            object.__setattr__(new, name, value)
    return new


def _iter_attributes(value: object) -> Iterator[tuple[str, object]]:
    names: list[str] = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # the stubs do not list it
    if type(value).__dictoffset__:
        yield from object.__getattribute__(value, "__dict__").items()
    for name in names:
        with suppress(AttributeError):  # a slot without a value
            yield name, object.__getattribute__(value, name)


def _pack(old: PackedSequence, data: Any) -> Sequence[object]:
    """Return the fields of a PackedSequence with new data; torch needs the sizes on the CPU, the indices beside it."""
    indices = [None if each is None else each.to(data.device) for each in (old.sorted_indices, old.unsorted_indices)]
    return data, old.batch_sizes, *indices


def _class_of(node: object) -> str:
    return type(node).__qualname__


def _describe(step: _Step) -> str:
    """Return the path of a step as text, shortened if it is long."""
    path = step.find_path()
    shown = "".join(f"[{reprlib.repr(key)}]" for key in path[:_SHOWN_KEYS])
    return f"tree{shown}" + ("..." if len(path) > _SHOWN_KEYS else "")
