"""Walks over trees of containers: yields their tensors, converts them, moves them to a device, casts them."""

from __future__ import annotations

import copy
import copyreg
import reprlib
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from inspect import getattr_static
from typing import Any, Final, TypeAlias, TypeVar, overload

import torch
from torch.nn.utils.rnn import PackedSequence

from holdfast.errors import Mismatch, Unsupported
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


Device: TypeAlias = torch.device | str | int

PACKED_FLOAT: Final[torch.dtype | None] = getattr(torch, "float4_e2m1fn_x2", None)
"""Has two values in each element. Torch calls it a floating dtype, and cannot convert it. None: torch lacks it."""


def move_to_device(tree: Tree, device: Device, *, non_blocking: bool = False) -> Tree:
    """Return `tree` with its tensors on `device`; a tensor that is there already is the same object.

    Copies to an accelerator run on a side stream; the current stream waits for it. With `non_blocking` they may still
    be running on return: do not change pinned sources until they are done. Copies to the host are always complete.
    """
    target = resolve_device(device)
    if _is_accelerator(target):
        return _move_on_side_stream(tree, target, non_blocking=non_blocking)
    return _move_and_wait(tree, target, non_blocking=non_blocking)


def to_kwargs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, device: Device, *, non_blocking: bool = False
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """Return the arguments of a call on `device`, as a tuple of one args and a tuple of one kwargs.

    Without positional arguments the args are `()`, without keyword arguments the kwargs are `{}`. Without any
    arguments both tuples are empty, as in torch.
    """
    if not args and not kwargs:
        return (), ()
    moved_args, moved_kwargs = move_to_device((args, dict(kwargs or {})), device, non_blocking=non_blocking)
    return (moved_args,), (moved_kwargs,)


def cast_floating(tree: Tree, dtype: torch.dtype | None) -> Tree:
    """Return `tree` with its floating tensors as `dtype`; with None, return it unchanged.

    `requires_grad` is kept, and gradients flow through the cast to the original tensor. Where no graph is recorded,
    as under no_grad, the cast tensor is a new leaf.
    """
    if dtype is None:
        return tree
    if not dtype.is_floating_point:
        raise Unsupported(f"floating tensors cannot be cast to {dtype}; choose a floating dtype such as torch.float64")

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return _cast(tensor, dtype)

    return apply_to_tensors(cast, tree)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    if PACKED_FLOAT is not None and PACKED_FLOAT in (tensor.dtype, dtype):
        raise Unsupported(f"a tensor of {tensor.dtype} cannot be cast to {dtype}; convert it by hand")
    cast = tensor.to(dtype)
    return cast if cast.requires_grad == tensor.requires_grad else cast.requires_grad_(tensor.requires_grad)


def _move_on_side_stream(tree: Tree, target: torch.device, *, non_blocking: bool) -> Tree:
    current = torch.accelerator.current_stream(target)
    side = torch.Stream(device=target)
    copies: list[torch.Tensor] = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == target:
            return tensor
        _verify_data(tensor, target)
        if not _has_one_storage(tensor):
            return tensor.to(target, non_blocking=non_blocking)
        with side:
            copies.append(tensor.to(target, non_blocking=non_blocking))
        return copies[-1]

    moved = apply_to_tensors(move, tree)
    if copies:
        current.wait_stream(side)
    for tensor in copies:
        # Allocated on the side stream, used on the current one: the memory must not be reused before that use ends.
        tensor.record_stream(current)
    return moved


def _move_and_wait(tree: Tree, target: torch.device, *, non_blocking: bool) -> Tree:
    sources: set[torch.device] = set()

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == target:
            return tensor
        _verify_data(tensor, target)
        sources.add(tensor.device)
        return tensor.to(target, non_blocking=non_blocking)

    moved = apply_to_tensors(move, tree)
    for source in sources:
        # One wait for all copies; without it the host could read memory before a copy is complete.
        if non_blocking and _is_accelerator(source):
            torch.accelerator.current_stream(source).synchronize()
    return moved


def resolve_device(device: Device) -> torch.device:
    """Return the device in the form that tensors report ("cuda:0", not "cuda"), so that the two can be compared."""
    return torch.empty(0, device=device).device


def find_accelerator() -> torch.device | None:
    """Return the kind of accelerator that torch is built for; None if there is none."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # what torch 2.6 does if there is none
        return None


def _is_accelerator(device: torch.device) -> bool:
    accelerator = find_accelerator()
    return accelerator is not None and device.type == accelerator.type


def _has_one_storage(tensor: torch.Tensor) -> bool:
    """Return whether record_stream covers all memory of a tensor: False if it is made of other tensors."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
    )


def _verify_data(tensor: torch.Tensor, target: torch.device) -> None:
    if tensor.is_meta and target.type != "meta":
        raise Unsupported(
            f"a meta tensor of shape {tuple(tensor.shape)} has no data to move to {target}; "
            "load into it with assign=True, or make one with torch.empty_like"
        )


def pack_kwargs(*args: object, **kwargs: object) -> tuple[tuple[object, ...], tuple[str, ...]]:
    """Return all values, keyword arguments last, and the keywords."""
    return (*args, *kwargs.values()), tuple(kwargs)


def unpack_kwargs(flat: Sequence[Any], keys: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that were passed to `pack_kwargs`."""
    if len(keys) > len(flat):
        raise Mismatch(
            f"{len(keys)} keywords for {len(flat)} values: pass both results of pack_kwargs, unchanged",
            problems=tuple(f"no value for keyword {key!r}" for key in keys[: len(keys) - len(flat)]),
        )
    num_args = len(flat) - len(keys)
    kwargs = dict(zip(keys, flat[num_args:], strict=True))
    if len(kwargs) != len(keys):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise Mismatch(
            f"keyword {twice[0]!r} occurs twice: pass both results of pack_kwargs, unchanged",
            problems=tuple(f"keyword {key!r} occurs twice" for key in twice),
        )
    return tuple(flat[:num_args]), kwargs
